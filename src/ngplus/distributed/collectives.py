"""Communication between ranks: the sums of a refresh, the inverses, the directions.

Each rank has sums over its own samples. A refresh first all-reduces the sample counts, and whether any rank has no
per-sample curvature; then the lower triangles of the sums, d (d + 1) / 2 entries for each matrix, in buckets. DDP
averages gradients over W ranks: .grad = 1/W sum over ranks and samples of c_i = 1/N sum_i G_i, so G_i = N/W c_i with N
the samples of all ranks. This is exact for ranks with different numbers of samples, too, if their losses are weighted
by these numbers.

Each matrix has an owner, assigned by cost (:func:`assign`), which computes its inverse. A result that several ranks use
is computed by the owner and broadcast, so that it is bitwise equal on all ranks. :class:`ReplicatedDistributor` is for
ranks that have all parameters; :mod:`ngplus.distributed.sharded` for ranks that have shards of them.

The curvature "batch" needs no communication: its gradients are averaged already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.accumulator import Accumulator
from ngplus.capture.collector import Collector
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher.blocks import BlockPartition
from ngplus.utils.typing import Group

BUCKET_BYTES = 64 * 2**20
DISTRIBUTIONS = ("communication", "memory")


@dataclass
class MatrixSum:
    """The sums of one matrix that are reduced over ranks: to the rank ``destination``, or to all where it is None."""

    gathered: Accumulator
    partition: BlockPartition
    dtype: torch.dtype
    device: torch.device
    failed: bool
    destination: int | None = None


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train one model together."""

    group: dist.ProcessGroup
    size: int

    @classmethod
    def of(cls, model: nn.Module | None, group: dist.ProcessGroup | None) -> RankGroup | None:
        """The ranks of a DistributedDataParallel model, or of the given group; None for a single process."""
        if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
            group = model.process_group
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, dist.get_world_size(group))

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def reduce(self, sums: Sequence[MatrixSum]) -> None:
        """Reduces the sums to their destinations, in place. Counts and ``failed`` are all-reduced.

        All ranks pass the same matrices in the same order. The sums of a rank without samples may be empty.
        """
        if not sums:
            return
        counts = torch.tensor(
            [[s.gathered.samples, s.gathered.used, s.gathered.ranks, float(s.failed)] for s in sums],
            dtype=torch.float64,
            device=sums[0].device,
        )
        dist.all_reduce(counts, group=self.group)
        packed: list[tuple[MatrixSum, Tensor]] = []
        for s, (samples, used, ranks, failed) in zip(sums, counts.tolist(), strict=True):
            s.gathered.samples, s.gathered.used, s.gathered.ranks = round(samples), round(used), round(ranks)
            s.failed = failed > 0
            if s.failed or not used:
                continue
            stacks = s.gathered.products()
            if stacks is None:
                stacks = [
                    torch.zeros(s.partition.groups * n, p, p, dtype=s.dtype, device=s.device)
                    for _, n, p in s.partition.stacks
                ]
            packed.append((s, pack(stacks)))
        packed.sort(key=lambda pair: -1 if pair[0].destination is None else pair[0].destination)
        for destination, bucket in buckets([(s.destination, flat) for s, flat in packed]):
            joined = torch.cat([packed[i][1] for i in bucket])
            if destination is None:
                dist.all_reduce(joined, group=self.group)
            else:
                dist.reduce(joined, dst=dist.get_global_rank(self.group, destination), group=self.group)
            here = destination is None or destination == self.rank
            for i, flat in zip(bucket, joined.split([packed[i][1].numel() for i in bucket]), strict=True):
                s = packed[i][0]
                s.gathered.product_sum, s.gathered.low_rank = unpack(flat, s.partition) if here else None, []

    def broadcast(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Broadcasts each tensor from its owner, in place."""
        order = sorted(range(len(tensors)), key=lambda i: owners[i])
        for owner, bucket in buckets([(owners[i], tensors[i]) for i in order]):
            own = [tensors[order[i]] for i in bucket]
            joined = torch.cat([tensor.flatten() for tensor in own])
            assert owner is not None
            dist.broadcast(joined, src=dist.get_global_rank(self.group, owner), group=self.group)
            for tensor, flat in zip(own, joined.split([tensor.numel() for tensor in own]), strict=True):
                tensor.copy_(flat.view_as(tensor))


class Traffic(NamedTuple):
    """Entries of one matrix that ranks communicate: the sums of a refresh, its inverse, and those of every step."""

    average: int
    inverse: int
    step: int


class Distributor:
    """Distributes the work on some matrices over ranks. Each matrix has an owner among them."""

    owners: dict[int, int]  # by the id of the matrix
    ranks: RankGroup  # that share the work

    def __init__(self, matrices: Sequence[ParameterMatrix]) -> None:
        self.matrices = list(matrices)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        raise NotImplementedError

    def owns(self, matrix: ParameterMatrix) -> bool:
        raise NotImplementedError

    def kept_by_owner_only(self, matrix: ParameterMatrix) -> bool:
        """Whether only the owner has the curvature of a matrix, and sends the direction in every step."""
        raise NotImplementedError

    def has_curvature(self, matrix: ParameterMatrix) -> bool:
        """Whether this rank has the curvature of a matrix, and computes its direction."""
        return self.owns(matrix) or not self.kept_by_owner_only(matrix)

    def reduce(self, due: Sequence[tuple[ParameterMatrix, MatrixSum]]) -> None:
        """Reduces the sums of a refresh to the ranks that need them."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        raise NotImplementedError

    def gather(self, matrices: Sequence[ParameterMatrix]) -> dict[int, list[Tensor]]:
        """Gathers sharded gradients at their owners; returns those of this rank by the id of their matrix."""
        return {}

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """Sends the directions that owners have computed; returns those of all these matrices."""
        raise NotImplementedError


def reduce_curvature(
    distributor: Distributor, collector: Collector, due: Sequence[ParameterMatrix], groups: Mapping[nn.Parameter, Group]
) -> list[ParameterMatrix]:
    """Reduces the sums of these matrices over the samples of all ranks. All ranks call it with the same matrices.

    Returns the matrices for which any rank has counted samples.
    """
    sums = []
    for matrix in due:
        partition = matrix.partition_of(groups[matrix.params[0]])
        failed = matrix.source == "batch" or bool(matrix.reason)
        entry = MatrixSum(collector.of(matrix), partition, matrix.dtype, matrix.params[0].device, failed)
        sums.append((matrix, entry))
    distributor.reduce(sums)
    for matrix, s in sums:
        if s.failed and matrix.source != "batch":
            matrix.fall_back(matrix.reason or reasons.OTHER_RANK)
        if s.gathered.used and not s.failed:
            s.gathered.note_seen(matrix)
        if s.failed or not s.gathered.used or not distributor.has_curvature(matrix):
            collector.take(matrix)
    return [matrix for matrix, s in sums if s.gathered.used and not s.failed]


class ReplicatedDistributor(Distributor):
    """For ranks that all have the whole parameters, as with DistributedDataParallel.

    "communication": at a refresh the owner broadcasts the inverse, and every rank applies it. "memory": only the owner
    has the curvature; it broadcasts the direction in every step.
    """

    def __init__(
        self,
        ranks: RankGroup,
        matrices: Sequence[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        distribution: str,
        old_owners: Mapping[nn.Parameter, int],
    ) -> None:
        super().__init__(matrices)
        self.ranks, self._groups = ranks, groups
        # Ranks have different rows of a sparse gradient, and R is small: each rank applies the inverse to its rows.
        self._remote = {id(m) for m in matrices if distribution == "memory" and not m.sparse}
        costs = [cost_of(m, m.partition_of(groups[m.params[0]]), id(m) in self._remote) for m in matrices]
        owners = assign(costs, ranks.size, [old_owners.get(m.params[0]) for m in matrices])
        self.owners = dict(zip(map(id, matrices), owners, strict=True))

    def owns(self, matrix: ParameterMatrix) -> bool:
        return self.owners[id(matrix)] == self.ranks.rank

    def kept_by_owner_only(self, matrix: ParameterMatrix) -> bool:
        return id(matrix) in self._remote

    def reduce(self, due: Sequence[tuple[ParameterMatrix, MatrixSum]]) -> None:
        """To the owner; to all ranks where each of them has the moving average."""
        for matrix, s in due:
            averaged = self._groups[matrix.params[0]]["curvature"] == "momentum"
            s.destination = None if averaged and not self.kept_by_owner_only(matrix) else self.owners[id(matrix)]
        self.ranks.reduce([s for _, s in due])

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.ranks.group)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        partition = matrix.partition_of(group)
        if self.kept_by_owner_only(matrix):
            return Traffic(partition.triangle, 0, sum(p.numel() for p in matrix.active_params))
        numbers = 2 if group.get("graft") == "sgd" else 1  # lambda, and the longest step
        return Traffic(partition.triangle, partition.triangle + numbers, 0)

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        params = [(param, self.owners[id(m)]) for m in matrices for param in m.active_params]
        out = {p: directions[p].contiguous() if p in directions else torch.empty_like(p) for p, _ in params}
        self.ranks.broadcast(list(out.values()), [owner for _, owner in params])
        return out


def cost_of(matrix: ParameterMatrix, partition: BlockPartition, steps: bool) -> float:
    """The cost of a matrix, by its shape alone so that it never changes: d p^2 for the refresh. With ``steps``, also
    d p D for each preconditioned side, and m n for elementwise operations."""
    entries = matrix.layout.rows * matrix.layout.cols
    products = sum(own.elements * (entries // own.d) for _, own in partition.sides("left"))
    return float(partition.cubes + (products + partition.groups * entries if steps else 0))


def assign(costs: Sequence[float], ranks: int, old_owners: Sequence[int | None] = ()) -> list[int]:
    """Assigns each item to a rank: in order of falling cost, to the rank with the least load so far.

    The largest load is at most 4/3 of that of the best assignment (Graham, 1969). Items with an old owner stay there.
    """
    loads = [0.0] * ranks
    owners = list(old_owners) or [None] * len(costs)
    for owner, cost in zip(owners, costs, strict=True):
        if owner is not None:
            loads[owner] += cost
    for i in sorted((i for i, owner in enumerate(owners) if owner is None), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[i]
        owners[i] = rank
    return [owner for owner in owners if owner is not None]


def pack(stacks: Sequence[Tensor]) -> Tensor:
    """The lower triangles of stacks [blocks, p, p] as one vector."""
    flat = []
    for stack in stacks:
        rows, cols = torch.tril_indices(stack.shape[-1], stack.shape[-1], device=stack.device)
        flat.append(stack[:, rows, cols].flatten())
    return torch.cat(flat)


def unpack(flat: Tensor, partition: BlockPartition) -> list[Tensor]:
    """The inverse of :func:`pack`, with both triangles."""
    stacks, start = [], 0
    for _, count, size in partition.stacks:
        blocks, length = partition.groups * count, size * (size + 1) // 2
        rows, cols = torch.tril_indices(size, size, device=flat.device)
        stack = flat.new_empty(blocks, size, size)
        values = flat[start : start + blocks * length].view(blocks, length)
        stack[:, rows, cols] = values
        stack[:, cols, rows] = values
        stacks.append(stack)
        start += blocks * length
    return stacks


def buckets(entries: Sequence[tuple[int | None, Tensor]]) -> list[tuple[int | None, list[int]]]:
    """Groups the indices of consecutive entries with the same rank and dtype, up to ``BUCKET_BYTES``."""
    found: list[tuple[int | None, list[int]]] = []
    free, last = 0, None
    for i, (rank, tensor) in enumerate(entries):
        size = tensor.numel() * tensor.element_size()
        if not found or size > free or (rank, tensor.dtype) != last:
            found.append((rank, []))
            free, last = BUCKET_BYTES, (rank, tensor.dtype)
        found[-1][1].append(i)
        free -= size
    return found
