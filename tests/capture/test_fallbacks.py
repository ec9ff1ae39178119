"""What falls back to mini-batch curvature: computed weights, loose parameters, sparse and nested inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import ngplus
from helpers.steps import (
    EXACT,
    Model,
    assert_equal,
    brute_force,
    data,
    loss_fn,
    mlp,
    one_step,
    several_steps,
)

pytestmark = pytest.mark.usefixtures("double")


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.mT


def _symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


DISGUISES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrize": _symmetric,
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_weight_that_is_parametrized_after_the_optimizer_was_made(disguise: str, steps: int) -> None:
    """Mini-batch curvature for it, exact for all others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    for _ in range(steps):
        one_step(model, optimizer, x, y)
        optimizer.zero_grad()
    DISGUISES[disguise](model[0])
    before = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"No per-sample curvature for 0\."):
        one_step(model, optimizer, x, y)
    assert optimizer.plan()["2.weight"].source == "sample"
    hidden = [row for row in optimizer.plan() if row.name.startswith("0.") and row.name != "0.bias"]
    assert {row.source for row in hidden} == {"batch"}
    if disguise != "spectral_norm":  # whose forward changes its buffers
        expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("2.")}
        assert_equal(model, before, expected)


def test_loose_parameters_warn_and_fall_back() -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.token = nn.Linear(4, 3), nn.Parameter(torch.randn(4))
            self.list = nn.ParameterList([nn.Parameter(torch.randn(4, 4))])

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh((x + self.token) @ self.list[0]))

    model = Loose()
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match="No per-sample curvature") as caught:
        several_steps(model, optimizer, *data(4))
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in ("token", "list.0"))
    assert {row.name: row.source for row in optimizer.plan()} == {
        "token": "batch", "head.weight": "sample", "list.0": "batch",
    }  # fmt: skip


class ThereAndBack(nn.Module):
    """One weight in a convolution and in the transposed one behind it, each with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


def test_a_weight_tied_in_different_layouts_falls_back() -> None:
    model = ThereAndBack()
    optimizer = ngplus.NGPlus(model, lr=0.01)
    plan = optimizer.plan()
    assert {name for row in plan for name in row.parameters} == {"there.weight", "there.bias", "back.bias"}
    assert all("different layouts" in row.note for row in plan)
    x = torch.randn(4, 3, 6, 6)

    def train() -> float:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    with pytest.warns(UserWarning, match="No per-sample curvature"):
        first = train()
    assert train() < first


SPARSE = {"coo": lambda x: x.to_sparse(), "csr": lambda x: x.to_sparse_csr()}


NO_NOISE = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors", "ignore:No per-sample curvature"
)


@NO_NOISE
@pytest.mark.parametrize("frozen", ["nothing", "weight"])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_inputs(kind: str, frozen: str) -> None:
    """The layer that takes them has mini-batch curvature, unless its bias alone is trained; the others are exact."""
    model = mlp()
    if frozen == "weight":
        model[0].weight.requires_grad_(False)
    x, y = data(4)
    before, thin = copy.deepcopy(model), SPARSE[kind](F.relu(x))
    expected = brute_force(before, thin.to_dense(), y, skip="\0" if frozen == "weight" else "0.")
    loss_fn(before(thin), y).backward()
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss_fn(model(thin), y).backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    optimizer.step()
    assert_equal(model, before, expected)
    first, last = optimizer.plan()
    assert (first.source, last.source) == ("sample" if frozen == "weight" else "batch", "sample")
    assert "sparse or nested" in first.note or frozen == "weight"


class Mixed(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix)


@NO_NOISE
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs(layout: torch.layout, batch_dim: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(torch.relu(m.a(x)))
        return m.b(torch.nested.to_padded_tensor(m.mixed(h), 0.0).sum(1))

    model = Model(forward, a=nn.Linear(4, 4), norm=nn.LayerNorm(4), mixed=Mixed(), b=nn.Linear(4, 3))
    x, y = data(5, 4)
    nested = torch.nested.nested_tensor([row[: i % 5 + 1] for i, row in enumerate(x)], layout=layout)
    before = copy.deepcopy(model)
    loss_fn(before(nested), y).backward()
    optimizer = ngplus.NGPlus(model, **EXACT, batch_dim=batch_dim)
    loss_fn(model(nested), y).backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    optimizer.step()
    rows = {row.name: row for row in optimizer.plan()}
    assert {name for name, row in rows.items() if "sparse or nested" in row.note} == set(rows) - {"b.weight"}
    assert rows["b.weight"].source == "batch"  # the samples are not followed through nested tensors
