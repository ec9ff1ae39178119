"""What is released: the wheel installs beside torch alone, and works from there. ``make dist`` runs all core tests."""

from __future__ import annotations

import email
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ngplus
from helpers.project import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling, the build backend")
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    build = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "ngplus/py.typed" in names
    assert not [name for name in names if not name.startswith("ngplus")]  # no tests, no tools
    (metadata,) = (email.message_from_bytes(zipfile.ZipFile(wheel).read(n)) for n in names if n.endswith("/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("ngplus", ngplus.__version__)
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.10", "MIT")
    assert [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need] == ["torch>=2.6"]
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL")} >= {"Homepage", "Issues", "Paper"}
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(r'\]\(([^)]+)\)|src(?:set)?="([^"]+)"', metadata.get_payload())
    assert len(links) > 20
    assert all("".join(link).startswith("https://") for link in links)  # the page on PyPI is not in the repository
    check = [sys.executable, str(ROOT / "tools" / "check_release.py"), str(wheel), "--tests"]
    done = subprocess.run([*check, str(ROOT / "tests" / "fisher" / "test_inverses.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"ngplus {ngplus.__version__} installed" in done.stdout


def test_the_version_is_semantic_and_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", ngplus.__version__)
    assert f"version: {ngplus.__version__}" in (ROOT / "CITATION.cff").read_text()
