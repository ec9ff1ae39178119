"""A small classification, and the loop that the trainers are compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ngplus
from helpers.training import flat

OPTIONS = {"lr": 0.1, "update_every": 3}
STEPS, SAVED = 8, 4


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def loader(batch: int, samples: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def plain_loop(batches: Iterable[Any] | None = None) -> Tensor:
    """The parameters after a step on each batch (default: those of ``loader(8)``)."""
    model = small_net()
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in loader(8) if batches is None else batches:
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return flat(model)
