"""Per-sample gradients in the cheapest form that a layer has: factors that need not be multiplied out.

A layer hands over its per-sample gradients G_i (m x n) as a :class:`Factors`:

========== ==================================================== ==========================================
class      G_i                                                  where
========== ==================================================== ==========================================
Outer      sum over positions p of l_ip r_ip^T                  Linear, Conv, attention
Lookup     sum over positions p of e_index(ip) v_ip^T           Embedding
Bags       (sum over entries j of w_j e_index(j)) g_i^T         EmbeddingBag
Rows       given as it is                                       norm layers, the vmap fallback
Joined     the sum of several of the above, same samples        tied weights, modules called several times
========== ==================================================== ==========================================

:mod:`ngplus.fisher` turns them into L or R. Tensors only: nothing here knows layers or optimizers.

On the way from gradient to step: the form in which G_i leaves the layer rules and enters :mod:`ngplus.fisher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ngplus.sketch import Sketch


class Lazy(Protocol):
    """A factor that is made only for the samples asked for, such as the patches of a convolution's input."""

    shape: tuple[int, ...]

    def take(self, samples: Tensor | slice) -> Tensor:
        """[groups, samples, positions, n] of these samples."""

    def outer(self, samples: Tensor | slice, left: Tensor) -> Tensor:
        """sum_p r_ip l_ip^T, [groups, samples, n, m], by whatever way is best."""

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """r_ip . r_iq, [groups, samples, positions, positions], by whatever way is best."""

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` a sample."""


Factor = Tensor | Lazy


def _take(factor: Factor, samples: Tensor | slice) -> Tensor:
    return factor[:, samples] if isinstance(factor, Tensor) else factor.take(samples)


class Factors:
    """Per-sample gradients G_i (m x n) of one matrix, in a form that need not be multiplied out."""

    groups: int
    samples: int
    positions: int
    rows: int
    cols: int

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """G_i multiplied out, [groups, samples, m, n]."""
        raise NotImplementedError

    @property
    def coarse(self) -> bool:
        """Are the numbers of 16 bits?"""
        return any(isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in vars(self).values())

    def total(self, dtype: torch.dtype) -> Tensor:
        """sum_i G_i, [groups, m, n]: the mini-batch gradient as far as these factors know it."""
        return self.gradients(slice(None), dtype).sum(1)

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Y and Z, [groups, k, d], whose product Y^T Z is the sum over these samples. Here: from the gradients."""
        gradients = self.gradients(samples, dtype)
        if side == "left":
            gradients = gradients.mT
        if sketch is not None:
            gradients = sketch(gradients.mT).mT
        tall = gradients.flatten(1, 2)
        return tall, tall

    def root(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """U, [groups, d, r], with U U^T the sum over these samples."""
        return self.pair(side, "explicit", samples, None, dtype)[0].mT

    def curved_and_other(self, side: str) -> tuple[int, int]:
        """d and D."""
        return (self.rows, self.cols) if side == "left" else (self.cols, self.rows)

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        """Multiplications a sample of each form that applies."""
        d, _ = self.curved_and_other(side)
        return {"explicit": float(d * other * block)}

    def rank(self, side: str) -> int:
        """Columns of ``root`` for all samples."""
        return self.samples * self.curved_and_other(side)[1]

    def memory(self, side: str, form: str, other: int) -> int:
        """Numbers that a sample needs while it is worked on."""
        return self.groups * self.rows * self.cols


@dataclass
class Outer(Factors):
    """G_i = sum_p l_ip r_ip^T with l [groups, samples, positions, m] and r [groups, samples, positions, n].

    With ``ones`` the right factor has one more column, of ones, that is never written out where it can be avoided: the
    bias.
    """

    left: Factor
    right: Factor
    ones: bool = False

    def __post_init__(self) -> None:
        self.groups, self.samples, self.positions, self.rows = self.left.shape
        self.cols = self.right.shape[-1] + self.ones

    def dense_right(self, samples: Tensor | slice) -> Tensor:
        right = _take(self.right, samples)
        return torch.nn.functional.pad(right, (0, 1), value=1.0) if self.ones else right

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return _take(self.left, samples).to(dtype).mT @ self.dense_right(samples).to(dtype)

    def total(self, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(())
        step = self.samples if isinstance(self.right, Tensor) else 1  # patches are made for one sample at a time
        for start in range(0, self.samples, max(1, step)):
            piece = slice(start, start + step)
            left, right = _take(self.left, piece).to(dtype), self.dense_right(piece).to(dtype)
            out = out.to(left) + left.flatten(1, 2).mT @ right.flatten(1, 2)
        return out

    def _curved(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return (_take(self.left, samples) if side == "left" else self.dense_right(samples)).to(dtype)

    def _other(
        self, side: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, bool]:
        """The other factor, and whether a column of ones is still to be added to it."""
        if side == "right":
            other, ones = _take(self.left, samples), False
        elif sketch is not None:
            other, ones = self.dense_right(samples), False
        else:
            other, ones = _take(self.right, samples), self.ones
        other = other.to(dtype)
        return (other if sketch is None else sketch(other)), ones

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if form == "explicit" and sketch is None and not isinstance(self.right, Tensor):
            left = _take(self.left, samples).to(dtype)
            tall = self.right.outer(samples, left)
            if self.ones:
                tall = torch.cat((tall, left.sum(-2)[..., None, :]), dim=-2)
            tall = (tall if side == "left" else tall.mT).flatten(1, 2)
            return tall, tall
        curved = self._curved(side, samples, dtype)
        if form == "gram" and sketch is None and side == "left" and not isinstance(self.right, Tensor):
            gram = self.right.gram(samples, dtype)
            return curved.flatten(1, 2), ((gram + 1.0 if self.ones else gram) @ curved).flatten(1, 2)
        other, ones = self._other(side, samples, sketch, dtype)
        if form == "rank-one":
            weight = other.square().sum(-1, keepdim=True) + float(ones)
            return curved.flatten(1, 2), (weight * curved).flatten(1, 2)
        if form == "gram":
            gram = other @ other.mT
            return curved.flatten(1, 2), ((gram + 1.0 if ones else gram) @ curved).flatten(1, 2)
        # Laid out as [D, d] for each sample, so that all samples are one tall matrix with no permuted copy.
        tall = other.mT @ curved
        if ones:
            tall = torch.cat((tall, curved.sum(-2, keepdim=True)), dim=-2)
        return (tall := tall.flatten(1, 2)), tall

    def root(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        other_size = self.curved_and_other(side)[1]
        if self.positions > 1 and other_size <= self.positions:
            return self.pair(side, "explicit", samples, None, dtype)[0].mT
        curved = self._curved(side, samples, dtype)
        other, ones = self._other(side, samples, None, dtype)
        if self.positions == 1:
            weight = other.square().sum(-1, keepdim=True) + float(ones)
            return (weight.sqrt() * curved).flatten(1, 2).mT
        return (gram_root(other @ other.mT + float(ones)) @ curved).flatten(1, 2).mT

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        gram = None
        if side == "left" and other == self.cols and not isinstance(self.right, Tensor):
            gram = self.right.gram_cost
        return outer_costs(self.positions, d, other, block, gram)

    def rank(self, side: str) -> int:
        return self.samples * min(self.positions, self.curved_and_other(side)[1])

    def memory(self, side: str, form: str, other: int) -> int:
        d, _ = self.curved_and_other(side)
        taken = self.positions * (self.rows + self.cols)  # patches, casts and the column of ones make copies
        work = d * other if form == "explicit" else self.positions * (self.positions + 2 * d)
        return self.groups * max(taken, work)


def outer_costs(kappa: int, d: int, other: int, block: int, gram: float | None = None) -> dict[str, float]:
    """Multiplications a sample of each form of ``Outer``; ``gram``: of the inner products, where they cost less."""
    costs = {
        "gram": (kappa * kappa * other if gram is None else gram) + float(kappa * kappa * d + kappa * d * block),
        "explicit": float(kappa * d * other + d * other * block),
    }
    return {"rank-one": float(other + d * block), **costs} if kappa == 1 else costs


@dataclass
class Lookup(Factors):
    """An embedding's G_i = sum_p e_index(ip) v_ip^T.

    ``index`` is [samples, positions], ``values`` [samples, positions, n].

    On the right side nothing of size m is made: equal rows of one sample are added up, then R is one product.
    """

    index: Tensor
    values: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.groups = 1
        self.samples, self.positions, self.cols = self.values.shape

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        index, values = self.index[samples], self.values[samples].to(dtype)
        out = values.new_zeros(len(values), self.rows, self.cols)
        return out.scatter_add_(1, index[..., None].expand_as(values), values)[None]

    def total(self, dtype: torch.dtype) -> Tensor:
        out = self.values.new_zeros(self.rows, self.cols, dtype=dtype)
        return out.index_add_(0, self.index.flatten(), self.values.flatten(0, 1).to(dtype))[None]

    def _touched(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The rows of all G_i that are not zero, [1, touched, n]."""
        index, values = self.index[samples], self.values[samples].to(dtype)
        return _add_equal(index + self.rows * _arange_like(index), values.flatten(0, 1))[None]

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if side == "left":
            return super().pair(side, form, samples, sketch, dtype)
        touched = self._touched(samples, dtype)
        return touched, touched

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        return {"explicit": float(d * block * (self.positions if side == "right" else other))}

    def rank(self, side: str) -> int:
        return self.samples * (self.positions if side == "right" else self.cols)

    def memory(self, side: str, form: str, other: int) -> int:
        return self.cols * (self.positions if side == "right" else self.rows)


@dataclass
class Bags(Factors):
    """An embedding bag's G_i = (sum_j w_j e_index(j)) g_i^T.

    ``index``, ``sample`` and ``weight`` have one entry for each entry of a bag; ``grads`` is [samples, n]. One
    position, so R = sum_i c_i g_i g_i^T with c_i the squared length of the bag's row weights, equal rows
    added up first.
    """

    index: Tensor
    sample: Tensor
    weight: Tensor
    grads: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.groups, self.positions = 1, 1
        self.samples, self.cols = self.grads.shape

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        chosen = torch.arange(self.samples, device=self.grads.device)[samples]
        place = torch.full((self.samples,), -1, device=chosen.device).scatter_(0, chosen, _arange_like(chosen))[
            self.sample
        ]
        kept = place >= 0
        left = self.grads.new_zeros(len(chosen), self.rows, dtype=dtype)
        left.index_put_((place[kept], self.index[kept]), self.weight[kept].to(dtype), accumulate=True)
        return (left[:, :, None] * self.grads[samples].to(dtype)[:, None, :])[None]

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if side == "left":
            return super().pair(side, form, samples, sketch, dtype)
        grads = self.grads[samples].to(dtype)
        return grads[None], (self._lengths(dtype)[samples][:, None] * grads)[None]

    def root(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        if side == "left":
            return super().root(side, samples, dtype)
        return (self._lengths(dtype)[samples].sqrt()[:, None] * self.grads[samples].to(dtype))[None].mT

    def total(self, dtype: torch.dtype) -> Tensor:
        out = self.grads.new_zeros(self.rows, self.cols, dtype=dtype)
        return out.index_add_(0, self.index, (self.weight[:, None] * self.grads[self.sample]).to(dtype))[None]

    def _lengths(self, dtype: torch.dtype) -> Tensor:
        """||sum_j w_j e_index(j)||^2 of each bag."""
        keys, place = torch.unique(self.sample * self.rows + self.index, return_inverse=True)
        weight = self.weight.new_zeros(len(keys), dtype=dtype).index_add_(0, place, self.weight.to(dtype))
        owner = keys.div(self.rows, rounding_mode="floor")
        return weight.new_zeros(self.samples).index_add_(0, owner, weight.square())

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        d, _ = self.curved_and_other(side)
        return {"rank-one": float(d * block)} if side == "right" else {"explicit": float(d * block * other)}

    def rank(self, side: str) -> int:
        return self.samples * (1 if side == "right" else self.cols)

    def memory(self, side: str, form: str, other: int) -> int:
        return self.cols * (1 if side == "right" else self.rows)


@dataclass
class Rows(Factors):
    """G_i as it is: ``values`` is [groups, samples, m, n]."""

    values: Tensor

    def __post_init__(self) -> None:
        self.groups, self.samples, self.rows, self.cols = self.values.shape
        self.positions = min(self.rows, self.cols)

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return self.values[:, samples].to(dtype)


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
        # No sketch here: the inner products of one-hot rows cost nothing, and the exact product is at hand.
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
                other = use.dense_right(samples) if side == "left" else _take(use.left, samples)
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
    if isinstance(factors, Joined):
        return Joined([widen(use, columns, total) for use in factors.uses])
    assert isinstance(factors, Rows)
    return Rows(place(factors.values))


def gram_root(gram: Tensor) -> Tensor:
    """A matrix B with B^T B = K, for a positive semi-definite K that may be singular."""
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min(0).sqrt()[..., None] * vectors.mT


def _arange_like(index: Tensor) -> Tensor:
    return torch.arange(len(index), device=index.device).view(-1, *[1] * (index.dim() - 1))


def _add_equal(keys: Tensor, values: Tensor) -> Tensor:
    """The sums of the rows of ``values`` that have equal keys."""
    unique, place = torch.unique(keys.flatten(), return_inverse=True)
    return values.new_zeros(len(unique), values.shape[-1]).index_add_(0, place, values)


def _inner(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Inner products of the positions of two factors; a whole-number factor stands for one-hot rows."""
    if a.dtype == b.dtype == torch.long:
        return (a[..., :, None] == b[..., None, :]).to(dtype)
    if a.dtype == torch.long:
        return _inner(b, a, dtype).mT
    if b.dtype == torch.long:
        return a.gather(-1, b[..., None, :].expand(*a.shape[:-1], b.shape[-1]))
    return a @ b.mT
