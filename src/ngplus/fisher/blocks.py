"""The block-diagonal form: how the curved dimension d is cut into blocks of p, the last of any size.

A cut matrix is a list of one or two stacks, [groups * blocks, p, D] and, where p does not divide d, [groups, rest, D].
Without a block size there is one stack with one block a group. Where both sides are curved there are those of the one
and then those of the other, and where none is there is no stack; the gradient then stays whole.

Tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPartition:
    """The stacks that a dimension of length d falls into: ``(start, number of blocks, block size)`` each."""

    groups: int
    d: int
    size: int

    @classmethod
    def of(cls, groups: int, d: int, block_size: int | None) -> BlockPartition:
        return cls(groups, d, d if block_size is None else min(block_size, d))

    @cached_property
    def stacks(self) -> list[tuple[int, int, int]]:
        full, rest = divmod(self.d, self.size)
        stacks = [(0, full, self.size)]
        if rest:
            stacks.append((full * self.size, 1, rest))
        return stacks

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each stack, how many blocks it has over all groups, and their size."""
        return [(self.groups * count, size) for _, count, size in self.stacks]

    @property
    def count(self) -> int:
        """Blocks in all, over all groups."""
        return self.groups * sum(count for _, count, _ in self.stacks)

    @property
    def elements(self) -> int:
        """Numbers in all the blocks' matrices."""
        return self.groups * sum(count * size * size for _, count, size in self.stacks)

    @property
    def triangle(self) -> int:
        """Numbers in the lower triangles of all the blocks' matrices: what a symmetric matrix is on the wire."""
        return self.groups * sum(count * size * (size + 1) // 2 for _, count, size in self.stacks)

    @property
    def cubes(self) -> int:
        """The sum of p^3 over all blocks, the cost of an inverse up to its constant."""
        return self.groups * sum(count * size**3 for _, count, size in self.stacks)

    def sides(self, side: str) -> list[tuple[str, BlockPartition]]:
        """Each side that is curved, with a cut of its own; ``side`` is the first."""
        return [(side, self)]

    def split(self, x: Tensor) -> list[Tensor]:
        """[groups, d, D] to stacks of [groups * blocks, p, D]; views wherever strides allow it."""
        out = []
        for start, count, size in self.stacks:
            piece = x if count * size == self.d else x.narrow(1, start, count * size)
            out.append(piece.unflatten(1, (count, size)).flatten(0, 1) if count > 1 else piece)
        return out

    def merge(self, stacks: Sequence[Tensor]) -> Tensor:
        """The way back: stacks of [groups * blocks, p, D] to [groups, d, D]."""
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
    """No side curved: the gradient stays as it is, and so do Adam's moments of it."""

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
    """Both sides of a matrix curved (NGAdam): for d and for the other dimension, each whole or in blocks.

    The gradient stays one stack; only what is made of the sides, their products and roots, comes in those of each.
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
        """That of the side which the rule m <= n takes."""
        return self.first.dense(stacks[: len(self.first.stacks)])
