"""Adaptive scaling: Adam's moments in the eigenbases of one side, of both or of none, against plain formulas."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import reference as ref
import torch
from linear_cases import SHAPES, batches, compare, matrix_of, per_sample, train
from plain_adaptive import PlainAdaptive, PlainAdaptiveBatch, PlainDefault, PlainTwoSided, adam_step
from torch import Tensor, nn

import ngplus

pytestmark = pytest.mark.usefixtures("double")

BARE = {"scaling": "adaptive", "curvature": "sample", "side": "smaller", "nesterov": False, "early_refreshes": False}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["full", "factored"])
def test_adaptive_scaling(shape: tuple[int, int], every: int, kind: str) -> None:
    compare(
        PlainAdaptive(0.8, 0.95, every, kind),
        shape=shape,
        **{**BARE, "update_every": every, "momentum": 0.8, "beta2": 0.95, "second_moment": kind},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_adaptive_scaling_with_batch_curvature(shape: tuple[int, int]) -> None:
    # Where the average is still lambda I its eigenvectors are not unique, but no gradient has reached there either.
    compare(
        PlainAdaptiveBatch(0.8, 0.95, 1),
        shape=shape,
        steps=4,
        second_moment="full",
        **{**BARE, "update_every": 1, "momentum": 0.8, "beta2": 0.95, "curvature": "batch", "beta": 0.8},
    )


@pytest.mark.parametrize(
    ("every", "early"),
    [(1, [0]), (2, [0]), (3, [0, 1]), (10, [0, 1]), (11, [0, 1, 5]), (20, [0, 1, 5]), (51, [0, 1, 5, 25])],
)
def test_when_the_early_refreshes_come(every: int, early: list[int]) -> None:
    """At the start and after 1, 5, 25, ... steps, below T/2; then every T from the last of these."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, update_every=every)
    refreshed = []
    for k, (x, y) in enumerate(batches(early[-1] + every + 2)):
        before = optimizer.state[model.weight].get("basis")
        train(model, optimizer, x, y)
        if optimizer.state[model.weight]["basis"] is not before:
            refreshed.append(k)
    assert refreshed[: len(early) + 1] == [*early, early[-1] + every]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default(shape: tuple[int, int]) -> None:
    model = nn.Linear(*shape)
    plain, optimizer = PlainDefault(), ngplus.NGPlus(model)
    for k, (x, y) in enumerate(batches(30, features=shape[0], outputs=shape[1])):
        before = matrix_of(model)
        wanted = plain(k, per_sample(model, x, y), before)
        train(model, optimizer, x, y)
        assert ref.relative_error(before - matrix_of(model), 0.01 * wanted) < 1e-6, k


def test_what_the_default_settles_on() -> None:
    """Blocks and a sketch have one side; the paper's scaling has none of what is new."""

    def settled(**options: Any) -> list[Any]:
        group = ngplus.NGPlus(nn.Linear(4, 3), **options).param_groups[0]
        return [group[name] for name in ("side", "curvature", "beta", "nesterov", "early_refreshes")]

    assert settled() == ["auto", "momentum", 0.5, True, True]
    assert settled(scaling="inverse") == ["auto", "sample", 0.9, False, False]
    for one in ({"scaling": "inverse"}, {"block_size": 2}, {"sketch": 2}):
        assert ngplus.NGPlus(nn.Linear(4, 3), **one).plan()[0].side == "left"
    assert settled(curvature="batch")[2] == 0.95
    assert settled(momentum=0.0)[3] is False
    assert settled(side="left", curvature="sample", beta=0.7, nesterov=False, early_refreshes=False) == [
        *("left", "sample", 0.7, False, False)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["full", "factored"])
def test_adaptive_scaling_of_both_sides(shape: tuple[int, int], every: int, kind: str) -> None:
    compare(
        PlainTwoSided(0.8, 0.95, every, kind),
        shape=shape,
        **{**BARE, "side": "both", "update_every": every, "momentum": 0.8, "beta2": 0.95, "second_moment": kind},
    )


