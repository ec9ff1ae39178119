"""Brute force: for every layer and option, one step and its curvature against per-sample gradients by a loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.layer_cases import CASES, Case, doubled, each, joined, randn, squared
from helpers.steps import PAPER

LAMBDA = 0.3


def run(case: Case, dtype: torch.dtype, loss_fn: Callable[[Tensor, Tensor], Tensor] = squared, **options: Any) -> None:
    """One step of the optimizer against the reference, the update and the curvature."""
    torch.manual_seed(0)
    model = case.model().to(dtype).train()
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.inputs())
    target = torch.rand(case.samples, 1, dtype=dtype) + 0.5
    take = case.take or each
    one_by_one = [(take(inputs, i), target[i : i + 1]) for i in range(case.samples)]
    grads = ref.per_sample_gradients(copy.deepcopy(model).double(), loss_fn, [doubled(s) for s in one_by_one])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = ngplus.NGPlus(model, lr=0.5, momentum=0.0, damping=LAMBDA, **{**PAPER, **case.options, **options})
    loss_fn(model(*inputs), target).backward()
    optimizer.step()
    after = dict(model.named_parameters())
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    for names, lay in case.units:
        stack = torch.stack([lay(*(g[name] for name in names)) for g in grads])
        side = ref.side_of(stack[0]) if options.get("side", "smaller") == "smaller" else options["side"]
        curvature = ref.gfim(stack, side)
        # With a sum, .grad is the sum over the samples, and so is G.
        gradient = stack.sum(0) if options.get("loss_reduction") == "sum" else stack.mean(0)
        wanted = ref.direction(gradient, curvature, side, LAMBDA)
        update = lay(*((before[name] - after[name].detach()).double() for name in names)) / 0.5
        assert ref.relative_error(update, wanted) < tolerance, names
        got = optimizer.curvature(names[0])
        assert got.side == side
        assert ref.relative_error(got.matrix.double().reshape(curvature.shape), curvature) < tolerance, names
        row = optimizer.plan()[names[0]]
        assert row.source in ("sample", "vmap")
        assert row.shape == tuple(stack.shape[-2:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_one_step_is_exact(case: Case, dtype: torch.dtype) -> None:
    run(case, dtype)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forced_side_is_exact(case: Case, side: str) -> None:
    run(case, torch.float64, side=side)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_loss_reduced_by_sum(case: Case) -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return squared(output, target) * len(target)

    run(case, torch.float64, summed, loss_reduction="sum")


@pytest.mark.parametrize("solver", ["dense", "woodbury"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_solvers_are_exact(case: Case, solver: str) -> None:
    run(case, torch.float64, solver=solver)


def batch_gradient_parts(module: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Each sample's share of the gradient of a batch norm layer, whose statistics are those of the whole batch."""
    y = module(x)
    (grad,) = torch.autograd.grad(squared(y, target), y)
    dims = [0, *range(2, x.dim())]
    centred = x - x.mean(dims, keepdim=True)
    normal = centred / (centred.square().mean(dims, keepdim=True) + module.eps).sqrt()
    rest = list(range(2, x.dim()))
    scale = (grad * normal).sum(rest) if rest else grad * normal
    return {"weight": len(x) * scale, "bias": len(x) * (grad.sum(rest) if rest else grad)}


