"""Matrices that do not factorise: more damping, float64, the diagonal, or the last good inverse."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.hostile import net, state_is_finite, train
from helpers.training import failing_eigh, parameters
from ngplus import NGAdam, NGPlus
from ngplus.fisher import inverses
from ngplus.utils.finite import RefreshStatus

pytestmark = [pytest.mark.filterwarnings("ignore:.*Sparse invariant checks"), pytest.mark.usefixtures("looks")]


HOPELESS = torch.tensor([[[1.0, 1e12], [1e12, 1.0]]])


INDEFINITE = torch.tensor([[[1.0, 0.0], [0.0, -1e-3]]])


@pytest.mark.parametrize(("matrix", "plain"), [(INDEFINITE, False), (HOPELESS, True)])
def test_trouble_tells_how_far_the_ladder_was_climbed(matrix: Tensor, plain: bool) -> None:
    trouble = RefreshStatus(may_wait=True)
    inverse = inverses.dense_inverse(matrix, torch.tensor(1e-4), trouble)
    assert inverse.isfinite().all()
    assert trouble.retried is not None
    assert bool(trouble.retried)
    assert (trouble.plain is not None and bool(trouble.plain)) == plain


def test_without_a_look_a_failure_is_the_plain_step_and_is_noted(looks: bool) -> None:
    trouble = RefreshStatus()
    matrix = torch.cat([INDEFINITE, torch.eye(2)[None]])
    inverse = inverses.dense_inverse(matrix, torch.tensor(1e-4), trouble)
    assert trouble.retried is not None
    assert bool(trouble.retried)
    torch.testing.assert_close(inverse[1], torch.eye(2) / (1 + 1e-4))
    if not looks:
        assert torch.equal(inverse[0], inverse[0, 0, 0] * torch.eye(2))
        assert trouble.unsolved is not None


def test_a_failure_on_a_device_keeps_the_last_good_inverse_and_is_helped_at_the_next(
    monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = NGPlus(model, lr=1e-3, update_every=1, solver="dense")

    def go() -> Tensor:
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        return optimizer.state[model.weight]["inverse"].clone()

    good = go()
    calls: list[int] = []
    real = inverses._cholesky_inverse

    def attempt(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        inverse, failed = real(matrix)
        return inverse, torch.ones_like(failed) if len(calls) in (1, 2) else failed

    monkeypatch.setattr(inverses, "_cholesky_inverse", attempt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second, third = go(), go()
    if looks:  # climbs at once: two failures, the third attempt has 100 times the damping
        assert len(calls) == 4
        assert not torch.equal(good, second)
    else:  # the first failure leaves the inverse; the next refresh fails as well, and climbs
        assert torch.equal(good, second)
        assert len(calls) == 3
        assert not torch.equal(second, third)
    assert optimizer.health()["weight"].retried == (1 if looks else 2)
    assert any("could not be factorised at the first" in str(w.message) for w in caught)


def health_after_training(model: nn.Module, optimizer: Any) -> ngplus.LayerHealth:
    train(model, optimizer, 3)
    return optimizer.health()["4.weight"]


def test_an_eigendecomposition_that_fails_in_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = NGAdam(model, lr=1e-3, update_every=2)
    failing_eigh(monkeypatch, torch.float32, torch.float64)
    before = parameters(model)
    with pytest.warns(ngplus.HealthWarning, match=r"could not be factorised.*NGAdam uses the root of the diagonal"):
        found = health_after_training(model, optimizer)
    assert state_is_finite(optimizer, model)
    assert all(not torch.equal(p, b) for p, b in zip(parameters(model), before, strict=True))
    assert (found.retried, found.plain) == (3, 3)  # the first four steps make roots each
    root = optimizer.state[model[4].weight]["right_root"][0]
    assert torch.equal(root, root.diagonal().diag())


def test_an_eigendecomposition_that_fails_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in float64 takes its place."""
    model, other = net(), net()
    optimizer, untroubled = (NGAdam(m, lr=1e-3, update_every=2) for m in (model, other))
    train(other, untroubled, 3)
    failing_eigh(monkeypatch, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ngplus.HealthWarning)
        found = health_after_training(model, optimizer)
    assert (found.retried, found.plain) == (3, 0)
    for name in ("0.weight", "6.weight"):  # small matrices, whose roots float32 finds as well
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name), rtol=0, atol=1e-5)


def test_an_eigendecomposition_that_is_not_finite(monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    """As MKL's in float32 of some matrices of low rank, without an error: float64 takes its place as well."""
    if not looks:
        pytest.skip("of the host")
    original = torch.linalg.eigh

    def eigh(x: Tensor) -> Any:
        values, vectors = original(x)
        return (values, vectors) if x.dtype == torch.float64 else (values * math.nan, vectors * math.nan)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ngplus.HealthWarning)
        found = health_after_training(model, NGAdam(model, lr=1e-3, update_every=2))
    assert (found.retried, found.plain, found.steps) == (3, 0, 0)
