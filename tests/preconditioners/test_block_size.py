"""The blocks of NGAdam's L and R."""

from __future__ import annotations

import pytest

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
