"""What crosses ranks: the sums of products of a refresh, weighted by sample counts, and the inverses' owners.

Each rank has gathered sums over its own share of the samples. One short vector brings the counts, and whether any rank
had to fall back; then the lower triangles of all matrices travel in few large buckets, d (d + 1) / 2 numbers for each
matrix. With DDP's averaged gradients, .grad = 1/W sum over ranks and samples of c_i = 1/N sum_i G_i, so G_i = N/W c_i
with N the samples of all ranks: exact for unequal shares whose losses are weighted as their shares are.

"batch" curvature communicates nothing of its own: its gradients are averaged already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ngplus.blocks import Cut
from ngplus.curvature import Gathered

BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model together."""

    group: dist.ProcessGroup
    size: int

    @classmethod
    def of(cls, model: nn.Module | None, group: dist.ProcessGroup | None) -> Ranks | None:
        """Those of a DistributedDataParallel model, or those that the user names; None for a process of its own."""
        if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
            group = model.process_group
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, dist.get_world_size(group))

    def add_up(
        self, entries: Sequence[tuple[Gathered, Cut, torch.dtype, torch.device]], failed: list[bool]
    ) -> list[bool]:
        """Makes every rank's sums those of all ranks; returns which entries any rank had to leave.

        The entries are the same on all ranks, in the same order; a rank whose module saw no samples has empty ones.
        """
        if not entries:
            return []
        device = entries[0][3]
        counts = torch.tensor(
            [[g.samples, g.used, float(bad)] for (g, *_), bad in zip(entries, failed, strict=True)],
            dtype=torch.float64,
            device=device,
        )
        dist.all_reduce(counts, group=self.group)
        table = counts.tolist()
        travelling: list[Tensor] = []
        owners: list[tuple[Gathered, Cut]] = []
        for (gathered, cut, dtype, place), (samples, used, bad) in zip(entries, table, strict=True):
            gathered.samples, gathered.used, gathered.ranks = round(samples), round(used), self.size
            if bad or not used:
                continue
            stacks = gathered.products()
            if stacks is None:
                stacks = [torch.zeros(cut.groups * n, p, p, dtype=dtype, device=place) for _, n, p in cut.stacks]
            travelling.append(torch.cat([_lower(stack) for stack in stacks]))
            owners.append((gathered, cut))
        for bucket in _buckets(travelling):
            joined = torch.cat([travelling[i] for i in bucket])
            dist.all_reduce(joined, group=self.group)
            for i, piece in zip(bucket, joined.split([travelling[i].numel() for i in bucket]), strict=True):
                gathered, cut = owners[i]
                gathered.total, gathered.roots = _from_lower(piece, cut), []
        return [bool(bad) for _, _, bad in table]


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each piece of work: the heaviest first, each to the rank with the least so far.

    The heaviest rank has at most 4/3 of the load that the best assignment would give it.
    """
    loads = [0.0] * ranks
    owner = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(ranks), key=lambda r: (loads[r], r))
        loads[owner[i]] += costs[i]
    return owner


def _lower(stack: Tensor) -> Tensor:
    """The lower triangles of [blocks, p, p], flat."""
    rows, cols = torch.tril_indices(stack.shape[-1], stack.shape[-1], device=stack.device)
    return stack[:, rows, cols].flatten()


def _from_lower(flat: Tensor, cut: Cut) -> list[Tensor]:
    """The way back, both triangles filled."""
    stacks, start = [], 0
    for _, count, size in cut.stacks:
        blocks, length = cut.groups * count, size * (size + 1) // 2
        rows, cols = torch.tril_indices(size, size, device=flat.device)
        stack = flat.new_empty(blocks, size, size)
        values = flat[start : start + blocks * length].view(blocks, length)
        stack[:, rows, cols] = values
        stack[:, cols, rows] = values
        stacks.append(stack)
        start += blocks * length
    return stacks


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Neighbours of one dtype together, up to the size of a bucket."""
    buckets: list[list[int]] = []
    room = 0
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room or tensors[buckets[-1][-1]].dtype != tensor.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(i)
        room -= size
    return buckets
