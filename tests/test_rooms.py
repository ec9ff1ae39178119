"""The rooms' rules: who may import whom, torch only in the core, the public names only in the laboratory."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ngplus

ROOT = Path(__file__).resolve().parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rooms = tool("rooms")


def test_no_rule_is_broken() -> None:
    assert rooms.broken() == []


def test_the_rules_are_seen_when_broken() -> None:
    wrong = [
        rooms.Import("ngplus.solve", 1, "ngplus.optimizer"),
        rooms.Import("ngplus.fisher", 2, "numpy"),
        rooms.Import("ngplus.lab.train", 3, "ngplus.curvature"),
        rooms.Import("ngplus.update", 4, "ngplus"),
    ]
    said = rooms.broken(wrong)
    assert len(said) == 4
    assert "solve may not know optimizer" in said[0]
    assert "torch only, not numpy" in said[1]
    assert "public names only, not ngplus.curvature" in said[2]


def test_rooms_know_no_circle() -> None:
    order = [room.name for room in rooms.ROOMS]
    for room in rooms.ROOMS:
        assert all(order.index(other) < order.index(room.name) for other in room.knows)


def test_the_laboratory_takes_public_attributes_only() -> None:
    """``ngplus.x`` in the laboratory is a public name, and so is what it imports from a public module."""
    wrong = []
    for name, path in rooms.modules().items():
        if not name.startswith("ngplus.lab"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ngplus":
                if node.attr not in ngplus.__all__ and node.attr != "__version__":
                    wrong.append(f"{name}, line {node.lineno}: ngplus.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module in rooms.PUBLIC - {"ngplus"}:
                public = getattr(importlib.import_module(node.module), "__all__", ())
                wrong += [f"{name}: {node.module}.{a.name}" for a in node.names if a.name not in public]
    assert not wrong, wrong


def test_the_picture_is_that_of_the_import_graph() -> None:
    for path, text in rooms.pictures().items():
        assert path.read_text() == text, f"{path.name} is old: make pictures"


def test_every_module_says_what_it_is_for_and_where_it_stands() -> None:
    """A file of the core ends its docstring with its place; those of the laboratory are not on that way."""
    for name, path in rooms.modules().items():
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said, f"{name} has no docstring"
        if name != "ngplus" and not name.startswith("ngplus.lab"):
            assert "On the way from gradient to step: " in said, f"{name} does not say where it stands"


def test_import_brings_torch_only() -> None:
    """A fresh interpreter in which everything but torch's own needs is out of reach."""
    code = (
        "import sys, torch; before = {m.split('.')[0] for m in sys.modules}; import ngplus, ngplus.baselines; "
        "new = {m.split('.')[0] for m in sys.modules} - before - set(sys.stdlib_module_names); print(sorted(new))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ngplus']"
