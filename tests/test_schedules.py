"""Damping schedules, and the paper's learning-rate strategies on torch's own schedulers, against its formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, PolynomialLR, SequentialLR

import ngplus
from ngplus.schedules import ExponentialDamping, LambdaDamping


def ng_plus(damping: Any = 0.16, lr: float = 0.18) -> ngplus.NGPlus:
    torch.manual_seed(0)
    return ngplus.NGPlus(nn.Linear(3, 2), lr=lr, damping=damping, graft=None)


def preconditioner(damping: Any = 0.16) -> ngplus.Preconditioner:
    torch.manual_seed(0)
    return ngplus.Preconditioner(nn.Linear(3, 2), damping=damping)


def two_groups(first: Any = 0.16, second: Any = 0.3) -> ngplus.NGPlus:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters()), "damping": second}]
    return ngplus.NGPlus(groups, lr=0.1, model=model, damping=first)


OWNERS = {"NGPlus": ng_plus, "Preconditioner": preconditioner}


# ------------------------------------------------------------------------------------------------ damping


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize(
    ("start", "rate"), [(0.16, 0.8), (0.05, 0.87), (0.2, 0.7), (0.3, 0.7), (0.3, 0.87)], ids=lambda x: str(x)
)
def test_whole_epochs(owner: str, start: float, rate: float) -> None:
    """The paper's settings of lambda_0 r^(epoch/10), epoch by epoch."""
    optimizer = OWNERS[owner](start)
    schedule = ExponentialDamping(optimizer, rate=rate)
    for epoch in range(53):
        assert optimizer.param_groups[0]["damping"] == pytest.approx(start * rate ** (epoch / 10), rel=1e-12)
        assert schedule.get_last_damping() == [optimizer.param_groups[0]["damping"]]
        schedule.step()


def test_paper_values() -> None:
    """0.16 * 0.8^(epoch/10), worked out by hand."""
    optimizer = ng_plus(0.16)
    schedule = ExponentialDamping(optimizer, rate=0.8)
    for epoch, damping in ((0, 0.16), (10, 0.128), (20, 0.1024), (30, 0.08192), (5, 0.16 * math.sqrt(0.8))):
        schedule.step(epoch)
        assert optimizer.param_groups[0]["damping"] == pytest.approx(damping, rel=1e-12)


@pytest.mark.parametrize("owner", OWNERS)
def test_fractions_of_an_epoch(owner: str) -> None:
    """epoch_k = k / (iterations an epoch), given in every iteration; no rounding adds up."""
    optimizer, iterations = OWNERS[owner](0.3), 7
    schedule = ExponentialDamping(optimizer, rate=0.87)
    for k in range(30):
        schedule.step(k / iterations)
        assert optimizer.param_groups[0]["damping"] == pytest.approx(0.3 * 0.87 ** (k / iterations / 10), rel=1e-12)
    schedule.step()  # and on from there
    assert optimizer.param_groups[0]["damping"] == pytest.approx(0.3 * 0.87 ** ((29 / iterations + 1) / 10), rel=1e-12)


def test_every() -> None:
    optimizer = ng_plus(1.0)
    schedule = ExponentialDamping(optimizer, rate=0.5, every=2)
    schedule.step(6)
    assert schedule.get_last_damping() == [pytest.approx(0.125)]


def test_several_groups_keep_their_own_start() -> None:
    optimizer = two_groups(0.16, 0.3)
    schedule = ExponentialDamping(optimizer, rate=0.8)
    schedule.step(25.0)
    assert schedule.get_last_damping() == [pytest.approx(0.16 * 0.8**2.5), pytest.approx(0.3 * 0.8**2.5)]


def test_group_added_later() -> None:
    """The schedule goes on, and the new group is on it, from its own damping."""
    optimizer = ngplus.NGPlus([nn.Parameter(torch.ones(2, 3))], lr=0.1, curvature="batch", damping=0.16)
    schedule = ExponentialDamping(optimizer, rate=0.8)
    schedule.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "damping": 0.3})
    schedule.step(10.0)
    assert schedule.get_last_damping() == [pytest.approx(0.16 * 0.8), pytest.approx(0.3 * 0.8)]


def test_lambda_damping() -> None:
    optimizer = ng_plus(0.5)
    schedule = LambdaDamping(optimizer, lambda epoch: 1 / (1 + epoch))
    assert optimizer.param_groups[0]["damping"] == 0.5
    schedule.step()
    assert optimizer.param_groups[0]["damping"] == 0.25


