"""The block-diagonal form: the dimension d of L or R is split into blocks of p; the last block may be smaller.

A partitioned matrix is a list of one or two stacks: [groups * blocks, p, D] and, where p does not divide d,
[groups, rest, D]. Without a block size there is one stack with one block for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPartition:
    """Splits a dimension of length d into blocks of ``size``, for each group."""

    groups: int
    d: int
    size: int

    @classmethod
    def of(cls, groups: int, d: int, block_size: int | None) -> BlockPartition:
        return cls(groups, d, d if block_size is None else min(block_size, d))

    @cached_property
    def stacks(self) -> list[tuple[int, int, int]]:
        """``(start, number of blocks, block size)`` of each stack, for one group."""
        full, rest = divmod(self.d, self.size)
        return [(0, full, self.size)] + ([(full * self.size, 1, rest)] if rest else [])

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """``(number of blocks over all groups, block size)`` of each stack."""
        return [(self.groups * count, size) for _, count, size in self.stacks]

    @property
    def count(self) -> int:
        """Number of blocks over all groups."""
        return self.groups * sum(count for _, count, _ in self.stacks)

    @property
    def elements(self) -> int:
        """Number of entries of all blocks."""
        return self.groups * sum(count * size * size for _, count, size in self.stacks)

    @property
    def triangle(self) -> int:
        """Number of entries of the lower triangles of all blocks, which is what ranks communicate."""
        return self.groups * sum(count * size * (size + 1) // 2 for _, count, size in self.stacks)

    @property
    def cubes(self) -> int:
        """Sum of p^3 over all blocks: the cost of the inverses up to a constant."""
        return self.groups * sum(count * size**3 for _, count, size in self.stacks)

    def sides(self, side: str) -> list[tuple[str, BlockPartition]]:
        """The preconditioned sides, each with its partition; ``side`` comes first."""
        return [(side, self)]

    def split(self, x: Tensor) -> list[Tensor]:
        """[groups, d, D] to stacks of [groups * blocks, p, D]; views where strides allow it."""
        out = []
        for start, count, size in self.stacks:
            piece = x if count * size == self.d else x.narrow(1, start, count * size)
            out.append(piece.unflatten(1, (count, size)).flatten(0, 1) if count > 1 else piece)
        return out

    def merge(self, stacks: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`: stacks of [groups * blocks, p, D] to [groups, d, D]."""
        pieces = [
            stack.unflatten(0, (self.groups, count)).flatten(1, 2) if count > 1 else stack
            for stack, (_, count, _) in zip(stacks, self.stacks, strict=True)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def dense(self, stacks: Sequence[Tensor]) -> Tensor:
        """Stacks of [groups * blocks, p, p] as block-diagonal matrices [groups, d, d]."""
        out = stacks[0].new_zeros(self.groups, self.d, self.d)
        for stack, (start, count, size) in zip(stacks, self.stacks, strict=True):
            for block in range(count):
                at = start + block * size
                out[:, at : at + size, at : at + size] = stack[block::count]
        return out


@dataclass(frozen=True)
class NoPartition(BlockPartition):
    """No side is preconditioned: there are no stacks, and the gradient is not split."""

    @cached_property
    def stacks(self) -> list[tuple[int, int, int]]:
        return []

    def sides(self, side: str) -> list[tuple[str, BlockPartition]]:
        return []

    def split(self, x: Tensor) -> list[Tensor]:
        return [x]

    def merge(self, stacks: Sequence[Tensor]) -> Tensor:
        return stacks[0]


@dataclass(frozen=True)
class TwoSidedPartition(BlockPartition):
    """Both sides are preconditioned (NGAdam): ``first`` partitions d, ``second`` the other dimension.

    ``stacks`` are those of L and R, first side first. The gradient is not split.
    """

    other: int = 0
    other_size: int = field(default=0, repr=False)

    @cached_property
    def first(self) -> BlockPartition:
        return BlockPartition(self.groups, self.d, self.size)

    @cached_property
    def second(self) -> BlockPartition:
        return BlockPartition(self.groups, self.other, self.other_size)

    @cached_property
    def stacks(self) -> list[tuple[int, int, int]]:
        return self.first.stacks + self.second.stacks

    def sides(self, side: str) -> list[tuple[str, BlockPartition]]:
        return [(side, self.first), ("right" if side == "left" else "left", self.second)]

    def split(self, x: Tensor) -> list[Tensor]:
        return [x]

    def merge(self, stacks: Sequence[Tensor]) -> Tensor:
        return stacks[0]

    def dense(self, stacks: Sequence[Tensor]) -> Tensor:
        """The block-diagonal matrices of the first side."""
        return self.first.dense(stacks[: len(self.first.stacks)])
