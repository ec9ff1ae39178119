"""The public interface changes only on purpose: ``tests/public_interface.txt`` lists it. The lab takes nothing else."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import subprocess
import sys

import ngplus
from helpers.project import ROOT, load_tool

PUBLIC_MODULES = ("ngplus.baselines", "ngplus.layers", "ngplus.reference", "ngplus.schedules")


interface = load_tool("public_interface")


def test_the_interface_is_the_one_that_is_listed() -> None:
    listed, found = interface.FILE.read_text().splitlines(), interface.text().splitlines()
    change = "\n".join(difflib.unified_diff(listed, found, "listed", "found", lineterm=""))
    assert not change, f"The public interface has changed. If that is meant: make interface, and CHANGELOG.md\n{change}"


def test_every_public_name_is_there() -> None:
    assert all(hasattr(ngplus, name) for name in ngplus.__all__)
    listed = interface.FILE.read_text()
    assert all(f"ngplus.{name}" in listed for name in ngplus.__all__)


def test_the_lab_takes_public_attributes_only() -> None:
    """import-linter sees modules; here are the attributes: ``ngplus.x``, and what comes from a public module."""
    wrong = []
    for path in (ROOT / "src" / "ngplus" / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ngplus":
                if node.attr not in ngplus.__all__ and node.attr != "__version__":
                    wrong.append(f"{path.name}, line {node.lineno}: ngplus.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module in PUBLIC_MODULES:
                public = getattr(importlib.import_module(node.module), "__all__", ())
                wrong += [f"{path.name}: {node.module}.{a.name}" for a in node.names if a.name not in public]
    assert not wrong, wrong


def test_every_module_has_a_docstring() -> None:
    for path in (ROOT / "src" / "ngplus").rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_import_brings_torch_only() -> None:
    """A fresh interpreter in which everything but torch's own needs is out of reach."""
    code = (
        "import sys, torch; before = {m.split('.')[0] for m in sys.modules}; import ngplus, ngplus.baselines; "
        "new = {m.split('.')[0] for m in sys.modules} - before - set(sys.stdlib_module_names); print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ngplus']"
