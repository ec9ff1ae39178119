"""NGAdam against ngplus.reference, and what torch.optim users expect of an optimizer."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.training import Inputs, equal, floats, indices, train_to_zero
from ngplus.lab.candidates import Roots
from ngplus.preconditioners.inverse_root import MAX_RMS, damping_at
from ngplus.reference import column_stride, inverse_root, ngadam_direction, some_columns

pytestmark = pytest.mark.usefixtures("one_thread", "double")
LR, DECAY = 0.02, 0.3


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


# ------------------------------------------------------------------------------------------------ the update


def test_step_of_a_matrix_is_that_of_the_reference() -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = ngplus.NGAdam([weight], lr=LR, weight_decay=DECAY, update_every=1)
    state: dict[str, Any] = {}
    for gradient in gradients((4, 6), 9):
        wanted = weight.detach() * (1 - LR * DECAY) - LR * ngadam_direction(gradient, state, update_every=1)
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), wanted)
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 600), (600, 150), (3, 2500)])
def test_wide_matrices_are_averaged_from_some_columns(shape: tuple[int, int]) -> None:
    """L and R against averages over the columns written one by one."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = ngplus.NGAdam([weight], betas=(0.9, 0.8))
    left, right = torch.zeros(shape[0], shape[0]), torch.zeros(shape[1], shape[1])
    for step, gradient in enumerate(gradients(shape, 3), 1):
        weight.grad = gradient
        optimizer.step()
        for average, x in ((left, gradient), (right, gradient.mT)):
            every = min(8, math.ceil(x.shape[1] / 256))
            taken = [column for column in range(x.shape[1]) if column % every == step % every]
            average.mul_(0.8).add_(sum(torch.outer(x[:, c], x[:, c]) for c in taken), alpha=0.2 * every)
    state = optimizer.state[weight]
    for average, stored in ((left, state["left"]), (right, state["right"])):
        rows = stored.shape[-1]
        if rows > 1:  # a diagonal side takes in all columns
            blocks = [average[i : i + rows, i : i + rows] for i in range(0, len(average), rows)]
            for own, wanted in zip(stored, blocks, strict=True):
                torch.testing.assert_close(own[: len(wanted), : len(wanted)], wanted)


def test_some_columns_add_up_to_the_product() -> None:
    x = torch.randn(5, 700)
    every = column_stride(700)
    products = [(part @ part.mT) for part in (some_columns(x, step) for step in range(every))]
    assert every == 3
    torch.testing.assert_close(torch.stack(products).mean(0), x @ x.mT)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 28, 3), nn.ReLU(), nn.Conv2d(28, 8, 3), nn.Flatten(), nn.Linear(128, 4))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 180), nn.Tanh(), nn.LayerNorm(180), nn.Linear(180, 5))


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(convolutions, floats(4, 3, 8, 8)), (wide, floats(8, 200)), (table, indices(50, 7))],
    ids=["convolutions", "blocks", "table"],
)
def test_same_as_the_candidate_that_was_chosen(model: Callable[[], nn.Module], inputs: Inputs) -> None:
    """With blocks of long sides and of kernels, diagonal tables, and vectors."""
    one = model()
    other = copy.deepcopy(one)
    train_to_zero(one, ngplus.NGAdam(one, lr=LR, weight_decay=DECAY), inputs, range(12))
    train_to_zero(other, Roots(other, lr=LR, weight_decay=DECAY, decay=True), inputs, range(12))
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_of_a_convolution_is_a_matrix(transposed: bool) -> None:
    layer: Any = nn.ConvTranspose1d(4, 6, 2, groups=2) if transposed else nn.Conv1d(4, 6, 2, groups=2)
    optimizer = ngplus.NGAdam(layer, lr=LR, weight_decay=0.0, update_every=1)
    states: list[dict[str, Any]] = [{}, {}]
    for gradient in gradients(tuple(layer.weight.shape), 4):
        before = layer.weight.detach().clone()
        layer.weight.grad = gradient
        optimizer.step()
        step = (before - layer.weight.detach()) / LR
        for own, made, state in zip(gradient.chunk(2), step.chunk(2), states, strict=True):
            turned = [x.transpose(0, 1) if transposed else x for x in (own, made)]
            wanted = ngadam_direction(turned[0].flatten(1), state, update_every=1)
            torch.testing.assert_close(turned[1].flatten(1), wanted)


def test_rows_of_a_sparse_gradient() -> None:
    layer = nn.Embedding(1000, 5, sparse=True)
    optimizer = ngplus.NGAdam(layer, lr=LR, weight_decay=0.0)
    index = torch.tensor([3, 3, 17, 900])
    before = layer.weight.detach().clone()
    layer(index).square().sum().backward()
    grad = layer.weight.grad.coalesce()  # type: ignore[union-attr]
    optimizer.step()
    rows = grad.values()
    right = rows.mT @ rows / len(rows)
    direction = rows @ inverse_root(right, damping_at(1) * right.trace() / 5)
    direction = direction / (direction.square().mean().sqrt() / MAX_RMS).clamp_min(1.0)
    wanted = before.index_add(0, grad.indices()[0], -LR * direction)
    torch.testing.assert_close(layer.weight.detach(), wanted)
    assert sum(x.numel() for x in optimizer.state[layer.weight].values() if isinstance(x, Tensor)) == 2 * 25


