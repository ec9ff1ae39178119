"""The gradients of a step as matrices, their norms, on which ranks agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor
from ngplus.utils.dtensor import local
from ngplus.utils.finite import norms_of


def gradient_parts(
    matrix: ParameterMatrix, group: Mapping[str, Any], given: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """G, [groups, m, n], as the parts that stand side by side in it, one for each trained parameter. Of a sparse
    gradient only the rows that it touches, and their indices.

    ``given`` are the gradients of the trained parameters where they had to be put together from several ranks.
    """
    grads = [p.grad for p in matrix.active_params] if given is None else list(given)
    rows, first = None, grads[0]
    if first is not None and first.is_sparse:
        if group["weight_decay"] != 0 and "momentum" in group:  # decoupled weight decay leaves sparse rows alone
            raise RuntimeError(
                f"weight_decay option is not compatible with the sparse gradient of {matrix.name!r}: give it a "
                "parameter group with weight_decay=0"
            )
        first = first.coalesce()
        one_sided = len(matrix.partition_of(group).sides("right")) == 1
        right = matrix.fixed_partition is not None or matrix.side(group.get("side", "smaller")) == "right"
        if len(grads) == 1 and one_sided and right and matrix.kinds[0] == "rows":
            rows = first.indices()
        grads[0] = first.values().flatten(1) if rows is not None else first.to_dense()
    if rows is not None:
        assert grads[0] is not None
        parts = [grads[0][None]]
    else:
        pairs = zip(matrix.active_params, grads, strict=True)
        parts = matrix.layout.parts([torch.zeros_like(p) if g is None else g for p, g in pairs])
    parts = [part.to(matrix.dtype) for part in parts]
    return ([-part for part in parts] if group["maximize"] else parts), rows


def gradient_norms(matrices: Iterable[ParameterMatrix]) -> tuple[list[str], Tensor]:
    """The names of the parameters that have gradients, and the norms of these. One that is finite says that every
    entry is, and its square as well."""
    grads = [(name, p.grad) for m in matrices for name, p in zip(m.names, m.params, strict=True) if p.grad is not None]
    if not grads:
        return [], torch.zeros(0)
    return [name for name, _ in grads], norms_of([local(grad) for _, grad in grads])


def agree(distributor: Distributor) -> tuple[list[ParameterMatrix], list[str], Tensor]:
    """The matrices of a team for which any rank has a gradient, and the names and norms, the same on all ranks.

    What one rank has to skip all skip, so that none waits for it.
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
