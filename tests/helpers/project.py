"""The project's own folder, and its scripts as modules."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What the Trainer reports of its own speed, and numbers: they differ between machines.
NOT_COMPARED = re.compile(r"'train_(?:runtime|samples_per_second|steps_per_second)': '[^']*', |\d[\d.]*(?:e[-+]\d+)?")


def same_but_for_numbers(a: str, b: str) -> bool:
    """Compares texts that were printed. The numbers, and with them the width of columns, may differ."""
    return NOT_COMPARED.sub("", a).split() == NOT_COMPARED.sub("", b).split()


def block_of(page: str, beginning: str) -> str:
    """The Python block of a page in docs/ that begins so."""
    blocks = (ROOT / "docs" / page).read_text().split("```python\n")
    return next(block for block in blocks if block.startswith(beginning)).partition("```")[0]
