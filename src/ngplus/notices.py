"""Warnings that point at the user's own line, on whatever way the step was called.

On the way from gradient to step: beside it.
"""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the first caller outside of the core and of torch, whose hooks and wrappers lie in between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _inside(module: str) -> bool:
    return module.partition(".")[0] in ("ngplus", "torch") and not module.startswith("ngplus.lab")
