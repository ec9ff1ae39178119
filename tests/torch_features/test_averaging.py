"""EMA of the weights and SWA by torch.optim.swa_utils: the averages are right, and averaging leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import ngplus
from helpers.steps import EXACT, assert_equal, data, loss_fn, one_step
from helpers.training import flat

pytestmark = pytest.mark.usefixtures("double")

STEPS, DECAY = 6, 0.8
OPTIONS = {**EXACT, "update_every": 2, "lr": 0.05, "momentum": 0.9}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def history() -> tuple[nn.Module, list[Tensor]]:
    """The model after a training without any averaging, and its weights after each step."""
    model = net()
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    weights = []
    for _ in range(STEPS):
        one_step(model, optimizer, *data(4))
        weights.append(flat(model))
    return model, weights


def averaged(kind: str, model: nn.Module) -> Any:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY) if kind == "EMA" else None)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_averaged_weights(kind: str, made: str) -> None:
    """The averaged model is a copy with hooks that do nothing. Made before or after the optimizer, it is evaluated,
    called with gradients, and has its batch norm statistics renewed, all while the capture is armed."""
    model = net()
    before = copy.deepcopy(model)
    mean = averaged(kind, model) if made == "before" else None
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    mean = mean or averaged(kind, model)
    x, y = data(4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        mean.eval()
        with torch.no_grad():
            mean(x)
        mean.train()
        loss_fn(mean(x * 2), y).backward()  # with the capture armed, for other samples
        loss.backward()
        optimizer.step()
        mean.update_parameters(model)
        update_bn([(x, y)], mean)
    plain, weights = history()
    assert_equal(model, before, dict(plain.named_parameters()), 1e-12)
    if kind == "SWA":
        expected = torch.stack(weights).mean(0)
    else:
        expected = weights[0]
        for w in weights[1:]:
            expected = DECAY * expected + (1 - DECAY) * w
    assert torch.allclose(flat(mean), expected, rtol=1e-10)


def test_the_averaged_weights_evaluated_in_the_model_itself() -> None:
    """Swapped in for an evaluation, and out again, in the middle of training."""
    model = net()
    before = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    mean = averaged("EMA", model)
    x, y = data(4)
    for _ in range(STEPS):
        one_step(model, optimizer, x, y)
        mean.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(mean.module.state_dict())
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        model.load_state_dict(kept)
    plain, _ = history()
    assert_equal(model, before, dict(plain.named_parameters()), 1e-12)


def test_statistics_of_the_trained_model_renewed() -> None:
    """update_bn calls the model itself in training mode, without gradients."""
    model, plain = net(), net()
    before = copy.deepcopy(model)
    x, y = data(4)
    for one, renew in ((model, True), (plain, False)):
        optimizer = ngplus.NGPlus(one, **OPTIONS)
        for _ in range(STEPS):
            optimizer.zero_grad()
            if renew:
                update_bn([(x * 3, y)], one)
            loss_fn(one(x), y).backward()
            if renew:
                update_bn([(x, y)], one)
            optimizer.step()
    assert_equal(model, before, dict(plain.named_parameters()), 1e-12)


def test_the_schedule_of_swa() -> None:
    """SWALR anneals to its learning rate, and the steps follow."""
    model = net()
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3, anneal_strategy="linear")
    x, y = data(4)
    rates = []
    for _ in range(5):
        one_step(model, optimizer, x, y)
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[2:] == pytest.approx([0.01] * 3)
    assert 0.01 < rates[0] < 0.05
