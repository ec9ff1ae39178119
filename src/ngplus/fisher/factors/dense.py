"""G_i as a product of dense factors, with or without positions, and G_i as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngplus.fisher.factors.base import Factor, Factors, take
from ngplus.fisher.sketch import Sketch

PIECE = 2**22  # numbers that ``Outer.total`` works on at a time


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
        right = take(self.right, samples)
        return torch.nn.functional.pad(right, (0, 1), value=1.0) if self.ones else right

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return take(self.left, samples).to(dtype).mT @ self.dense_right(samples).to(dtype)

    def total(self, dtype: torch.dtype) -> Tensor:
        if isinstance(self.right, Tensor):
            left, right = take(self.left, slice(None)).to(dtype), self.dense_right(slice(None)).to(dtype)
            return left.flatten(1, 2).mT @ right.flatten(1, 2)
        step = max(1, PIECE // self.memory("left", "explicit", self.cols))
        out = torch.zeros(())
        for start in range(0, self.samples, step):
            tall = self._written("left", slice(start, start + step), dtype).unflatten(1, (-1, self.cols))
            out = out.to(tall) + tall.sum(1).mT
        return out

    def _written(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Y of the form "explicit", [groups, samples * D, d], where the right factor is made for it."""
        assert not isinstance(self.right, Tensor)
        return self.right.outer(samples, take(self.left, samples).to(dtype), side, self.ones)

    def _curved(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return (take(self.left, samples) if side == "left" else self.dense_right(samples)).to(dtype)

    def _other(
        self, side: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, bool]:
        """The other factor, and whether a column of ones is still to be added to it."""
        if side == "right":
            other, ones = take(self.left, samples), False
        elif sketch is not None:
            other, ones = self.dense_right(samples), False
        else:
            other, ones = take(self.right, samples), self.ones
        other = other.to(dtype)
        return (other if sketch is None else sketch(other)), ones

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if form == "explicit" and sketch is None and not isinstance(self.right, Tensor):
            tall = self._written(side, samples, dtype)
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

    @property
    def writing_cost(self) -> float:
        return float(self.positions * self.rows * self.cols)

    def rank(self, side: str) -> int:
        return self.samples * min(self.positions, self.curved_and_other(side)[1])

    def memory(self, side: str, form: str, other: int) -> int:
        d, _ = self.curved_and_other(side)
        if form == "explicit" and other == self.curved_and_other(side)[1] and not isinstance(self.right, Tensor):
            return self.groups * d * other + self.right.outer_memory(self.rows)
        taken = self.positions * (self.rows + self.cols)  # patches, casts and the column of ones make copies
        update = d * other if form == "explicit" else self.positions * (self.positions + 2 * d)
        return self.groups * max(taken, update)


def outer_costs(kappa: int, d: int, other: int, block: int, gram: float | None = None) -> dict[str, float]:
    """Multiplications a sample of each form of ``Outer``; ``gram``: of the inner products, where they cost less."""
    costs = {
        "gram": (kappa * kappa * other if gram is None else gram) + float(kappa * kappa * d + kappa * d * block),
        "explicit": float(kappa * d * other + d * other * block),
    }
    return {"rank-one": float(other + d * block), **costs} if kappa == 1 else costs


@dataclass
class Rows(Factors):
    """G_i as it is: ``values`` is [groups, samples, m, n]."""

    values: Tensor

    def __post_init__(self) -> None:
        self.groups, self.samples, self.rows, self.cols = self.values.shape
        self.positions = min(self.rows, self.cols)

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        return self.values[:, samples].to(dtype)


def gram_root(gram: Tensor) -> Tensor:
    """A matrix B with B^T B = K, for a positive semi-definite K that may be singular."""
    values, vectors = torch.linalg.eigh(gram)
    return values.clamp_min(0).sqrt()[..., None] * vectors.mT
