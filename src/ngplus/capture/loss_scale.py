"""The loss scale of mixed precision, by which captured gradients are multiplied."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from ngplus.utils.compiled import uncompiled


def captured_scale() -> Tensor | float:
    """Returns the loss scale that captured gradients are multiplied by; 1.0 without a GradScaler.

    A GradScaler divides .grad by it before the step, but not the captured gradients. The scaler is found on the stack,
    since ``step()`` is called by ``GradScaler.step()``.
    """
    if torch.compiler.is_compiling():  # frames cannot be traced
        found: Tensor | float = uncompiled()(captured_scale)
        return found
    frame = inspect.currentframe()
    # The locals of other frames are not read: Python would keep them alive.
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back
    scaler = None if frame is None else frame.f_locals["self"]
    if scaler is None or not scaler.is_enabled():
        return 1.0
    scale = scaler._get_scale_async()  # get_scale() waits for the device
    return 1.0 if scale is None else scale
