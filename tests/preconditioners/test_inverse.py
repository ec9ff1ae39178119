"""The inverse of NGPlus: blocks, sketches, solvers, damping, and momentum inside the product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.linear import LAMBDA, PAPER, SHAPES, batches, compare, matrix_of, per_sample
from helpers.steps import loss_fn, one_step

pytestmark = pytest.mark.usefixtures("double")


def test_damping_of_the_last_refresh_stays_with_its_inverse() -> None:
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.1, update_every=2, **PAPER)
    data = batches(4)
    kept, damping = torch.zeros(()), 0.0
    for k, (x, y) in enumerate(data):
        optimizer.param_groups[0]["damping"] = 0.5 + k
        grads, before = per_sample(model, x, y), matrix_of(model)
        if k % 2 == 0:
            kept, damping = ref.gfim(grads, "left"), 0.5 + k
        one_step(model, optimizer, x, y)
        wanted = 0.1 * ref.direction(grads.mean(0), kept, "left", damping)
        assert ref.relative_error(before - matrix_of(model), wanted) < 1e-6


@pytest.mark.parametrize("shape", [(5, 3), (2, 7), (9, 8)])
@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_blocks(shape: tuple[int, int], block: int) -> None:
    """The diagonal blocks of L or R, the last of any size; a block of all rows is the dense form."""

    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side = ref.side_of(grads)
        full = ref.gfim(grads, side)
        owner = torch.arange(full.shape[-1]) // block
        return ref.direction(grads.mean(0), full * (owner[:, None] == owner[None, :]), side, LAMBDA)

    optimizer = compare(direction, steps=3, shape=shape, block_size=block, update_every=1)
    d = min(shape[1], shape[0] + 1)
    assert optimizer.plan()[0].blocks == math.ceil(d / block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("curvature", ["sample", "batch"])
@pytest.mark.parametrize("size", [None, 1000], ids=["all columns", "larger than the matrix"])
def test_whole_sketch_without_replacement_is_exact(shape: tuple[int, int], size: int | None, curvature: str) -> None:
    size = size or max(shape[1], shape[0] + 1)
    options = {**PAPER, "curvature": curvature, "update_every": 1}
    plain, sketched = nn.Linear(*shape), nn.Linear(*shape)
    sketched.load_state_dict(plain.state_dict())
    first = ngplus.NGPlus(plain, lr=0.1, **options)
    second = ngplus.NGPlus(sketched, lr=0.1, sketch={"size": size, "replacement": False}, **options)
    for x, y in batches(4, features=shape[0], outputs=shape[1]):
        one_step(plain, first, x, y)
        one_step(sketched, second, x, y)
    torch.testing.assert_close(plain.weight, sketched.weight)


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "countsketch", "srht"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(30, 4), lambda: nn.Conv2d(4, 3, 3)], ids=["linear", "conv"])
def test_sketched_product_is_close_on_the_mean(kind: str, make: Callable[[], nn.Module]) -> None:
    layer = make()
    x = torch.randn(6, 30) if isinstance(layer, nn.Linear) else torch.randn(6, 4, 5, 5)

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.square().flatten(1).sum(1).mean()

    exact = ngplus.gfim(layer, loss, x, None)["weight"].matrix
    found = []
    for seed in range(150):
        optimizer = ngplus.NGPlus(layer, lr=0.0, sketch={"size": 8, "kind": kind}, seed=seed, **PAPER)
        optimizer.zero_grad()
        loss(layer(x), None).backward()
        optimizer.step()
        found.append(optimizer.curvature("weight").matrix)
    stack = torch.stack(found)
    spread = float((stack - exact).flatten(1).norm(dim=1).mean() / exact.norm())
    error = ref.relative_error(stack.mean(0), exact)
    assert spread > 0.05  # it is a sketch
    assert error < 3 * spread / math.sqrt(150)  # and an unbiased one


def test_sketched_least_squares_is_exact_for_an_orthogonal_sketch() -> None:
    """All rows once, in any order: Omega^T Omega = I, so the sketched problem is the problem."""
    plain, sketched = nn.Linear(40, 8), nn.Linear(40, 8)
    sketched.load_state_dict(plain.state_dict())
    first = ngplus.NGPlus(plain, lr=0.1, update_every=2, **PAPER)
    second = ngplus.NGPlus(
        sketched, lr=0.1, update_every=2, solver="sketched", sketch={"size": 8, "replacement": False}, **PAPER
    )
    for x, y in batches(4, samples=3, features=40, outputs=8):
        one_step(plain, first, x, y)
        one_step(sketched, second, x, y)
    torch.testing.assert_close(plain.weight, sketched.weight)


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "countsketch", "srht"])
def test_sketched_least_squares_solves_the_sketched_problem(kind: str) -> None:
    """-(G - U Z) / lambda with Z from the sketched problem, for the very Omega that the optimizer drew."""
    from ngplus.fisher.sketch import Sketch, SketchSpec

    model = nn.Linear(40, 12)
    optimizer = ngplus.NGPlus(model, lr=0.1, solver="sketched", sketch={"size": 7, "kind": kind}, seed=3, **PAPER)
    (x, y) = batches(1, samples=3, features=40, outputs=12)[0]
    grads, before = per_sample(model, x, y), matrix_of(model)
    one_step(model, optimizer, x, y)
    u = ref.gfim(grads, "left")[0]
    values, vectors = torch.linalg.eigh(u)
    root = vectors[:, -3:] * values[-3:].sqrt()
    omega = Sketch(SketchSpec(7, kind), 12, int(optimizer.state[model.weight]["sketch_seed"]))(torch.eye(12)).mT
    short = omega @ root
    z = torch.linalg.solve(LAMBDA * torch.eye(3) + short.mT @ short, short.mT @ (omega @ grads.mean(0)[0]))
    wanted = 0.1 * (grads.mean(0)[0] - root @ z) / LAMBDA
    assert ref.relative_error(before - matrix_of(model), wanted[None]) < 1e-6


def test_solver_is_chosen_by_rank() -> None:
    """Few samples for the size of the matrix: U is kept in place of L. Many: the inverse."""
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    optimizer = ngplus.NGPlus(model, lr=0.1, **PAPER)
    (x, y) = batches(1, samples=4, features=30)[0]
    loss_fn(model(x), y).backward()
    optimizer.step()
    assert {"factor", "core"} <= set(optimizer.state[model[0].weight])
    assert "inverse" not in optimizer.state[model[0].weight]
    assert optimizer.state[model[0].weight]["factor"].shape == (1, 20, 4)
    assert "inverse" in optimizer.state[model[1].weight]
    plan = optimizer.plan()
    assert (plan["0.weight"].solver, plan["1.weight"].solver) == ("woodbury", "dense")
    resumed = ngplus.NGPlus(model, lr=0.1, **PAPER)
    resumed.load_state_dict(optimizer.state_dict())
    assert [row.solver for row in resumed.plan()] == ["woodbury", "dense"]


def test_without_damping_the_solver_is_dense() -> None:
    """Woodbury's identity divides by it."""
    model = nn.Linear(100, 50)
    optimizer = ngplus.NGPlus(model, lr=0.1, damping=0.0)
    model(torch.randn(4, 100)).square().sum(1).mean().backward()
    optimizer.step()
    assert "inverse" in optimizer.state[model.weight]
    assert optimizer.plan()["weight"].solver == "dense"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_damping_that_has_gone_to_zero_since_the_samples_were_seen() -> None:
    model = nn.Linear(100, 50)
    optimizer = ngplus.NGPlus(model, lr=0.1, damping=0.1)
    model(torch.randn(4, 100)).square().sum(1).mean().backward()
    optimizer.param_groups[0]["damping"] = 0.0
    optimizer.step()
    assert "inverse" in optimizer.state[model.weight]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("solver", ["dense", "woodbury"])
@pytest.mark.parametrize("damping", [0.0, 0.2])
def test_relative_damping_adds_a_part_of_the_mean_eigenvalue(damping: float, solver: str) -> None:
    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side = ref.side_of(grads)
        curvature = ref.gfim(grads, side)
        mean_eigenvalue = float(torch.linalg.eigvalsh(curvature).mean())
        return ref.direction(grads.mean(0), curvature, side, damping + 0.1 * mean_eigenvalue)

    compare(direction, update_every=1, solver=solver, damping=damping, relative_damping=0.1)
