"""What crosses ranks: the sums of products of a refresh, weighted by sample counts; inverses and directions.

Each rank has gathered sums over its own share of the samples. One short vector brings the counts, and whether any rank
had to fall back; then the lower triangles of all matrices travel in few large buckets, d (d + 1) / 2 numbers for each
matrix. With DDP's averaged gradients, .grad = 1/W sum over ranks and samples of c_i = 1/N sum_i G_i, so G_i = N/W c_i
with N the samples of all ranks: exact for unequal shares whose losses are weighted as their shares are.

What follows is shared out: each matrix has an owner, by cost (``assign``), that inverts or decomposes it. A result that
several ranks use is worked out by one and sent, so that all hold the same bits. :class:`Replicas` is the team of ranks
that all hold the whole parameters; :mod:`ngplus.distributed.sharded` has the team of those that hold parts of them.

"batch" curvature communicates nothing of its own: its gradients are averaged already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.collector import Collector
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher.blocks import BlockPartition
from ngplus.utils.typing import Group

BUCKET_BYTES = 64 * 2**20
DISTRIBUTIONS = ("communication", "memory")


@dataclass
class Sum:
    """The sums of one matrix on this rank, on their way to those of all ranks.

    ``keeper`` is the rank that alone needs the result; None where all do.
    """

    gathered: Accumulator
    partition: BlockPartition
    dtype: torch.dtype
    device: torch.device
    failed: bool
    keeper: int | None = None


@dataclass(frozen=True)
class RankGroup:
    """The ranks that train one model together."""

    group: dist.ProcessGroup
    size: int

    @classmethod
    def of(cls, model: nn.Module | None, group: dist.ProcessGroup | None) -> RankGroup | None:
        """Those of a DistributedDataParallel model, or those that the user names; None for a process of its own."""
        if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
            group = model.process_group
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, dist.get_world_size(group))

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def add_up(self, sums: Sequence[Sum]) -> None:
        """Makes the sums those of all ranks, at their keepers; the counts, and who had to fall back, everywhere.

        The sums are of the same matrices on all ranks, in the same order; a rank whose module saw no samples has empty
        ones.
        """
        if not sums:
            return
        counts = torch.tensor(
            [[s.gathered.samples, s.gathered.used, s.gathered.ranks, float(s.failed)] for s in sums],
            dtype=torch.float64,
            device=sums[0].device,
        )
        dist.all_reduce(counts, group=self.group)
        travelling: list[tuple[Sum, Tensor]] = []
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
            travelling.append((s, pack(stacks)))
        travelling.sort(key=lambda pair: -1 if pair[0].keeper is None else pair[0].keeper)
        for keeper, bucket in buckets([(s.keeper, flat) for s, flat in travelling]):
            joined = torch.cat([travelling[i][1] for i in bucket])
            self._to_keeper(joined, keeper)
            for i, piece in zip(bucket, joined.split([travelling[i][1].numel() for i in bucket]), strict=True):
                s = travelling[i][0]
                here = keeper is None or keeper == self.rank
                s.gathered.total, s.gathered.roots = unpack(piece, s.partition) if here else None, []

    def _to_keeper(self, flat: Tensor, keeper: int | None) -> None:
        if keeper is None:
            dist.all_reduce(flat, group=self.group)
        else:
            dist.reduce(flat, dst=dist.get_global_rank(self.group, keeper), group=self.group)

    def send(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Each tensor gets, in place and on all ranks, what it holds at its owner."""
        order = sorted(range(len(tensors)), key=lambda i: owners[i])
        for owner, bucket in buckets([(owners[i], tensors[i]) for i in order]):
            mine = [tensors[order[i]] for i in bucket]
            joined = torch.cat([tensor.flatten() for tensor in mine])
            assert owner is not None
            dist.broadcast(joined, src=dist.get_global_rank(self.group, owner), group=self.group)
            for tensor, piece in zip(mine, joined.split([tensor.numel() for tensor in mine]), strict=True):
                tensor.copy_(piece.view_as(tensor))


class Traffic(NamedTuple):
    """Numbers of one matrix that cross ranks: the sums of a refresh, the inverse of a refresh, those of every step."""

    average: int
    inverse: int
    step: int


class Distributor:
    """Ranks that share the work on some matrices. Each matrix has an owner among them."""

    owners: dict[int, int]  # by the id of the matrix

    def __init__(self, matrices: Sequence[ParameterMatrix]) -> None:
        self.matrices = list(matrices)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        raise NotImplementedError

    def owns(self, matrix: ParameterMatrix) -> bool:
        raise NotImplementedError

    def is_remote(self, matrix: ParameterMatrix) -> bool:
        """Is the matrix's curvature with its owner alone, and its direction sent in every step?"""
        raise NotImplementedError

    def keeps(self, matrix: ParameterMatrix) -> bool:
        """Does this rank hold the matrix's curvature, and find its direction?"""
        return self.owns(matrix) or not self.is_remote(matrix)

    def add_up(self, due: Sequence[tuple[ParameterMatrix, Sum]]) -> None:
        """The sums of a refresh, brought to where they are needed."""
        raise NotImplementedError

    def agree(self, table: Tensor) -> None:
        """Adds up a small tensor over the team, in place."""
        raise NotImplementedError

    def gather(self, matrices: Sequence[ParameterMatrix]) -> dict[int, list[Tensor]]:
        """Gradients that have to be put together first, at their owners, by the id of their matrix."""
        return {}

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """The directions of these matrices on every rank, from those that their owners have found."""
        raise NotImplementedError


