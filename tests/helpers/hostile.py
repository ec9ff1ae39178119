"""A network, the methods to train it with, and ways to spoil its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.steps import PAPER
from helpers.training import Method
from ngplus import NGAdam, NGPlus

METHODS: dict[str, Method] = {
    "default": NGPlus,
    "dense": partial(NGPlus, solver="dense"),
    "relative": partial(NGPlus, graft="adam", damping=0.0, relative_damping=0.1),
    "momentum": partial(NGPlus, curvature="momentum", nesterov=True),
    "the paper": partial(NGPlus, **PAPER, damping=0.3),
    "momentum in blocks": partial(NGPlus, curvature="momentum", block_size=3),
    "batch": partial(NGPlus, curvature="batch", weight_decay=0.1, graft="sgd"),
    "woodbury": partial(NGPlus, solver="woodbury", curvature="sample"),
    "sketched": partial(NGPlus, solver="sketched", curvature="sample", weight_decay=0.1),
    "NGAdam": NGAdam,
    "NGAdam without momentum": partial(NGAdam, betas=(0.0, 0.9), weight_decay=0.1),
}


every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Tanh(),
        nn.Linear(6, 3),
    )  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randn(8, 3, generator=generator)


def backward(model: nn.Module, seed: int = 0, spoil: Callable[[Tensor], None] | None = None) -> None:
    x, y = batch(seed)
    if spoil is not None:
        spoil(x)
    model.zero_grad()
    (model(x) - y).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, first + steps):
        backward(model, k)
        optimizer.step()


def state_is_finite(optimizer: Any, model: nn.Module) -> bool:
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return all(bool(t.isfinite().all()) for t in [*model.parameters(), *kept] if t.is_floating_point())


def spoil_layer(model: nn.Module, value: float) -> None:
    backward(model, 9)
    grad = model[4].weight.grad
    grad[0].fill_(value)


SPOILS: dict[str, Callable[[nn.Module], None]] = {
    "one sample": lambda model: backward(model, 9, lambda x: x[3].fill_(math.nan)),
    "an input": lambda model: backward(model, 9, lambda x: x.view(-1)[5:6].fill_(math.inf)),
    "one layer": lambda model: spoil_layer(model, -math.inf),
    "too large": lambda model: spoil_layer(model, 3e38),
}
