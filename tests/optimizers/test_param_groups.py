"""Parameter groups: what may be given, added later or refused."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from helpers.training import (
    Method,
    assert_same,
    both,
    described,
    every_method,
    small_net,
    train,
)
from ngplus import NGAdam, NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")
T = 2  # update_every


@every_method
def test_add_param_group_after_steps(method: Method) -> None:
    model = small_net()
    head = list(model[5].parameters())
    optimizer = method(model[:5].parameters(), model=model, lr=1e-3)
    start = [p.clone() for p in head]
    train(model, optimizer, range(3))
    assert_same(list(map(torch.Tensor.detach, head)), [s.detach() for s in start])
    state = copy.deepcopy(optimizer.state_dict()["state"])

    optimizer.add_param_group({"params": head, "lr": 2e-3})
    kept = optimizer.state_dict()["state"]
    assert_same({i: kept[i] for i in state}, state)
    assert [group["step"] for group in optimizer.param_groups] == [3, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the new parameters are captured from their first step on
        train(model, optimizer, range(3, 6))
    assert all(not torch.equal(p, s) for p, s in zip(head, start, strict=True))
    size = 3 if method is NGAdam else 11
    assert optimizer.curvature("5.weight").matrix.shape == (size, size)
    assert [group["step"] for group in optimizer.param_groups] == [6, 3]


@pytest.mark.parametrize(
    "method",
    [partial(NGPlus, side=side, graft=graft) for side in ("left", "right") for graft in (None, "adam")] + [NGAdam],
    ids=described,
)
def test_a_bias_may_join_its_weight_later(method: Method) -> None:
    model = small_net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = method(weights, model=model, lr=1e-3)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": biases})
    start = [p.detach().clone() for p in biases]
    train(model, optimizer, range(2, 4))
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(not torch.equal(p, s) for p, s in zip(biases, start, strict=True))


@both
@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"update_every": 0}, "update_every"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, "complex"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)]}, "int32"),
        ({"params": "known"}, "more than one parameter group"),
    ],
    ids=["lr", "update_every", "complex", "integer", "known"],
)
def test_a_bad_group_is_refused_and_the_optimizer_goes_on(group: dict[str, Any], message: str, kind: Method) -> None:
    model, other = small_net(), small_net()
    optimizer, untouched = (kind(m.parameters(), model=m, lr=1e-3, update_every=T) for m in (model, other))
    train(model, optimizer, range(T + 1))
    train(other, untouched, range(T + 1))
    params = [model[0].weight] if group.get("params") == "known" else [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({**group, "params": group["params"] if message in ("complex", "int32") else params})
    assert_same(optimizer.state_dict(), untouched.state_dict())
    train(model, optimizer, range(T + 1, 3 * T))
    train(other, untouched, range(T + 1, 3 * T))
    assert_same(model, other)
