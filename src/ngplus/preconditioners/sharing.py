"""What an owner sends of a refresh, so that every rank can apply it: the inverse as a triangle, or the eigenbasis.

With d the curved dimension in blocks of p, scaling "inverse" takes d (p + 1) / 2 numbers and lambda, scaling "adaptive"
d p + d: eigenvectors have no triangle. All ranks, the owner as well, install what was sent, so all hold the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import ReplicatedDistributor, pack, unpack
from ngplus.preconditioners import curvature as curvatures
from ngplus.preconditioners.curvature import CurvatureEstimate, Solved
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import Group, State


def solved(estimate: CurvatureEstimate | None, state: State, group: Group, seed: int, status: RefreshStatus) -> Solved:
    """What the owner has to send; without new curvature, what is in use."""
    if estimate is not None:
        return curvatures.solved(estimate, group, seed, status)
    if group["scaling"] == "adaptive":
        return {key: curvatures.read(state, key) for key in ("basis", "spectrum")}
    return {"inverse": curvatures.read(state, "inverse"), "damping": state["damping"]}


def send(
    distributor: ReplicatedDistributor,
    matrices: Sequence[ParameterMatrix],
    groups: Mapping[nn.Parameter, Group],
    found: Sequence[Solved | None],
) -> list[Solved]:
    """What each matrix's owner has found, on all ranks."""
    parcels = [
        _room(m, groups[m.params[0]]) if new is None else _parcel(new) for m, new in zip(matrices, found, strict=True)
    ]
    owners = [distributor.owners[id(m)] for m, parcel in zip(matrices, parcels, strict=True) for _ in parcel]
    distributor.ranks.send([tensor for parcel in parcels for tensor in parcel], owners)
    return [_opened(parcel, m, groups[m.params[0]]) for m, parcel in zip(matrices, parcels, strict=True)]


def _parcel(new: Solved) -> list[Tensor]:
    if "basis" in new:  # in rows, as they arrive at the others: products round by it
        return [tensor.contiguous() for tensor in (*new["spectrum"], *new["basis"])]
    return [pack(new["inverse"]), new["damping"].reshape(1)]


def _room(matrix: ParameterMatrix, group: Group) -> list[Tensor]:
    """Tensors of the shapes of a parcel."""
    partition = matrix.partition_of(group)
    if group["scaling"] == "adaptive":
        blocks = [(partition.groups * count, size) for _, count, size in partition.stacks]
        shapes: list[tuple[int, ...]] = [*blocks, *[(count, size, size) for count, size in blocks]]
    else:
        shapes = [(partition.triangle,), (1,)]
    return [torch.empty(shape, dtype=matrix.dtype, device=matrix.params[0].device) for shape in shapes]


def _opened(parcel: Sequence[Tensor], matrix: ParameterMatrix, group: Group) -> Solved:
    if group["scaling"] == "adaptive":
        half = len(parcel) // 2
        return {"basis": list(parcel[half:]), "spectrum": list(parcel[:half])}
    return {"inverse": unpack(parcel[0], matrix.partition_of(group)), "damping": parcel[1].reshape(())}


def unchanged(state: State, new: Solved) -> bool:
    """Is this the basis in use? Then the owner has dropped a refresh, and there are no moments to turn."""
    old, basis = curvatures.read(state, "basis") or [], new.get("basis", [None])
    if [(o.shape, o.dtype, o.device) for o in old] != [(q.shape, q.dtype, q.device) for q in basis if q is not None]:
        return False
    return bool(old) and all(map(torch.equal, old, basis))
