"""G_i as a product of dense factors, where samples have unlike numbers of rows: no rows of zeros are made.

On the way from gradient to step: what the rule of Linear gives for graphs, or for packed sequences, of unlike sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ngplus.factors.base import Factors
from ngplus.sketch import Sketch


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

    def _of(self, samples: Tensor | slice, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """The rows of each of these samples."""
        chosen = range(self.samples)[samples] if isinstance(samples, slice) else samples.tolist()
        spans = [slice(self._ends[i] - self.sizes[i], self._ends[i]) for i in chosen]
        return [tuple(x[span] for x in tensors) for span in spans]

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        each = self._of(samples, self.left.to(dtype), self.right.to(dtype))
        return torch.stack([left.mT @ right for left, right in each])[None]

    def total(self, dtype: torch.dtype) -> Tensor:
        return (self.left.to(dtype).mT @ self.right.to(dtype))[None]

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if form != "gram":
            return super().pair(side, form, samples, sketch, dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        curved, other = (left, right) if side == "left" else (right, left)
        each = self._of(samples, curved, other if sketch is None else sketch(other))
        weighted = [(o @ o.mT) @ c for c, o in each]
        return torch.cat([c for c, _ in each])[None], torch.cat(weighted)[None]

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        mean, squares = (sum(k**power for k in self.sizes) / self.samples for power in (1, 2))
        return {"gram": squares * (d + other) + mean * d * block, "explicit": mean * d * other + d * other * block}

    @property
    def writing_cost(self) -> float:
        return sum(self.sizes) / self.samples * self.rows * self.cols

    def memory(self, side: str, form: str, other: int) -> int:
        if form == "gram":
            return self.positions * (self.positions + 2 * self.curved_and_other(side)[0])
        return self.rows * self.cols
