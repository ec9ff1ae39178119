"""Warnings at the user's line, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first caller outside of ngplus and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


@contextmanager
def no_vmap_warnings() -> Iterator[None]:
    """Disables torch's warning of operations that vmap has to run sample by sample, and no other."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def no_such_name(name: str, known: Iterable[str], where: str) -> str:
    """The text of a KeyError, with the closest known name."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"No parameter {name!r} in {where}: {f'did you mean {near[0]!r}?' if near else 'print(plan()) lists all'}"


def _inside(module: str) -> bool:
    return module.partition(".")[0] in ("ngplus", "torch") and not module.startswith("ngplus.lab")
