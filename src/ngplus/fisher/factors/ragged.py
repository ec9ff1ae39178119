"""G_i as a product of dense factors, where samples have unlike numbers of rows: no rows of zeros are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ngplus.fisher.factors.base import Factors
from ngplus.fisher.sketch import Sketch


@dataclass
class Segments(Factors):
    """G_i = sum_p l_p r_p^T over the rows p of sample i, with l [rows, m] and r [rows, n], the rows of one sample after
    those of the other, ``sizes`` of each."""

    left: Tensor
    right: Tensor
    sizes: Sequence[int]

    def __post_init__(self) -> None:
        self.groups, self.samples, self.positions = 1, len(self.sizes), max(self.sizes)
        self.rows, self.cols = self.left.shape[-1], self.right.shape[-1]
        self._ends = list(accumulate(self.sizes))

    def _each(self, samples: Tensor | slice, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """The rows of each of these samples, left and right."""
        chosen = range(self.samples)[samples] if isinstance(samples, slice) else samples.tolist()
        spans = [slice(self._ends[i] - self.sizes[i], self._ends[i]) for i in chosen]
        return [(self.left[span].to(dtype), self.right[span].to(dtype)) for span in spans]

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return torch.stack([left.mT @ right for left, right in self._each(samples, dtype)])[None]

    def total(self, dtype: torch.dtype) -> Tensor:
        return (self.left.to(dtype).mT @ self.right.to(dtype))[None]

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if form != "gram":
            return super().pair(side, form, samples, sketch, dtype)
        pairs = []
        for left, right in self._each(samples, dtype):
            curved, other = (left, right) if side == "left" else (right, left)
            other = other if sketch is None else sketch(other)
            if len(other) > other.shape[-1]:  # then G_i has fewer rows than its factors
                tall = other.mT @ curved
                pairs.append((tall, tall))
            else:
                pairs.append((curved, (other @ other.mT) @ curved))
        return torch.cat([y for y, _ in pairs])[None], torch.cat([z for _, z in pairs])[None]

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        written = [k * d * other + d * other * block for k in self.sizes]
        inner = [k * k * (d + other) + k * d * block for k in self.sizes]
        least = [w if k > other else i for k, w, i in zip(self.sizes, written, inner, strict=True)]
        return {"gram": sum(least) / self.samples, "explicit": sum(written) / self.samples}

    @property
    def writing_cost(self) -> float:
        return sum(self.sizes) / self.samples * self.rows * self.cols

    def memory(self, side: str, form: str, other: int) -> int:
        if form == "gram":
            most = min(self.positions, other)
            return most * (most + 2 * self.curved_and_other(side)[0])
        return self.rows * self.cols