def add_up(
    distributor: Distributor, collector: Collector, due: Sequence[ParameterMatrix], groups: Mapping[nn.Parameter, Group]
) -> list[ParameterMatrix]:
    """On all ranks alike: the sums of these matrices become those of all ranks' samples, at those that need them.

    Returns the matrices for which any rank has counted samples.
    """
    sums = []
    for matrix in due:
        partition = matrix.partition_of(groups[matrix.params[0]])
        failed = matrix.source == "batch" or bool(matrix.reason)
        sums.append((matrix, Sum(collector.of(matrix), partition, matrix.dtype, matrix.params[0].device, failed)))
    distributor.add_up(sums)
    for matrix, s in sums:
        if s.failed and matrix.source != "batch":
            matrix.fall_back(matrix.reason or "another rank has no per-sample curvature for it")
        if s.failed or not s.gathered.used or not distributor.keeps(matrix):
            collector.take(matrix)
    return [matrix for matrix, s in sums if s.gathered.used and not s.failed]


class ReplicatedDistributor(Distributor):
    """The team of ranks that all hold the parameters, as with DistributedDataParallel.

    "communication": the owner inverts L and sends the inverse, once a refresh; every rank applies
    it. "memory": the owner alone keeps the curvature, and sends the direction in every step.
    """

    def __init__(
        self,
        ranks: RankGroup,
        matrices: Sequence[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        distribution: str,
        kept: Mapping[nn.Parameter, int],
    ) -> None:
        super().__init__(matrices)
        self.ranks, self._groups = ranks, groups
        # The rows of a sparse gradient come and go, and their side is short: each rank applies the inverse to them.
        self._remote = {id(m) for m in matrices if distribution == "memory" and not m.sparse}
        costs = [cost_of(m, m.partition_of(groups[m.params[0]]), id(m) in self._remote) for m in matrices]
        owners = assign(costs, ranks.size, [kept.get(m.params[0]) for m in matrices])
        self.owners = dict(zip(map(id, matrices), owners, strict=True))

    def owns(self, matrix: ParameterMatrix) -> bool:
        return self.owners[id(matrix)] == self.ranks.rank

    def is_remote(self, matrix: ParameterMatrix) -> bool:
        return id(matrix) in self._remote

    def shares(self, matrix: ParameterMatrix) -> bool:
        """Does the owner send the inverse?"""
        return not self.is_remote(matrix)

    def add_up(self, due: Sequence[tuple[ParameterMatrix, Sum]]) -> None:
        """To the owner; to all where each rank inverts for itself, or keeps the moving average."""
        for matrix, s in due:
            averaged = self._groups[matrix.params[0]]["curvature"] == "momentum"
            alone = self.is_remote(matrix) or (self.shares(matrix) and not averaged)
            s.keeper = self.owners[id(matrix)] if alone else None
        self.ranks.add_up([s for _, s in due])

    def agree(self, table: Tensor) -> None:
        dist.all_reduce(table, group=self.ranks.group)

    def traffic(self, matrix: ParameterMatrix, group: Group) -> Traffic:
        partition = matrix.partition_of(group)
        step = sum(p.numel() for p in matrix.active_params) if self.is_remote(matrix) else 0
        return Traffic(partition.triangle, partition.triangle + 1 if self.shares(matrix) else 0, step)

    def scatter_directions(
        self, matrices: Sequence[ParameterMatrix], directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        params = [(param, self.owners[id(m)]) for m in matrices for param in m.active_params]
        out = {p: directions[p].contiguous() if p in directions else torch.empty_like(p) for p, _ in params}
        self.ranks.send(list(out.values()), [owner for _, owner in params])
        return out


def cost_of(matrix: ParameterMatrix, partition: BlockPartition, steps: bool) -> float:
    """The cost of a matrix by its shape alone, so that it never changes: d p^2 a refresh; for each side d p D a step,
    and m n for what is elementwise, which is all where no side is curved."""
    entries = matrix.layout.rows * matrix.layout.cols
    products = sum(own.elements * (entries // own.d) for _, own in partition.sides("left"))
    return float(partition.cubes + (products + partition.groups * entries if steps else 0))


def assign(costs: Sequence[float], ranks: int, kept: Sequence[int | None] | None = None) -> list[int]:
    """The owner of each piece of work: the heaviest first, each to the rank with the least so far.

    The heaviest rank has at most 4/3 of the load that the best assignment would give it. ``kept`` are owners that stay,
    of work that was assigned before.
    """
    loads = [0.0] * ranks
    owner = [0] * len(costs)
    for i, known in enumerate(kept or ()):
        if known is not None:
            owner[i] = known
            loads[known] += costs[i]
    new = [i for i in range(len(costs)) if kept is None or kept[i] is None]
    for i in sorted(new, key=lambda i: (-costs[i], i)):
        owner[i] = min(range(ranks), key=lambda r: (loads[r], r))
        loads[owner[i]] += costs[i]
    return owner


def pack(stacks: Sequence[Tensor]) -> Tensor:
    """The lower triangles of stacks [blocks, p, p], flat."""
    flat = []
    for stack in stacks:
        rows, cols = torch.tril_indices(stack.shape[-1], stack.shape[-1], device=stack.device)
        flat.append(stack[:, rows, cols].flatten())
    return torch.cat(flat)


def unpack(flat: Tensor, partition: BlockPartition) -> list[Tensor]:
    """The way back, both triangles filled."""
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
    """Neighbours of one address and one dtype together, up to the size of a bucket."""
    found: list[tuple[int | None, list[int]]] = []
    room, last = 0, None
    for i, (address, tensor) in enumerate(entries):
        size = tensor.numel() * tensor.element_size()
        if not found or size > room or (address, tensor.dtype) != last:
            found.append((address, []))
            room, last = BUCKET_BYTES, (address, tensor.dtype)
        found[-1][1].append(i)
        room -= size
    return found
