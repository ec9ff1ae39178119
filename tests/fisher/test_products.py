"""The products of factors: every form, chunk size, side, block size and sub-sample against plain sums in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factor_cases import (
    BUILDERS,
    CASES,
    COLS,
    ROWS,
    SAMPLES,
    SIDES,
    SUBSAMPLES,
    Late,
    Stored,
    built,
    close,
    diagonal_blocks,
    expected_forms,
    lookup,
    outer,
    partition_of,
    plain_gfim,
    random,
    rows,
)

from ngplus.fisher.factors import (
    Bags,
    Factors,
    Joined,
    Lookup,
    OnDemand,
    Outer,
    Parts,
    Rows,
    Segments,
    SomeRows,
    gram_root,
    join,
    widen,
)
from ngplus.fisher.products import gfim_low_rank, gfim_sum
from ngplus.fisher.sketch import KINDS, Sketch, SketchSpec

# ------------------------------------------------------------------------------------------------ the factors


@pytest.mark.parametrize("name", BUILDERS)
def test_gradients_and_total(name: str) -> None:
    factors, dense = built(name)
    assert (factors.groups, factors.samples, factors.rows, factors.cols) == tuple(dense.shape)
    close(factors.gradients(slice(None), torch.float64), dense)
    close(factors.gradients(slice(1, 3), torch.float64), dense[:, 1:3])
    close(factors.gradients(torch.tensor([4, 0]), torch.float64), dense[:, [4, 0]])
    close(factors.gradient_sum(torch.float64), dense.sum(1))


@pytest.mark.parametrize("name", BUILDERS)
def test_block_of_the_sum(name: str) -> None:
    factors, dense = built(name)
    rows, cols = slice(1, 4), slice(1, 3)
    block, squares = factors.gradient_block(rows, cols, torch.float64)
    close(block, dense.sum(1)[:, rows, cols])
    exact = dense[..., rows, cols].square().sum()
    if name.startswith(("outer", "late", "rows")) and "+" not in name:
        close(squares, exact)
    elif "on demand" in name:  # estimated, since computing each G_i again would take long
        assert squares > 0
    else:
        assert squares >= exact * (1 - 1e-12)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_forms_that_apply(name: str, side: str) -> None:
    factors, _ = built(name)
    wanted = expected_forms(name, side)
    assert set(factors.costs(side, 3, 2)) == wanted
    for form in {"rank-one", "gram", "explicit", "nonsense"} - wanted:
        with pytest.raises(ValueError, match=form):
            gfim_sum(factors, side, partition_of(factors, side), form=form, dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ the products


@pytest.mark.parametrize("picked", SUBSAMPLES)
@pytest.mark.parametrize(("name", "side", "form"), CASES)
def test_sum_by_form_chunk_and_subsample(name: str, side: str, form: str, picked: str) -> None:
    factors, dense = built(name)
    index = None if SUBSAMPLES[picked] is None else torch.tensor(SUBSAMPLES[picked])
    want = plain_gfim(dense if index is None else dense[:, index], side)
    cut = partition_of(factors, side)
    for chunk_bytes in (1, 700, 2**26):  # one sample at a time, a few, all of them
        got = gfim_sum(factors, side, cut, form=form, samples=index, chunk_bytes=chunk_bytes, dtype=torch.float64)
        assert len(got) == 1
        close(got[0], want)


@pytest.mark.parametrize("chunk_bytes", [1, 2**26])
@pytest.mark.parametrize(("name", "side", "form"), CASES)
def test_sum_by_block_size(name: str, side: str, form: str, chunk_bytes: int) -> None:
    factors, dense = built(name)
    for p in (1, 2, 3, 4, 5, 6, 9):  # d is 6 or 4: blocks that divide it, that do not, p = d and p > d
        cut = partition_of(factors, side, p)
        stacks = gfim_sum(factors, side, cut, form=form, chunk_bytes=chunk_bytes, dtype=torch.float64)
        assert [tuple(stack.shape[1:]) for stack in stacks] == [(size, size) for _, _, size in cut.stacks]
        close(cut.dense(stacks), diagonal_blocks(plain_gfim(dense, side), p))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("side", SIDES)
def test_auto_is_the_chosen_form(name: str, side: str) -> None:
    factors, dense = built(name)
    close(gfim_sum(factors, side, partition_of(factors, side), dtype=torch.float64)[0], plain_gfim(dense, side))


@pytest.mark.parametrize("picked", SUBSAMPLES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_root(name: str, side: str, picked: str) -> None:
    """U U^T = L, and its diagonal blocks are those of U's rows."""
    factors, dense = built(name)
    index = None if SUBSAMPLES[picked] is None else torch.tensor(SUBSAMPLES[picked])
    want = plain_gfim(dense if index is None else dense[:, index], side)
    for p in (1, 4, 5, want.shape[-1]):
        cut = partition_of(factors, side, p)
        roots = gfim_low_rank(factors, side, cut, samples=index, dtype=torch.float64)
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
    cut = partition_of(low, side)
    for form in sorted(expected_forms(name, side)):
        got = gfim_sum(low, side, cut, form=form)[0]
        assert got.dtype == torch.float32
        close(got.double(), want, rtol=2e-5)
    root = gfim_low_rank(low, side, cut)[0]
    assert root.dtype == torch.float32
    close((root @ root.mT).double(), want, rtol=2e-5)


