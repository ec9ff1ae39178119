"""Evaluation in the middle of training leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.steps import BOTH, EXACT, Make, N, check, data, loss_fn, mlp, one_step

pytestmark = pytest.mark.usefixtures("double")


@BOTH
def test_evaluation_in_the_middle(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y)
        model.eval()
        with torch.no_grad():
            model(x[:2])
        with torch.inference_mode():
            model(x[:2])
        loss_fn(model(x[:1]), y[:1])
        model.train()
        loss.backward()
        with torch.no_grad():
            model(x[:3])
        optimizer.step()

    check(model(), *data(4), train)


def test_gradient_taken_in_eval_mode_is_not_captured() -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        model.eval()
        probe = x.clone().requires_grad_()
        (saliency,) = torch.autograd.grad(model(probe).sum(), probe)
        assert saliency.norm() > 0
        model.train()
        one_step(model, optimizer, x, y)

    check(mlp(), *data(4), train)


def test_training_in_eval_mode_warns() -> None:
    model = mlp().eval()
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match=r"0\.weight.*eval\(\) mode"):
        one_step(model, optimizer, *data(4))


def test_functional_transforms_of_a_watched_model() -> None:
    """torch.func on a model that is armed for a refresh neither fails nor is captured."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss_fn(torch.func.functional_call(model, params, (x[None],)), y[None])

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
        assert per_sample["0.weight"].shape == (N, 5, 4)
        one_step(model, optimizer, x, y)

    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    check(model, *data(4), train)
