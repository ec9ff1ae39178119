"""Broadcasts the inverse of a matrix from its owner to all ranks: its lower triangle, lambda, and with ``graft="sgd"``
the longest step.

With d the curved dimension in blocks of p, the triangle has d (p + 1) / 2 numbers. The owner itself takes what it has
sent, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import ReplicatedDistributor, pack, unpack
from ngplus.preconditioners import ngplus_curvature as curvatures
from ngplus.preconditioners.ngplus_curvature import CurvatureEstimate, StateEntries
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import Group, State


def entries_to_send(
    estimate: CurvatureEstimate | None, state: State, group: Group, seed: int, status: RefreshStatus
) -> StateEntries:
    """The new inverse; without an estimate, the one in use."""
    if estimate is not None:
        return curvatures.invert(estimate, group, seed, status)
    most = state["damping"].new_full((), torch.finfo(state["damping"].dtype).max)  # of an older checkpoint
    scalars = {"damping": state["damping"], "longest": state.get("longest", most)}
    return {"inverse": curvatures.read(state, "inverse"), **{key: scalars[key] for key in scalar_keys(group)}}


def scalar_keys(group: Group) -> tuple[str, ...]:
    """The numbers that go with an inverse."""
    return ("damping", "longest") if group["graft"] == "sgd" else ("damping",)


def broadcast_inverses(
    distributor: ReplicatedDistributor,
    matrices: Sequence[ParameterMatrix],
    groups: Mapping[nn.Parameter, Group],
    found: Sequence[StateEntries | None],
) -> list[StateEntries]:
    """The inverses of these matrices on all ranks. ``found`` has those that this rank owns, and None for the others."""
    sent: list[Tensor] = []
    keys = [scalar_keys(groups[m.params[0]]) for m in matrices]
    partitions = [m.partition_of(groups[m.params[0]]) for m in matrices]
    for matrix, names, partition, new in zip(matrices, keys, partitions, found, strict=True):
        if new is None:
            device = matrix.params[0].device
            sent += [torch.empty(size, dtype=matrix.dtype, device=device) for size in (partition.triangle, len(names))]
        else:
            sent += [pack(new["inverse"]), torch.stack([new[name] for name in names])]
    distributor.ranks.broadcast(sent, [distributor.owners[id(m)] for m in matrices for _ in range(2)])
    return [
        {"inverse": unpack(triangle, partition), **dict(zip(names, scalars.unbind(), strict=True))}
        for triangle, scalars, names, partition in zip(sent[::2], sent[1::2], keys, partitions, strict=True)
    ]
