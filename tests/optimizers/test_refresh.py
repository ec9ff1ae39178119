"""When a refresh is due."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ngplus
from helpers.training import floats, train_to_zero


@pytest.mark.parametrize(("option", "value"), [("side", "left"), ("block_size", 2)])
@pytest.mark.parametrize("rows", [3, 6, 7], ids=["wide", "square", "tall"])
def test_a_change_of_side_or_blocks_is_a_refresh(rows: int, option: str, value: str | int) -> None:
    """The next step is the first step of an optimizer that has them from the beginning."""
    torch.manual_seed(1)
    net = nn.Linear(5, rows).double()  # rows x 6, with the bias
    optimizer = ngplus.NGPlus(net, momentum=0.0, side="right", update_every=100)
    train_to_zero(net, optimizer, floats(8, 5), range(3))
    twin = copy.deepcopy(net)
    optimizer.param_groups[0][option] = value
    train_to_zero(net, optimizer, floats(8, 5), range(3, 4))
    train_to_zero(
        twin, ngplus.NGPlus(twin, momentum=0.0, **{"side": "right", option: value}), floats(8, 5), range(3, 4)
    )
    torch.testing.assert_close(net.weight, twin.weight)


def test_a_layer_that_keeps_u_may_be_initialised_by_a_step_of_zeros() -> None:
    net = nn.Linear(100, 50)
    optimizer = ngplus.NGPlus(net, lr=0.0, solver="auto", curvature="sample")
    (0 * net(torch.randn(4, 100)).sum()).backward()
    optimizer.step()
    assert {"inverse", "factor", "core"} <= set(optimizer.state[net.weight])
    assert optimizer.plan()["weight"].solver == "woodbury"
    assert not optimizer._due(optimizer._matrices[0]) or optimizer.param_groups[0]["step"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    net(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
    assert optimizer.health().good