@pytest.mark.parametrize("owner", OWNERS)
def test_state_dict_round_trip(owner: str) -> None:
    """A resumed run has the same dampings, from the first step after loading on."""
    first = OWNERS[owner](0.16)
    schedule = ExponentialDamping(first, rate=0.8)
    for _ in range(7):
        schedule.step()
    saved = copy.deepcopy((first.state_dict(), schedule.state_dict()))
    second = OWNERS[owner](0.16)
    again = ExponentialDamping(second, rate=0.8)
    second.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert again.state_dict() == schedule.state_dict()
    for _ in range(3):
        assert second.param_groups[0]["damping"] == first.param_groups[0]["damping"]
        schedule.step()
        again.step()


@pytest.mark.parametrize("owner", OWNERS)
def test_schedule_made_after_loading_starts_from_the_first_damping(owner: str) -> None:
    """The other order: the groups of the checkpoint already hold a damping that has decayed."""
    first = OWNERS[owner](0.16)
    schedule = ExponentialDamping(first, rate=0.8)
    schedule.step(20.0)
    saved = copy.deepcopy((first.state_dict(), schedule.state_dict()))
    second = OWNERS[owner](0.16)
    second.load_state_dict(saved[0])
    again = ExponentialDamping(second, rate=0.8)
    again.load_state_dict(saved[1])
    assert second.param_groups[0]["damping"] == pytest.approx(0.1024)


def test_schedule_is_plain_numbers_for_a_checkpoint(tmp_path: Any) -> None:
    schedule = ExponentialDamping(ng_plus(), rate=0.8)
    schedule.step(2.5)
    torch.save(schedule.state_dict(), tmp_path / "schedule.pt")
    assert torch.load(tmp_path / "schedule.pt", weights_only=True) == schedule.state_dict()


