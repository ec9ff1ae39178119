"""G_i as a product of dense factors, and G_i itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ngplus.fisher.factors.base import CHUNK, Factor, Factors, LazyGradients, Pair, Samples, block_of, take
from ngplus.fisher.factors.parts import add_up
from ngplus.fisher.sketch import Sketch


@dataclass
class Outer(Factors):
    """G_i = sum_p l_ip r_ip^T with l [groups, samples, positions, m] and r [groups, samples, positions, n].

    With ``ones`` the right factor has an additional column of ones, for the bias, concatenated only where needed.
    ``sizes`` has the number of positions of each sample, where those after them are padding, with l = 0.
    """

    left: Tensor | SomeRows
    right: Factor
    ones: bool = False
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.groups, self.samples, self.positions, self.rows = self.left.shape
        self.cols = self.right.shape[-1] + self.ones

    def dense_right(self, samples: Samples) -> Tensor:
        right = take(self.right, samples)
        return torch.nn.functional.pad(right, (0, 1), value=1.0) if self.ones else right

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return take(self.left, samples).to(dtype).mT @ self.dense_right(samples).to(dtype)

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return add_up(self._sum_of(chunk, dtype) for chunk in self._chunks())

    def _sum_of(self, samples: slice, dtype: torch.dtype) -> Tensor:
        if not isinstance(self.right, Tensor):
            tall = self._lazy_outer("left", samples, dtype).unflatten(1, (-1, self.cols))
            return tall.sum(1).mT
        left = take(self.left, samples).to(dtype).flatten(1, 2)
        total = left.mT @ self.right[:, samples].to(dtype).flatten(1, 2)
        return torch.cat((total, left.sum(1)[..., None]), dim=-1) if self.ones else total

    def _chunks(self) -> list[slice]:
        """Samples whose factors, or G_i of a lazy right factor, have about ``CHUNK`` entries."""
        copies = self.groups * self.positions * (self.rows + self.cols)
        each = copies if isinstance(self.right, Tensor) else self.memory("left", "explicit", self.cols)
        step = max(1, CHUNK // max(1, each))
        return [slice(start, start + step) for start in range(0, max(1, self.samples), step)]

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = []
        for samples in self._chunks():
            some, other = self.left, self.right
            left = some[:, samples, :, rows] if isinstance(some, Tensor) else some.columns(rows, samples)
            right = other[:, samples, :, cols] if isinstance(other, Tensor) else other.columns(cols, samples)
            found.append(block_of(left.to(dtype).mT @ right.to(dtype)))
        return add_up(block for block, _ in found), add_up(squares for _, squares in found)

    def _lazy_outer(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        """Y of the form "explicit", [groups, samples * D, d], for a lazy right factor."""
        assert not isinstance(self.right, Tensor)
        return self.right.outer(samples, take(self.left, samples).to(dtype), side, self.ones)

    def _curved(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        return (take(self.left, samples) if side == "left" else self.dense_right(samples)).to(dtype)

    def _other(self, side: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """The factor of dimension D, and whether it lacks the column of ones."""
        if side == "right":
            other = take(self.left, samples).to(dtype)
            return (other if sketch is None else sketch(other)), False
        if sketch is not None:
            return sketch(self.dense_right(samples).to(dtype)), False
        return take(self.right, samples).to(dtype), self.ones

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        lazy = sketch is None and not isinstance(self.right, Tensor)
        if form == "explicit" and lazy:
            tall = self._lazy_outer(side, samples, dtype)
            return tall, tall
        curved = self._curved(side, samples, dtype)
        if form == "gram":
            if lazy and side == "left" and not isinstance(self.right, Tensor):
                gram, ones = self.right.gram(samples, dtype), self.ones
            else:
                other, ones = self._other(side, samples, sketch, dtype)
                gram = other @ other.mT
            return curved.flatten(1, 2), ((gram.add_(1.0) if ones else gram) @ curved).flatten(1, 2)
        other, ones = self._other(side, samples, sketch, dtype)
        if form == "rank-one":
            weight = other.square().sum(-1, keepdim=True) + float(ones)
            return curved.flatten(1, 2), (weight * curved).flatten(1, 2)
        # [D, d] for each sample: all samples form one tall matrix without a permuted copy.
        tall = other.mT @ curved
        if ones:
            tall = torch.cat((tall, curved.sum(-2, keepdim=True)), dim=-2)
        tall = tall.flatten(1, 2)
        return tall, tall

    def low_rank(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        if self.low_rank_form(side) == "explicit":
            return self.pair(side, "explicit", samples, None, dtype)[0].mT
        curved = self._curved(side, samples, dtype)
        other, ones = self._other(side, samples, None, dtype)
        if self.positions == 1:
            weight = other.square().sum(-1, keepdim=True) + float(ones)
            return (weight.sqrt() * curved).flatten(1, 2).mT
        return (gram_root(other @ other.mT + float(ones)) @ curved).flatten(1, 2).mT

    def low_rank_form(self, side: str) -> str:
        many = self.positions > 1 and self.curved_and_other(side)[1] <= self.positions
        return "explicit" if many else "gram"

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        gram = None
        if side == "left" and other == self.cols and not isinstance(self.right, Tensor):
            gram = self.right.gram_cost
        return outer_costs(self.positions, d, other, block, gram)

    def rank(self, side: str) -> int:
        return self.samples * min(self.positions, self.curved_and_other(side)[1])

    def memory(self, side: str, form: str, other: int) -> int:
        d, full = self.curved_and_other(side)
        products = (1 + self.ones) * d * other if form == "explicit" else self.positions * (self.positions + 2 * d)
        if not isinstance(self.right, Tensor) and other == full:
            if form == "explicit":
                return self.groups * products + self.right.outer_memory(self.rows)
            if form == "gram" and side == "left":
                return self.groups * products + self.right.gram_memory
        copies = self.positions * (self.rows + self.cols)  # patches, casts and the column of ones
        return self.groups * (copies + products)


class SomeRows:
    """A left factor of a part of a matrix's rows, with zeros in the others; made for some samples at a time."""

    def __init__(self, values: Tensor, start: int, total: int) -> None:
        self._values, self._start, self._end = values, start, total - start - values.shape[-1]
        self.shape = (*values.shape[:-1], total)
        self.device = values.device

    def take(self, samples: Samples) -> Tensor:
        return torch.nn.functional.pad(self._values[:, samples], (self._start, self._end))

    def tensors(self) -> Iterator[Tensor]:
        yield self._values

    def columns(self, cols: slice, samples: slice) -> Tensor:
        wanted = range(*cols.indices(self.shape[-1]))
        own = [i - self._start for i in wanted if 0 <= i - self._start < self._values.shape[-1]]
        found = self._values[:, samples, :, own]
        before = sum(i < self._start for i in wanted)
        return torch.nn.functional.pad(found, (before, len(wanted) - before - len(own)))


