"""Does the wheel work where there is torch and nothing else? Installs it into an empty virtual environment and runs the
core's tests from there.

    python tools/check_release.py dist/ngplus-*.whl                    # make dist does this
    python tools/check_release.py dist/ngplus-*.whl --install-torch    # torch by pip, as a user would

By default torch is not installed again: the new environment gets links to torch and to the packages that torch itself
needs, and to nothing else of the environment that runs this script. pytest, hypothesis and expecttest are linked in the
same way, for the tests. The core's tests are those files in tests/ that import nothing beyond these and what is in
tests/ itself, and that do not look at the rest of the project. Those of tests/distributed that need its own package
stay out: torch's distributed checkpoints want numpy.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOR_TESTS = ("pytest", "hypothesis", "expecttest")


def closure(names: Iterable[str]) -> set[str]:
    """The distributions that these need, themselves included, without their extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link(names: Iterable[str], place: Path) -> None:
    """Links to all that these distributions have installed, and to nothing else."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {Path(str(file)).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (place / top).exists():
                (place / top).symlink_to(source)


def core_tests() -> list[Path]:
    """The test files that import torch, ngplus without its laboratory, and helpers of the tests only."""
    own = {"helpers", *(path.stem for path in (ROOT / "tests").rglob("*.py") if not path.stem.startswith("test_"))}
    allowed = {*sys.stdlib_module_names, *FOR_TESTS, "torch", "ngplus", *own}
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "helpers.project" in text:  # it looks at pages, examples or tools
            continue
        names: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if {name.split(".")[0] for name in names} <= allowed and not any("ngplus.lab" in name for name in names):
            found.append(path)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--install-torch", action="store_true", help="install torch by pip in place of linking it")
    parser.add_argument("--tests", nargs="*", type=Path, help="test files; the core's where none are named")
    asked = parser.parse_args()
    tests = asked.tests or core_tests()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "venv"
        venv.create(place, symlinks=True, with_pip=False)
        python = place / "bin" / "python"
        packages = next((place / "lib").glob("python3*")) / "site-packages"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "-q"]
        if asked.install_torch:
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "torch", *FOR_TESTS], check=True)
        else:
            link(closure(["torch", *FOR_TESTS]), packages)
        subprocess.run([*pip, "--no-deps", "--no-index", str(asked.wheel)], check=True)
        # Copies outside of the project: nothing but the installed package can be imported.
        away = Path(folder) / "tests"
        away.mkdir()
        others = [p for p in (ROOT / "tests").rglob("*") if p.is_file() and p.suffix != ".pyc"]  # helpers, stored files
        for path in [*tests, *(p for p in others if not p.name.startswith("test_"))]:
            copy = away / path.resolve().relative_to(ROOT / "tests")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        shutil.copy(ROOT / "pyproject.toml", folder)
        look = (
            "import ngplus, pathlib, importlib.util as u; place = pathlib.Path(ngplus.__file__).parent; "
            "assert 'site-packages' in str(place) and (place / 'py.typed').exists(); "
            "assert u.find_spec('numpy') is None or 'numpy' in __import__('sys').argv, 'numpy is there'; "
            "print('ngplus', ngplus.__version__, 'installed')"
        )
        subprocess.run([python, "-I", "-c", look, *(["numpy"] if asked.install_torch else [])], cwd=folder, check=True)
        command = [python, "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=prepend", "tests"]
        return subprocess.run(command, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main())