def test_relative_damping_is_scheduled_too() -> None:
    """Both summands of lambda follow the schedule, so lambda itself does."""
    optimizer = two_groups(0.16, 0.3)
    optimizer.param_groups[1]["relative_damping"] = 0.2
    schedule = LambdaDamping(optimizer, lambda epoch: 0.5**epoch)
    schedule.step(2.0)
    assert [group["damping"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.075])
    assert optimizer.param_groups[1]["relative_damping"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "bad", [{"rate": 0.0}, {"rate": -0.8}, {"rate": math.nan}, {"rate": 0.8, "every": 0.0}], ids=str
)
def test_bad_arguments(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        ExponentialDamping(ng_plus(), **bad)


@pytest.mark.parametrize("owner", OWNERS)
def test_the_direction_follows_the_schedule(owner: str) -> None:
    """A step after 10 epochs has the direction of lambda_0 r: the number in the group is the one that is used."""

    def directions(damping: float, epoch: float | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options = {"damping": damping, "relative_damping": 0.0, "update_every": 1}
        if owner == "NGPlus":
            optimizer: Any = ngplus.NGPlus(model, lr=1.0, momentum=0.0, **options)
        else:
            optimizer = ngplus.Preconditioner(model, **options)
        if epoch is not None:
            ExponentialDamping(optimizer, rate=0.8).step(epoch)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.randn(5, 3)).square().sum(1).mean().backward()
        optimizer.step()
        if owner == "NGPlus":
            return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        return [p.grad for p in model.parameters()]

    scheduled, fixed, other = directions(0.5, 10.0), directions(0.4, None), directions(0.5, None)
    for a, b, c in zip(scheduled, fixed, other, strict=True):
        torch.testing.assert_close(a, b)
        assert not torch.allclose(a, c, rtol=1e-2)


# ------------------------------------------------------------------------------------------------ learning rates


def rates(lr: float, make: Callable[[torch.optim.Optimizer], LRScheduler], epochs: int) -> list[float]:
    """The learning rate of each epoch, with the optimizer's step before the scheduler's as torch wants it."""
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = ngplus.NGPlus([parameter], lr=lr, curvature="batch")
    schedule = make(optimizer)
    out = []
    for _ in range(epochs):
        out.append(float(optimizer.param_groups[0]["lr"]))
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()
    return out


@pytest.mark.parametrize(
    ("a0", "max_epoch", "decay"), [(0.18, 52, 5), (1.3, 50, 5), (2.6, 50, 5), (0.1, 60, 4)], ids=lambda x: str(x)
)
def test_polynomial_decay(a0: float, max_epoch: int, decay: float) -> None:
    """The paper's "exponential" strategy, a0 (1 - epoch/max_epoch)^decay, is PolynomialLR."""
    got = rates(a0, lambda o: PolynomialLR(o, total_iters=max_epoch, power=decay), max_epoch + 3)
    want = [a0 * max(1 - epoch / max_epoch, 0) ** decay for epoch in range(max_epoch + 3)]
    assert got == pytest.approx(want, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("a0", "max_epoch"), [(0.8, 76), (0.1, 90)])
def test_cosine_with_a_floor(a0: float, max_epoch: int) -> None:
    """0.001 + 0.5 (a0 - 0.001) (1 + cos(epoch/max_epoch pi)) is CosineAnnealingLR with eta_min=0.001."""
    got = rates(a0, lambda o: CosineAnnealingLR(o, T_max=max_epoch, eta_min=0.001), max_epoch + 1)
    want = [0.001 + 0.5 * (a0 - 0.001) * (1 + math.cos(epoch / max_epoch * math.pi)) for epoch in range(max_epoch + 1)]
    assert got == pytest.approx(want, rel=1e-9)
    assert got[-1] == pytest.approx(0.001)


@pytest.mark.parametrize(("a0", "max_epoch"), [(1.3, 50), (2.6, 50)])
def test_linear_warm_up_before_polynomial_decay(a0: float, max_epoch: int) -> None:
    """From 0.01 in equal steps to a0 over 5 epochs, then the decay. SequentialLR counts the decay from its start."""
    warm, start, decay = 5, 0.01, 5

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, start_factor=start / a0, total_iters=warm)
        fall = PolynomialLR(optimizer, total_iters=max_epoch - warm, power=decay)
        return SequentialLR(optimizer, [rise, fall], milestones=[warm])

    got = rates(a0, make, max_epoch + 1)
    want = [start + (a0 - start) * epoch / warm for epoch in range(warm)]
    want += [a0 * (1 - (epoch - warm) / (max_epoch - warm)) ** decay for epoch in range(warm, max_epoch + 1)]
    assert got == pytest.approx(want, rel=1e-9, abs=1e-15)
    assert got[0] == pytest.approx(0.01)
    assert max(got) == got[warm] == pytest.approx(a0)


def test_warm_up_with_the_decay_counted_from_the_first_epoch() -> None:
    """The letter of the formula: epoch_k counts all epochs, so the rate after the warm-up is a0 (1 - 5/52)^5."""
    a0, warm, max_epoch, decay = 0.18, 5, 52, 5

    def factor(epoch: float) -> float:
        return min(1.0, (epoch + 1) / warm) * max(1 - epoch / max_epoch, 0) ** decay

    got = rates(a0, lambda o: LambdaLR(o, factor), max_epoch)
    assert got[warm:] == pytest.approx([a0 * (1 - e / max_epoch) ** decay for e in range(warm, max_epoch)], rel=1e-12)
    assert got[0] == pytest.approx(a0 / warm)


def test_inverse_square_root_after_ten_epochs() -> None:
    """SchNet: 2e-4 max(epoch - 10, 1)^-0.5."""
    got = rates(2e-4, lambda o: LambdaLR(o, lambda epoch: max(epoch - 10, 1) ** -0.5), 40)
    assert got == pytest.approx([2e-4 * max(epoch - 10, 1) ** -0.5 for epoch in range(40)], rel=1e-12)
    assert got[:12] == pytest.approx([2e-4] * 12)
    assert got[14] == pytest.approx(1e-4)


def test_learning_rate_and_damping_schedules_side_by_side() -> None:
    """The recipe for ResNet-50: both decay, neither touches the other."""
    optimizer = ng_plus(0.16, lr=0.18)
    rate, damping = PolynomialLR(optimizer, total_iters=52, power=5), ExponentialDamping(optimizer, rate=0.8)
    for epoch in range(20):
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(0.18 * (1 - epoch / 52) ** 5)
        assert group["damping"] == pytest.approx(0.16 * 0.8 ** (epoch / 10))
        optimizer.zero_grad()
        optimizer._model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        rate.step()
        damping.step()
