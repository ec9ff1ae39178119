"""Preconditioner: directions of NGPlus for another optimizer's step."""

from __future__ import annotations

import pytest
import torch

import ngplus
from helpers.steps import conv_net, data, loss_fn


def test_preconditioner_leaves_the_step_to_another() -> None:
    torch.manual_seed(0)
    model = conv_net()
    preconditioner = ngplus.Preconditioner(model, damping=0.5, update_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = data(2, 4, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(loss.item())
        preconditioner.step()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert len(preconditioner.plan()) == 3
    assert preconditioner.curvature("4.weight").side == "right"
    again = ngplus.Preconditioner(model, damping=0.5, update_every=2)
    again.load_state_dict(preconditioner.state_dict())
    assert again.param_groups[0]["step"] == 30


@pytest.mark.parametrize("option", ["lr", "weight_decay", "momentum", "nesterov", "maximize"])
def test_preconditioner_refuses_the_options_of_the_step(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        ngplus.Preconditioner(conv_net(), **{option: 0.1})


def test_preconditioner_takes_the_momentum_that_shapes_the_direction() -> None:
    assert ngplus.Preconditioner(conv_net(), graft="adam", momentum=0.8).param_groups[0]["momentum"] == 0.8
    with pytest.raises(TypeError, match="momentum"):
        ngplus.Preconditioner(conv_net(), graft="sgd", momentum=0.9)
    with pytest.raises(TypeError, match="nesterov"):
        ngplus.Preconditioner(conv_net(), graft="adam", momentum=0.9, nesterov=True)
