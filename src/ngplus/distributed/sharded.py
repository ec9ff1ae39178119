"""Sharded parameters: DTensors of FSDP2, HSDP and tensor parallelism.

A mesh dimension of a parameter is one of three kinds. Its ranks have different shards and different samples (FSDP2),
the same shard and different samples (the replicas of HSDP), or different shards and the same samples (tensor parallel).
The ranks that together have all shards of a matrix's parameters form a group, and one of them is its owner. In every
step the shards of the gradient are sent to the owner, which alone has the curvature and computes the direction; the
shards of the direction are sent back. With W ranks each has about 1/W of the curvature, as of the parameters.

With tensor parallelism the input or the output gradient of a layer is sharded by features. The capture gathers the
shards, so that the factors have the full m and n, and only the owner adds them to its sums. Sums over different samples
are reduced as in :mod:`.collectives`: over the ranks of FSDP2 to the owner, then over the owners of HSDP's replicas.
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

from ngplus.capture import reasons
from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor, MatrixSum, RankGroup, Traffic, assign, cost_of
from ngplus.utils.dtensor import is_dtensor, local
from ngplus.utils.typing import Group

SHARDED_SINCE = "2.13"  # the version of torch that is tested; with torch 2.8 training with FSDP2 gives other numbers


class Shard(NamedTuple):
    """The shape and the offset of a rank's shard of a parameter."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))]


class FSDPDims(NamedTuple):
    """The mesh dimensions along which FSDP2 shards and replicates a parameter."""

    shard: int | None
    replicate: int | None


def managed_by_fsdp(model: nn.Module | None) -> dict[Tensor, tuple[FSDPDims, Any]]:
    """The parameters that ``fully_shard`` manages, with FSDP2's own record (``FSDPParam``) of each."""
    found: dict[Tensor, tuple[FSDPDims, Any]] = {}
    for module in model.modules() if model is not None and "torch.distributed.fsdp" in sys.modules else ():
        if not isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:
            for param in group.fsdp_params if group is not None else ():
                info = group.mesh_info
                found[param.sharded_param] = FSDPDims(info.shard_mesh_dim, info.replicate_mesh_dim), param
    return found


