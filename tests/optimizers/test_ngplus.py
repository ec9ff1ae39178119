"""NGPlus: Algorithm 1, its constructions of L and R and the options of its step, against plain formulas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.linear import LAMBDA, PAPER, SHAPES, batches, compare, matrix_of, per_sample
from helpers.steps import loss_fn, one_step

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 3])
def test_algorithm_1(shape: tuple[int, int], every: int) -> None:
    """L or R is made anew at k mod T == 0, the first at k = 0, and kept with its inverse in between."""
    kept: dict[str, Tensor] = {}

    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side = ref.side_of(grads)
        if k % every == 0:
            kept["c"] = ref.gfim(grads, side)
        return ref.direction(grads.mean(0), kept["c"], side, LAMBDA)

    compare(direction, shape=shape, update_every=every)


@pytest.mark.parametrize("nesterov", [False, True])
def test_defaults_are_the_pseudocode_of_the_docstring(nesterov: bool) -> None:
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.05, weight_decay=0.1, nesterov=nesterov, update_every=2)
    alpha, mu, w, beta = 0.05, 0.9, 0.1, 0.8
    average, velocity, long = torch.empty(0), torch.empty(0), 0
    for k, (x, y) in enumerate(batches(6)):
        x = 30 * x if k == 3 else x  # an outlier, whose gradient is longer than the bound
        weight, grads = matrix_of(model)[0], per_sample(model, x, y)[:, 0]
        one_step(model, optimizer, x, y)
        gradient = grads.mean(0)
        if k % 2 == 0:
            right = (grads.mT @ grads).mean(0)
            average = right if k == 0 else beta * average + (1 - beta) * right
            damping = 0 + 1 * average.trace() / 6
            inverse = torch.linalg.inv(damping * torch.eye(6) + average)
        direction = gradient @ inverse
        long += int(gradient.norm() > average.trace().sqrt())
        direction = direction * torch.minimum(gradient.norm(), average.trace().sqrt()) / direction.norm()
        direction = direction + w * weight
        velocity = direction if k == 0 else mu * velocity + direction
        direction = direction + mu * velocity if nesterov else velocity
        assert torch.allclose(matrix_of(model)[0], weight - alpha * direction, rtol=1e-9), k
    assert long == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_momentum_curvature(shape: tuple[int, int]) -> None:
    """Lbar_k = beta Lbar_(k-1) + (1 - beta) L_k, Lbar_0 = L_0, at refreshes only."""
    kept: dict[str, Tensor] = {}

    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side = ref.side_of(grads)
        if k % 2 == 0:
            new = ref.gfim(grads, side)
            kept["c"] = new if k == 0 else 0.7 * kept["c"] + 0.3 * new
        return ref.direction(grads.mean(0), kept["c"], side, LAMBDA)

    optimizer = compare(direction, shape=shape, curvature="momentum", beta=0.7, update_every=2)
    assert ref.relative_error(optimizer.curvature("weight").matrix[None], kept["c"]) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("gamma", "every"), [(0.4, 1), (1.0, 3), (0.0, 2)])
def test_batch_curvature(shape: tuple[int, int], gamma: float, every: int) -> None:
    """Ltilde_k = beta Ltilde_(k-1) + gamma G_B G_B^T from lambda_0 I in every step; its inverse every T steps."""
    kept: dict[str, Tensor] = {}

    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side, mean = ref.side_of(grads), grads.mean(0)
        product = ref.gfim(mean[None], side)
        if k == 0:
            kept["l"] = LAMBDA * torch.eye(product.shape[-1])[None]
        kept["l"] = 0.6 * kept["l"] + gamma * product
        if k % every == 0:
            kept["c"] = kept["l"]
        return ref.direction(mean, kept["c"], side, LAMBDA)

    compare(direction, shape=shape, curvature="batch", beta=0.6, gamma=gamma, update_every=every)


def test_batch_curvature_needs_no_model() -> None:
    torch.manual_seed(1)
    with_model, without = nn.Linear(5, 1), nn.Linear(5, 1, bias=False)
    with_model.bias.requires_grad_(False).zero_()
    without.load_state_dict({"weight": with_model.weight})
    first = ngplus.NGPlus(with_model, lr=0.1, **{**PAPER, "curvature": "batch"})
    second = ngplus.NGPlus(without.parameters(), lr=0.1, **{**PAPER, "curvature": "batch"})
    for x, y in batches(4, outputs=1):
        one_step(with_model, first, x, y)
        one_step(without, second, x, y)
    torch.testing.assert_close(with_model.weight, without.weight)


@pytest.mark.parametrize("samples", [2, 0.5])
def test_sub_sample(samples: int | float) -> None:
    """S_k is a subset of the batch of that size, another one at another refresh; G stays that of the whole batch."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.1, update_every=1, samples=samples, **PAPER)
    size = 2 if samples == 2 else 3
    chosen = []
    for x, y in batches(6):
        grads, before = per_sample(model, x, y), matrix_of(model)
        one_step(model, optimizer, x, y)
        update = before - matrix_of(model)
        errors = {
            subset: ref.relative_error(
                update, 0.1 * ref.direction(grads.mean(0), ref.gfim(grads[list(subset)], "left"), "left", LAMBDA)
            )
            for subset in itertools.combinations(range(6), size)
        }
        best = min(errors, key=lambda s: errors[s])
        assert errors[best] < 1e-6
        chosen.append(best)
    assert len(set(chosen)) > 1


