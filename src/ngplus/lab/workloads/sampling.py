"""Random numbers that depend on the seed and the step alone, and what tasks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn


def generator(*key: int) -> torch.Generator:
    """A generator of its own for each key, such as (seed, step)."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


@lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, epoch))


def batch_index(count: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Which of ``count`` examples make the batch of a step: each epoch in a new order, without its short last one."""
    size = min(batch_size, count)
    epoch, place = divmod(step, count // size)
    return _order(count, seed, epoch)[place * size : (place + 1) * size]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, without gradients; the mode is put back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
