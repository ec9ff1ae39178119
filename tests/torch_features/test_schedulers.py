"""Learning rates and dampings that change during training: each step uses those of its moment.

That a compiled model or step is not compiled again for them is in test_compile.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import ngplus
from helpers.steps import EXACT, assert_equal, brute_force, data, mlp, one_step

pytestmark = pytest.mark.usefixtures("double")

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6, eta_min=0.001),
    "warm-up, then polynomial": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.PolynomialLR(o, 6, 5)], milestones=[2]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.5, step_size_up=2, cycle_momentum=False),
}


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_step_has_the_rate_and_damping_of_its_moment(schedule: str, tensor: bool) -> None:
    """W <- W - lr_k (lambda_k I + L_k)^-1 G_k against a loop over samples, in every step."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "lr": torch.tensor(0.5) if tensor else 0.5})
    rates = SCHEDULES[schedule](optimizer)
    dampings = ngplus.schedules.ExponentialDamping(optimizer, rate=0.5, every=1)
    x, y = data(4)
    seen = set()
    for k in range(5):
        group = optimizer.param_groups[0]
        rate, damping = float(group["lr"]), group["damping"]
        assert damping == pytest.approx(0.1 * 0.5**k)
        before = copy.deepcopy(model)
        one_step(model, optimizer, x, y)
        assert_equal(model, before, brute_force(before, x, y, lr=rate, damping=damping))
        rates.step()
        dampings.step()
        seen.add(rate)
    assert len(seen) > 1


def test_a_cycled_momentum() -> None:
    """OneCycleLR finds NG+'s momentum and turns it against the learning rate."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, lr=0.01, momentum=0.9)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, base_momentum=0.8, max_momentum=0.95)
    x, y = data(4)
    momenta = []
    for _ in range(5):
        one_step(model, optimizer, x, y)
        schedule.step()
        momenta.append(optimizer.param_groups[0]["momentum"])
    assert min(momenta) == pytest.approx(0.8, abs=0.02)
    assert momenta[-1] > 0.9


def test_reduced_on_a_plateau() -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    one_step(model, optimizer, *data(4))
    for loss in (1.0, 1.0, 1.0):
        schedule.step(loss)
    assert optimizer.param_groups[0]["lr"] < 0.5
    before = copy.deepcopy(model)
    x, y = data(4)
    one_step(model, optimizer, x, y)
    assert_equal(model, before, brute_force(before, x, y, lr=optimizer.param_groups[0]["lr"]))
