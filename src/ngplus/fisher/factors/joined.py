"""Several uses of one matrix by the same samples: their G_i add up before L is formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ngplus.fisher.factors.base import Factors, take
from ngplus.fisher.factors.dense import Outer, Rows, gram_root
from ngplus.fisher.factors.ragged import Segments
from ngplus.fisher.factors.tables import Bags, Lookup
from ngplus.fisher.sketch import Sketch


@dataclass
class Joined(Factors):
    """The sum of several uses of one matrix by the same samples: G_i = sum_u G_i^(u), cross terms and all.

    Where the uses have factors, their positions stand side by side in one Gram matrix; an embedding's part of it is a
    comparison of indices, and its cross part with a dense use a gather, so a tied output layer costs no one-hot matrix.
    Other mixtures are multiplied out, a chunk of samples at a time.
    """

    uses: Sequence[Factors]

    def __post_init__(self) -> None:
        first = self.uses[0]
        self.groups, self.samples, self.rows, self.cols = first.groups, first.samples, first.rows, first.cols
        self.positions = sum(use.positions for use in self.uses)

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return torch.stack([use.gradients(samples, dtype) for use in self.uses]).sum(0)

    @property
    def coarse(self) -> bool:
        return any(use.coarse for use in self.uses)

    def total(self, dtype: torch.dtype) -> Tensor:
        return torch.stack([use.total(dtype) for use in self.uses]).sum(0)

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if form != "gram":
            return super().pair(side, form, samples, sketch, dtype)
        # No sketch here: inner products with one-hot rows want the full dimension. Dense uses alone are exact, too.
        curved, gram = self._curved_and_gram(side, samples, dtype)
        return curved.flatten(1, 2), (gram @ curved).flatten(1, 2)

    def root(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        if "gram" not in self.costs(side, 1, 1):
            return super().root(side, samples, dtype)
        curved, gram = self._curved_and_gram(side, samples, dtype)
        return (gram_root(gram) @ curved).flatten(1, 2).mT

    def _curved_and_gram(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        curved, others = [], []
        for use in self.uses:
            if isinstance(use, Lookup):
                curved.append(use.values[samples].to(dtype)[None])
                others.append(use.index[samples][None])
            else:
                assert isinstance(use, Outer)
                curved.append(use._curved(side, samples, dtype))
                other = use.dense_right(samples) if side == "left" else take(use.left, samples)
                others.append(other.to(dtype))
        rows = [torch.cat([_inner(a, b, dtype) for b in others], dim=-1) for a in others]
        return torch.cat(curved, dim=2), torch.cat(rows, dim=2)

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        kappa = self.positions
        costs = {"explicit": float(kappa * d * other + d * other * block)}
        if all(isinstance(use, Outer) or (isinstance(use, Lookup) and side == "right") for use in self.uses):
            # Only dense positions are multiplied with each other; those of an embedding are compared or gathered.
            dense = sum(use.positions for use in self.uses if isinstance(use, Outer))
            costs["gram"] = float(kappa * kappa * d + dense * dense * other + kappa * d * block)
        return costs

    @property
    def writing_cost(self) -> float:
        return float(self.positions * self.rows * self.cols)

    def rank(self, side: str) -> int:
        other = self.curved_and_other(side)[1]
        return self.samples * (self.positions if "gram" in self.costs(side, 1, 1) else other)

    def memory(self, side: str, form: str, other: int) -> int:
        d, _ = self.curved_and_other(side)
        taken = max(use.memory(side, form, other) for use in self.uses)
        if form == "gram":
            return max(taken, self.groups * self.positions * (self.positions + 2 * d))
        return max(taken, self.groups * self.rows * self.cols * (1 + len(self.uses)))


def join(uses: Sequence[Factors]) -> list[Factors]:
    """Uses of one matrix by the same samples as one; uses with another number of samples stay apart."""
    by_samples: dict[int, list[Factors]] = {}
    for use in uses:
        by_samples.setdefault(use.samples, []).append(use)
    return [_join_same(same) for same in by_samples.values()]


def _join_same(uses: Sequence[Factors]) -> Factors:
    uses = [use for use in uses if use.positions > 0] or uses[:1]  # a use without rows adds nothing
    lookups = [use for use in uses if isinstance(use, Lookup)]
    if len(uses) > 1 and len(lookups) == len(uses):  # more positions of the same table
        index, values = torch.cat([u.index for u in lookups], 1), torch.cat([u.values for u in lookups], 1)
        return Lookup(index, values, lookups[0].rows)
    return uses[0] if len(uses) == 1 else Joined(uses)


def widen(factors: Factors, columns: Sequence[int], total: int) -> Factors:
    """Sets the columns of a use into a wider matrix: a tied weight whose other use has a bias of its own."""
    if list(columns) == list(range(total)):
        return factors

    def place(x: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], total)
        out[..., list(columns)] = x
        return out

    if isinstance(factors, Outer):
        return Outer(factors.left, place(factors.dense_right(slice(None))))
    if isinstance(factors, Lookup):
        return Lookup(factors.index, place(factors.values), factors.rows)
    if isinstance(factors, Bags):
        return Bags(factors.index, factors.sample, factors.weight, place(factors.grads), factors.rows)
    if isinstance(factors, Segments):
        return Segments(factors.left, place(factors.right), factors.sizes)
    if isinstance(factors, Joined):
        return Joined([widen(use, columns, total) for use in factors.uses])
    assert isinstance(factors, Rows)
    return Rows(place(factors.values))


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of the positions of two factors; a whole-number factor stands for one-hot rows."""
    if a.dtype == b.dtype == torch.long:
        return (a[..., :, None] == b[..., None, :]).to(dtype)
    if a.dtype == torch.long:
        return _inner(b, a, dtype).mT
    if b.dtype == torch.long:
        return a.gather(-1, b[..., None, :].expand(*a.shape[:-1], b.shape[-1]))
    return a @ b.mT
