"""G_i as a product of dense factors, where samples have different numbers of positions. Nothing is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ngplus.fisher.factors.base import Factors, Pair, Samples
from ngplus.fisher.sketch import Sketch


@dataclass
class Segments(Factors):
    """G_i = sum_p l_p r_p^T over the positions p of sample i, with l [positions, m] and r [positions, n].

    The positions of sample 0 come first, then those of sample 1, and so on; ``sizes`` has the number of each.
    """

    left: Tensor
    right: Tensor
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        self.groups, self.samples, self.positions = 1, len(self.sizes), max(self.sizes)
        self.rows, self.cols = self.left.shape[-1], self.right.shape[-1]
        self._ends = list(accumulate(self.sizes))

    def _each(self, samples: Samples, dtype: torch.dtype) -> list[Pair]:
        """l and r of each of these samples."""
        chosen = range(self.samples)[samples] if isinstance(samples, slice) else samples.tolist()
        spans = [slice(self._ends[i] - self.sizes[i], self._ends[i]) for i in chosen]
        return [(self.left[span].to(dtype), self.right[span].to(dtype)) for span in spans]

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return torch.stack([left.mT @ right for left, right in self._each(samples, dtype)])[None]

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return (self.left.to(dtype).mT @ self.right.to(dtype))[None]

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        left, right = self.left[:, rows].to(dtype), self.right[:, cols].to(dtype)
        squares = left.square().sum(1) @ right.square().sum(1)
        return (left.mT @ right)[None], self.positions * squares

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
        if form == "gram":
            most = min(self.positions, other)
            return most * (most + 2 * self.curved_and_other(side)[0])
        return self.rows * self.cols
