"""Who owns what: a pure function of the costs, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from ngplus.distributed.collectives import assign, cost_of
from ngplus.fisher.blocks import BlockPartition


def loads(costs: list[float], owners: list[int], ranks: int) -> list[float]:
    return [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]


def test_assignment_is_balanced_and_the_same_everywhere() -> None:
    costs = [float((7 * i) % 13 + 1) for i in range(40)]
    owners = assign(costs, 4)
    shares = loads(costs, owners, 4)
    assert owners == assign(costs, 4)
    assert max(shares) <= 4 / 3 * sum(costs) / 4 + max(costs)
    assert max(shares) - min(shares) <= max(costs)


def test_small_cases() -> None:
    assert assign([], 3) == []
    assert assign([5.0, 1.0], 1) == [0, 0]
    assert assign([1.0, 5.0, 2.0], 2) == [1, 0, 1]  # the heaviest first
    assert assign([1.0, 1.0, 1.0], 3) == [0, 1, 2]  # equal ones in their order
    assert set(assign([3.0, 2.0], 8)) == {0, 1}  # more ranks than work


def test_owners_stay_where_more_work_comes() -> None:
    assert assign([4.0, 1.0, 1.0, 2.0], 2, [1, 1, None, None]) == [1, 1, 0, 0]
    before = assign([3.0, 2.0, 2.0], 2)
    assert assign([3.0, 2.0, 2.0, 9.0, 1.0], 2, [*before, None, None])[:3] == before


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_within_four_thirds_of_the_best(ranks: int) -> None:
    """A case whose best assignment is known: each rank's load cut into three pieces."""
    pieces = [(0.5, 0.3, 0.2), (0.6, 0.25, 0.15), (0.4, 0.35, 0.25)]
    costs = [c for r in range(ranks) for c in pieces[r % 3]]
    assert max(loads(costs, assign(costs, ranks), ranks)) <= 4 / 3 + 1e-9


@pytest.mark.parametrize("block", [None, 2])
def test_a_triangle_has_half_the_numbers(block: int | None) -> None:
    """The lower triangle of the smaller side, d (d + 1) / 2 numbers a block."""
    assert BlockPartition.of(2, 5, block).triangle == 2 * (15 if block is None else 3 + 3 + 1)


def tables() -> nn.Module:
    return nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))


def vectors() -> nn.Module:
    return nn.ParameterList(torch.zeros(50) for _ in range(4))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "model"), [(ngplus.NGPlus, tables), (ngplus.NGAdam, tables), (ngplus.NGAdam, vectors)]
)
def test_equal_matrices_are_shared_out(kind: Any, model: Callable[[], nn.Module], ranks: int) -> None:
    """Also vectors, of which NGAdam keeps Adam's moments alone: the owner keeps them."""
    optimizer = kind(model())
    costs = [cost_of(m, m.partition_of(optimizer.param_groups[0]), steps=True) for m in optimizer._matrices]
    assert sorted(assign(costs, ranks)) == sorted(list(range(ranks)) * (4 // ranks))
    for distribution in ("memory", "sharded"):
        plan = optimizer.plan()
        assert plan.on_ranks(ranks, distribution).state_bytes == plan.state_bytes // ranks > 0