def test_gradient_accumulation_gathers_all_micro_batches() -> None:
    whole, parts = nn.Linear(5, 3), nn.Linear(5, 3)
    parts.load_state_dict(whole.state_dict())
    first = ngplus.NGPlus(whole, lr=0.1, update_every=1, **PAPER)
    second = ngplus.NGPlus(parts, lr=0.1, update_every=1, **PAPER)
    for x, y in batches(3):
        one_step(whole, first, x, y)
        second.zero_grad()
        for xs, ys in zip(x.chunk(3), y.chunk(3), strict=True):
            (loss_fn(parts(xs), ys) / 3).backward()
        second.step()
    torch.testing.assert_close(whole.weight, parts.weight)
    assert first.param_groups[0]["step"] == second.param_groups[0]["step"] == 3


SGD_OPTIONS = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.1},
    {"maximize": True, "momentum": 0.5},
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_momentum_and_decay_are_those_of_sgd(options: dict[str, Any]) -> None:
    """A Preconditioner in front of torch's SGD is the same method by another way."""
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    first = ngplus.NGPlus(ours, lr=0.1, update_every=2, **{**PAPER, **options})
    preconditioner = ngplus.Preconditioner(
        theirs, update_every=2, **{k: v for k, v in PAPER.items() if k != "momentum"}
    )
    second = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    for x, y in batches(5):
        one_step(ours, first, x, y)
        second.zero_grad()
        loss_fn(theirs(x), y).backward()
        kept = [p.grad for p in theirs.parameters()]
        copies = [g.clone() for g in kept]
        preconditioner.step()
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))  # .grad is replaced, not changed
        second.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_sparse_rows_keep_to_themselves() -> None:
    """D = G (lambda I + R)^-1 touches the rows that the gradient touches, and no other."""
    dense, sparse = nn.Embedding(50, 4), nn.Embedding(50, 4, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    first = ngplus.NGPlus(dense, lr=0.1, **PAPER)
    second = ngplus.NGPlus(sparse, lr=0.1, **PAPER)
    start = dense.weight.detach().clone()
    x = torch.randint(0, 9, (6, 5))
    for model, optimizer in ((dense, first), (sparse, second)):
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - 1).square().sum((1, 2)).mean().backward()
            optimizer.step()
    torch.testing.assert_close(dense.weight, sparse.weight)
    assert torch.equal(sparse.weight[9:], start[9:])
    assert not any(
        t.numel() >= 50 * 4 for t in second.state[sparse.weight].values() if isinstance(t, Tensor)
    )  # nothing of the table's size is kept


def test_groups_have_their_own_options() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(
        [
            {"params": model[0].parameters(), "damping": 10.0, "lr": 0.0},
            {"params": model[2].parameters(), "block_size": 1},
        ],
        lr=0.1,
        model=model,
        **PAPER,
    )
    before = [p.detach().clone() for p in model.parameters()]
    (x, y) = batches(1)[0]
    loss_fn(model(x), y).backward()
    optimizer.step()
    assert torch.equal(before[0], model[0].weight)
    assert not torch.equal(before[2], model[2].weight)
    assert [row.blocks for row in optimizer.plan()] == [1, 3]
    assert float(optimizer.state[model[0].weight]["damping"]) == 10.0


def test_bias_in_a_group_of_its_own() -> None:
    """No weight decay on biases, as people have it: the bias stays a column of its weight, at its own group's rate."""
    split, joined = nn.Linear(5, 3), nn.Linear(5, 3)
    joined.load_state_dict(split.state_dict())
    first = ngplus.NGPlus(
        [{"params": [split.weight], "weight_decay": 0.1}, {"params": [split.bias], "lr": 0.0}],
        lr=0.1,
        model=split,
        **PAPER,
    )
    second = ngplus.NGPlus(joined, lr=0.1, weight_decay=0.1, **PAPER)
    (x, y) = batches(1)[0]
    start = split.bias.detach().clone()
    one_step(split, first, x, y)
    one_step(joined, second, x, y)
    torch.testing.assert_close(split.weight, joined.weight)
    assert torch.equal(split.bias, start)
    assert len(first.plan()) == 1
