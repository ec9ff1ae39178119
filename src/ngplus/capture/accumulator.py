"""The sums of one matrix between two steps: products of the per-sample gradients of all micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher import products
from ngplus.fisher.factors import Factors
from ngplus.fisher.sketch import Sketch, SketchSpec
from ngplus.utils.typing import Group


@dataclass
class Accumulator:
    """What a refresh has gathered so far: sums over samples, not yet divided by anything."""

    total: list[Tensor] | None = None
    roots: list[list[Tensor]] = field(default_factory=list)
    samples: int = 0  # samples in the batch, all micro-batches together
    used: int = 0  # those of them in S_k
    ranks: int = 1  # processes whose samples are in the sums
    gradient: Tensor | None = None  # sum_i G_i, kept on the first refresh only, to check that nothing was missed
    coarse: bool = False  # some of the factors were of 16 bits

    def take_in(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int, check: bool = False) -> None:
        """Counts a batch's factors in; with ``check``, their own sum, too."""
        matrix.seen = (factors.samples, factors.positions)
        self.samples += factors.samples
        if check:
            self.coarse = self.coarse or factors.half_precision
            total = factors.total(matrix.dtype)
            self.gradient = total if self.gradient is None else self.gradient + total
        self.add(matrix, factors, group, seed)

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        """Adds a batch's factors: to the sum of products, or to the columns of U where the rank is low."""
        side, partition = matrix.side(group["side"]), matrix.partition_of(group)
        index = subsample(factors.samples, group["samples"], seed)
        self.used += factors.samples if index is None else len(index)
        if keeps_root(group, factors.rank(side), partition.size):
            matrix.form = "root"
            self.roots.append(products.gfim_root(factors, side, partition, samples=index, dtype=matrix.dtype))
            return
        spec = SketchSpec.parse(group["sketch"])

        def sketch(size: int) -> Sketch | None:
            """Omega for the other dimension; one that would not make it shorter is the exact product."""
            return None if spec is None or spec.size >= size else Sketch(spec, size, seed)

        other = factors.curved_and_other(side)[1]
        matrix.form = products.choose_form(
            factors, side, other if spec is None else min(other, spec.size), partition.size
        )
        added = products.gfim_sum(factors, side, partition, sketch=sketch, samples=index, dtype=matrix.dtype)
        if self.total is None:
            self.total = added
        else:
            torch._foreach_add_(self.total, added)

    def products(self) -> list[Tensor] | None:
        """All that was gathered as one sum; None where nothing was."""
        total = self.total
        for roots in self.roots:  # low rank, or micro-batches of unlike sizes of which some were
            products = [root @ root.mT for root in roots]
            total = products if total is None else [a + b for a, b in zip(total, products, strict=True)]
        return total

    def length(self) -> Tensor:
        """A bound on |sum_i G_i|, which may be the small difference of large parts: sqrt(N sum_i |G_i|^2)."""
        traces = [m.diagonal(dim1=-2, dim2=-1).sum() for m in self.total or []]
        traces += [root.square().sum() for roots in self.roots for root in roots]
        return (self.samples * torch.stack(traces).sum()).sqrt()


def subsample(count: int, samples: int | float | None, seed: int) -> Tensor | None:
    """S_k: a random subset of the batch, given by its size or its fraction; None for the whole batch."""
    size = subsample_size(count, samples)
    if size == count:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def subsample_size(count: int, samples: int | float | None) -> int:
    """|S_k| of a batch of so many: one at least, all at most."""
    if samples is None:
        return count
    return min(count, max(1, round(samples * count)) if isinstance(samples, float) else samples)


def keeps_root(group: Group, rank: int, size: int) -> bool:
    """Is L of blocks of ``size`` rows kept as U, with L = U U^T of that rank? Woodbury's identity divides by lambda."""
    if group["solver"] in ("woodbury", "sketched"):
        return True
    return bool(
        2 * rank < size  # then 4 d r D FLOPs of a step are below 2 d^2 D
        and group["solver"] == "auto"
        and group["curvature"] == "sample"
        and group["sketch"] is None
        and group["samples"] is None
        and group["damping"] != 0
    )
