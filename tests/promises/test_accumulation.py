"""Gradient accumulation: micro-batches give the curvature of the whole batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from steps import (
    BOTH,
    Make,
    N,
    check,
    data,
    loss_fn,
)
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("double")


@BOTH
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 1, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_accumulation_equals_the_whole_batch(model: Make, cuts: tuple[int, ...], curvature: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for a, b in pairwise(cuts):
            (loss_fn(model(x[a:b]), y[a:b]) * (b - a) / N).backward()
        optimizer.step()

    optimizer = check(model(), *data(4), train, curvature=curvature)
    assert optimizer.param_groups[0]["step"] == 1


@BOTH
def test_all_forward_passes_before_the_backward_passes(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        losses = [loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3 for i in range(0, N, 2)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    check(model(), *data(4), train)
