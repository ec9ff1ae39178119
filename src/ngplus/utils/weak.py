"""Callbacks that do not keep their object alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a bound method without keeping its object alive. Calls do nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call
