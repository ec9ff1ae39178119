"""The cut of a dimension into blocks: round trips, the last block of any size, groups that do not mix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ngplus.fisher.blocks import BlockPartition

GROUPS = (1, 3)
DIMENSIONS = [
    (1, None),
    (1, 1),
    (1, 4),
    (6, None),
    (6, 1),
    (6, 2),
    (6, 3),
    (6, 4),
    (6, 5),
    (6, 6),
    (6, 7),
    (7, 2),
    (7, 100),
]
EVERY = [(groups, d, p) for groups in GROUPS for d, p in DIMENSIONS]


def numbered(groups: int, d: int, columns: int) -> Tensor:
    """Every entry is another number, so that no exchange goes unseen."""
    return torch.arange(groups * d * columns, dtype=torch.float64).view(groups, d, columns)


def plain_blocks(d: int, p: int | None) -> list[range]:
    p = d if p is None else p
    return [range(start, min(start + p, d)) for start in range(0, d, p)]


@pytest.mark.parametrize(("groups", "d", "p"), EVERY)
def test_split_gives_the_rows_of_each_block(groups: int, d: int, p: int | None) -> None:
    """Group after group, and the blocks of a group in order; the smaller last ones in a stack of their own."""
    x, blocks = numbered(groups, d, 5), plain_blocks(d, p)
    largest = len(blocks[0])
    want = [[x[g, b.start : b.stop] for g in range(groups) for b in blocks if len(b) == largest]]
    if len(blocks[-1]) < largest:
        want.append([x[g, blocks[-1].start : blocks[-1].stop] for g in range(groups)])
    got = BlockPartition.of(groups, d, p).split(x)
    assert len(got) == len(want)
    for stack, pieces in zip(got, want, strict=True):
        assert torch.equal(stack, torch.stack(pieces))


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize(("groups", "d", "p"), EVERY)
def test_merge_is_the_way_back(groups: int, d: int, p: int | None, columns: int) -> None:
    cut = BlockPartition.of(groups, d, p)
    x = numbered(groups, d, columns)
    assert torch.equal(cut.merge(cut.split(x)), x)
    transposed = numbered(groups, columns, d).mT  # as a right-hand problem comes in
    assert torch.equal(cut.merge(cut.split(transposed)), transposed)


@pytest.mark.parametrize(("groups", "d", "p"), EVERY)
def test_dense_is_block_diagonal(groups: int, d: int, p: int | None) -> None:
    cut = BlockPartition.of(groups, d, p)
    x = numbered(groups, d, 4) + 1
    want = torch.zeros(groups, d, d, dtype=torch.float64)
    for g in range(groups):
        for block in plain_blocks(d, p):
            rows = slice(block.start, block.stop)
            want[g, rows, rows] = x[g, rows] @ x[g, rows].T
    assert torch.equal(cut.dense([stack @ stack.mT for stack in cut.split(x)]), want)


@pytest.mark.parametrize(("groups", "d", "p"), EVERY)
def test_block_products_are_those_of_the_dense_matrix(groups: int, d: int, p: int | None) -> None:
    """Matrix by stack, merged, is the block-diagonal matrix by the whole."""
    cut = BlockPartition.of(groups, d, p)
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(groups, d, 5, generator=generator, dtype=torch.float64)
    stacks = [
        torch.randn(groups * n, size, size, generator=generator, dtype=torch.float64) for _, n, size in cut.stacks
    ]
    product = cut.merge([m @ x for m, x in zip(stacks, cut.split(g), strict=True)])
    torch.testing.assert_close(product, cut.dense(stacks) @ g)


@pytest.mark.parametrize(("groups", "d", "p"), EVERY)
def test_counts(groups: int, d: int, p: int | None) -> None:
    cut = BlockPartition.of(groups, d, p)
    sizes = [len(block) for block in plain_blocks(d, p)]
    assert cut.count == groups * len(sizes)
    assert cut.elements == groups * sum(s**2 for s in sizes)
    assert cut.cubes == groups * sum(s**3 for s in sizes)
    assert cut.stacks[0][1] * cut.stacks[0][2] == sum(s for s in sizes if s == sizes[0])


def test_one_block_is_a_view() -> None:
    x = numbered(2, 6, 4)
    (whole,) = BlockPartition.of(2, 6, None).split(x)
    assert whole.data_ptr() == x.data_ptr()
    (pairs,) = BlockPartition.of(2, 6, 3).split(x)
    assert pairs.data_ptr() == x.data_ptr()
