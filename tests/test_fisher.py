"""The products of factors: every form, chunk size, side, block size and sub-sample against plain sums in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ngplus.blocks import Cut
from ngplus.factors import (
    Bags,
    Factors,
    Joined,
    Lookup,
    Outer,
    Rows,
    gram_root,
    join,
    widen,
)
from ngplus.fisher import choose_form, gfim_root, gfim_sum
from ngplus.sketch import KINDS, Sketch, SketchSpec

SAMPLES, ROWS, COLS = 5, 6, 4
SIDES = ("left", "right")


class Late:
    """A factor that is made when samples are asked for, as a convolution's patches are."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, tuple(values.shape)

    def take(self, samples: Tensor | slice) -> Tensor:
        return self.values[:, samples].clone()

    def outer(self, samples: Tensor | slice, left: Tensor) -> Tensor:
        return self.take(samples).to(left.dtype).mT @ left

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        taken = self.take(samples).to(dtype)
        return taken @ taken.mT

    @property
    def gram_cost(self) -> float:
        return float(self.shape[2] ** 2 * self.shape[3])


# Each builder makes factors and, by plain loops that share no code with the package, their gradients
# [groups, samples, m, n].
Built = tuple[Factors, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outer(kappa: int = 1, ones: bool = False, groups: int = 1, late: bool = False, seed: int = 1) -> Built:
    left = random(groups, SAMPLES, kappa, ROWS, seed=seed)
    right = random(groups, SAMPLES, kappa, COLS - ones, seed=seed + 1)
    full = torch.cat([right, torch.ones(groups, SAMPLES, kappa, 1, dtype=right.dtype)], -1) if ones else right
    dense = torch.zeros(groups, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for g in range(groups):
        for i in range(SAMPLES):
            for p in range(kappa):
                dense[g, i] += torch.outer(left[g, i, p], full[g, i, p])
    return Outer(left, Late(right) if late else right, ones), dense


def lookup(kappa: int = 3, seed: int = 11) -> Built:
    index = torch.randint(ROWS, (SAMPLES, kappa), generator=torch.Generator().manual_seed(seed))
    if kappa > 1:
        index[:, 1] = index[:, 0]  # a word twice in one sample
    values = random(SAMPLES, kappa, COLS, seed=seed + 1)
    dense = torch.zeros(1, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for i in range(SAMPLES):
        for p in range(kappa):
            dense[0, i, index[i, p]] += values[i, p]
    return Lookup(index, values, ROWS), dense


def bags(seed: int = 21) -> Built:
    index = torch.tensor([0, 3, 3, 5, 1, 2, 2, 2, 4])  # bag 0 has a row twice, bag 2 a row thrice, bag 3 is empty
    sample = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 4])
    weight, grads = random(len(index), seed=seed), random(SAMPLES, COLS, seed=seed + 1)
    dense = torch.zeros(1, SAMPLES, ROWS, COLS, dtype=torch.float64)
    for j, i, w in zip(index, sample, weight, strict=True):
        dense[0, i, j] += w * grads[i]
    return Bags(index, sample, weight, grads, ROWS), dense


def rows(groups: int = 1, seed: int = 31) -> Built:
    values = random(groups, SAMPLES, ROWS, COLS, seed=seed)
    return Rows(values), values.clone()


def joined(*uses: Built) -> Built:
    dense = uses[0][1]
    for _, more in uses[1:]:
        dense = dense + more
    return Joined([factors for factors, _ in uses]), dense


BUILDERS: dict[str, Callable[[], Built]] = {
    "outer": lambda: outer(),
    "outer-ones": lambda: outer(ones=True),
    "outer-groups": lambda: outer(groups=2),
    "outer-groups-ones": lambda: outer(groups=2, ones=True),
    "outer-3": lambda: outer(3),
    "outer-3-ones": lambda: outer(3, ones=True),
    "outer-7-ones": lambda: outer(7, ones=True),  # more positions than rows or columns
    "outer-3-groups-ones": lambda: outer(3, ones=True, groups=2),
    "late": lambda: outer(late=True),
    "late-3-ones": lambda: outer(3, ones=True, late=True),
    "late-7-groups-ones": lambda: outer(7, ones=True, groups=2, late=True),
    "lookup": lambda: lookup(),
    "lookup-1": lambda: lookup(1),
    "bags": bags,
    "rows": lambda: rows(),
    "rows-groups": lambda: rows(groups=2),
    "outer+outer": lambda: joined(outer(), outer(2, seed=5)),
    "outer-ones+outer-ones": lambda: joined(outer(2, ones=True), outer(3, ones=True, seed=5)),
    "outer+outer-groups": lambda: joined(outer(2, groups=2), outer(2, groups=2, seed=5)),
    "outer+late": lambda: joined(outer(2, ones=True), outer(2, ones=True, late=True, seed=5)),
    "lookup+outer": lambda: joined(lookup(2), outer(3)),
    "outer-ones+lookup": lambda: joined(outer(3, ones=True), lookup(2)),
    "lookup+lookup": lambda: joined(lookup(2), lookup(3, seed=15)),
    "lookup+outer+lookup": lambda: joined(lookup(2), outer(1), lookup(3, seed=15)),
    "rows+rows": lambda: joined(rows(), rows(seed=35)),
    "rows+outer": lambda: joined(rows(), outer(3, ones=True)),
    "bags+outer": lambda: joined(bags(), outer(2)),
    "bags+lookup+rows": lambda: joined(bags(), lookup(), rows()),
}


@functools.cache
def built(name: str) -> Built:
    return BUILDERS[name]()


def expected_forms(name: str, side: str) -> set[str]:
    """The forms that the module's table promises."""
    if "+" in name:
        plain = all(
            part.startswith(("outer", "late")) or (part == "lookup" and side == "right") for part in parts(name)
        )
        return {"gram", "explicit"} if plain else {"explicit"}
    if name.startswith(("outer", "late")):
        several = {"gram", "explicit"}
        return several if any(k in name for k in ("-3", "-7")) else several | {"rank-one"}
    return {"rank-one"} if name == "bags" and side == "right" else {"explicit"}


def parts(name: str) -> list[str]:
    return name.split("+")


CASES = [(name, side, form) for name in BUILDERS for side in SIDES for form in sorted(expected_forms(name, side))]
SUBSAMPLES = {"all": None, "some": [0, 2, 3], "one": [4]}


def plain_gfim(gradients: Tensor, side: str) -> Tensor:
    """sum_i G_i G_i^T or sum_i G_i^T G_i of [groups, samples, m, n], as [groups, d, d]."""
    return torch.einsum("gsij,gskj->gik" if side == "left" else "gsji,gsjk->gik", gradients, gradients)


def diagonal_blocks(matrix: Tensor, p: int) -> Tensor:
    """The matrix with all but its diagonal blocks of p rows set to zero; the last block may be smaller."""
    block = torch.arange(matrix.shape[-1]) // p
    return torch.where(block[:, None] == block, matrix, 0.0)


def cut_of(factors: Factors, side: str, p: int | None = None) -> Cut:
    return Cut.of(factors.groups, factors.curved_and_other(side)[0], p)


def close(a: Tensor, b: Tensor, rtol: float = 1e-11) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max().clamp_min(1e-300)))