class ScaledFirst(nn.BatchNorm2d):
    """Normalizes something else than its input; the result is the same, but for eps."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(1e4 * x)


NORMS: list[tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = [
    ("one dimension", lambda: nn.BatchNorm1d(4), (6, 4)),
    ("two dimensions", lambda: nn.BatchNorm2d(4), (6, 4, 3, 2)),
    ("no running statistics", lambda: nn.BatchNorm2d(4, track_running_stats=False), (6, 4, 3, 2)),
    ("another input", lambda: ScaledFirst(4, eps=1e-12), (6, 4, 3, 2)),
]


@pytest.mark.parametrize(("case", "make", "shape"), NORMS, ids=[case[0] for case in NORMS])
def test_batch_norm_in_training(case: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, target = torch.randn(*shape, dtype=torch.float64), torch.rand(6, 1, dtype=torch.float64)
    parts = batch_gradient_parts(copy.deepcopy(model), x, target)
    running = None if model.running_mean is None else model.running_mean.clone()
    stack = torch.stack([parts["weight"], parts["bias"]], dim=-1)[:, None]
    optimizer = ngplus.NGPlus(model, lr=1.0, momentum=0.0, damping=LAMBDA, **PAPER)
    before = ref.columns(model.weight.detach().clone(), model.bias.detach().clone())
    squared(model(x), target).backward()
    optimizer.step()
    wanted = ref.direction(stack.mean(0), ref.gfim(stack, "right"), "right", LAMBDA)
    update = before - ref.columns(model.weight.detach(), model.bias.detach())
    assert ref.relative_error(update, wanted) < 1e-6
    if running is not None and case != "another input":
        # The statistics are updated once, by the forward pass, and not again by the capture.
        dims = [0, *range(2, x.dim())]
        torch.testing.assert_close(model.running_mean, 0.9 * running + 0.1 * x.mean(dims))


def sources_after(model: nn.Module, x: Tensor, steps: int, **options: Any) -> list[str]:
    """Where the curvature of each matrix comes from after some steps under autocast, in which nothing went wrong."""
    optimizer = ngplus.NGPlus(model, lr=1e-3, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
    assert optimizer.health().good
    return [row.source for row in optimizer.plan()]


def test_batch_norm_of_16_bits_keeps_its_samples() -> None:
    """Under autocast torch's statistics have 32 bits, and the gradients 16: the check of the first refresh knows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sources_after(model, torch.randn(32, 6) + 3, 4, update_every=2) == ["sample"] * 3


def test_large_convolutions_of_16_bits() -> None:
    """Whose samples' gradients come from torch's own convolutions, one by one."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 64, 3), nn.Flatten(), nn.Linear(135424, 2)
    )
    assert sources_after(model, torch.randn(2, 3, 48, 48), 2, update_every=1) == ["sample"] * 3


def test_embedding_scaled_by_frequency() -> None:
    """The frequencies are those of the whole batch, so a sample's share is not its own gradient alone."""
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, scale_grad_by_freq=True).double()
    x, target = torch.randint(0, 6, (5, 4)), torch.rand(5, 1, dtype=torch.float64)
    weight = model.weight.detach().clone().requires_grad_()
    y = F.embedding(x, weight)
    (grad,) = torch.autograd.grad(squared(y, target), y)
    counts = torch.bincount(x.flatten(), minlength=6)
    stack = torch.zeros(5, 1, 6, 3, dtype=torch.float64)
    for i in range(5):
        for p in range(4):
            stack[i, 0, x[i, p]] += 5 * grad[i, p] / counts[x[i, p]]
    optimizer = ngplus.NGPlus(model, lr=1.0, momentum=0.0, damping=LAMBDA, **PAPER)
    before = model.weight.detach().clone()
    squared(model(x), target).backward()
    assert ref.relative_error(stack.mean(0)[0], model.weight.grad) < 1e-12
    optimizer.step()
    wanted = ref.direction(stack.mean(0), ref.gfim(stack, "right"), "right", LAMBDA)
    assert ref.relative_error((before - model.weight.detach())[None], wanted) < 1e-6


