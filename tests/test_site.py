"""The documentation site: built strictly, without anything from the network, and looked at in a real browser."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.browser import browser, needs_browser, set_scheme
from helpers.project import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra ngplus[docs]")

SEEN = """
const root = document.documentElement;
return {
  title: document.title, overflow: root.scrollWidth - root.clientWidth,
  broken: [...document.images].filter((one) => !(one.complete && one.naturalWidth)).map((one) => one.src),
  back: getComputedStyle(document.body).backgroundColor, size: document.querySelector("article").innerText.length};"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    surroundings = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=surroundings)
    assert done.returncode == 0, done.stderr
    return place


def test_every_page_is_in_the_navigation_and_fetches_nothing(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists()
    home = (site / "index.html").read_text()
    for page in site.rglob("*.html"):
        html = page.read_text()
        fetched = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\" >]+)", html)
        fetched += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect)[^>]+href=\"?(https?:[^\" >]+)", html)
        assert not fetched, f"{page.name} fetches {fetched}"
        name = str(page.relative_to(site))
        assert name in ("404.html", "index.html") or f'href="{name}"' in home, f"{name} is not in the nav of mkdocs.yml"


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_in_a_browser(site: Path, width: int, scheme: str, tmp_path: Path) -> None:
    """Every page fits a phone and a wide screen, shows its pictures, and is light or dark as the system is."""
    pages = [path.as_uri() for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(pages) > 20
    with browser(tmp_path, width, phone=width < 500) as driver:
        set_scheme(driver, scheme)
        for page in pages:
            driver.get(page)
            seen = driver.execute_script(SEEN)
            assert seen["size"] > 100, page
            assert seen["overflow"] <= 0, f"{page} is wider than a screen of {width} pixels"
            assert not seen["broken"], f"{page} has pictures that do not show: {seen['broken']}"
            shades = [int(number) for number in re.findall(r"\d+", seen["back"])[:3]]
            assert (sum(shades) < 300) is (scheme == "dark"), f"{page}: {seen['back']}"