def test_a_table_without_a_basis_has_means_over_its_rows_and_columns() -> None:
    """Adam with a second moment of m + n numbers, in plain formulas; a vector keeps all of its own."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "norm": nn.LayerNorm(4, bias=False)})
    optimizer = ngplus.NGPlus(model, lr=0.01, nesterov=False)
    m, v = torch.zeros(5, 4), torch.zeros(5, 4)
    for k in range(1, 5):
        optimizer.zero_grad()
        model["norm"](model["table"](torch.randint(5, (6,)))).square().sum().backward()
        before, gradient = model["table"].weight.detach().clone(), model["table"].weight.grad
        optimizer.step()
        assert gradient is not None
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        wanted = before - 0.01 * adam_step(m, v, k, 0.9, 0.95, "factored")
        torch.testing.assert_close(model["table"].weight.detach(), wanted)
    assert "exp_avg_sq" in optimizer.state[model["norm"].weight]


def test_what_a_factored_second_moment_keeps() -> None:
    """m + n numbers in place of m n; a change of the kind begins the moments anew."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model)
    state = optimizer.state[model.weight]
    train(model, optimizer, *batches(1)[0])
    assert "exp_avg_sq" not in state
    assert [tuple(state[key].shape) for key in ("exp_avg_sq_row", "exp_avg_sq_col")] == [(1, 3, 1), (1, 1, 6)]
    optimizer.param_groups[0]["second_moment"] = "full"
    train(model, optimizer, *batches(1)[0])
    assert tuple(state["exp_avg_sq"].shape) == (1, 3, 6)
    assert "exp_avg_sq_row" not in state
    assert state["adam_step"] == 1


@pytest.mark.parametrize("options", [{}, {"side": "smaller"}, {"side": "smaller", "block_size": 4}])
def test_a_factored_step_is_no_longer_than_adams_first(options: dict[str, Any]) -> None:
    """Of few gradients the means know too little, and steps along the small ones would be tens of times too long: no
    block, and no group of a convolution, moves by more than lr in the root mean square."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(32, 8))
    optimizer = ngplus.NGPlus(model, lr=0.01, **options)
    longest = []
    for _ in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(16, 4, 6) * torch.logspace(0, -3, 16)[:, None, None]
        train(model, optimizer, x, torch.randn(16, 8))
        conv, weight, bias = (old - new.detach() for old, new in zip(before, model.parameters(), strict=True))
        joined = torch.cat([weight, bias[:, None]], dim=1)
        blocks = [*conv.flatten(1).split(4), *joined.split(options.get("block_size", 8))]
        longest.append(max(float(block.square().mean().sqrt()) for block in blocks))
    assert max(longest) < 0.01 * (1 + 1e-6)
    assert longest[0] > 0.01 * (1 - 1e-6)


def test_both_sides_of_grouped_convolutions_tables_and_vectors() -> None:
    """Groups have two bases each; the rows of a table and the entries of a vector are left as they are."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(4, 6, 3, groups=2, bias=False), "table": nn.Embedding(9, 4), "norm": nn.LayerNorm(6)}
    )
    optimizer = ngplus.NGPlus(model, lr=0.01, side="both", curvature="batch")
    for _ in range(3):
        optimizer.zero_grad()
        hidden = model["conv"](model["table"](torch.tensor([[1, 2, 5, 1]])).mT)
        model["norm"](hidden.mT).square().sum().backward()
        optimizer.step()
    shapes = {
        name: [
            tuple(optimizer.state[param][key].shape) for key in ("basis", "basis_tail") if key in optimizer.state[param]
        ]
        for name, param in model.named_parameters()
        if "basis" in optimizer.state[param]
    }
    assert shapes == {"conv.weight": [(2, 3, 3), (2, 6, 6)], "table.weight": [(1, 4, 4)], "norm.weight": [(1, 2, 2)]}
    assert [row.side for row in optimizer.plan()] == ["both", "right", "right"]