def test_float16_gradients_do_not_overflow() -> None:
    """Scaled losses make products of factors that float16 cannot hold; L is float32 and can."""
    left, right = torch.full((1, 2, 3, ROWS), 300.0), torch.full((1, 2, 3, COLS), 300.0)
    uses = [Outer(left.half(), right.half()), Outer(left.half(), right.half())]
    cut = partition_of(uses[0], "left")
    for form in ("gram", "explicit"):
        assert gfim_sum(Joined(uses), "left", cut, form=form)[0].isfinite().all(), form


def cast(factors: Factors, dtype: torch.dtype) -> Factors:
    if isinstance(factors, Joined):
        return Joined([cast(use, dtype) for use in factors.uses])
    if isinstance(factors, Parts):
        build = factors.build
        parts = {"build": lambda samples: cast(build(samples), dtype), "largest": cast(factors.largest, dtype)}
        return replace(factors, **parts)
    if isinstance(factors, Outer) and isinstance(factors.left, SomeRows):
        some = SomeRows(factors.left._values.to(dtype), factors.left._start, factors.rows)
        return Outer(some, factors.right.to(dtype), factors.ones)
    if isinstance(factors, Outer):
        late = isinstance(factors.right, Late)
        right = (factors.right.values if late else factors.right).to(dtype)
        return Outer(factors.left.to(dtype), Late(right) if late else right, factors.ones)
    if isinstance(factors, Lookup):
        return Lookup(factors.index, factors.values.to(dtype), factors.rows)
    if isinstance(factors, Bags):
        return Bags(factors.index, factors.sample, factors.weight.to(dtype), factors.grads.to(dtype), factors.rows)
    if isinstance(factors, Segments):
        return Segments(factors.left.to(dtype), factors.right.to(dtype), factors.sizes, factors.ones)
    if isinstance(factors, OnDemand):
        return OnDemand(Stored(factors.gradients(slice(None), dtype)))
    assert isinstance(factors, Rows)
    return Rows(factors.values.to(dtype))


# ------------------------------------------------------------------------------------------------ sketches


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", BUILDERS)
def test_sketched_sum(name: str, side: str) -> None:
    """sum_i (G_i Omega)(G_i Omega)^T with one Omega; an embedding's exact right product needs none."""
    factors, dense = built(name)
    transposed = dense if side == "left" else dense.mT
    n = transposed.shape[-1]
    exact = side == "right" and (isinstance(factors, Lookup | Bags) or name == "parts-lookup")
    for kind in KINDS:
        omega = Sketch(SketchSpec(3, kind), n, seed=7)
        short = transposed @ omega(torch.eye(n, dtype=torch.float64))
        want = plain_gfim(dense, side) if exact else plain_gfim(short, "left")
        for chunk_bytes in (1, 2**26):
            got = gfim_sum(
                factors,
                side,
                partition_of(factors, side),
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

    got = gfim_sum(factors, side, partition_of(factors, side), sketch=sketch, dtype=torch.float64)
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
        close(gfim_sum(wide, side, partition_of(wide, side), dtype=torch.float64)[0], plain_gfim(want, side))


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
            got = gfim_sum(both, side, partition_of(both, side), form=form, dtype=torch.float64)
            close(got[0], plain_gfim(dense, side))


def test_join_puts_equal_numbers_of_samples_together() -> None:
    (a, _), (b, _), (c, _) = outer(3), outer(2, seed=5), rows()
    other = Rows(random(1, 2, ROWS, COLS))
    together = join([a, other, b, c])
    assert [type(f) for f in together] == [Joined, Rows]
    assert list(together[0].uses) == [a, b, c]
    assert together[1] is other
    assert join([a]) == [a]


def test_a_use_without_rows_adds_nothing() -> None:
    """A table that is looked up for nodes, and for edges where there are none, stays one that is looked up."""
    table, _ = lookup()
    none = Segments(random(0, ROWS), random(0, COLS), [0] * SAMPLES)
    assert join([table, none]) == [table]
    assert join([none, none]) == [none]
    for side in SIDES:
        (total,) = gfim_sum(none, side, partition_of(none, side), dtype=torch.float64)
        assert not total.any()
