"""Factors of some samples at a time, where those of all would be copies of a layer's inputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ngplus.fisher.factors.base import CHUNK, Factors, Pair, Samples
from ngplus.fisher.sketch import Sketch


@dataclass
class Parts(Factors):
    """G_i by factors that are made for some samples at a time.

    Attributes:
        build: makes the factors of some samples.
        samples: their number.
        largest: the factors of the sample with the most positions.
        copied: entries that ``build`` copies for that sample.
        kept: the tensors that it copies from.
        step: samples of which ``gradient_sum`` and ``gradient_block`` make the factors at a time.
    """

    build: Callable[[Samples], Factors]
    samples: int
    largest: Factors
    copied: int
    kept: Sequence[Tensor]
    step: int

    def __post_init__(self) -> None:
        like = self.largest
        self.groups, self.positions, self.rows, self.cols = like.groups, like.positions, like.rows, like.cols

    @property
    def half_precision(self) -> bool:
        return self.largest.half_precision

    def tensors(self) -> Iterator[Tensor]:
        yield from self.kept
        yield from self.largest.tensors()

    def _parts(self) -> Iterator[Factors]:
        for start in range(0, self.samples, self.step):
            yield self.build(slice(start, start + self.step))

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self.build(samples).gradients(slice(None), dtype)

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return add_up(part.gradient_sum(dtype) for part in self._parts())

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = [part.gradient_block(rows, cols, dtype) for part in self._parts()]
        return add_up(block for block, _ in found), add_up(squares for _, squares in found)

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        return self.build(samples).pair(side, form, slice(None), sketch, dtype)

    def low_rank(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self.build(samples).low_rank(side, slice(None), dtype)

    def low_rank_form(self, side: str) -> str:
        return self.largest.low_rank_form(side)

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        return self.largest.costs(side, other, block)

    def rank(self, side: str) -> int:
        return self.samples * self.largest.rank(side)

    def memory(self, side: str, form: str, other: int) -> int:
        return self.largest.memory(side, form, other) + self.copied


def at_once(factors: Factors) -> Factors:
    """Returns the factors of all samples, which take the copies that :class:`Parts` saves."""
    while isinstance(factors, Parts):
        factors = factors.build(slice(None))
    return factors


def in_parts(build: Callable[[Samples], Factors], samples: int, copied: int, kept: Sequence[Tensor]) -> Factors:
    """Returns the factors that ``build`` makes, for some samples at a time if it copies more than ``CHUNK`` entries."""
    if samples * copied <= CHUNK:
        return build(slice(None))
    return Parts(build, samples, build(slice(0, 1)), copied, kept, max(1, CHUNK // copied))


def add_up(tensors: Iterator[Tensor]) -> Tensor:
    """Sums tensors, of which one is there at a time."""
    total = next(tensors).clone()
    for tensor in tensors:
        total += tensor
    return total