def outer_costs(kappa: int, d: int, other: int, block: int, gram: float | None = None) -> dict[str, float]:
    """Multiplications per sample of each form of ``Outer``; ``gram``: those of the Gram matrix, where it is lazy."""
    costs = {
        "gram": (kappa * kappa * other if gram is None else gram) + float(kappa * kappa * d + kappa * d * block),
        "explicit": float(kappa * d * other + d * other * block),
    }
    return {"rank-one": float(other + d * block), **costs} if kappa == 1 else costs


@dataclass
class Rows(Factors):
    """G_i itself: ``values`` is [groups, samples, m, n]."""

    values: Tensor

    def __post_init__(self) -> None:
        self.groups, self.samples, self.rows, self.cols = self.values.shape
        self.positions = min(self.rows, self.cols)

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self.values[:, samples].to(dtype)

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return block_of(self.values[..., rows, cols].to(dtype))


@dataclass
class OnDemand(Factors):
    """G_i computed when it is asked for, for some samples at a time."""

    source: LazyGradients

    def __post_init__(self) -> None:
        self.groups, self.samples, self.rows, self.cols = self.source.shape
        self.positions = min(self.rows, self.cols)

    @property
    def half_precision(self) -> bool:
        return self.source.half_precision

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self.source.take(samples, dtype)

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return self.source.total(dtype)

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The squares are those of the sum, since each G_i would have to be computed."""
        block = self.source.total(dtype)[:, rows, cols]
        return block, block.square().sum()

    def memory(self, side: str, form: str, other: int) -> int:
        return super().memory(side, form, other) + self.groups * self.rows * self.cols + self.source.entries


def gram_root(gram: Tensor) -> Tensor:
    """A matrix B with B^T B = K, for a positive semi-definite K that may be singular."""
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min(0).sqrt()[..., None] * vectors.mT