def test_a_change_from_one_side_to_both_is_a_refresh() -> None:
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=100, side="smaller", early_refreshes=False)
    (x, y), *rest = batches(3)
    train(model, optimizer, x, y)
    optimizer.param_groups[0]["side"] = "both"
    train(model, optimizer, *rest[0])
    assert "basis_tail" in optimizer.state[model.weight]
    assert optimizer.plan()[0].source == "sample"
    optimizer.param_groups[0].update(scaling="inverse", side="smaller", curvature="sample", nesterov=False)
    train(model, optimizer, *rest[1])
    kept = set(optimizer.state[model.weight])
    assert kept == {"inverse", "damping", "refreshed", "momentum_buffer"}  # and nothing of what adaptive scaling keeps


@pytest.mark.parametrize("bad", [{"scaling": "inverse"}, {"block_size": 2}, {"sketch": 2}])
def test_both_sides_refuse_what_has_one(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="side='both' goes with"):
        ngplus.NGPlus(nn.Linear(4, 3), side="both", **bad)


def test_adaptive_scaling_of_a_vector_is_adam() -> None:
    """A lone vector is a matrix of one column: R is a number, its basis 1, and Adam is what is left."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.v)

    ours, theirs = Shift(), Shift()
    first = ngplus.NGPlus(ours, lr=0.1, scaling="adaptive", momentum=0.9, beta2=0.99, nesterov=False)
    second = torch.optim.Adam(theirs.parameters(), lr=0.1, betas=(0.9, 0.99))
    for _ in range(5):
        x = torch.randn(6, 4)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.v, theirs.v)


def test_vectors_and_tables_have_no_basis_by_default_and_are_adam() -> None:
    """What is only looked up; one that is the output layer as well has a basis, and one with sparse gradients. With
    second moments in full it is Adam to the last digit."""

    class Words(nn.Module):
        def __init__(self, tied: bool, sparse: bool = False) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(9, 4, sparse=sparse), nn.LayerNorm(4)
            self.head = nn.Linear(4, 9, bias=False)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.table(x)))

    def sides(model: nn.Module, **options: Any) -> dict[str, str]:
        return {row.name: row.side for row in ngplus.NGPlus(model, **options).plan()}

    assert sides(Words(tied=False)) == {"table.weight": "none", "norm.weight": "none", "head.weight": "both"}
    assert sides(Words(tied=True)) == {"table.weight": "right", "norm.weight": "none"}
    assert sides(Words(tied=False, sparse=True))["table.weight"] == "right"
    assert sides(Words(tied=False), side="both") == {
        "table.weight": "right", "norm.weight": "right", "head.weight": "both"
    }  # fmt: skip

    ours = Words(tied=False)
    theirs = Words(tied=False)
    theirs.load_state_dict(ours.state_dict())
    first = ngplus.NGPlus(ours, lr=0.01, nesterov=False, beta2=0.99, second_moment="full")
    second = torch.optim.Adam([*theirs.table.parameters(), *theirs.norm.parameters()], lr=0.01, betas=(0.9, 0.99))
    for _ in range(5):
        x, y = torch.randint(9, (6,)), torch.randint(9, (6,))
        theirs.head.load_state_dict(ours.head.state_dict())
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name in ("table.weight", "norm.weight", "norm.bias"):
            torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name))
    assert "basis" not in first.state[ours.table.weight]
    with pytest.raises(RuntimeError, match=r"'table.weight' has no curvature of its own: side='auto' leaves"):
        first.curvature("table.weight")


def test_a_basis_that_is_given_up_takes_its_moments_along() -> None:
    model = nn.LayerNorm(5)
    optimizer = ngplus.NGPlus(model, side="both", early_refreshes=False)
    for side in ("both", "auto", "both"):
        optimizer.param_groups[0]["side"] = side
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the capture was not armed for this step
            train(model, optimizer, torch.randn(6, 5), torch.randn(6, 5))
        state = optimizer.state[model.weight]
        assert ("basis" in state) == (side == "both")
        assert state["adam_step"] == 1