def test_token_averaged_loss() -> None:
    """A mean over tokens that are not padding: the samples' parts add up to the gradient, N times each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
    x, labels = torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4, 5))
    labels[0, 2:] = labels[2, 4:] = -100

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

    tokens = int((labels != -100).sum())
    parts = []
    for i in range(4):
        one = copy.deepcopy(model)
        own = F.cross_entropy(one(x[i : i + 1]).flatten(0, 1), labels[i], ignore_index=-100, reduction="sum") / tokens
        parts.append(
            {n: 4 * g for n, g in zip(("w", "b"), torch.autograd.grad(own, list(one[1].parameters())), strict=True)}
        )
    stack = torch.stack([ref.rows(p["w"], p["b"]) for p in parts])
    optimizer = ngplus.NGPlus(model, lr=1.0, momentum=0.0, damping=LAMBDA, **PAPER)
    before = ref.rows(model[1].weight.detach().clone(), model[1].bias.detach().clone())
    loss_fn(model(x), labels).backward()
    optimizer.step()
    side = ref.side_of(stack[0])
    wanted = ref.direction(stack.mean(0), ref.gfim(stack, side), side, LAMBDA)
    update = before - ref.rows(model[1].weight.detach(), model[1].bias.detach())
    assert ref.relative_error(update, wanted) < 1e-6


@pytest.mark.parametrize("batch_dim", [1, {"0": 1}])
def test_batch_dimension_by_argument(batch_dim: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, target = torch.randn(6, 5, 4, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)

    def loss_fn(output: Tensor, t: Tensor) -> Tensor:
        return squared(output.transpose(0, 1), t)

    grads = ref.per_sample_gradients(model, loss_fn, [(x[:, i : i + 1], target[i : i + 1]) for i in range(5)])
    stack = torch.stack([ref.rows(g["0.weight"], g["0.bias"]) for g in grads])
    result = ngplus.gfim(model, loss_fn, x, target, batch_dim=batch_dim)["0.weight"]
    assert ref.relative_error(result.matrix[None], ref.gfim(stack, "left")) < 1e-6


def test_only_the_bias_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    model.weight.requires_grad_(False)
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    grads = ref.per_sample_gradients(model, squared, [(x[i : i + 1], target[i : i + 1]) for i in range(5)])
    stack = torch.stack([ref.columns(g["bias"]) for g in grads])
    frozen, before = model.weight.clone(), model.bias.detach().clone()
    optimizer = ngplus.NGPlus(model, lr=1.0, momentum=0.0, damping=LAMBDA, **PAPER)
    squared(model(x), target).backward()
    optimizer.step()
    # g / (lambda + R), with R a number
    number = stack.square().sum() / 5
    torch.testing.assert_close(before - model.bias.detach(), stack.mean(0)[0, :, 0] / (LAMBDA + number))
    assert torch.equal(frozen, model.weight)


def test_conv1d_of_hugging_face() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    case = Case("Conv1D", lambda: conv1d(6, 4), randn(5, 3, 4), joined(ref.transposed(1)))
    run(case, torch.float64)
    run(case, torch.float32)


def test_recurrent_layers_fall_back_with_one_warning() -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.r, self.h = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.h(self.r(x)[0])

    model = Recurrent().double()
    x, target = torch.randn(5, 6, 3, dtype=torch.float64), torch.rand(5, 1, dtype=torch.float64)
    optimizer = ngplus.NGPlus(model, lr=1.0, momentum=0.0, damping=LAMBDA, update_every=1, **PAPER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            squared(model(x), target).backward()
            gradient = ref.rows(model.r.weight_ih_l0.grad, model.r.bias_ih_l0.grad)
            before = ref.rows(model.r.weight_ih_l0.detach().clone(), model.r.bias_ih_l0.detach().clone())
            optimizer.step()
    said = [str(w.message) for w in caught if "per-sample" in str(w.message)]
    assert len(said) == 1
    assert "LSTM" in said[0]
    assert "h.weight" not in said[0]
    wanted = ref.direction(gradient, gradient.mT @ gradient, "right", LAMBDA)
    update = before - ref.rows(model.r.weight_ih_l0.detach(), model.r.bias_ih_l0.detach())
    assert ref.relative_error(update, wanted) < 1e-6
    assert {row.source for row in optimizer.plan()} == {"batch", "sample"}


def test_own_layer_rule() -> None:
    """A user's rule for a layer of their own, through the open registry."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return 2 * x @ self.matrix

    @ngplus.register_layer(Doubled)
    class DoubledRule(ngplus.layers.LayerRule):
        def matrices(self, module: nn.Module) -> list[ngplus.layers.MatrixSpec]:
            return [ngplus.layers.MatrixSpec(("matrix",), ("transposed",))]

        def factors(self, module: Any, inputs: Any, grad: Tensor, active: Any, batch: Any) -> Any:
            return ngplus.layers.linear_factors(2 * inputs[0], grad, active, batch)

    run(Case("own", Doubled, randn(5, 2, 4), [(("matrix",), ref.transposed(1))]), torch.float64)
