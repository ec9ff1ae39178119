"""Learning rates of the directions (``rate_gain``): against plain formulas, what they are for, and what they keep."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import reference as ref
import torch
from linear_cases import SHAPES, batches, matrix_of, per_sample, train
from plain_adaptive import PlainRated
from torch import Tensor, nn

import ngplus

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("shape", [*SHAPES, (2, 2), (1, 5)])
@pytest.mark.parametrize("gain", [0.15, 2.0])
def test_against_plain_formulas(shape: tuple[int, int], gain: float) -> None:
    """Over refreshes, which carry the rates from one basis to the next; the large gain meets the limits."""
    model = nn.Linear(*shape)
    plain, optimizer = PlainRated(gain), ngplus.NGPlus(model, rate_gain=gain)
    for k, (x, y) in enumerate(batches(30, features=shape[0], outputs=shape[1])):
        before = matrix_of(model)
        wanted = plain(k, per_sample(model, x, y), before)
        train(model, optimizer, x, y)
        assert ref.relative_error(before - matrix_of(model), 0.01 * wanted) < 1e-6, k
    assert any(abs(log) > 1e-3 for logs in plain.logs for log in logs)


def valley(lr: float, steps: int, **options: Any) -> float:
    """The loss of a quadratic, curved a thousand times as much along its first row as along its last."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 6))
    curved = torch.logspace(0, -3, 6)[:, None]
    optimizer = ngplus.NGPlus([weight], lr=lr, curvature="batch", **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (curved * weight.square()).sum()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("lr", [0.1, 0.3, 1.0, 3.0])
def test_a_valley_whatever_the_learning_rate(lr: float) -> None:
    assert valley(lr, 60, rate_gain=0.15) < 0.25 * valley(lr, 60)


def logs_of(optimizer: ngplus.NGPlus, param: Tensor) -> list[Tensor]:
    return [optimizer.state[param][key] for key in ("rate_row", "rate_col")]


def test_a_gradient_that_goes_on_raises_every_rate_to_the_limit_and_one_that_turns_lowers_it() -> None:
    weight = nn.Parameter(torch.zeros(4, 3))
    optimizer = ngplus.NGPlus([weight], lr=0.01, curvature="batch", rate_gain=0.5)
    gradient = torch.randn(4, 3)
    for _ in range(40):
        weight.grad = gradient.clone()
        optimizer.step()
    assert all(torch.allclose(log.exp(), torch.tensor(4.0)) for log in logs_of(optimizer, weight))
    for k in range(60):
        weight.grad = gradient * (-1.0) ** k
        optimizer.step()
    assert all(bool((log < 0).all()) for log in logs_of(optimizer, weight))


def test_without_it_nothing_is_kept() -> None:
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, rate_gain=0.1)
    for x, y in batches(3):
        train(model, optimizer, x, y)
    state = optimizer.state[model.weight]
    assert [tuple(log.shape) for log in logs_of(optimizer, model.weight)] == [(1, 3, 1), (1, 1, 6)]
    optimizer.param_groups[0]["rate_gain"] = 0.0
    train(model, optimizer, *batches(1)[0])
    assert "rate_row" not in state
    assert state["adam_step"] == 4  # the moments go on
    optimizer.param_groups[0]["rate_gain"] = 0.1
    train(model, optimizer, *batches(1)[0])
    assert "rate_row" in state


def test_plan_counts_the_rates() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, rate_gain=0.1)
    expected = [row.state_bytes for row in optimizer.plan()]
    for x, y in batches(3):
        train(model, optimizer, x, y)
    for row, before in zip(optimizer.plan(), expected, strict=True):
        assert row.state_bytes - before in (0, 8), row.name  # the floor, one number


@pytest.mark.parametrize("at", [1, 2, 4, 7])
def test_a_checkpoint_and_a_copy_go_on_bit_for_bit(at: int) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))

    one = model()
    optimizer = ngplus.NGPlus(one, rate_gain=0.15)
    other, resumed = one, optimizer
    for k, (x, y) in enumerate(batches(12)):
        if k == at:
            other, file = model(), io.BytesIO()
            other.load_state_dict(copy.deepcopy(one.state_dict()))
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            resumed = ngplus.NGPlus(other, rate_gain=0.15)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        train(one, optimizer, x, y)
        if k >= at:
            train(other, resumed, x, y)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_matrix_of_one_number(scale: float) -> None:
    """Whose row, column and whole are the same: a gradient that goes on raises its rate, whatever its size."""
    number = nn.Parameter(torch.zeros(()))
    optimizer = ngplus.NGPlus([number], curvature="batch", rate_gain=0.15)
    for _ in range(10):
        number.grad = torch.tensor(scale)
        optimizer.step()
    wanted = sum(max(0.0, 0.15 - 0.5 / t) for t in range(2, 11))
    for log in logs_of(optimizer, number):
        torch.testing.assert_close(log.squeeze(), torch.tensor(wanted))


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-20, 1e-10, 1e10])
def test_no_rate_moves_by_more_than_the_gain(scale: float) -> None:
    """In float32, where the squares of small numbers are 0: after gradients of a usual size, and back to them."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float32))
    one_basis = {"curvature": "batch", "update_every": 100, "early_refreshes": False}
    optimizer = ngplus.NGPlus([weight], rate_gain=0.15, **one_basis)
    before = [torch.zeros(())] * 2
    for k in range(40):
        weight.grad = torch.randn(4, 4, dtype=torch.float32) * (scale if k in (20, 21, 30) else 1e-2)
        optimizer.step()
        logs = [log.clone() for log in logs_of(optimizer, weight)]
        assert all(float((new - old).abs().max()) <= 0.1501 for new, old in zip(logs, before, strict=True)), k
        before = logs


def test_parameters_of_two_precisions_in_one_group() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, dtype=torch.float32))
    optimizer = ngplus.NGPlus([first, second], curvature="batch", rate_gain=0.15)
    for _ in range(3):
        first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
        optimizer.step()
    torch.testing.assert_close(first.detach().float(), second.detach())
    assert optimizer.health().good


def test_what_layers_of_one_shape_kept_is_gone_with_the_option() -> None:
    """They go through a step as one, and each keeps its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ngplus.NGPlus(model, rate_gain=0.15)
    for k, (x, _) in enumerate(batches(12, features=4)):
        optimizer.param_groups[0]["rate_gain"] = 0.15 if k < 8 else 0.0
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert not any("rate_row" in optimizer.state[layer.weight] for layer in model)


def test_a_gradient_of_zeros_moves_no_rate() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = ngplus.NGPlus([weight], lr=0.01, curvature="batch", rate_gain=0.15)
    for scale in (1.0, 1.0, 0.0, 0.0):
        held = [log.clone() for log in logs_of(optimizer, weight)] if optimizer.state[weight] else []
        weight.grad = scale * torch.ones(4, 3)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(held, logs_of(optimizer, weight), strict=True))
    assert bool(weight.isfinite().all())
