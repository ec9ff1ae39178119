"""The method: Algorithm 1 and every construction, solver and option, against plain formulas over several steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.linear import LAMBDA, PAPER, SHAPES, batches, compare, loss_fn, matrix_of, per_sample, train
from ngplus.fisher import inverses
from ngplus.preconditioners.inverse import InversePreconditioner

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
        train(model, optimizer, x, y)
        wanted = 0.1 * ref.direction(grads.mean(0), kept, "left", damping)
        assert ref.relative_error(before - matrix_of(model), wanted) < 1e-6


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
    first = ngplus.NGPlus(with_model, lr=0.1, curvature="batch", **PAPER)
    second = ngplus.NGPlus(without.parameters(), lr=0.1, curvature="batch", **PAPER)
    for x, y in batches(4, outputs=1):
        train(with_model, first, x, y)
        train(without, second, x, y)
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
        train(model, optimizer, x, y)
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
def test_whole_sketch_without_replacement_is_exact(shape: tuple[int, int], curvature: str) -> None:
    other = max(shape[1], shape[0] + 1)
    options = {**PAPER, "curvature": curvature, "update_every": 1}
    plain, sketched = nn.Linear(*shape), nn.Linear(*shape)
    sketched.load_state_dict(plain.state_dict())
    first = ngplus.NGPlus(plain, lr=0.1, **options)
    second = ngplus.NGPlus(sketched, lr=0.1, sketch={"size": other, "replacement": False}, **options)
    for x, y in batches(4, features=shape[0], outputs=shape[1]):
        train(plain, first, x, y)
        train(sketched, second, x, y)
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
        train(plain, first, x, y)
        train(sketched, second, x, y)
    torch.testing.assert_close(plain.weight, sketched.weight)


@pytest.mark.parametrize("kind", ["uniform", "gaussian", "countsketch", "srht"])
def test_sketched_least_squares_solves_the_sketched_problem(kind: str) -> None:
    """-(G - U Z) / lambda with Z from the sketched problem, for the very Omega that the optimizer drew."""
    from ngplus.fisher.sketch import Sketch, SketchSpec

    model = nn.Linear(40, 12)
    optimizer = ngplus.NGPlus(model, lr=0.1, solver="sketched", sketch={"size": 7, "kind": kind}, seed=3, **PAPER)
    (x, y) = batches(1, samples=3, features=40, outputs=12)[0]
    grads, before = per_sample(model, x, y), matrix_of(model)
    train(model, optimizer, x, y)
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


def test_gradient_accumulation_gathers_all_micro_batches() -> None:
    whole, parts = nn.Linear(5, 3), nn.Linear(5, 3)
    parts.load_state_dict(whole.state_dict())
    first = ngplus.NGPlus(whole, lr=0.1, update_every=1, **PAPER)
    second = ngplus.NGPlus(parts, lr=0.1, update_every=1, **PAPER)
    for x, y in batches(3):
        train(whole, first, x, y)
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
    preconditioner = ngplus.Preconditioner(theirs, update_every=2, damping=LAMBDA)
    second = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    for x, y in batches(5):
        train(ours, first, x, y)
        second.zero_grad()
        loss_fn(theirs(x), y).backward()
        kept = [p.grad for p in theirs.parameters()]
        copies = [g.clone() for g in kept]
        preconditioner.step()
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))  # .grad is replaced, not changed
        second.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


STRAIGHT: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7), nn.Linear(7, 3)),  # left and right, each with a bias
    lambda: nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 6, bias=False), nn.Linear(6, 3, bias=False)),
    lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 2), nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(12, 3)
    ),
]
STRAIGHT_OPTIONS = [
    {"solver": "dense"},
    {"solver": "woodbury"},
    {"solver": "dense", "weight_decay": 0.1},
    {"solver": "dense", "maximize": True},
]


@pytest.mark.parametrize("options", STRAIGHT_OPTIONS, ids=str)
@pytest.mark.parametrize("make", STRAIGHT, ids=("biases", "weights", "convolutions"))
def test_momentum_inside_the_product_is_momentum_after_it(
    make: Callable[[], nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way, buffer <- momentum * buffer + A B, against the long one, by the direction itself."""

    def trained(short: bool) -> tuple[nn.Module, int]:
        torch.manual_seed(3)
        model, used = make(), []
        with monkeypatch.context() as patch:
            add_to = inverses.Product.add_to
            patch.setattr(inverses.Product, "add_to", lambda *args: (used.append(1), add_to(*args)))
            if not short:
                patch.setattr(InversePreconditioner, "_products", lambda self, update: None)
            optimizer = ngplus.NGPlus(model, lr=0.05, update_every=2, **{**PAPER, "momentum": 0.9, **options})
            for x, y in batches(5):
                train(model, optimizer, x, y)
        return model, len(used)

    (fast, used), (plain, none) = trained(short=True), trained(short=False)
    assert used >= 4 * 3
    assert none == 0
    for a, b in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_momentum_inside_the_product_in_memory_of_another_order() -> None:
    a, b = torch.randn(1, 4, 3), torch.randn(1, 3, 6)
    buffer = torch.randn(4, 6)
    transposed = buffer.mT.contiguous().mT
    inverses.Product([(a, b)]).add_to(buffer, 0.9)
    inverses.Product([(a, b)]).add_to(transposed, 0.9)
    torch.testing.assert_close(buffer, transposed)


