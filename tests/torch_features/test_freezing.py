"""Parameters frozen and thawed, and modules used late or never."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import ngplus
from helpers.steps import EXACT, Model, assert_equal, brute_force, check, data, mlp, one_step

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parameter(frozen: str) -> None:
    model = mlp()
    model.get_parameter(frozen).requires_grad_(False)
    before = copy.deepcopy(model)
    check(model, *data(4))
    assert torch.equal(model.get_parameter(frozen), before.get_parameter(frozen))


def test_bias_alone_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    check(model, *data(4))


def test_frozen_and_thawed_during_training() -> None:
    """After each change the step is that of a new optimizer on the same model."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = data(4)
    changes = [(), ("0.weight", "0.bias"), ("2.bias",), (), ("0.bias",), ()]
    for frozen in changes:
        for name, p in model.named_parameters():
            p.requires_grad_(name not in frozen)
        before = copy.deepcopy(model)
        expected = brute_force(before, x, y)
        one_step(model, optimizer, x, y)
        assert_equal(model, before, expected)
        for name in frozen:
            assert torch.equal(model.get_parameter(name), before.get_parameter(name))


def test_frozen_and_thawed_between_refreshes() -> None:
    """Thawed where no refresh is due: the layer gets one of its own, the others keep theirs."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100})
    x, y = data(4)
    model[0].bias.requires_grad_(False)
    one_step(model, optimizer, x, y)
    one_step(model, optimizer, x, y)
    model[0].bias.requires_grad_(True)
    kept = optimizer.curvature("2.weight").matrix.clone()
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("0.")}
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)
    assert torch.allclose(optimizer.curvature("2.weight").matrix, kept)


def test_unused_modules() -> None:
    model = Model(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3), table=nn.Embedding(5, 4))
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("used")}
    optimizer = ngplus.NGPlus(model, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            one_step(model, optimizer, x, y)
            assert_equal(model, before, expected)
            before = copy.deepcopy(model)
            expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("used")}
    for name in ("unused.weight", "unused.bias", "table.weight"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name))


def test_module_used_from_the_second_step_on() -> None:
    model = Model(lambda m, x: m.late(x) if m.on else m.early(x), early=nn.Linear(4, 3), late=nn.Linear(4, 3))
    model.on = False
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 100})
    x, y = data(4)
    one_step(model, optimizer, x, y)
    model.on = True
    before = copy.deepcopy(model)
    expected = {n: e for n, e in brute_force(before, x, y).items() if n.startswith("late")}
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)
