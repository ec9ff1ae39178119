"""G_i as a product of dense factors, where samples have different numbers of positions. Nothing is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ngplus.fisher.factors.base import CHUNK, Factors, Pair, Samples
from ngplus.fisher.factors.parts import add_up
from ngplus.fisher.sketch import Sketch


@dataclass
class Segments(Factors):
    """G_i = sum_p l_p r_p^T over the positions p of sample i, with l [positions, m] and r [positions, n].

    The positions of sample 0 come first, then those of sample 1, and so on; ``sizes`` has the number of each. With
    ``ones``, r has an additional column of ones, for the bias.
    """

    left: Tensor
    right: Tensor
    sizes: Sequence[int]
    ones: bool = False

    def __post_init__(self) -> None:
        self.groups, self.samples, self.positions = 1, len(self.sizes), max(self.sizes)
        self.rows, self.cols = self.left.shape[-1], self.right.shape[-1] + self.ones
        self._ends = list(accumulate(self.sizes))

    def _each(self, samples: Samples, dtype: torch.dtype) -> list[Pair]:
        """l and r of each of these samples."""
        chosen = range(self.samples)[samples] if isinstance(samples, slice) else samples.tolist()
        spans = [slice(self._ends[i] - self.sizes[i], self._ends[i]) for i in chosen]
        return [(self.left[span].to(dtype), self.dense_right(span).to(dtype)) for span in spans]

    def dense_right(self, span: slice) -> Tensor:
        """r of some positions, with the column of ones."""
        return torch.nn.functional.pad(self.right[span], (0, int(self.ones)), value=1.0)

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return torch.stack([left.mT @ right for left, right in self._each(samples, dtype)])[None]

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return add_up(left.mT @ right for left, right in self._chunks(slice(None), slice(None), dtype))[None]

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = [
            (left.mT @ right, left.square().sum(1) @ right.square().sum(1))
            for left, right in self._chunks(rows, cols, dtype)
        ]
        block, squares = (add_up(iter(each)) for each in zip(*found, strict=True))
        return block[None], self.positions * squares

    def _chunks(self, rows: slice, cols: slice, dtype: torch.dtype) -> Iterator[Pair]:
        """Some rows and columns of the factors, for about ``CHUNK`` entries of them at a time."""
        step = max(1, CHUNK // (self.rows + self.cols))
        for start in range(0, max(1, len(self.left)), step):
            span = slice(start, start + step)
            yield self.left[span, rows].to(dtype), self.dense_right(span)[:, cols].to(dtype)

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        if form != "gram":
            return super().pair(side, form, samples, sketch, dtype)
        pairs = []
        for left, right in self._each(samples, dtype):
            curved, other = (left, right) if side == "left" else (right, left)
            other = other if sketch is None else sketch(other)
            if len(other) > other.shape[-1]:  # G_i has fewer rows than its factors
                tall = other.mT @ curved
                pairs.append((tall, tall))
            else:
                pairs.append((curved, (other @ other.mT) @ curved))
        return torch.cat([y for y, _ in pairs])[None], torch.cat([z for _, z in pairs])[None]

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        explicit = [k * d * other + d * other * block for k in self.sizes]
        inner = [k * k * (d + other) + k * d * block for k in self.sizes]
        gram = [e if k > other else i for k, e, i in zip(self.sizes, explicit, inner, strict=True)]
        return {"gram": sum(gram) / self.samples, "explicit": sum(explicit) / self.samples}

    def memory(self, side: str, form: str, other: int) -> int:
        casts = self.positions * (self.rows + self.cols)
        if form == "gram":
            most = min(self.positions, other)
            return casts + most * (most + 3 * self.curved_and_other(side)[0])
        return casts + 2 * self.rows * self.cols
