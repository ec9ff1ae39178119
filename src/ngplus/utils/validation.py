"""Checks of options: a ValueError has the name, the value, and the valid values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def choice(name: str, value: Any, known: Sequence[Any]) -> None:
    """Raises ValueError where the value is not one of ``known``."""
    if value not in known:
        raise ValueError(f"Invalid {name}: {value!r} (one of {', '.join(map(repr, known))})")


def number(name: str, value: Any, top: float = math.inf, open_top: bool = False, hint: str = "") -> None:
    if isinstance(value, str) or not isinstance(value, int | float | Tensor) or isinstance(value, bool):
        raise ValueError(f"Invalid {name}: {value!r}{hint or _range(top, open_top)}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return  # reading it would wait for the device
    found = float(value)
    if not math.isfinite(found) or found < 0.0 or found > top or (open_top and found == top):
        raise ValueError(f"Invalid {name}: {value}{hint or _range(top, open_top)}")


def _range(top: float, open_top: bool) -> str:
    if top == math.inf:
        return " (a number of 0 or more)"
    return f" (a number of 0 or more and below {top:g})" if open_top else f" (a number from 0 to {top:g})"


def whole(name: str, value: Any, least: int | None = 1) -> None:
    """Raises ValueError where the value is not an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise ValueError(f"Invalid {name}: {value!r} (a whole number{'' if least is None else f' of {least} or more'})")