@pytest.mark.parametrize("solver", ["dense", "woodbury"])
def test_automatic_damping_is_a_tenth_of_the_mean_eigenvalue(solver: str) -> None:
    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side = ref.side_of(grads)
        curvature = ref.gfim(grads, side)
        mean_eigenvalue = float(torch.linalg.eigvalsh(curvature).mean())
        return ref.direction(grads.mean(0), curvature, side, 0.1 * mean_eigenvalue)

    compare(direction, update_every=1, solver=solver, damping="auto")


def test_grafting_to_sgd() -> None:
    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side, mean = ref.side_of(grads), grads.mean(0)
        shape = ref.direction(mean, ref.gfim(grads, side), side, LAMBDA)
        return shape * mean.norm() / shape.norm()

    compare(direction, update_every=1, graft="sgd")


def test_grafting_to_adam() -> None:
    """The length is that of torch's own Adam on the same gradients, whatever the direction."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.1, update_every=1, graft="adam", **PAPER)
    shadow = nn.Linear(5, 3)
    adam = torch.optim.Adam(shadow.parameters(), lr=0.1, betas=(0.0, 0.95), eps=1e-8)
    for x, y in batches(5):
        grads, before = per_sample(model, x, y), matrix_of(model)
        train(model, optimizer, x, y)
        update = before - matrix_of(model)
        old = matrix_of(shadow)
        shadow.weight.grad, shadow.bias.grad = grads.mean(0)[0, :, :-1].clone(), grads.mean(0)[0, :, -1].clone()
        adam.step()
        assert float(update.norm()) == pytest.approx(float((old - matrix_of(shadow)).norm()), rel=1e-6)
        shape = ref.direction(grads.mean(0), ref.gfim(grads, "left"), "left", LAMBDA)
        assert ref.relative_error(update / update.norm(), shape / shape.norm()) < 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_grafted_momentum_keeps_the_length(nesterov: bool) -> None:
    """Of gradients that do not change every step is as long as Adam's: a number each."""
    weight = nn.Parameter(torch.zeros(4, 3))
    gradient = torch.randn(4, 3)
    options = {**PAPER, "graft": "adam", "curvature": "batch", "momentum": 0.9, "nesterov": nesterov}
    optimizer = ngplus.NGPlus([weight], lr=0.1, **options)
    for _ in range(6):
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        assert float((weight - before).norm()) == pytest.approx(0.1 * 12**0.5, rel=1e-5)


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
    train(split, first, x, y)
    train(joined, second, x, y)
    torch.testing.assert_close(split.weight, joined.weight)
    assert torch.equal(split.bias, start)
    assert len(first.plan()) == 1


def test_gfim_folds_rows_into_samples() -> None:
    """A layer that sees two rows a sample, as after flatten(0, 1), has as many samples as the model was called with."""

    class Folding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 2, bias=False), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x.flatten(0, 1)).unflatten(0, (len(x), 2)).flatten(1))

    torch.manual_seed(0)
    model, x, y = Folding().double(), torch.randn(5, 2, 3).double(), torch.randn(5, 1).double()
    found = ngplus.gfim(model, nn.functional.mse_loss, x, y)["inner.weight"]
    wanted = torch.zeros(2, 2).double()
    for i in range(5):
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(model(x[i : i + 1]), y[i : i + 1]), model.inner.weight)
        wanted += gradient @ gradient.mT / 5
    torch.testing.assert_close(found.matrix, wanted)
