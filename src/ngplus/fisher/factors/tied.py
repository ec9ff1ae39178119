"""Several uses of one matrix by the same samples: their G_i are added before L or R is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ngplus.fisher.factors.base import Factors, LazyGradients, Pair, Samples, take
from ngplus.fisher.factors.outer import OnDemand, Outer, Rows, gram_root
from ngplus.fisher.factors.parts import Parts, add_up, in_parts
from ngplus.fisher.factors.ragged import Segments
from ngplus.fisher.factors.tables import Bags, Lookup
from ngplus.fisher.sketch import Sketch


@dataclass
class Joined(Factors):
    """G_i = sum_u G_i^(u) over the uses u of one matrix, including the cross terms of L and R.

    Where all uses have factors, one Gram matrix has the positions of all of them. The left factor of an embedding is
    one-hot: its inner products are comparisons of indices, and gathers with those of a dense use. Otherwise each G_i is
    computed, in chunks of samples.
    """

    uses: Sequence[Factors]

    def __post_init__(self) -> None:
        first = self.uses[0]
        self.groups, self.samples, self.rows, self.cols = first.groups, first.samples, first.rows, first.cols
        self.positions = sum(use.positions for use in self.uses)

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return add_up(use.gradients(samples, dtype) for use in self.uses)

    @property
    def half_precision(self) -> bool:
        return any(use.half_precision for use in self.uses)

    def tensors(self) -> Iterator[Tensor]:
        for use in self.uses:
            yield from use.tensors()

    @property
    def extra_bytes(self) -> int:
        return max(use.extra_bytes for use in self.uses)

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        return add_up(use.gradient_sum(dtype) for use in self.uses)

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        blocks, squares = zip(*(use.gradient_block(rows, cols, dtype) for use in self.uses), strict=True)
        return torch.stack(blocks).sum(0), len(blocks) * torch.stack(squares).sum()

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        if form != "gram":
            return super().pair(side, form, samples, sketch, dtype)
        # Exact, whatever the sketch: inner products with one-hot vectors need the full dimension.
        curved, gram = self._curved_and_gram(side, samples, dtype)
        return curved.flatten(1, 2), (gram @ curved).flatten(1, 2)

    def low_rank(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        if self.low_rank_form(side) == "explicit":
            return super().low_rank(side, samples, dtype)
        curved, gram = self._curved_and_gram(side, samples, dtype)
        return (gram_root(gram) @ curved).flatten(1, 2).mT

    def low_rank_form(self, side: str) -> str:
        return "gram" if "gram" in self.costs(side, 1, 1) else "explicit"

    def _curved_and_gram(self, side: str, chosen: Samples, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        curved, others = [], []
        for of_all in self.uses:
            use, samples = (of_all.build(chosen), slice(None)) if isinstance(of_all, Parts) else (of_all, chosen)
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
        kinds = [use.largest if isinstance(use, Parts) else use for use in self.uses]
        if all(isinstance(use, Outer) or (isinstance(use, Lookup) and side == "right") for use in kinds):
            # Those of an embedding are compared or gathered, not multiplied.
            dense = sum(use.positions for use in kinds if isinstance(use, Outer))
            costs["gram"] = float(kappa * kappa * d + dense * dense * other + kappa * d * block)
        return costs

    def rank(self, side: str) -> int:
        other = self.curved_and_other(side)[1]
        return self.samples * (self.positions if "gram" in self.costs(side, 1, 1) else other)

    def memory(self, side: str, form: str, other: int) -> int:
        d, _ = self.curved_and_other(side)
        of_uses = [use.memory(side, form, other) for use in self.uses]
        if form == "gram":
            return sum(of_uses) + self.groups * self.positions * (self.positions + 2 * d)
        return max(of_uses) + 2 * self.groups * self.rows * self.cols


def join(uses: Sequence[Factors]) -> list[Factors]:
    """Joins the uses of one matrix that have the same number of samples."""
    by_samples: dict[int, list[Factors]] = {}
    for use in uses:
        by_samples.setdefault(use.samples, []).append(use)
    return [_join_same(same) for same in by_samples.values()]


def _join_same(uses: Sequence[Factors]) -> Factors:
    uses = [use for use in uses if use.positions > 0] or uses[:1]  # a use without positions adds nothing
    lookups = [use for use in uses if isinstance(use, Lookup)]
    if len(uses) > 1 and len(lookups) == len(uses):  # more positions of the same table

        def build(samples: Samples) -> Factors:
            index, values = ([each[samples] for each in given] for given in zip(*pairs, strict=True))
            return Lookup(torch.cat(index, 1), torch.cat(values, 1), lookups[0].rows)

        pairs = [(use.index, use.values) for use in lookups]
        copied = sum(use.positions * (use.cols + 2) for use in lookups)
        return in_parts(build, lookups[0].samples, copied, [x for use in lookups for x in use.tensors()])
    return uses[0] if len(uses) == 1 else Joined(uses)


def widen(factors: Factors, columns: Sequence[int], total: int) -> Factors:
    """The factors of a wider matrix with ``total`` columns: a tied weight whose other use has a bias."""
    if list(columns) == list(range(total)):
        return factors

    def place(x: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], total)
        out[..., list(columns)] = x
        return out

    if isinstance(factors, Outer | Lookup):
        return _wide_parts(factors, place, total)
    if isinstance(factors, Bags):
        return Bags(factors.index, factors.sample, factors.weight, place(factors.grads), factors.rows)
    if isinstance(factors, Segments):
        return Segments(factors.left, place(factors.dense_right(slice(None))), factors.sizes)
    if isinstance(factors, Parts):
        build, largest = factors.build, widen(factors.largest, columns, total)
        return replace(factors, build=lambda samples: widen(build(samples), columns, total), largest=largest)
    if isinstance(factors, Joined):
        return Joined([widen(use, columns, total) for use in factors.uses])
    if isinstance(factors, OnDemand):
        return OnDemand(_Widened(factors.source, place, total))
    assert isinstance(factors, Rows)
    return Rows(place(factors.values))


def _wide_parts(factors: Outer | Lookup, place: Callable[[Tensor], Tensor], total: int) -> Factors:
    """The wider factors of all samples, or of some at a time if these are large copies."""

    def build(samples: Samples) -> Factors:
        if isinstance(factors, Lookup):
            return Lookup(factors.index[samples], place(factors.values[samples]), factors.rows)
        return Outer(take(factors.left, samples), place(factors.dense_right(samples)))

    return in_parts(build, factors.samples, 2 * factors.groups * factors.positions * total, [*factors.tensors()])


class _Widened:
    """Gradients of a part of a matrix's columns, with zeros in the others."""

    def __init__(self, source: LazyGradients, place: Callable[[Tensor], Tensor], total: int) -> None:
        self._source, self._place = source, place
        self.shape, self.half_precision = (*source.shape[:3], total), source.half_precision
        self.entries = source.entries + prod(source.shape) // source.shape[1]

    def take(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        return self._place(self._source.take(samples, dtype))

    def total(self, dtype: torch.dtype) -> Tensor:
        return self._place(self._source.total(dtype))

    def tensors(self) -> Iterator[Tensor]:
        return self._source.tensors()


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of the positions of two factors; an integer factor has the indices of one-hot vectors."""
    if a.dtype == b.dtype == torch.long:
        return (a[..., :, None] == b[..., None, :]).to(dtype)
    if a.dtype == torch.long:
        return _inner(b, a, dtype).mT
    if b.dtype == torch.long:
        return a.gather(-1, b[..., None, :].expand(*a.shape[:-1], b.shape[-1]))
    return a @ b.mT
