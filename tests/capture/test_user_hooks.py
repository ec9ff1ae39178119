"""Hooks of the user and wrappers around the model: the update still equals brute force."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from helpers.steps import (
    EXACT,
    Model,
    assert_equal,
    brute_force,
    data,
    mlp,
    one_step,
)

pytestmark = pytest.mark.usefixtures("double")


USER_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda m, args, out: out * 2 + 1),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
    "full backward": lambda m: m.register_full_backward_hook(lambda m, inputs, outputs: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, outputs: None),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", USER_HOOKS)
def test_user_hooks(hook: str, when: str) -> None:
    """Hooks that look or change, put on before or after the optimizer was made."""
    model, hooked = mlp(), None
    model[1] = nn.Tanh()
    hooked = copy.deepcopy(model)
    USER_HOOKS[hook](hooked[0])
    x, y = data(4)
    expected = brute_force(hooked, x, y)
    if when == "before":
        USER_HOOKS[hook](model[0])
    optimizer = ngplus.NGPlus(model, **EXACT)
    if when == "after":
        USER_HOOKS[hook](model[0])
    one_step(model, optimizer, x, y)
    assert_equal(model, hooked, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_user_hook_that_makes_a_tuple(when: str) -> None:
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x)[0])), a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    hook = lambda m, args, out: (out, "note")  # noqa: E731
    hooked = copy.deepcopy(model)
    hooked.a.register_forward_hook(hook)
    x, y = data(4)
    expected = brute_force(hooked, x, y)
    if when == "before":
        model.a.register_forward_hook(hook)
    optimizer = ngplus.NGPlus(model, **EXACT)
    if when == "after":
        model.a.register_forward_hook(hook)
    one_step(model, optimizer, x, y)
    assert_equal(model, hooked, expected)


def test_wrapped_model() -> None:
    """The optimizer on the model, the call through a wrapper, and the other way round."""
    x, y = data(4)
    for inner in (True, False):
        model = mlp()
        wrapper = nn.Sequential(model)
        before = copy.deepcopy(model)
        expected = brute_force(before, x, y)
        optimizer = ngplus.NGPlus(model if inner else wrapper, **EXACT)
        one_step(wrapper, optimizer, x, y)
        assert_equal(model, before, expected)


def test_group_added_in_the_plain_way() -> None:
    """As in torch: a dict with params, though the optimizer was made from a model."""
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT)
    one_step(model, optimizer, *data(4))
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)
