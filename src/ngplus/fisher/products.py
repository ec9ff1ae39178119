"""The generalized Fisher matrices: from the factors of per-sample gradients to L or R.

Every form of :mod:`.factors` comes down to a pair of tall matrices Y, Z with sum_i G_i G_i^T = Y^T Z (left side)
or sum_i G_i^T G_i = Y^T Z (right side), made chunk by chunk so that memory stays bounded. With d the curved dimension
(m on the left, n on the right), D the other one, kappa positions, per sample and in multiplications:

========= ============================ ============================== =========================================
form      Y                            Z                              cost
========= ============================ ============================== =========================================
rank-one  c_i                          ||o_i||^2 c_i                  D + d^2            (kappa = 1 only)
gram      C_i (kappa x d)              (O_i O_i^T) C_i                kappa^2 (d + D) + kappa d^2
explicit  O_i^T C_i (D x d)            the same                       kappa d D + d^2 D
========= ============================ ============================== =========================================

where C_i holds the curved factor's positions as rows and O_i the other's. ``choose_form`` takes the cheapest of those
that apply; each of them can be forced, and they agree.

Tensors only: nothing here knows layers or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import Bags, Factors, Lookup
from ngplus.fisher.sketch import Sketch

CHUNK_BYTES = 16 * 2**20


def choose_form(factors: Factors, side: str, other: int, block: int) -> str:
    """The cheapest exact form by the cost model."""
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

    ``samples`` picks a sub-sample by index; ``sketch`` makes the sketch of the other dimension, or None for it.
    """
    other = factors.curved_and_other(side)[1]
    omega = sketch(other) if sketch is not None and not _skips_sketch(factors, side) else None
    other = other if omega is None else omega.spec.size
    if form == "auto":
        form = choose_form(factors, side, other, partition.size)
    elif form not in factors.costs(side, other, partition.size):
        raise ValueError(f"The form {form!r} does not apply to {type(factors).__name__} on the {side} side")
    total: list[Tensor] = []
    for piece in _pieces(factors, factors.memory(side, form, other), samples, chunk_bytes, dtype):
        y, z = factors.pair(side, form, piece, omega, dtype)
        _add_products(total, partition.split(y.mT), partition.split(z.mT))
    for acc in total:
        _mirror(acc)
    return total


def _pieces(
    factors: Factors, numbers: int, samples: Tensor | None, chunk_bytes: int, dtype: torch.dtype
) -> Iterator[Tensor | slice]:
    """The samples in pieces that fit into ``chunk_bytes`` at so many numbers a sample."""
    count = factors.samples if samples is None else len(samples)
    step = max(1, int(chunk_bytes // max(1, numbers * (torch.finfo(dtype).bits // 8))))
    for start in range(0, count, step):
        yield slice(start, start + step) if samples is None else samples[start : start + step]


def _add_products(total: list[Tensor], ys: Sequence[Tensor], zs: Sequence[Tensor]) -> None:
    """total += y z^T, begun where there is none yet; lower triangles only."""
    if total:
        for acc, y, z in zip(total, ys, zs, strict=True):
            _add_lower(acc, y, z)
    else:
        total += [_lower(y, z) for y, z in zip(ys, zs, strict=True)]


def gfim_root(
    factors: Factors,
    side: str,
    partition: BlockPartition,
    *,
    samples: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """U with U U^T = sum_i G_i G_i^T (left) or sum_i G_i^T G_i (right), [blocks, p, r] for each stack."""
    return partition.split(factors.root(side, slice(None) if samples is None else samples, dtype))


def _panel(d: int) -> int:
    """Rows that are worked on together where only the lower triangle is made; d for small matrices, made as a whole."""
    return d if d < 256 else min(256, -(-d // 256) * 64)


def _lower(a: Tensor, b: Tensor) -> Tensor:
    """a b^T, of which, since it is symmetric, only the panels of rows up to their diagonal blocks are made."""
    d = a.shape[1]
    if _panel(d) == d:
        return torch.bmm(a, b.mT)
    total = a.new_zeros(len(a), d, d)
    _add_lower(total, a, b)
    return total


def _add_lower(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The same, added to what there is."""
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
    """Fills the upper panels that ``_add_lower`` has left out."""
    d = total.shape[-1]
    panel = _panel(d)
    for start in range(panel, d, panel):
        end = min(d, start + panel)
        total[:, :start, start:end] = total[:, start:end, :start].mT


def _skips_sketch(factors: Factors, side: str) -> bool:
    """An embedding's exact product already touches nothing of the other dimension's size."""
    return side == "right" and isinstance(factors, Lookup | Bags)
