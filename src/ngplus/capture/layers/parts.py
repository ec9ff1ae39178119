"""Factors for some samples at a time, where those of all would copy the input and the gradient of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ngplus.capture.batch import Batch
from ngplus.fisher.factors import Factors, Parts
from ngplus.fisher.factors.base import Samples

Build = Callable[[Sequence[Tensor], Batch], Factors]
COPIES = 3  # of a sample's entries: in their order, filled up, and in the order of the factor


def by_parts(
    build: Build, tensors: Sequence[Tensor], batch: Batch, copies: bool = False, fills: bool = True
) -> Factors:
    """Returns the factors of all samples, or :class:`Parts` that copies some of them at a time.

    Args:
        build: makes the factors of some samples from their entries of the tensors.
        tensors: the inputs and the gradient, with the entries of the samples along dimension 0.
        batch: all samples, along that dimension.
        copies: ``build`` copies its tensors, also where the entries of each sample stand together.
        fills: ``build`` pads samples to the size of the largest.
    """
    length = len(tensors[0])
    if batch.dim is None or not (copies or batch.copies(length)):
        return build(tensors, batch)
    samples, (largest, entries) = batch.count(length), batch.longest(length)
    given = sum(x.nbytes for x in tensors)
    each = COPIES * entries * given // length  # bytes of the largest sample
    if (samples * each if fills else COPIES * given) <= batch.part_bytes:
        return build(tensors, batch)
    batch.check_bytes(each)

    def part(chosen: Samples) -> Factors:
        index, own = batch.part(length, chosen)
        return build([x[index.to(x.device) if isinstance(index, Tensor) else index] for x in tensors], own)

    like = part(torch.tensor([largest]))
    copied = COPIES * entries * sum(x.nbytes // min(4, x.element_size()) for x in tensors) // length
    step = batch.part_bytes // (4 * (each if fills else COPIES * given // samples + 1))
    return Parts(part, samples, like, copied, tensors, max(1, step))
