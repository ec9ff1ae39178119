"""The gradients of a step as matrices, and their norms, on which ranks agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor
from ngplus.utils.dtensor import local
from ngplus.utils.finite import norms_of


def gradient_matrix(
    matrix: ParameterMatrix, group: Mapping[str, Any], grads: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """G, [groups, m, n], from the gradients of the trained parameters of a matrix. Where G is sparse and R is its only
    curvature, returns the rows of G that are not zero, [1, r, n], and their indices."""
    rows, first = None, grads[0]
    if first is not None and first.is_sparse:
        first = first.coalesce()
        one_sided = len(matrix.partition_of(group).sides("right")) == 1
        right = matrix.fixed_partition is not None or matrix.side(group.get("side", "smaller")) == "right"
        if len(grads) == 1 and one_sided and right and matrix.kinds[0] == "rows":
            rows = first.indices()
        else:
            grads = [first.to_dense(), *grads[1:]]
    if rows is not None and first is not None:
        gradient = first.values().flatten(1)[None]
    else:
        pairs = zip(matrix.active_params, grads, strict=True)
        gradient = matrix.layout.join([torch.zeros_like(p) if g is None else g for p, g in pairs])
    gradient = gradient.to(matrix.dtype)
    return (-gradient if group["maximize"] else gradient), rows


def refuse_sparse_decay(matrix: ParameterMatrix, group: Mapping[str, Any]) -> None:
    """Raises as torch.optim.SGD does: its weight decay would change rows without a gradient."""
    if group["weight_decay"] != 0 and any(p.grad is not None and p.grad.is_sparse for p in matrix.params):
        raise RuntimeError(
            f"weight_decay option is not compatible with the sparse gradient of {matrix.name!r}: give it a "
            "parameter group with weight_decay=0"
        )


def gradient_norms(matrices: Iterable[ParameterMatrix]) -> tuple[list[str], Tensor]:
    """The names of the parameters that have gradients, and the norms of the gradients. A finite norm implies that all
    entries and their squares are finite."""
    grads = [(name, p.grad) for m in matrices for name, p in zip(m.names, m.params, strict=True) if p.grad is not None]
    if not grads:
        return [], torch.zeros(0)
    return [name for name, _ in grads], norms_of([local(grad) for _, grad in grads])


def agree(distributor: Distributor) -> tuple[list[ParameterMatrix], list[str], Tensor]:
    """The matrices of a distributor for which any rank has a gradient, and the names and norms, equal on all ranks.

    All ranks skip the same steps, so that none waits for another.
    """
    rows = [(name, p) for m in distributor.matrices for name, p in zip(m.names, m.params, strict=True)]
    table = torch.zeros(len(rows), 2, dtype=torch.float64)
    present = [(i, local(p.grad)) for i, (_, p) in enumerate(rows) if p.grad is not None]
    if present:
        norms = norms_of([grad for _, grad in present]).double().cpu()
        table[[i for i, _ in present]] = torch.stack((norms, torch.ones_like(norms)), dim=1)
    shared = table.to(rows[0][1].device)
    distributor.all_reduce(shared)
    norms, counts = shared.cpu().unbind(1)
    seen = {p for (_, p), count in zip(rows, counts.tolist(), strict=True) if count}
    return [m for m in distributor.matrices if any(p in seen for p in m.params)], [name for name, _ in rows], norms
