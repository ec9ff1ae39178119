"""What the forms of L and R cost: the cost model against counted FLOPs, and no tensor larger than a chunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from factor_cases import SIDES, Late, partition_of, random
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import (
    Bags,
    Factors,
    Joined,
    Lookup,
    Outer,
    Rows,
)
from ngplus.fisher.products import choose_form, gfim_low_rank, gfim_sum

# ------------------------------------------------------------------------------------------------ the cost model


def sized(kappa: int, m: int, n: int, samples: int = 4, ones: bool = False, late: bool = False) -> Outer:
    right = random(1, samples, kappa, n - ones)
    return Outer(random(1, samples, kappa, m), Late(right) if late else right, ones)


def documented_costs(kappa: int, d: int, other: int, p: int) -> dict[str, int]:
    """The table of the module, with d^2 as d p where the matrix is cut in blocks of p."""
    costs = {"gram": kappa**2 * (d + other) + kappa * d * p, "explicit": kappa * d * other + d * other * p}
    return {"rank-one": other + d * p, **costs} if kappa == 1 else costs


@given(
    kappa=st.integers(1, 60),
    m=st.integers(1, 40),
    n=st.integers(2, 40),
    p=st.integers(1, 50),
    side=st.sampled_from(SIDES),
)
@settings(max_examples=100, deadline=None)
def test_choose_form_is_the_brute_force_minimum(kappa: int, m: int, n: int, p: int, side: str) -> None:
    factors = Outer(torch.empty(1, 1, kappa, m), torch.empty(1, 1, kappa, n))
    d, other = (m, n) if side == "left" else (n, m)
    costs = documented_costs(kappa, d, other, min(p, d))
    assert factors.costs(side, other, min(p, d)) == costs
    assert costs[choose_form(factors, side, other, min(p, d))] == min(costs.values())


@given(kappa=st.integers(2, 4000), d=st.integers(1, 1000), more=st.integers(0, 4000))
@settings(max_examples=150, deadline=None)
def test_choose_form_follows_the_rule_of_the_design(kappa: int, d: int, more: int) -> None:
    big = d + more
    bound = d * ((big - d) + math.sqrt(5 * big**2 + 2 * d * big + d**2)) / (2 * (d + big))
    assume(abs(kappa - bound) > 1e-6 * bound)
    for side, m, n in (("left", d, big), ("right", big, d)):
        factors = Outer(torch.empty(1, 1, kappa, m, device="meta"), torch.empty(1, 1, kappa, n, device="meta"))
        assert choose_form(factors, side, big, d) == ("gram" if kappa < bound else "explicit")


def flops(factors: Factors, side: str, form: str, p: int | None = None) -> int:
    with FlopCounterMode(display=False) as counter:
        gfim_sum(factors, side, partition_of(factors, side, p), form=form, dtype=torch.float64)
    return int(counter.get_total_flops())


COUNTED: dict[str, Callable[[], Factors]] = {
    "kappa 1": lambda: sized(1, 24, 40),
    "kappa 9": lambda: sized(9, 24, 40),
    "kappa 60": lambda: sized(60, 24, 40),
    "ones": lambda: sized(9, 24, 40, ones=True),
    "late": lambda: sized(9, 24, 40, ones=True, late=True),
    "joined": lambda: Joined([sized(5, 24, 40), sized(8, 24, 40)]),
    "rows": lambda: Rows(random(1, 4, 24, 40)),
    "lookup": lambda: Lookup(torch.arange(24).view(4, 6), random(4, 6, 40), 24),  # no row twice
    "bags": lambda: Bags(torch.arange(4), torch.arange(4), random(4), random(4, 40), 24),
}


@pytest.mark.parametrize("p", [None, 8, 7, 1])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", COUNTED)
def test_counted_flops_are_those_of_the_cost_model(case: str, side: str, p: int | None) -> None:
    """Two FLOPs a multiplication, to within a factor of 1.1 (a column of ones is free, a last block is smaller).

    The lengths of the rank-one form, D multiplications a sample, are no matrix product: the counter does not see them.
    """
    factors = COUNTED[case]()
    d, other = factors.curved_and_other(side)
    block = min(p or d, d)
    for form, cost in factors.costs(side, other, block).items():
        seen = cost - (other if form == "rank-one" and case != "bags" else 0)
        ratio = flops(factors, side, form, p) / (2 * factors.groups * factors.samples * seen)
        assert 1 / 1.1 <= ratio <= 1.1, (form, ratio)


@pytest.mark.parametrize("kappa", [2, 5, 12, 20, 30, 60])
@pytest.mark.parametrize(("m", "n"), [(8, 40), (40, 8), (24, 24)])
@pytest.mark.parametrize("side", SIDES)
def test_the_chosen_form_has_the_fewest_counted_flops(kappa: int, m: int, n: int, side: str) -> None:
    factors = sized(kappa, m, n)
    d, other = factors.curved_and_other(side)
    counted = {form: flops(factors, side, form) for form in ("gram", "explicit")}
    assert counted[choose_form(factors, side, other, d)] == min(counted.values())


def test_embedding_gram_of_tied_weights_costs_no_one_hot_product() -> None:
    """The Gram matrix of an embedding's positions is a comparison: fewer FLOPs than for dense positions."""
    m, n, kappa = 500, 8, 6
    words = Lookup(torch.arange(4 * kappa).view(4, kappa), random(4, kappa, n), m)
    tied = Joined([words, sized(kappa, m, n)])
    dense = Joined([sized(kappa, m, n), sized(kappa, m, n)])
    assert flops(tied, "right", "gram") < 0.5 * flops(dense, "right", "gram")


