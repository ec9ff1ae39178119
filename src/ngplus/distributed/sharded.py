"""Parameters in parts: DTensors of FSDP2, HSDP and tensor parallelism.

A mesh dimension of a parameter is one of three: ranks that hold other parts and see other samples (FSDP2), ranks that
hold the same and see other samples (HSDP's replicas), ranks that hold other parts and see the same samples (tensor
parallelism). The ranks that hold the parts between them are a team. Each matrix has an owner in its team: the parts of
its gradient go to the owner, which alone keeps the curvature and finds the direction; the parts of the direction come
back. A step sends each gradient and each direction once; a rank holds a W-th of the curvature, as of the parameters.

With tensor parallelism a layer's input or output gradient is itself in parts, by features. They are brought together
where they are captured, so that the factors have the full m and n, and the owner counts them alone. Samples that differ
are added up as in :mod:`.collectives`: over FSDP2's ranks to the owner, over HSDP's replicas among the owners.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor, RankGroup, Sum, Traffic, assign, cost_of
from ngplus.utils.dtensor import is_dtensor, local
from ngplus.utils.typing import Group

SHARDED_SINCE = "2.13"  # a version of torch: the tests hold there; with torch 2.8 FSDP2 trains to other numbers


class Piece(NamedTuple):
    """Where a rank's part of a parameter lies in the whole."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))]


class Managed(NamedTuple):
    """The mesh dimensions along which FSDP2 shards a parameter and replicates it."""

    shard: int | None
    replicate: int | None


def managed_by_fsdp(model: nn.Module | None) -> dict[Tensor, tuple[Managed, Any]]:
    """The parameters that ``fully_shard`` manages, with its own record of each. Their module's parameters are others
    while it runs."""
    found: dict[Tensor, tuple[Managed, Any]] = {}
    for module in model.modules() if model is not None and "torch.distributed.fsdp" in sys.modules else ():
        if not isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                info = group.mesh_info
                found[param.sharded_param] = Managed(info.shard_mesh_dim, info.replicate_mesh_dim), param
    return found


