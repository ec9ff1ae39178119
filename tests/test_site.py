"""The documentation site: built strictly, without anything from the network, and looked at in a real browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

import ngplus
from helpers.browser import browser, needs_browser, set_scheme
from helpers.project import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra ngplus[docs]")

SEEN = """
const root = document.documentElement;
return {
  title: document.title, overflow: root.scrollWidth - root.clientWidth,
  broken: [...document.images].filter((one) => !(one.complete && one.naturalWidth)).map((one) => one.src),
  back: getComputedStyle(document.body).backgroundColor, size: document.querySelector("article").innerText.length,
  cut: [...document.querySelectorAll(".md-typeset__scrollwrap")].filter((one) => one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.querySelector("table")).filter((table) => table.dataset.phone !== "scroll")
    .map((table) => table.innerText.slice(0, 60))};"""


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


# How a formula looks that is not typeset.
ASCII_FORMULAS = re.compile(
    r"\^\(?-|\^T\b|\bsum_[a-z]\b|\b(?:lambda|kappa|alpha)\b|sqrt\(|[\w)]\^[\w(]|\b[A-Za-z]_[a-z\d]\b| \* |\|\||[<>]="
    r"|\b(?:Lbar|Ltilde|beta[12])\b"
)


def test_formulas_are_typeset(site: Path) -> None:
    """As MathML, in pages and docstrings; outside of code blocks and names no formula is left in ASCII or LaTeX."""
    formulas = 0
    for page in site.rglob("*.html"):
        article = re.search(r"<article.*?</article>", page.read_text(), re.S)
        assert article is not None
        formulas += article[0].count("<math ")
        text = re.sub(r"<(pre|code|math|style|script)\b.*?</\1>", " ", article[0], flags=re.S)
        assert not re.search(r":(class|func|meth|mod):<|::</p>", article[0]), f"{page.name} has reStructuredText"
        text = unescape(re.sub(r"<[^>]+>", "", text))
        assert not (left := re.findall(r".*(?:\\[a-z]+|\$[^$ ]+\$).*", text)), f"{page.name} has LaTeX: {left}"
        left = [line.strip() for line in text.splitlines() if ASCII_FORMULAS.search(line)]
        assert not left, f"{page.name} has formulas in ASCII: {left}"
    assert formulas > 300


def test_arguments_have_their_default_once_and_docstrings_link_to_pages(site: Path) -> None:
    for name in ("optimizers", "inspection", "baselines"):
        html = (site / "api" / f"{name}.html").read_text()
        items = re.findall(r'<li class="doc-section-item.*?</li>', html, re.S)
        assert len(items) > 10
        assert not [item for item in items if item.count("default:") > 1]
    assert '<a href="../method.html">docs/method.md</a>' in (site / "api" / "optimizers.html").read_text()


def test_every_page_has_its_neighbours_a_link_to_edit_and_the_version(site: Path) -> None:
    generated = {"404.html", "changelog.html", "contributing.html", "examples.html"}  # not from docs/
    for page in site.rglob("*.html"):
        html = page.read_text()
        assert f"ngplus {ngplus.__version__}" in html, page.name
        if page.name not in generated:
            assert 'title="Edit this page"' in html, page.name
        if page.name != "404.html":
            assert re.search(r'class="md-footer__link md-footer__link--(prev|next)"', html), page.name
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert {entry["location"].partition("#")[0] for entry in index["docs"]} >= {"method.html", "api/optimizers.html"}


def test_pictures_follow_the_scheme_of_the_site(site: Path) -> None:
    """Each in a light and a dark form, and in one for narrow screens whose letters, indices too, can be read there."""
    seen = 0
    for page in site.rglob("*.html"):
        html = page.read_text()
        light, dark = (
            re.findall(rf'<picture class="only-{scheme}">(.*?)</picture>', html, re.S) for scheme in ("light", "dark")
        )
        assert len(light) == len(dark)
        for own, other in zip(light, dark, strict=True):
            files = re.findall(r'(?:src|srcset)="([^"]+)"', own)
            dark_files = re.findall(r'(?:src|srcset)="([^"]+)"', other)
            assert dark_files == [re.sub(r"(\.\w+)$", r"-dark\1", file) for file in files]
            if not files[0].endswith("-narrow.svg"):
                continue
            seen += 1
            for file, width in zip(files, (358, 720), strict=True):  # narrow, wide
                svg = (page.parent / file).read_text()
                box = re.search(r'viewBox="0 0 ([\d.]+)', svg)
                assert box is not None
                letters = [float(size) for size in re.findall(r'font(?:-size="|-size: |: (?:bold )?)([\d.]+)', svg)]
                assert min(letters) * width / float(box[1]) >= 6, f"{file} has letters too small to read"
    assert seen == 10


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
            assert not seen["cut"], f"{page} has tables wider than a screen of {width} pixels: {seen['cut']}"
            shades = [int(number) for number in re.findall(r"\d+", seen["back"])[:3]]
            assert (sum(shades) < 300) is (scheme == "dark"), f"{page}: {seen['back']}"