# ------------------------------------------------------------------------------------------------ memory


class Largest(TorchDispatchMode):
    """Bytes of the largest storage that any operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in _tensors(args) + _tensors(kwargs or {})}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


MANY = 24
BIG: dict[str, Callable[[], Factors]] = {
    "kappa 1": lambda: sized(1, 12, 20, MANY),
    "few positions": lambda: sized(4, 12, 20, MANY),
    "few positions, ones": lambda: sized(4, 12, 20, MANY, ones=True),
    "many positions": lambda: sized(40, 12, 20, MANY),
    "many positions, ones": lambda: sized(40, 12, 20, MANY, ones=True),
    "late": lambda: sized(40, 12, 20, MANY, ones=True, late=True),
    "joined": lambda: Joined([sized(4, 12, 20, MANY), sized(30, 12, 20, MANY)]),
    "joined, ones": lambda: Joined([sized(4, 12, 20, MANY, ones=True), sized(40, 12, 20, MANY, ones=True)]),
    "joined, late": lambda: Joined([sized(100, 12, 20, MANY, late=True), sized(100, 12, 20, MANY, late=True)]),
    "lookup": lambda: Lookup(torch.randint(12, (MANY, 30)), random(MANY, 30, 20), 12),
    "tied": lambda: Joined([Lookup(torch.randint(12, (MANY, 30)), random(MANY, 30, 20), 12), sized(4, 12, 20, MANY)]),
    "bags": lambda: Bags(torch.randint(12, (MANY,)), torch.arange(MANY), random(MANY), random(MANY, 20), 12),
    "bags+rows": lambda: Joined(
        [
            Bags(torch.randint(12, (MANY,)), torch.arange(MANY), random(MANY), random(MANY, 20), 12),
            Rows(random(1, MANY, 12, 20)),
        ]
    ),
    "rows": lambda: Rows(random(1, MANY, 12, 20)),
}


def one_sample(factors: Factors, form: str) -> int:
    """Bytes that a single sample cannot do without: its gradient or its Gram matrix, and a copy of its factors."""
    work = factors.positions**2 if form == "gram" else factors.rows * factors.cols
    uses = len(factors.uses) if isinstance(factors, Joined) else 1
    return 8 * max(work * uses, factors.positions * max(factors.rows, factors.cols))


@pytest.mark.parametrize("width", [1, 4], ids=["one sample", "four samples"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("case", BIG)
def test_no_tensor_is_larger_than_a_chunk(case: str, side: str, width: int) -> None:
    """With room for 1 or 4 of 24 samples, nothing larger than that room is made, beside L or R and their like."""
    factors = BIG[case]()
    d, other = factors.curved_and_other(side)
    for form in factors.costs(side, other, d):
        room = width * one_sample(factors, form)
        with Largest() as largest:
            gfim_sum(factors, side, partition_of(factors, side), form=form, chunk_bytes=room, dtype=torch.float64)
        assert largest.bytes <= max(room, 8 * d * d), (form, largest.bytes / room)


def test_right_side_of_an_embedding_makes_nothing_of_its_rows() -> None:
    huge = 1_000_000
    words = Lookup(torch.randint(huge, (8, 5)), random(8, 5, 3), huge)
    bag = Bags(torch.randint(huge, (20,)), torch.arange(20) % 8, random(20), random(8, 3), huge)
    with Largest() as largest:
        for factors in (words, bag, Joined([words, Lookup(torch.randint(huge, (8, 2)), random(8, 2, 3), huge)])):
            gfim_sum(factors, "right", partition_of(factors, "right"))
            gfim_low_rank(factors, "right", partition_of(factors, "right"))
    assert largest.bytes < 100_000


@pytest.mark.parametrize("kappa", [2, 64])
def test_gram_and_rank_one_never_form_a_gradient(kappa: int) -> None:
    """kappa = 1 and few positions: nothing of the size of the per-sample gradients is made."""
    m, n, samples = 200, 300, 4
    for positions in (1, kappa):
        with Largest() as largest:
            gfim_sum(sized(positions, m, n, samples), "left", BlockPartition.of(1, m, None), dtype=torch.float64)
        assert largest.bytes < 8 * samples * m * n / 2


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [255, 256, 300, 515, 1030])
def test_large_products_are_made_by_their_lower_triangle(size: int, side: str) -> None:
    """Only panels of rows up to their diagonal blocks are multiplied, then mirrored: the whole matrix all the same."""
    curved = torch.randn(1, 7, 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    other = torch.randn(1, 7, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    factors = Outer(curved, other) if side == "left" else Outer(other, curved)
    gradients = factors.gradients(slice(None), torch.float64)[0]
    wanted = (gradients @ gradients.mT if side == "left" else gradients.mT @ gradients).sum(0)
    cut = BlockPartition.of(1, size, None)
    with FlopCounterMode(display=False) as counter:
        (made,) = gfim_sum(factors, side, cut, chunk_bytes=4 * size * 8, dtype=torch.float64)
    torch.testing.assert_close(made[0], wanted)
    if size > 500:
        assert 0.5 < counter.get_total_flops() / (2 * 7 * size * size) < 0.75
