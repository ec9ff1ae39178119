"""What the tests of KFAC and SENG share: a step whose update is the direction, and Woodbury by brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LAMBDA = 0.3


def plain(kind: Any, model: Any, **options: Any) -> Any:
    """An optimizer whose update is the direction."""
    return kind(model, **{"lr": 1.0, "momentum": 0.0, "damping": LAMBDA, **options})


def update_of(model: nn.Module, optimizer: Any, *losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What a step takes away from each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


def woodbury(stack: Tensor, gradient: Tensor, damping: float = LAMBDA) -> Tensor:
    """(lambda I + 1/S sum_i vec(G_i) vec(G_i)^T)^-1 vec(G), by a dense solve. ``stack`` is [samples, ...]."""
    flat = stack.flatten(1)
    fisher = flat.T @ flat / len(flat) + damping * torch.eye(flat.shape[1]).to(flat)
    return torch.linalg.solve(fisher, gradient.flatten()).view_as(gradient)
