"""Mixed precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from steps import (
    EXACT,
    check,
    data,
    loss_fn,
    mlp,
    one_step,
)
from torch import Tensor, nn

import ngplus

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("unscale", [False, True])
def test_loss_scaling_does_not_scale_the_curvature(unscale: bool) -> None:
    """scaler.unscale_ before the step, the usual way to clip, takes the scale off the gradients only."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_fn(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    check(mlp(), *data(4), train)


@pytest.mark.parametrize("new", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
def test_dtype_changed_between_refreshes(new: torch.dtype, scaling: str) -> None:
    old = torch.float64 if new == torch.float32 else torch.float32
    model = mlp().to(old)
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100, "scaling": scaling})
    x, y = data(4)
    one_step(model, optimizer, x.to(old), y.to(old))
    model.to(new)
    before = copy.deepcopy(model)
    one_step(model, optimizer, x.to(new), y.to(new))
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert all(p.isfinite().all() and p.dtype == new for p in model.parameters())
