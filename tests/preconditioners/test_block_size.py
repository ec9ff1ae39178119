"""The blocks of NGAdam's L and R, and those of NGPlus on packed projections."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import ngplus
from ngplus.fisher.blocks import TwoSidedPartition
from ngplus.preconditioners.inverse_root import block_size


@pytest.mark.parametrize("width", [128, 144, 160, 192, 256, 288, 320, 384, 512, 640, 768, 1024])
def test_no_block_has_rows_of_two_of_queries_keys_and_values(width: int) -> None:
    assert width % block_size(3 * width, width) == 0


@pytest.mark.parametrize(
    ("length", "other", "unit", "rows"),
    [
        (160, 10, 1, 160),
        (161, 10, 1, 81),
        (512, 128, 1, 128),
        (768, 256, 1, 128),
        (3 * 257, 257, 1, 111),  # 257 is prime: seven blocks of at most 128 rows
        (641, 128, 1, 1),
        (641, 129, 1, 107),
        (288, 64, 9, 144),
        (450, 150, 25, 125),  # whole channels, where a convolution has three times as many columns as rows
    ],
)
def test_block_size(length: int, other: int, unit: int, rows: int) -> None:
    assert block_size(length, other, unit) == rows


@pytest.mark.parametrize("head", [32, 64, 128])
@pytest.mark.parametrize("width", [256, 384, 512, 640, 768, 1024, 1280, 2048, 4096])
def test_no_block_has_a_part_of_a_head_where_the_width_is_a_multiple_of_128(width: int, head: int) -> None:
    """Rows of queries, packed or not, and columns of the projection of the output."""
    for rows in (block_size(width, width), block_size(3 * width, width)):
        assert rows % head == 0


def packed(kind: str, width: int) -> nn.Module:
    if kind == "attention":
        return nn.MultiheadAttention(width, 3)
    if kind == "linear":
        return nn.Linear(width, 3 * width)
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(3 * width, width)  # of GPT-2: [width, 3 width]


def partition_of(optimizer: Any, length: int) -> Any:
    return next(m for m in optimizer._matrices if m.layout.rows == length or m.layout.cols == length).partition_of({})


@pytest.mark.parametrize("by_model", [True, False])
@pytest.mark.parametrize("kind", ["attention", "linear", "conv1d"])
def test_packed_projections_of_ngadam(kind: str, by_model: bool) -> None:
    model = packed(kind, 192)
    partition = partition_of(ngplus.NGAdam(model if by_model else model.parameters()), 3 * 192)
    assert isinstance(partition, TwoSidedPartition)
    sizes = {partition.d: partition.size, partition.other: partition.other_size}
    assert sizes == {3 * 192: 96, 192: 96}


@pytest.mark.parametrize("kind", ["attention", "linear"])
def test_packed_projections_of_ngplus(kind: str) -> None:
    """By default there is R of the inputs, which the three have in common. With L, the block size is the user's."""
    model = packed(kind, 192)
    for row in ngplus.NGPlus(model).plan():
        assert row.side == "right"
    left = ngplus.NGPlus(model, side="left", block_size=96).plan()
    row = next(row for row in left if row.shape[0] == 3 * 192)
    assert (row.side, row.blocks) == ("left", 6)
