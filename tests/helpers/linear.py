"""A linear layer trained on random batches: its per-sample gradients in closed form, and the loop that compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers import steps
from helpers.steps import one_step

LAMBDA = 0.2
PAPER: dict[str, Any] = {**steps.PAPER, "momentum": 0.0, "damping": LAMBDA}


def batches(count: int, samples: int = 6, features: int = 5, outputs: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(samples, features), torch.randn(samples, outputs)) for _ in range(count)]


def per_sample(model: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    """[samples, 1, m, n + 1] for a single linear layer with bias, in closed form."""
    g = 2 * (model(x) - y).detach()
    a = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    return (g[:, :, None] * a[:, None, :])[:, None]


def matrix_of(model: nn.Linear) -> Tensor:
    return torch.cat([model.weight.detach(), model.bias.detach()[:, None]], dim=1)[None].clone()


def compare(
    direction: Callable[[int, Tensor, Tensor], Tensor], steps: int = 7, shape: tuple[int, int] = (5, 3), **options: Any
) -> ngplus.NGPlus:
    """Trains a linear layer; before each step ``direction(k, G_i, W)`` says what lr * (-D) should be."""
    model = nn.Linear(*shape)
    optimizer = ngplus.NGPlus(model, lr=0.1, **{**PAPER, **options})
    for k, (x, y) in enumerate(batches(steps, features=shape[0], outputs=shape[1])):
        before = matrix_of(model)
        wanted = direction(k, per_sample(model, x, y), before)
        one_step(model, optimizer, x, y)
        assert ref.relative_error(before - matrix_of(model), 0.1 * wanted) < 1e-6, k
    return optimizer


SHAPES = [(5, 3), (2, 7), (3, 4)]  # left, right, and square with the bias