def test_sparse_gradients_of_parameters_without_their_module() -> None:
    layer = nn.Embedding(40, 5, sparse=True)
    twin = copy.deepcopy(layer)
    optimizers = ngplus.NGAdam(layer, weight_decay=0.0), ngplus.NGAdam(twin.parameters(), weight_decay=0.0)
    for step in range(7):
        for model, optimizer in zip((layer, twin), optimizers, strict=True):
            optimizer.zero_grad()
            model(indices(40, 6)(step)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight, twin.weight)


# ------------------------------------------------------------------------------------------------ in use


def test_trains_without_a_warning_and_below_adamw() -> None:
    """On a regression whose inputs have scales from 0.01 to 10, in mini-batches."""

    def loss_after(make: Callable[[nn.Module], Any]) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 4))
        x = torch.randn(2048, 10) * torch.logspace(-2, 1, 10)
        y, optimizer = torch.sin(x @ torch.randn(10, 4)), make(model)
        for _ in range(400):
            chosen = torch.randint(len(x), (32,))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
        return nn.functional.mse_loss(model(x), y).item()

    rates = (0.003, 0.01, 0.03, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = min(loss_after(lambda m, lr=lr: ngplus.NGAdam(m, lr, weight_decay=0.0)) for lr in rates)  # type: ignore[misc]
    rival = min(loss_after(lambda m, lr=lr: torch.optim.AdamW(m.parameters(), lr, weight_decay=0.0)) for lr in rates)  # type: ignore[misc]
    assert own < 0.9 * rival


def test_resumes_where_it_was() -> None:
    one = wide()
    first = ngplus.NGAdam(one)
    train_to_zero(one, first, floats(8, 200), range(8))
    other = copy.deepcopy(one)
    second = ngplus.NGAdam(other)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in ((one, first), (other, second)):
        train_to_zero(model, optimizer, floats(8, 200), range(8, 16))
    assert equal(one, other)


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(3, 2)
    own, other = ngplus.NGAdam(model), ngplus.NGPlus(model)
    with pytest.raises(ValueError, match="not one of NGAdam: its groups have no betas"):
        own.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="not one of NGPlus: its groups have no damping"):
        other.load_state_dict(own.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_state_is_float32_for_parameters_of_16_bits(dtype: torch.dtype) -> None:
    model = nn.Linear(6, 4).to(dtype)
    optimizer = ngplus.NGAdam(model)
    train_to_zero(model, optimizer, lambda step: torch.randn(3, 6, dtype=dtype), range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    assert {x.dtype for x in kept} == {torch.float32}
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in model.parameters())


def test_a_cast_in_the_middle_keeps_the_averages() -> None:
    model = nn.Linear(6, 4).float()
    optimizer = ngplus.NGAdam(model)
    train_to_zero(model, optimizer, lambda step: torch.randn(3, 6, dtype=torch.float32), range(3))
    model.double()
    train_to_zero(model, optimizer, floats(3, 6), range(1))
    assert optimizer.state[model.weight]["step"] == 4
    assert optimizer.state[model.weight]["left"].dtype == torch.float64


def test_curvature_is_the_moving_average() -> None:
    weight = nn.Parameter(torch.randn(200, 3))
    optimizer = ngplus.NGAdam([("weight", weight)], update_every=1)
    seen = gradients((200, 3), 3)
    for gradient in seen:
        weight.grad = gradient
        optimizer.step()
    side, matrix = optimizer.curvature("weight")
    weights = torch.tensor([0.95**2, 0.95, 1.0]) / (0.95**2 + 0.95 + 1)
    wanted = sum(w * g.mT @ g for w, g in zip(weights, seen, strict=True))
    assert side == "right"
    torch.testing.assert_close(matrix, wanted)


def test_a_layer_without_gradients_in_float32() -> None:
    """Its L and R are zeros when the first roots are made; the next gradient then meets them."""
    model = nn.Linear(6, 4).float()
    optimizer = ngplus.NGAdam(model, weight_decay=0.0)
    for scale in (0.0, 0.0, 1.0, 1e-12, 1.0):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (scale * model(torch.randn(3, 6, dtype=torch.float32)).square().sum()).backward()
        optimizer.step()
        assert (model.weight - before).abs().max() <= 5e-3 * 0.3 * 24**0.5
    assert optimizer.health().good
    assert model.weight.isfinite().all()


def test_on_many_ranks_all_make_the_roots_unless_owners_keep_them() -> None:
    plan = ngplus.NGAdam(wide()).plan()
    loads = {kind: plan.on_ranks(4, kind) for kind in ("communication", "memory")}
    assert loads["communication"].refresh_flops == plan.refresh_flops
    assert loads["memory"].refresh_flops < plan.refresh_flops
    assert loads["communication"].step_bytes == 0
    assert loads["memory"].state_bytes < loads["communication"].state_bytes == plan.state_bytes
