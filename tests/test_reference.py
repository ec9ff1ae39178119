"""ngplus.reference: NGAdam's direction against dense formulas, and NGPlus's step against the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.reference import dense_direction, random_gradients
from helpers.steps import PAPER
from ngplus.reference import ngadam_direction

pytestmark = pytest.mark.usefixtures("one_thread", "double")


def whole(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left, right


@pytest.mark.parametrize("shape", [(3, 5), (6, 4), (1, 7), (4, 1)])
def test_step_is_the_formula(shape: tuple[int, int]) -> None:
    gradients, state = random_gradients(*shape, 9), {}
    for k, gradient in enumerate(gradients):
        made = ngadam_direction(gradient, state, update_every=1)
        torch.testing.assert_close(made, dense_direction(gradients[: k + 1], whole), rtol=1e-8, atol=1e-10)


def test_roots_are_kept_between_refreshes() -> None:
    state: dict[str, Any] = {}
    held = []
    for gradient in random_gradients(3, 4, 17):
        ngadam_direction(gradient, state)
        held.append(state["left_root"])
    new = [k + 1 for k in range(17) if k == 0 or held[k] is not held[k - 1]]
    assert new == [1, 2, 3, 4, 6, 11, 16]


def test_scale_and_rotation() -> None:
    """A change of the loss's scale changes nothing; a rotation of the space of W rotates the direction."""
    u, v = (torch.linalg.qr(torch.randn(d, d)).Q for d in (4, 6))
    states: list[dict[str, Any]] = [{}, {}, {}]
    for g in random_gradients(4, 6, 7):
        plain, scaled, rotated = (ngadam_direction(x, s) for x, s in zip((g, 1e-3 * g, u @ g @ v), states, strict=True))
        torch.testing.assert_close(scaled, plain)
        torch.testing.assert_close(rotated, u @ plain @ v)


def test_zero_gradients_give_no_step() -> None:
    assert ngadam_direction(torch.zeros(3, 2), {}).abs().max() == 0


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 4))


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))


@pytest.mark.parametrize(("model", "shape"), [(convolution, (6, 2, 4, 4)), (multilayer, (6, 5))])
def test_ngplus_makes_the_same_steps(model: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Three steps with a refresh in the first and the third."""
    slow, state = model(), None
    fast = copy.deepcopy(slow)
    optimizer = ngplus.NGPlus(fast, lr=0.3, momentum=0.0, damping=0.1, update_every=2, **PAPER)
    for _ in range(3):
        x = torch.randn(*shape)
        y = torch.randn_like(slow(x).detach())
        optimizer.zero_grad()
        nn.functional.mse_loss(fast(x), y).backward()
        optimizer.step()
        state = ngplus.reference.ngplus_step(slow, nn.functional.mse_loss, x, y, 0.3, 0.1, update_every=2, state=state)
        torch.testing.assert_close(dict(fast.named_parameters()), dict(slow.named_parameters()))
    assert state is not None
    for name, curvature in state.items():
        if name != "step":
            torch.testing.assert_close(optimizer.curvature(name).matrix, curvature)
