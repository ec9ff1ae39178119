"""Closures: ``step(closure)`` is the step after the closure's own backward pass, whatever else the closure does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.steps import BOTH, Make, N, check, data, loss_fn

pytestmark = pytest.mark.usefixtures("double")


def plain(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss


def zero_grad_after_the_forward_pass(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Lightning's order."""
    loss = loss_fn(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    return loss


def micro_batches(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    losses = []
    for i in range(0, N, 2):
        losses.append(loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3)
        losses[-1].backward()
    return torch.stack(losses).sum()


def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A line search may look at other losses first: the last one counts."""
    plain(model, optimizer, x.flip(0) * 2, y)
    return plain(model, optimizer, x, y)


def with_evaluation(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain(model, optimizer, x, y)
    with torch.no_grad():
        model(x[:2])
    return loss


@BOTH
@pytest.mark.parametrize("outside", ["plain", "no_grad"])
@pytest.mark.parametrize("closure", [plain, zero_grad_after_the_forward_pass, micro_batches, twice, with_evaluation])
def test_closure(model: Make, closure: Callable[..., Tensor], outside: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        expected = loss_fn(model(x), y).item()
        with torch.set_grad_enabled(outside == "plain"):
            loss = optimizer.step(lambda: closure(model, optimizer, x, y))
        assert loss.item() == pytest.approx(expected)

    optimizer = check(model(), *data(4), train)
    assert optimizer.param_groups[0]["step"] == 1
