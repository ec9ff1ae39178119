"""Gradient clipping before the step: the gradient is the clipped one, the curvature is that of the samples."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ngplus
from helpers.steps import EXACT, assert_equal, brute_force, data, loss_fn, mlp

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("clip", ["norm", "value", "none"])
def test_clipped_gradients_and_whole_curvature(clip: str, scaler: bool) -> None:
    """D = (lambda I + L)^-1 (clipped G), also after ``unscale_``."""
    model = mlp()
    before = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model, **EXACT)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaler)
    x, y = data(4)
    scaling.scale(loss_fn(model(x), y)).backward()
    scaling.unscale_(optimizer)
    if clip == "norm":
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
    elif clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
    clipped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    scaling.step(optimizer)
    assert [row.source for row in optimizer.plan()] == ["sample", "sample"]
    assert_equal(model, before, brute_force(before, x, y, gradients=clipped))
    assert (clip == "none") == (max(g.abs().max() for g in clipped.values()) > 0.1)
