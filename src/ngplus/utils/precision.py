"""The precision in which curvature is computed: that of its tensors, whatever the user has set for the model."""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from ngplus.utils.compiled import uncompiled

# The settings under torch.backends for products of float32 tensors, by device; other devices have those of oneDNN.
BACKENDS = {"cuda": ("cuda.matmul", "cudnn.conv"), "other": ("mkldnn.matmul", "mkldnn.conv")}


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast, and products of float32 tensors as TF32 or bfloat16, for the curvature on this device."""
    autocast = torch.is_autocast_enabled(device.type)  # entering autocast costs as much as a small layer
    reduced = _is_reduced(device)
    if not autocast and not reduced:
        return nullcontext()
    stack = ExitStack()
    if autocast:
        stack.enter_context(torch.autocast(device_type=device.type, enabled=False))
    if reduced:
        stack.enter_context(_Float32Products(device.type))
    return stack


def bfloat16_products(device: torch.device) -> bool:
    """Returns True if the model multiplies float32 tensors as bfloat16, also inside of ``full_precision``."""
    return any(_set_by_user(setting) == "bf16" for setting in _settings(device.type))


def _is_reduced(device: torch.device) -> bool:
    if torch.compiler.is_compiling():
        reduced: bool = uncompiled()(_is_reduced, device)
        return reduced
    return any(_set_by_user(setting) in ("tf32", "bf16") for setting in _settings(device.type))


class _Matmul:
    """``torch.set_float32_matmul_precision`` as a setting with ``fp32_precision``, which torch has from 2.9 on."""

    WORDS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}  # noqa: RUF012

    @property
    def fp32_precision(self) -> str:
        return self.WORDS[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        words = {**{new: old for old, new in self.WORDS.items()}, "none": "highest"}
        torch.set_float32_matmul_precision(words[value])


@functools.cache
def _settings(device: str) -> list[Any]:
    """The objects whose ``fp32_precision`` is that of the products on a device."""
    found = []
    for name in BACKENDS.get(device, BACKENDS["other"]):
        backend, _, operation = name.partition(".")
        setting = getattr(getattr(torch.backends, backend), operation, None)
        if hasattr(setting, "fp32_precision"):
            found.append(setting)
    return found or [_Matmul()]


class _Float32Products:
    """Computes products of float32 tensors in float32.

    The settings are those of the process, and autograd has a thread for each device: the first one that enters changes
    a setting, the last one that leaves restores it.
    """

    _lock = threading.Lock()
    _held: dict[int, tuple[int, str]] = {}  # noqa: RUF012  by id of a setting: how many are inside, and the user's value

    def __init__(self, device: str) -> None:
        self._settings = _settings(device)

    def __enter__(self) -> None:
        with self._lock:
            for setting in self._settings:
                inside, value = self._held.get(id(setting), (0, ""))
                if not inside:
                    value = setting.fp32_precision
                    setting.fp32_precision = "ieee"
                self._held[id(setting)] = (inside + 1, value)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for setting in self._settings:
                inside, value = self._held.pop(id(setting))
                if inside > 1:
                    self._held[id(setting)] = (inside - 1, value)
                    continue
                setting.fp32_precision = "none"  # what torch.backends.fp32_precision has set stays inherited
                if setting.fp32_precision != value:
                    setting.fp32_precision = value


def _set_by_user(setting: Any) -> str:
    held = _Float32Products._held.get(id(setting))
    value: str = setting.fp32_precision if held is None else held[1]
    return value
