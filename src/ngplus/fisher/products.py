"""The generalized Fisher matrices: from the factors of per-sample gradients to L or R.

Each class of :mod:`.factors` gives a pair of tall matrices Y, Z with sum_i G_i G_i^T = Y^T Z (left side) or
sum_i G_i^T G_i = Y^T Z (right side), in chunks of samples to bound memory. With d the size of L or R (m on the left, n
on the right), D the other dimension and kappa positions, the multiplications per sample are:

========= ============================ ============================== =========================================
form      Y                            Z                              cost
========= ============================ ============================== =========================================
rank-one  c_i                          ||o_i||^2 c_i                  D + d^2            (kappa = 1 only)
gram      C_i (kappa x d)              (O_i O_i^T) C_i                kappa^2 (d + D) + kappa d^2
explicit  O_i^T C_i (D x d)            the same                       kappa d D + d^2 D
========= ============================ ============================== =========================================

where the rows of C_i are the positions of the factor of size d ("curved"), and those of O_i the positions of the other
factor. ``choose_form`` takes the cheapest form that applies. All forms give the same sum up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import Bags, Factors, Lookup, Parts
from ngplus.fisher.sketch import Sketch

CHUNK_BYTES = 16 * 2**20
REFRESH_MEMORY = 2**30


def choose_form(factors: Factors, side: str, other: int, block: int) -> str:
    """The cheapest form by the cost model."""
    costs = factors.costs(side, other, block)
    return min(costs, key=lambda form: costs[form])


def gfim_sum(
    factors: Factors,
    side: str,
    partition: BlockPartition,
    *,
    form: str = "auto",
    sketch: Callable[[int], Sketch | None] | None = None,
    samples: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """sum_i G_i G_i^T (left) or sum_i G_i^T G_i (right) over the samples, as the stacks of ``partition``.

    ``samples`` are the indices of a sub-sample. ``sketch(D)`` returns the sketch of the other dimension, or None.
    """
    other = factors.curved_and_other(side)[1]
    omega, kind = None, factors.largest if isinstance(factors, Parts) else factors
    # The exact R of an embedding reads only the table rows that the samples use: no sketch makes it cheaper.
    if sketch is not None and not (side == "right" and isinstance(kind, Lookup | Bags)):
        omega = sketch(other)
    other = other if omega is None else omega.spec.size
    if form == "auto":
        form = choose_form(factors, side, other, partition.size)
    elif form not in factors.costs(side, other, partition.size):
        raise ValueError(f"The form {form!r} does not apply to {type(factors).__name__} on the {side} side")
    count = factors.samples if samples is None else len(samples)
    step = max(1, chunk_bytes // sample_bytes(factors, side, form, other, dtype))
    total: list[Tensor] = []
    for start in range(0, count, step):
        chunk = slice(start, start + step) if samples is None else samples[start : start + step]
        y, z = (partition.split(x.mT) for x in factors.pair(side, form, chunk, omega, dtype))
        if total:
            for acc, a, b in zip(total, y, z, strict=True):
                _add_lower(acc, a, b)
        else:
            total = [_lower(a, b) for a, b in zip(y, z, strict=True)]
    for acc in total:
        _mirror(acc)
    return total


def gfim_low_rank(
    factors: Factors,
    side: str,
    partition: BlockPartition,
    *,
    samples: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """U with U U^T = sum_i G_i G_i^T (left) or sum_i G_i^T G_i (right), [blocks, p, r] for each stack."""
    other, form = factors.curved_and_other(side)[1], factors.low_rank_form(side)
    step = max(1, chunk_bytes // sample_bytes(factors, side, form, other, dtype))
    count = factors.samples if samples is None else len(samples)
    chunks = [slice(start, start + step) for start in range(0, count, step)]
    parts = [factors.low_rank(side, chunk if samples is None else samples[chunk], dtype) for chunk in chunks]
    return partition.split(parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))


def sample_bytes(factors: Factors, side: str, form: str, other: int, dtype: torch.dtype) -> int:
    """Bytes of the temporaries for one sample."""
    return max(1, factors.memory(side, form, other) * (torch.finfo(dtype).bits // 8))


def low_rank_bytes(factors: Factors, side: str, dtype: torch.dtype) -> int:
    """Bytes of the temporaries of :func:`gfim_low_rank` for one sample, and of U, which is copied twice."""
    d, other = factors.curved_and_other(side)
    root = 3 * factors.groups * d * factors.rank(side) * (torch.finfo(dtype).bits // 8)
    return root + sample_bytes(factors, side, factors.low_rank_form(side), other, dtype)


def _panel(d: int) -> int:
    """Height of the row panels of the lower triangle; d where the whole matrix is computed at once."""
    return d if d < 256 else min(256, -(-d // 256) * 64)


def _lower(a: Tensor, b: Tensor) -> Tensor:
    """The symmetric product a b^T; of a large one only the row panels up to their diagonal blocks."""
    d = a.shape[1]
    if _panel(d) == d:
        return torch.bmm(a, b.mT)
    total = a.new_zeros(len(a), d, d)
    _add_lower(total, a, b)
    return total


def _add_lower(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b^T, in place, in the same panels."""
    d = total.shape[-1]
    panel = _panel(d)
    if panel == d:
        torch.baddbmm(total, a, b.mT, out=total)
        return
    for start in range(0, d, panel):
        end = min(d, start + panel)
        rows = total[:, start:end, :end]
        torch.baddbmm(rows, a[:, start:end], b[:, :end].mT, out=rows)


def _mirror(total: Tensor) -> None:
    """Fills the upper panels, which :func:`_add_lower` skips."""
    d = total.shape[-1]
    panel = _panel(d)
    for start in range(panel, d, panel):
        end = min(d, start + panel)
        total[:, :start, start:end] = total[:, start:end, :start].mT
