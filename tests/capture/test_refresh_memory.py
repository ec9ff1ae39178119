"""The memory of a refresh: bounded by ``refresh_memory``, exact below the bound, mini-batch curvature above it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ngplus
from helpers import reference as ref
from helpers.memory import CASES, WAITING, refresh_bytes
from helpers.steps import PAPER
from ngplus.capture import reasons


class Own(nn.Module):
    """A layer that no rule knows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """Several rows for each sample, flattened into the batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own(12, 9)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(x.flatten(0, 1)).tanh().view(len(x), -1)
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 6), nn.Linear(6, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        y: Tensor = self.out(self.words(index).tanh())
        return y


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, and the number of those with as many bytes or more."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.bytes, self.large, self._least = 0, 0, least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:  # no view, and not in place
                self.bytes, self.large = max(self.bytes, x.nbytes), self.large + (x.nbytes >= self._least)
        return out


def stepped(model: nn.Module, x: Tensor, **options: Any) -> ngplus.NGPlus:
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, **{**PAPER, **options})
    model(x).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return optimizer


def brute_force(model: nn.Module, x: Tensor, name: str) -> Tensor:
    """sum_i G_i^T G_i / S or sum_i G_i G_i^T / S, the smaller one, by batches of one."""
    own = dict(model.named_parameters())
    names = [name, name.replace("weight", "bias")] if name.replace("weight", "bias") in own else [name]
    grads = [torch.autograd.grad(model(row[None]).square().mean(), [own[n] for n in names]) for row in x]
    stack = torch.stack([torch.cat([g.reshape(len(g), -1) for g in each], dim=1) for each in grads])
    return ref.gfim(stack[:, None], ref.side_of(stack[0]))[0]


@pytest.mark.parametrize("chunk", [1, 2**12, 2**24])
@pytest.mark.parametrize("solver", ["dense", "woodbury"])
def test_rows_of_samples_in_chunks_are_exact(
    double: None, monkeypatch: pytest.MonkeyPatch, chunk: int, solver: str
) -> None:
    monkeypatch.setattr("ngplus.capture.batch.CHUNK_BYTES", chunk)
    monkeypatch.setattr("ngplus.fisher.products.CHUNK_BYTES", chunk)
    model, x = Rows(), torch.randn(7, 5, 12)
    optimizer = stepped(model, x, solver=solver)
    assert optimizer.plan()["own.weight"].source == "vmap"
    found = optimizer.curvature("own.weight").matrix
    assert ref.relative_error(found, brute_force(model, x, "own.weight")) < 1e-12


def test_rows_of_uneven_samples_are_exact(double: None) -> None:
    model, x = nn.Sequential(Own(4, 3), nn.Tanh()), torch.randn(9, 4)
    index = torch.tensor([2, 0, 1, 1, 0, 2, 2, 2, 0])
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, sample_index=lambda x: index, loss_reduction="sum", **PAPER)
    model(x).square().sum().backward()
    optimizer.step()
    own = model[0]
    grads = [torch.autograd.grad(model(x[index == i]).square().sum(), [own.weight, own.bias]) for i in range(3)]
    stack = torch.stack([torch.cat([w, b[:, None]], dim=1) for w, b in grads])
    assert ref.relative_error(optimizer.curvature("0.weight").matrix, ref.gfim(stack[:, None], "left")[0]) < 1e-12


@pytest.mark.parametrize("make", [lambda: Own(64, 48), lambda: nn.Linear(64, 48)], ids=["vmap", "rule"])
def test_no_tensor_of_a_refresh_is_larger_than_a_chunk(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]
) -> None:
    chunk = 2**18
    monkeypatch.setattr("ngplus.capture.batch.CHUNK_BYTES", chunk)
    monkeypatch.setattr("ngplus.fisher.products.CHUNK_BYTES", chunk)
    model, x = make(), torch.randn(512, 64)
    with Largest() as largest:
        optimizer = stepped(model, x, solver="dense")
    assert optimizer.plan()["weight"].source in ("vmap", "sample")
    assert largest.bytes <= max(chunk, x.nbytes)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LayerNorm(64), (32, 128, 64)),
        (lambda: nn.GroupNorm(4, 64), (32, 64, 16, 8)),
        (lambda: nn.Conv2d(2, 3, 3, padding=1), (256, 2, 16, 16)),
        (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (256, 2, 8, 8)),
    ],
    ids=["LayerNorm", "GroupNorm", "Conv2d", "ConvTranspose2d"],
)
def test_inputs_are_not_copied_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    for module in ("fisher.products", "capture.batch"):
        monkeypatch.setattr(f"ngplus.{module}.CHUNK_BYTES", 2**16)
    monkeypatch.setattr("ngplus.fisher.factors.outer.CHUNK", 2**14)
    model, x = make(), torch.randn(*shape)

    def large() -> int:
        with Largest(x.nbytes // 2) as made:
            model(x).square().sum().backward()
        return made.large

    alone = large()
    model.zero_grad()
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, **PAPER)
    assert large() == alone
    optimizer.step()
    assert optimizer.plan()[0].source == "sample"


TOO_LARGE = ["bags", "cross attention"]  # for the bound of the test
BOUND = 16 * 2**20
FIXED = 2**20  # parameters, L or R, and tensors of a number for each row


@pytest.mark.parametrize("case", [case for case in CASES if case not in TOO_LARGE])
def test_the_peak_is_within_the_bound(case: str) -> None:
    """Each takes more where all samples are worked on at once, and has the same curvature."""
    plain, peak, optimizer = refresh_bytes(CASES[case], BOUND)
    rows = [row for row in optimizer.plan() if row.refresh_bytes]
    assert {row.source for row in rows} <= {"sample", "vmap"}
    assert len(rows) == len(optimizer.plan())
    assert all(row.refresh_bytes <= BOUND for row in rows)
    assert peak - plain <= BOUND + FIXED


AT_ONCE = ["batch norm", "layer norm, sample_index", "table, sample_index", "attention, sample_index", "vmap"]


@pytest.mark.parametrize("case", AT_ONCE)
def test_more_at_once_exceeds_the_bound(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is what keeps the peak low, and does not change the curvature."""
    bounded = refresh_bytes(CASES[case], BOUND)[2]
    for module in ("fisher.products", "capture.batch"):
        monkeypatch.setattr(f"ngplus.{module}.CHUNK_BYTES", 2**40)
    plain, peak, optimizer = refresh_bytes(CASES[case], 2**40)
    assert peak - plain > 1.2 * BOUND
    for row in optimizer.plan():
        expected = optimizer.curvature(row.name).matrix
        assert ref.relative_error(bounded.curvature(row.name).matrix, expected) < 1e-4


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_is_above_the_bound_has_mini_batch_curvature(case: str) -> None:
    plain, peak, optimizer = refresh_bytes(CASES[case], BOUND)
    assert peak - plain <= BOUND + FIXED
    assert any("refresh_memory is 16,777,216" in row.note for row in optimizer.plan())


