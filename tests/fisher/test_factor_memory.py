"""The estimates of what products of factors take, against the peak that is measured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from factor_cases import SIDES
from torch import Tensor, nn

from helpers.memory import peak_bytes
from ngplus.capture.batch import Batch
from ngplus.capture.layers import ConvRule, ConvTransposeRule
from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import Bags, Factors, Joined, Lookup, Outer, Rows, Segments, SomeRows
from ngplus.fisher.products import gfim_low_rank, gfim_sum, low_rank_bytes, sample_bytes

SAMPLES = 64
SLACK = 2**14  # bytes of results, and of tensors with an entry for each sample


def normal(*shape: int) -> Tensor:
    return torch.randn(1, SAMPLES, *shape)


def segments() -> Segments:
    sizes = [50 + i % 50 for i in range(SAMPLES)]
    return Segments(torch.randn(sum(sizes), 20), torch.randn(sum(sizes), 16), sizes)


def bags() -> Bags:
    entries = SAMPLES * 50
    owners = torch.arange(SAMPLES).repeat_interleave(50)
    return Bags(torch.randint(30, (entries,)), owners, torch.randn(entries), torch.randn(SAMPLES, 20), 30)


def convolution(layer: nn.Module, *shape: int) -> Factors:
    rule = ConvTransposeRule() if isinstance(layer, nn.ConvTranspose2d) else ConvRule()
    x = torch.randn(SAMPLES, *shape)
    return rule.factors(layer, (x,), torch.randn_like(layer(x)), (True, True), Batch(size=SAMPLES))


def lookup(rows: int, positions: int, cols: int) -> Lookup:
    return Lookup(torch.randint(rows, (SAMPLES, positions)), torch.randn(SAMPLES, positions, cols), rows)


CASES: dict[str, Callable[[], Factors]] = {
    "one position": lambda: Outer(torch.randn(1, 6400, 1, 40), torch.randn(1, 6400, 1, 30), True),
    "several": lambda: Outer(normal(50, 40), normal(50, 30), True),
    "as of a convolution": lambda: Outer(normal(40, 50).mT, normal(50, 30), True),
    "few": lambda: Outer(normal(4, 80), normal(4, 90), True),
    "many": lambda: Outer(normal(500, 20), normal(500, 10), True),
    "bfloat16": lambda: Outer(normal(50, 40).bfloat16(), normal(50, 30).bfloat16(), True),
    "some rows": lambda: Outer(SomeRows(normal(50, 20), 20, 60), normal(50, 30), True),
    "segments": segments,
    "lookup": lambda: lookup(30, 50, 20),
    "lookup of thin rows": lambda: lookup(300, 500, 2),
    "bags": bags,
    "rows": lambda: Rows(normal(100, 2)),
    "outer and lookup": lambda: Joined([Outer(normal(20, 100), normal(20, 90)), lookup(100, 20, 90)]),
    "outer and outer": lambda: Joined([Outer(normal(20, 100), normal(20, 90), True) for _ in range(2)]),
    "outer and rows": lambda: Joined([Outer(normal(50, 20), normal(50, 30)), Rows(normal(20, 30))]),
    "convolution": lambda: convolution(nn.Conv2d(4, 6, 3, padding=1), 4, 12, 12),
    "wide convolution": lambda: convolution(nn.Conv2d(32, 32, 3, padding=1), 32, 12, 12),
    "strided convolution": lambda: convolution(nn.Conv2d(4, 6, 3, stride=2), 4, 12, 12),
    "1 x 1 convolution": lambda: convolution(nn.Conv2d(32, 16, 1), 32, 12, 12),
    "grouped convolution": lambda: convolution(nn.Conv2d(8, 8, 3, groups=4, padding=1), 8, 12, 12),
    "transposed convolution": lambda: convolution(nn.ConvTranspose2d(4, 6, 3, stride=2), 4, 8, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_not_below_the_peak(case: str) -> None:
    factors = CASES[case]()
    for side in SIDES:
        d, other = factors.curved_and_other(side)
        partition = BlockPartition.of(factors.groups, d, d)
        for form in factors.costs(side, other, d):
            estimate = factors.samples * sample_bytes(factors, side, form, other, torch.float32)
            peak = peak_bytes(
                lambda form=form, side=side, partition=partition: gfim_sum(
                    factors, side, partition, form=form, chunk_bytes=2**40
                )
            )
            assert peak - 4 * factors.groups * d * d <= estimate + factors.extra_bytes + SLACK, (side, form)
        one = sample_bytes(factors, side, factors.low_rank_form(side), other, torch.float32)
        estimate = low_rank_bytes(factors, side, torch.float32) + (factors.samples - 1) * one
        peak = peak_bytes(
            lambda side=side, partition=partition: gfim_low_rank(factors, side, partition, chunk_bytes=2**40)
        )
        assert peak <= estimate + factors.extra_bytes + SLACK, side