class ShardedDistributor(Distributor):
    """The team of a mesh: the ranks that hold the parts of these matrices' parameters between them."""

    def __init__(
        self,
        mesh: Any,
        data: Managed,
        matrices: Sequence[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        kept: Mapping[nn.Parameter, int],
        ranks: RankGroup | None,
    ) -> None:
        super().__init__(matrices)
        here = tuple(mesh.get_coordinate())
        dims = [dim for dim in range(mesh.ndim) if dim != data.replicate]
        ranges = [range(mesh.size(dim)) if dim in dims else [here[dim]] for dim in range(mesh.ndim)]
        places = list(itertools.product(*ranges))
        members = [int(mesh.mesh[place]) for place in places]
        if len(dims) == 1:
            self.group = mesh.get_group(dims[0])
        else:
            self.group = dist.new_group(members, use_local_synchronization=True)
        order = sorted(range(len(members)), key=lambda i: dist.get_group_rank(self.group, members[i]))
        places = [places[i] for i in order]
        self.size, self.rank = len(places), places.index(here)
        self._among_shards = None if data.shard is None else _ranks(mesh.get_group(data.shard))
        self._among_replicas = None if data.replicate is None else _ranks(mesh.get_group(data.replicate))
        if data.shard is None and data.replicate is None:
            self._among_replicas = ranks  # tensor parallel copies that the user, or DDP, trains on different samples
        costs = [cost_of(m, m.partition_of(groups[m.params[0]]), steps=True) for m in matrices]
        owners = assign(costs, self.size, [kept.get(m.params[0]) for m in matrices])
        self.owners = dict(zip(map(id, matrices), owners, strict=True))
        model_dims = [dim for dim in dims if dim != data.shard]
        self._keeper: dict[int, int] = {}
        self._pieces: dict[Tensor, list[Piece]] = {}
        for matrix in matrices:
            place = places[self.owners[id(matrix)]]
            matrix.counted = all(place[dim] == here[dim] for dim in model_dims)
            matrix.in_step = bool(model_dims)
            if data.shard is not None:
                self._keeper[id(matrix)] = place[data.shard]
            for param in matrix.params:
                self._pieces[param] = [_piece(param, place) for place in places]

    def owns(self, matrix: ParameterMatrix) -> bool:
        return self.owners[id(matrix)] == self.rank

    keeps = owns

    def is_remote(self, matrix: ParameterMatrix) -> bool:
        return True

    def add_up(self, due: Sequence[tuple[ParameterMatrix, Sum]]) -> None:
        if not due:
            return
        counted = [(m, s) for m, s in due if m.counted]
        if self._among_shards is not None:
            for matrix, s in counted:
                s.keeper = self._keeper[id(matrix)]
            self._among_shards.add_up([s for _, s in counted])
        else:  # dense like all others, so that a checkpoint has the same entries
            for _, s in counted:
                s.gathered.total, s.gathered.roots = s.gathered.products(), []
        if self._among_replicas is not None:
            mine = [s for m, s in counted if self.owns(m)]
            for s in mine:
                s.keeper = None
            self._among_replicas.add_up(mine)
        # Who has to fall back is known where the samples are counted; the whole team goes by it.
        failed = torch.tensor([float(s.failed) for _, s in due], dtype=torch.float64, device=due[0][1].device)
        self.agree(failed)
        for (_, s), bad in zip(due, failed.tolist(), strict=True):
            s.failed = bad > 0

    def agree(self, table: Tensor) -> None:
        dist.all_reduce(table, group=self.group)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        """Over all ranks together. Of a gradient each part is sent once, of a direction to all that hold it."""
        averages = sum(ranks is not None for ranks in (self._among_shards, self._among_replicas))
        gradient = sum(param.numel() for param in matrix.active_params)
        direction = sum(piece.numel for param in matrix.active_params for piece in self._pieces[param])
        return Traffic(averages * matrix.partition_of(group).triangle, 0, gradient + direction)

    def gather(self, matrices: Sequence[ParameterMatrix]) -> dict[int, list[Tensor]]:
        """The gradients of those of the matrices that this rank owns, whole: one for each parameter that is trained."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        rooms: list[list[Tensor]] = [[] for _ in range(self.size)]  # where each rank's parts go
        out: dict[int, list[Tensor]] = {}
        for matrix in matrices:
            owner = self.owners[id(matrix)]
            for param in matrix.active_params:
                pieces = self._pieces[param]
                senders = [
                    rank for rank, piece in enumerate(pieces) if pieces.index(piece) == rank
                ]  # of equal ones, one
                part = _gradient(param, matrix.dtype)  # on all ranks: it may have to be added up first
                if self.rank in senders:
                    sent[owner].append(part)
                if owner == self.rank:
                    full = torch.empty(param.shape, dtype=matrix.dtype, device=param.device)
                    out.setdefault(id(matrix), []).append(full)
                    for rank in senders:
                        rooms[rank].append(pieces[rank].of(full))
        got = self._exchange(sent, [[room.numel() for room in each] for each in rooms], matrices)
        for each, parts in zip(rooms, got, strict=True):
            for room, part in zip(each, parts, strict=True):
                room.copy_(part.view_as(room))
        return out

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """From the directions of the matrices that a rank owns to every rank's parts of all directions."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        expected: list[list[nn.Parameter]] = [[] for _ in range(self.size)]
        for matrix in matrices:
            owner = self.owners[id(matrix)]
            for param in matrix.active_params:
                expected[owner].append(param)
                if owner == self.rank:
                    for rank, piece in enumerate(self._pieces[param]):
                        sent[rank].append(piece.of(directions[param]).to(matrix.dtype))
        sizes = [[self._pieces[p][self.rank].numel for p in params] for params in expected]
        out: dict[nn.Parameter, Tensor] = {}
        for params, parts in zip(expected, self._exchange(sent, sizes, matrices), strict=True):
            for param, part in zip(params, parts, strict=True):
                out[param] = part.view(self._pieces[param][self.rank].shape).to(param.dtype)
        return out

    def _exchange(
        self, sent: list[list[Tensor]], sizes: list[list[int]], matrices: Sequence[ParameterMatrix]
    ) -> list[Sequence[Tensor]]:
        """All to all: a list of tensors for each rank, for one of each rank, whose ``sizes`` are known."""
        dtype = torch.float64 if any(m.dtype == torch.float64 for m in matrices) else torch.float32
        device = self.matrices[0].params[0].device
        flat = [t.reshape(-1).to(dtype) for tensors in sent for t in tensors]
        given = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        counts = [sum(t.numel() for t in tensors) for tensors in sent]
        totals = [sum(each) for each in sizes]
        got = torch.empty(sum(totals), dtype=dtype, device=device)
        dist.all_to_all_single(got, given, totals, counts, group=self.group)
        return [part.split(each) for part, each in zip(got.split(totals), sizes, strict=True)]


def _ranks(group: dist.ProcessGroup) -> RankGroup | None:
    size = dist.get_world_size(group)
    return None if size == 1 else RankGroup(group, size)


def _piece(param: Any, place: tuple[int, ...]) -> Piece:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found = _compute_local_shape_and_global_offset(param.shape, param.device_mesh.shape, list(place), param.placements)
    return Piece(*found)


def _gradient(param: Any, dtype: torch.dtype) -> Tensor:
    """This rank's part of the gradient; zeros where there is none."""
    grad = param.grad
    if grad is None:
        return torch.zeros_like(local(param), dtype=dtype)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad).to(dtype)


def shards_of(
    matrices: Sequence[ParameterMatrix],
    model: nn.Module | None,
    groups: Mapping[nn.Parameter, Group],
    kept: Mapping[nn.Parameter, int],
    ranks: RankGroup | None,
) -> list[ShardedDistributor]:
    """The teams of the matrices whose parameters are sharded, one for each mesh and way of sharding.

    ``kept`` are the owners, by first parameter, of matrices that have one; ``ranks`` those that average gradients.
    """
    if not any(is_dtensor(p) for m in matrices for p in m.params):
        return []
    if TorchVersion(torch.__version__) < SHARDED_SINCE:
        raise RuntimeError(
            f"Sharded parameters (FSDP2, tensor parallelism) need torch {SHARDED_SINCE} or newer, "
            f"and this is {torch.__version__}; DistributedDataParallel works with it"
        )
    managed = managed_by_fsdp(model)
    by_mesh: dict[Any, list[ParameterMatrix]] = {}
    for matrix in matrices:
        if not any(map(is_dtensor, matrix.params)):
            continue
        none = Managed(None, None), None
        kinds = {(getattr(p, "device_mesh", None), managed.get(p, none)[0]) for p in matrix.params}
        if len(kinds) != 1:
            raise ValueError(
                f"The parameters of one matrix, {', '.join(matrix.names)}, are not sharded alike: put them into one "
                "fully_shard call, or on the same mesh"
            )
        by_mesh.setdefault(kinds.pop(), []).append(matrix)
        matrix.managed = [managed[p][1] for p in matrix.params if p in managed]
        if matrix.source == "vmap":
            matrix.fall_back("its parameters are sharded, and no layer rule covers it")
    return [ShardedDistributor(mesh, data, each, groups, kept, ranks) for (mesh, data), each in by_mesh.items()]