@pytest.mark.parametrize("bound", [16, 50, 1024])
@pytest.mark.parametrize("case", WAITING)
def test_what_waits_is_within_the_bound(case: str, bound: int) -> None:
    """Uses of a matrix that wait for each other, and gradients of retained graphs, of all matrices together."""
    plain, peak, optimizer = refresh_bytes(WAITING[case][0], bound * 2**20, WAITING[case][1])
    print(case, bound, plain, peak - plain, [(r.source, r.refresh_bytes, r.note) for r in optimizer.plan()])
    assert peak - plain <= bound * 2**20 + FIXED
    sources = {row.source for row in optimizer.plan() if not row.note.startswith(reasons.TOO_LARGE)}
    assert sources <= {"sample", "vmap"}
    too_large = [row for row in optimizer.plan() if row.note.startswith(reasons.TOO_LARGE)]
    assert bool(too_large) == (bound == 16)


@pytest.mark.parametrize("case", ["autocast", "cross attention"])
def test_no_activation_is_there_twice(case: str) -> None:
    """Of an input that autocast converts, autograd and the refresh save the same tensor. Gradients of queries, keys and
    values are not filled up to those of all three."""
    plain, peak, optimizer = refresh_bytes(CASES[case], 2**30)
    assert {row.source for row in optimizer.plan()} == {"sample"}
    assert peak - plain < 400 * 20 * 128 * 4  # one float32 activation


def test_a_row_above_the_bound_ends_the_measurement(double: None) -> None:
    """The activations of a row are not known before it is computed: it ends as soon as they exceed the bound."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            wide = x[..., None, :] * self.weight * torch.ones(3000, 1, dtype=x.dtype)
            return wide.tanh().exp().sin().sum(-2)

    row = stepped(Wide(), torch.randn(6, 4), refresh_memory=200_000).plan()["weight"]
    assert row.source == "batch"
    assert "refresh_memory is 200,000" in row.note


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "vmap": (lambda: Own(30, 20), lambda: torch.randn(6, 30), "weight"),
    "linear": (lambda: nn.Linear(30, 20), lambda: torch.randn(6, 8, 30), "weight"),
    "convolution": (lambda: nn.Conv2d(3, 8, 3), lambda: torch.randn(6, 3, 9, 9), "weight"),
    "tied": (Tied, lambda: torch.randint(50, (6, 7)), "words.weight"),
    "embedding": (lambda: nn.Embedding(50, 6), lambda: torch.randint(50, (6, 7)), "weight"),
}


@pytest.mark.parametrize("solver", ["dense", "woodbury"])
@pytest.mark.parametrize("case", SMALL)
def test_what_does_not_fit_has_mini_batch_curvature(double: None, case: str, solver: str) -> None:
    make, inputs, name = SMALL[case]
    model, x = make(), inputs()
    alone = copy.deepcopy(model)
    row = stepped(model, x, solver=solver).plan()[name]
    assert row.source in ("vmap", "sample")
    assert row.refresh_bytes > 0
    above = stepped(copy.deepcopy(alone), x, solver=solver, refresh_memory=row.refresh_bytes).plan()[name]
    assert above.source == row.source
    below = stepped(alone, x, solver=solver, refresh_memory=100).plan()[name]
    assert (below.source, below.refresh_bytes) == ("batch", 0)
    assert "refresh_memory is 100" in below.note


def test_a_large_low_rank_root_is_multiplied_out(double: None) -> None:
    """Of the automatic solver, U needs more than the products in chunks: L or R takes its place."""
    model, x = nn.Linear(400, 300), torch.randn(100, 400)
    limit = 8 * 3 * 300 * 100 - 1
    optimizer = stepped(model, x, refresh_memory=limit)
    row = optimizer.plan()["weight"]
    assert (row.source, row.solver) == ("sample", "dense")
    assert row.refresh_bytes <= limit
    assert ref.relative_error(optimizer.curvature("weight").matrix, brute_force(model, x, "weight")) < 1e-12