# ------------------------------------------------------------------------------------------------ the factors


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_and_total(name: str) -> None:
    factors, dense = built(name)
    assert (factors.groups, factors.samples, factors.rows, factors.cols) == tuple(dense.shape)
    close(factors.gradients(slice(None), torch.float64), dense)
    close(factors.gradients(slice(1, 3), torch.float64), dense[:, 1:3])
    close(factors.gradients(torch.tensor([4, 0]), torch.float64), dense[:, [4, 0]])
    close(factors.total(torch.float64), dense.sum(1))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_forms_that_apply(name: str, side: str) -> None:
    factors, _ = built(name)
    wanted = expected_forms(name, side)
    assert set(factors.costs(side, 3, 2)) == wanted
    for form in {"rank-one", "gram", "explicit", "nonsense"} - wanted:
        with pytest.raises(ValueError, match=form):
            gfim_sum(factors, side, cut_of(factors, side), form=form, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ the products


@pytest.mark.parametrize("picked", SUBSAMPLES)
@pytest.mark.parametrize(("name", "side", "form"), CASES)
def test_sum_by_form_chunk_and_subsample(name: str, side: str, form: str, picked: str) -> None:
    factors, dense = built(name)
    index = None if SUBSAMPLES[picked] is None else torch.tensor(SUBSAMPLES[picked])
    want = plain_gfim(dense if index is None else dense[:, index], side)
    cut = cut_of(factors, side)
    for chunk_bytes in (1, 700, 2**26):  # one sample at a time, a few, all of them
        got = gfim_sum(factors, side, cut, form=form, samples=index, chunk_bytes=chunk_bytes, dtype=torch.float64)
        assert len(got) == 1
        close(got[0], want)


@pytest.mark.parametrize("chunk_bytes", [1, 2**26])
@pytest.mark.parametrize(("name", "side", "form"), CASES)
def test_sum_by_block_size(name: str, side: str, form: str, chunk_bytes: int) -> None:
    factors, dense = built(name)
    for p in (1, 2, 3, 4, 5, 6, 9):  # d is 6 or 4: blocks that divide it, that do not, p = d and p > d
        cut = cut_of(factors, side, p)
        stacks = gfim_sum(factors, side, cut, form=form, chunk_bytes=chunk_bytes, dtype=torch.float64)
        assert [tuple(stack.shape[1:]) for stack in stacks] == [(size, size) for _, _, size in cut.stacks]
        close(cut.dense(stacks), diagonal_blocks(plain_gfim(dense, side), p))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("side", SIDES)
def test_auto_is_the_chosen_form(name: str, side: str) -> None:
    factors, dense = built(name)
    close(gfim_sum(factors, side, cut_of(factors, side), dtype=torch.float64)[0], plain_gfim(dense, side))


@pytest.mark.parametrize("picked", SUBSAMPLES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_root(name: str, side: str, picked: str) -> None:
    """U U^T = L, and its diagonal blocks are those of U's rows."""
    factors, dense = built(name)
    index = None if SUBSAMPLES[picked] is None else torch.tensor(SUBSAMPLES[picked])
    want = plain_gfim(dense if index is None else dense[:, index], side)
    for p in (1, 4, 5, want.shape[-1]):
        cut = cut_of(factors, side, p)
        roots = gfim_root(factors, side, cut, samples=index, dtype=torch.float64)
        close(cut.dense([u @ u.mT for u in roots]), diagonal_blocks(want, p))
        assert all(u.shape[-1] <= factors.rank(side) for u in roots)


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_gram_root_of_a_singular_matrix(rank: int) -> None:
    x = random(2, 3, 5, rank)
    root = gram_root(x @ x.mT)
    torch.testing.assert_close(root.mT @ root, x @ x.mT, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------ low precision


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_low_precision_factors_are_multiplied_in_float32(name: str, side: str) -> None:
    """bfloat16 factors are numbers like others: what is made of them has float32's rounding, not theirs."""
    low = cast(built(name)[0], torch.bfloat16)
    want = plain_gfim(cast(low, torch.float64).gradients(slice(None), torch.float64), side)
    cut = cut_of(low, side)
    for form in sorted(expected_forms(name, side)):
        got = gfim_sum(low, side, cut, form=form)[0]
        assert got.dtype == torch.float32
        close(got.double(), want, rtol=2e-5)
    root = gfim_root(low, side, cut)[0]
    assert root.dtype == torch.float32
    close((root @ root.mT).double(), want, rtol=2e-5)


def test_float16_gradients_do_not_overflow() -> None:
    """Scaled losses make products of factors that float16 cannot hold; L is float32 and can."""
    left, right = torch.full((1, 2, 3, ROWS), 300.0), torch.full((1, 2, 3, COLS), 300.0)
    uses = [Outer(left.half(), right.half()), Outer(left.half(), right.half())]
    cut = cut_of(uses[0], "left")
    for form in ("gram", "explicit"):
        assert gfim_sum(Joined(uses), "left", cut, form=form)[0].isfinite().all(), form


def cast(factors: Factors, dtype: torch.dtype) -> Factors:
    if isinstance(factors, Joined):
        return Joined([cast(use, dtype) for use in factors.uses])
    if isinstance(factors, Outer):
        late = isinstance(factors.right, Late)
        right = (factors.right.values if late else factors.right).to(dtype)
        return Outer(factors.left.to(dtype), Late(right) if late else right, factors.ones)
    if isinstance(factors, Lookup):
        return Lookup(factors.index, factors.values.to(dtype), factors.rows)
    if isinstance(factors, Bags):
        return Bags(factors.index, factors.sample, factors.weight.to(dtype), factors.grads.to(dtype), factors.rows)
    assert isinstance(factors, Rows)
    return Rows(factors.values.to(dtype))


# ------------------------------------------------------------------------------------------------ sketches


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_sketched_sum(name: str, side: str) -> None:
    """sum_i (G_i Omega)(G_i Omega)^T with one Omega; an embedding's exact right product needs none."""
    factors, dense = built(name)
    turned = dense if side == "left" else dense.mT
    n = turned.shape[-1]
    exact = side == "right" and isinstance(factors, Lookup | Bags)
    for kind in KINDS:
        omega = Sketch(SketchSpec(3, kind), n, seed=7)
        short = turned @ omega(torch.eye(n, dtype=torch.float64))
        want = plain_gfim(dense, side) if exact else plain_gfim(short, "left")
        for chunk_bytes in (1, 2**26):
            got = gfim_sum(
                factors,
                side,
                cut_of(factors, side),
                sketch=lambda _, omega=omega: omega,
                chunk_bytes=chunk_bytes,
                dtype=torch.float64,
            )
            close(got[0], want)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_sketch_of_all_columns_without_replacement_is_exact(name: str, side: str) -> None:
    factors, dense = built(name)

    def sketch(n: int) -> Sketch:
        return Sketch(SketchSpec(n, "uniform", replacement=False), n, seed=3)

    got = gfim_sum(factors, side, cut_of(factors, side), sketch=sketch, dtype=torch.float64)
    close(got[0], plain_gfim(dense, side))


# ------------------------------------------------------------------------------------------------ join and widen


@pytest.mark.parametrize("columns", [[0, 1, 2, 3], [1, 2, 3, 4], [4, 0, 2, 1]], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_widen(name: str, columns: list[int]) -> None:
    factors, dense = built(name)
    wide = widen(factors, columns, COLS + 1)
    want = torch.zeros(*dense.shape[:-1], COLS + 1, dtype=torch.float64)
    for c, column in enumerate(columns):
        want[..., column] = dense[..., c]
    assert wide.cols == COLS + 1
    close(wide.gradients(slice(None), torch.float64), want)
    for side in SIDES:
        close(gfim_sum(wide, side, cut_of(wide, side), dtype=torch.float64)[0], plain_gfim(want, side))


def test_widen_to_the_same_columns_changes_nothing() -> None:
    factors, _ = outer(3, ones=True)
    assert widen(factors, list(range(COLS)), COLS) is factors


def test_tied_embedding_and_output_layer_with_a_bias() -> None:
    """The embedding has n columns, the output layer n + 1: the cross terms are in R."""
    word, word_dense = lookup(3)
    out, out_dense = outer(2, ones=True, seed=9)
    small = Lookup(word.index, word.values[..., : COLS - 1], ROWS)
    both = Joined([widen(small, range(COLS - 1), COLS), out])
    dense = out_dense + torch.nn.functional.pad(word_dense[..., : COLS - 1], (0, 1))
    for side in SIDES:
        for form in both.costs(side, 1, 1):
            got = gfim_sum(both, side, cut_of(both, side), form=form, dtype=torch.float64)
            close(got[0], plain_gfim(dense, side))


def test_join_puts_equal_numbers_of_samples_together() -> None:
    (a, _), (b, _), (c, _) = outer(3), outer(2, seed=5), rows()
    other = Rows(random(1, 2, ROWS, COLS))
    together = join([a, other, b, c])
    assert [type(f) for f in together] == [Joined, Rows]
    assert list(together[0].uses) == [a, b, c]
    assert together[1] is other
    assert join([a]) == [a]


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
        gfim_sum(factors, side, cut_of(factors, side, p), form=form, dtype=torch.float64)
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
            gfim_sum(factors, side, cut_of(factors, side), form=form, chunk_bytes=room, dtype=torch.float64)
        assert largest.bytes <= max(room, 8 * d * d), (form, largest.bytes / room)


def test_right_side_of_an_embedding_makes_nothing_of_its_rows() -> None:
    huge = 1_000_000
    words = Lookup(torch.randint(huge, (8, 5)), random(8, 5, 3), huge)
    bag = Bags(torch.randint(huge, (20,)), torch.arange(20) % 8, random(20), random(8, 3), huge)
    with Largest() as largest:
        for factors in (words, bag, Joined([words, Lookup(torch.randint(huge, (8, 2)), random(8, 2, 3), huge)])):
            gfim_sum(factors, "right", cut_of(factors, "right"))
            gfim_root(factors, "right", cut_of(factors, "right"))
    assert largest.bytes < 100_000


@pytest.mark.parametrize("kappa", [2, 64])
def test_gram_and_rank_one_never_form_a_gradient(kappa: int) -> None:
    """kappa = 1 and few positions: nothing of the size of the per-sample gradients is made."""
    m, n, samples = 200, 300, 4
    for positions in (1, kappa):
        with Largest() as largest:
            gfim_sum(sized(positions, m, n, samples), "left", Cut.of(1, m, None), dtype=torch.float64)
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
    cut = Cut.of(1, size, None)
    with FlopCounterMode(display=False) as counter:
        (made,) = gfim_sum(factors, side, cut, chunk_bytes=4 * size * 8, dtype=torch.float64)
    torch.testing.assert_close(made[0], wanted)
    if size > 500:
        assert 0.5 < counter.get_total_flops() / (2 * 7 * size * size) < 0.75
