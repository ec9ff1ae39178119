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


def random_crops(pixels: Tensor, padding: int, random: torch.Generator) -> Tensor:
    """Images [batch, channels, height, width], padded by black pixels and cut to their size at random places."""
    count, channels, height, width = pixels.shape
    padded = nn.functional.pad(pixels, (padding,) * 4)
    top, left = torch.randint(0, 2 * padding + 1, (2, count), generator=random)
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    return padded[torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None], rows, columns]


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