class ShardedDistributor(Distributor):
    """For the ranks of a mesh that together have all shards of these matrices."""

    def __init__(
        self,
        mesh: Any,
        data: FSDPDims,
        matrices: Sequence[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        old_owners: Mapping[nn.Parameter, int],
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
        self.ranks = RankGroup(self.group, self.size)
        self._shards = None if data.shard is None else RankGroup.of(None, mesh.get_group(data.shard))
        self._replicas = None if data.replicate is None else RankGroup.of(None, mesh.get_group(data.replicate))
        if data.shard is None and data.replicate is None:
            self._replicas = ranks  # tensor-parallel replicas that DDP, or the user, trains on different samples
        costs = [cost_of(m, m.partition_of(groups[m.params[0]]), steps=True) for m in matrices]
        owners = assign(costs, self.size, [old_owners.get(m.params[0]) for m in matrices])
        self.owners = dict(zip(map(id, matrices), owners, strict=True))
        model_dims = [dim for dim in dims if dim != data.shard]
        self._destinations: dict[int, int] = {}  # the owner's rank among the shards, by the id of the matrix
        self._pieces: dict[Tensor, list[Shard]] = {}  # of every rank, by parameter
        for matrix in matrices:
            place = places[self.owners[id(matrix)]]
            matrix.adds_samples = all(place[dim] == here[dim] for dim in model_dims)
            matrix.captured_jointly = bool(model_dims)
            if data.shard is not None:
                self._destinations[id(matrix)] = place[data.shard]
            for param in matrix.params:
                self._pieces[param] = [_shard(param, place) for place in places]

    def owns(self, matrix: ParameterMatrix) -> bool:
        return self.owners[id(matrix)] == self.rank

    has_curvature = owns

    def kept_by_owner_only(self, matrix: ParameterMatrix) -> bool:
        return True

    def reduce(self, due: Sequence[tuple[ParameterMatrix, MatrixSum]]) -> None:
        if not due:
            return
        counted = [(m, s) for m, s in due if m.adds_samples]
        if self._shards is not None:
            for matrix, s in counted:
                s.destination = self._destinations[id(matrix)]
            self._shards.reduce([s for _, s in counted])
        else:  # dense in any case, so that a checkpoint has the same entries
            for _, s in counted:
                s.gathered.product_sum, s.gathered.low_rank = s.gathered.products(), []
        if self._replicas is not None:
            own = [s for m, s in counted if self.owns(m)]
            for s in own:
                s.destination = None
            self._replicas.reduce(own)
        # Only the ranks that count the samples know of a failure.
        failed = torch.tensor([float(s.failed) for _, s in due], dtype=torch.float64, device=due[0][1].device)
        self.all_reduce(failed)
        for (_, s), bad in zip(due, failed.tolist(), strict=True):
            s.failed = bad > 0

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        """The sum over all ranks. Each shard of a gradient is sent once, each shard of a direction to all its ranks."""
        averages = sum(ranks is not None for ranks in (self._shards, self._replicas))
        gradient = sum(param.numel() for param in matrix.active_params)
        direction = sum(piece.numel for param in matrix.active_params for piece in self._pieces[param])
        return Traffic(averages * matrix.partition_of(group).triangle, 0, gradient + direction)

    def gather(self, matrices: Sequence[ParameterMatrix]) -> dict[int, list[Tensor]]:
        """The full gradients of the matrices that this rank owns, one for each trained parameter."""
        sent: list[list[Tensor]] = [[] for _ in range(self.size)]
        received: list[list[Tensor]] = [[] for _ in range(self.size)]  # views for the shards of each rank
        out: dict[int, list[Tensor]] = {}
        for matrix in matrices:
            owner = self.owners[id(matrix)]
            for param in matrix.active_params:
                pieces = self._pieces[param]
                senders = [rank for rank, piece in enumerate(pieces) if pieces.index(piece) == rank]  # each shard once
                gradient = _gradient(param, matrix.dtype)  # collective: on all ranks
                if self.rank in senders:
                    sent[owner].append(gradient)
                if owner == self.rank:
                    full = torch.empty(param.shape, dtype=matrix.dtype, device=param.device)
                    out.setdefault(id(matrix), []).append(full)
                    for rank in senders:
                        received[rank].append(pieces[rank].of(full))
        exchanged = self._exchange(sent, [[view.numel() for view in views] for views in received], matrices)
        for views, parts in zip(received, exchanged, strict=True):
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view_as(view))
        return out

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Sends the shards of the owned directions; returns this rank's shards of all directions."""
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
        """All-to-all: sends a list of tensors to each rank; returns those of each rank, of these ``sizes``."""
        dtype = torch.float64 if any(m.dtype == torch.float64 for m in matrices) else torch.float32
        device = self.matrices[0].params[0].device
        flat = [t.reshape(-1).to(dtype) for tensors in sent for t in tensors]
        given = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        sent_sizes = [sum(t.numel() for t in tensors) for tensors in sent]
        received_sizes = [sum(each) for each in sizes]
        received = torch.empty(sum(received_sizes), dtype=dtype, device=device)
        dist.all_to_all_single(received, given, received_sizes, sent_sizes, group=self.group)
        return [part.split(each) for part, each in zip(received.split(received_sizes), sizes, strict=True)]


def _shard(param: Any, place: tuple[int, ...]) -> Shard:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    found = _compute_local_shape_and_global_offset(param.shape, param.device_mesh.shape, list(place), param.placements)
    return Shard(*found)


def _gradient(param: Any, dtype: torch.dtype) -> Tensor:
    """This rank's shard of the gradient; zeros where there is none."""
    grad = param.grad
    if grad is None:
        return torch.zeros_like(local(param), dtype=dtype)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad).to(dtype)


def sharded_distributors(
    matrices: Sequence[ParameterMatrix],
    model: nn.Module | None,
    groups: Mapping[nn.Parameter, Group],
    old_owners: Mapping[nn.Parameter, int],
    ranks: RankGroup | None,
) -> list[ShardedDistributor]:
    """The distributors of the matrices with sharded parameters, one for each mesh and pair of FSDP dimensions.

    ``old_owners`` has the owners assigned before, by a matrix's first parameter; ``ranks`` average gradients.
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
        none = FSDPDims(None, None), None
        kinds = {(getattr(p, "device_mesh", None), managed.get(p, none)[0]) for p in matrix.params}
        if len(kinds) != 1:
            raise ValueError(
                f"The parameters {', '.join(matrix.names)} of one matrix are sharded differently: put them into one "
                "fully_shard call, or on the same mesh"
            )
        by_mesh.setdefault(kinds.pop(), []).append(matrix)
        matrix.managed = [managed[p][1] for p in matrix.params if p in managed]
        if matrix.source == "vmap":
            matrix.fall_back(reasons.SHARDED)
    return [ShardedDistributor(mesh, data, each, groups, old_owners, ranks) for (mesh, data), each in by_mesh.items()]
