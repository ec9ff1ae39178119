"""Accumulates L or R of one matrix over the micro-batches between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.layers.base import NotPerSample
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher import products
from ngplus.fisher.factors import Factors, OnDemand, Rows
from ngplus.fisher.sketch import Sketch, SketchSpec
from ngplus.utils.typing import Group


@dataclass
class Accumulator:
    """Sums over samples, not yet divided by their number."""

    product_sum: list[Tensor] | None = None  # sum_i G_i G_i^T or sum_i G_i^T G_i, as stacks of blocks
    low_rank: list[list[Tensor]] = field(default_factory=list)  # U of each micro-batch, where the sum is U U^T
    samples: int = 0  # samples of all micro-batches
    positions: int = 0  # the largest number of positions of a sample
    summed: bool = False  # some samples had their positions added before, and a bound of the rank stands for them
    used: int = 0  # the number of them in S_k
    ranks: int = 1  # processes whose samples are in the sums

    def take_in(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        """Adds the factors of a micro-batch. Where that needs too much memory, the matrix falls back."""
        try:
            self._take_in(matrix, factors, group, seed)
        except NotPerSample as reason:
            matrix.fall_back_at_step(str(reason))

    def _take_in(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        self.positions = max(self.positions, factors.positions)
        self.summed = self.summed or isinstance(factors, Rows | OnDemand)
        self.samples += factors.samples
        self.add(matrix, factors, group, seed)

    def note_seen(self, matrix: ParameterMatrix) -> None:
        """Notes for ``plan()`` what this refresh of the matrix saw, once the sums of all ranks are added."""
        matrix.seen = (self.samples, self.positions)
        matrix.summed, matrix.ranks = self.summed, self.ranks

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        """Adds the products of the factors to ``product_sum``, or U to ``low_rank`` if its rank is low."""
        side, partition = matrix.side(group["side"]), matrix.partition_of(group)
        index = subsample(factors.samples, group["samples"], seed)
        self.used += factors.samples if index is None else len(index)
        limit = matrix.refresh_memory - matrix.bytes_taken - factors.extra_bytes
        chunk: dict[str, Any] = {
            "samples": index,
            "chunk_bytes": min(limit, products.CHUNK_BYTES),
            "dtype": matrix.dtype,
        }
        rank = factors.rank(side) + sum(part[0].shape[-1] for part in self.low_rank)
        multiplied = self.product_sum is not None and group["solver"] == "auto"
        if keeps_low_rank(group, rank, partition.size) and not multiplied:
            roots = sum(root.nbytes for part in self.low_rank for root in part)  # of earlier micro-batches, copied once
            needed = roots + products.low_rank_bytes(factors, side, matrix.dtype)
            if needed <= limit or group["solver"] != "auto":
                matrix.note_refresh_bytes(factors.extra_bytes + needed)
                matrix.form = "root"
                self.low_rank.append(products.gfim_low_rank(factors, side, partition, **chunk))
                return
        if self.low_rank:  # with those of earlier micro-batches U would be larger than L
            self.product_sum, self.low_rank = self.products(), []
        spec = SketchSpec.parse(group["sketch"])

        def sketch(size: int) -> Sketch | None:
            """Returns Omega for the other dimension; None, the exact product, if Omega is not smaller."""
            return None if spec is None or spec.size >= size else Sketch(spec, size, seed)

        other = factors.curved_and_other(side)[1]
        other = other if spec is None else min(other, spec.size)
        needs = {
            form: products.sample_bytes(factors, side, form, other, matrix.dtype)
            for form in factors.costs(side, other, partition.size)
        }
        form = products.choose_form(factors, side, other, partition.size)
        if needs[form] > limit:
            form = min(needs, key=lambda form: needs[form])
        count = factors.samples if index is None else len(index)
        at_once = max(1, min(count, chunk["chunk_bytes"] // needs[form]))
        matrix.note_refresh_bytes(factors.extra_bytes + at_once * needs[form])
        matrix.form = form
        added = products.gfim_sum(factors, side, partition, form=form, sketch=sketch, **chunk)
        if self.product_sum is None:
            self.product_sum = added
        else:
            torch._foreach_add_(self.product_sum, added)

    def products(self) -> list[Tensor] | None:
        """Returns ``product_sum`` and the products U U^T as one sum; None if there is nothing."""
        total = self.product_sum
        for part in self.low_rank:
            products = [root @ root.mT for root in part]
            total = products if total is None else [a + b for a, b in zip(total, products, strict=True)]
        return total

    def length(self) -> Tensor:
        """Returns sqrt(N sum_i |G_i|^2), a bound on |sum_i G_i| that does not vanish if the G_i cancel."""
        traces = [m.diagonal(dim1=-2, dim2=-1).sum() for m in self.product_sum or []]
        traces += [root.square().sum() for part in self.low_rank for root in part]
        return (self.samples * torch.stack(traces).sum()).sqrt()


def subsample(count: int, samples: int | float | None, seed: int) -> Tensor | None:
    """Returns S_k, a random subset of the batch of that size or fraction; None for the whole batch."""
    size = subsample_size(count, samples)
    if size == count:
        return None
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def subsample_size(count: int, samples: int | float | None) -> int:
    """Returns |S_k| of a batch of ``count`` samples."""
    if samples is None:
        return count
    return min(count, max(1, round(samples * count)) if isinstance(samples, float) else samples)


def keeps_low_rank(group: Group, rank: int, size: int) -> bool:
    """Returns True if U of this rank, with L = U U^T, is stored in place of L. Woodbury divides by lambda."""
    if group["solver"] in ("woodbury", "sketched"):
        return True
    return bool(
        2 * rank < size  # then 4 d r D FLOPs of a step are below 2 d^2 D
        and group["solver"] == "auto"
        and group["curvature"] == "sample"
        and group["sketch"] is None
        and group["samples"] is None
        and (group["damping"] != 0 or group["relative_damping"] != 0)
    )
