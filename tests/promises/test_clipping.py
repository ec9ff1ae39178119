"""Gradient clipping before the step."""

from __future__ import annotations

import pytest
from steps import (
    EXACT,
    data,
    loss_fn,
    mlp,
)
from torch import nn

import ngplus

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_does_not_cost_the_curvature(clip: str) -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    loss_fn(model(x), y).backward()
    if clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    assert [row.source for row in optimizer.plan()] == ["sample", "sample"]
