"""Empty batches, steps without gradients and unknown names: the error says what to do, and no parameter changes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ngplus
from helpers.steps import EXACT, check, data, mlp, one_step
from helpers.training import Unchanged

pytestmark = pytest.mark.usefixtures("double")

MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "sequence": (lambda: nn.Linear(4, 3), (5, 4)),
    "conv": (lambda: nn.Conv1d(4, 3, 2), (4, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (4,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "unknown": (lambda: nn.PReLU(4), (4,)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_empty_batch(kind: str, curvature: str) -> None:
    make, shape = MODELS[kind]
    model = make()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "curvature": curvature})

    def step() -> None:  # the error may come from backward or from step
        model(torch.zeros(0, *shape)).sum().backward()
        optimizer.step()

    with Unchanged(model), pytest.raises((ValueError, RuntimeError), match=r"no samples|empty batch"):
        step()


def test_empty_batch_between_refreshes() -> None:
    """A mean over nothing is NaN; a sum is a zero gradient, and a zero step."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 3})
    x, y = data(4)
    one_step(model, optimizer, x, y)
    optimizer.zero_grad()
    with Unchanged(model):
        (model(x[:0]) - y[:0]).square().sum().backward()
        optimizer.step()


def test_batch_of_one_is_exact() -> None:
    check(mlp(), *(t[:1] for t in data(4)))


def test_loss_that_reaches_no_parameter() -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, _ = data(4)
    x.requires_grad_()
    model(x)
    x.square().mean().backward()
    with Unchanged(model), pytest.raises(RuntimeError, match="parameter"):
        optimizer.step()


def test_step_without_backward() -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    model(data(4)[0])
    with Unchanged(model), pytest.raises(RuntimeError, match=r"backward\(\) was not called"):
        optimizer.step()


EVERY = {
    "NGPlus": lambda model: ngplus.NGPlus(model, **EXACT),
    "NGPlus of parameters": lambda model: ngplus.NGPlus(model.parameters(), curvature="batch"),
    "NGAdam": ngplus.NGAdam,
    "NGAdam of parameters": lambda model: ngplus.NGAdam(model.parameters()),
    "Preconditioner": ngplus.Preconditioner,
    "KFAC": ngplus.baselines.KFAC,
}


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("other", [False, True])
def test_step_without_gradients_changes_nothing_and_says_so_once(kind: str, other: bool) -> None:
    """Before any backward pass, and after that of another model."""
    model, copied = mlp(), mlp()
    optimizer = EVERY[kind](model)
    if other:
        copied(data(4)[0]).square().mean().backward()
    with Unchanged(model):
        with pytest.warns(UserWarning, match="no parameter of this optimizer.*of another model") as caught:
            optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    watched = kind in ("NGPlus", "Preconditioner", "KFAC")
    assert ("the model of this optimizer was not called" in str(caught[0].message)) == watched
    assert optimizer.health().steps == 0


def test_the_loss_of_another_model_is_an_error_where_the_model_was_called() -> None:
    model, copied = mlp(), mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    model(data(4)[0])
    copied(data(4)[0]).square().mean().backward()
    with Unchanged(model), pytest.raises(RuntimeError, match="the loss does not reach any parameter"):
        optimizer.step()


def test_nothing_is_said_of_frozen_parameters() -> None:
    model = mlp().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ngplus.NGAdam(model).step()


def test_warnings_point_at_the_users_line() -> None:
    model = nn.LSTM(3, 2)
    for optimizer in (
        ngplus.NGPlus(model, lr=0.01),
        ngplus.baselines.KFAC(model, lr=0.01),
        ngplus.Preconditioner(model),
    ):
        model(torch.randn(4, 5, 3))[0].sum().backward()
        with pytest.warns(UserWarning, match=r"No per-sample curvature for weight_ih_l0") as caught:
            optimizer.step()
        assert caught[0].filename == __file__


def test_unknown_name_in_curvature() -> None:
    optimizer = ngplus.NGPlus(mlp(), **EXACT)
    with pytest.raises(KeyError, match=r"9\.weight"):
        optimizer.curvature("9.weight")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        optimizer.curvature("0.weight")  # not before the first step


def test_a_name_that_is_not_there_brings_the_nearest() -> None:
    optimizer = ngplus.NGPlus(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(KeyError, match=r"No parameter '0.wieght' in this optimizer: did you mean '0.weight'\?"):
        optimizer.curvature("0.wieght")
    with pytest.raises(KeyError, match=r"No parameter 'x' in this plan: print\(plan\(\)\) lists all"):
        optimizer.plan()["x"]
    with pytest.raises(KeyError, match=r"no such parameter of shape \(2, 3\): plan\(\) lists all"):
        optimizer.curvature(nn.Parameter(torch.zeros(2, 3)))


def test_errors_name_the_parameter() -> None:
    model = nn.Linear(3, 2)
    online = ngplus.OnlineNGPlus(model.named_parameters())
    model(torch.full((1, 3), torch.inf)).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of parameter weight is not finite"):
        online.step()
    with pytest.raises(ValueError, match=r"Invalid momentum: -1 \(a number of 0 or more\)"):
        ngplus.NGPlus(model, momentum=-1)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1.0 \(a number of 0 or more and below 1"):
        ngplus.NGAdam(model, betas=(0.9, 1.0))
