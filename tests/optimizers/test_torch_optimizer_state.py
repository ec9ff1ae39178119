"""What torch's own test_optim.py asks of an optimizer's state, hooks and copies, asked of NGPlus and NGAdam."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch_inputs import BASIC, INPUTS, Setting, build, copies, each_optimizer, every_curvature, every_input

from helpers.training import assert_same, loss_of, small_net, train
from ngplus import NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")


@every_input
def test_state_dict_is_deterministic(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    first, second = build(optim_input, model), build(optim_input, other)
    train(model, first, range(3))
    torch.manual_seed(123)  # torch's global generator plays no part
    train(other, second, range(3))
    assert_same(first.state_dict(), second.state_dict())
    assert_same(model, other)


@every_input
def test_state_holds_only_what_checkpoints_take(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return type(value) in (Tensor, bool, int, float, str)

    assert any(saved["state"].values())
    for key, value in saved["state"].items():
        assert isinstance(key, int)
        assert plain(value), key
    for group in saved["param_groups"]:
        for key, value in group.items():
            values = value if key == "betas" else (value,)
            assert all(x is None or plain(x) for x in values) or key in ("params", "param_names"), key


def test_a_fresh_optimizer_has_no_state() -> None:
    """torch.distributed.checkpoint takes any entry for a sign that the state is initialised."""
    assert [len(build(optim_input, small_net()).state) for optim_input in INPUTS] == [0] * len(INPUTS)


@every_curvature
def test_load_state_dict_with_param_groups(optim_input: Setting) -> None:
    """Groups of different options come back as they were, in the order of the groups."""
    changes = {"lr": 0.7, "weight_decay": 0.0}

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": model[3:].parameters(), "lr": 5e-4, "weight_decay": 0.1}, {"params": model[:3].parameters()}]

    model, other = small_net(), small_net(seed=1)
    optimizer = build(optim_input, groups(model), model=model)
    train(model, optimizer, range(3))
    restored = build(optim_input, groups(other), model=other, **changes)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    for key in ("lr", "weight_decay", "step"):
        assert [g[key] for g in restored.param_groups] == [g[key] for g in optimizer.param_groups]
    train(model, optimizer, range(3, 6))
    train(other, restored, range(3, 6))
    assert_same(model, other)


RELATIVE = [
    optim_input._replace(
        kwargs={**optim_input.kwargs, "damping": 0.0, "relative_damping": 0.1}, desc=f"{optim_input.desc} relative"
    )
    for optim_input in BASIC
    if optim_input.kind is NGPlus
]


@pytest.mark.parametrize("optim_input", BASIC + RELATIVE, ids=lambda optim_input: optim_input.desc)
def test_initialising_the_state_does_not_consume_the_first_refresh(optim_input: Setting) -> None:
    """torch.distributed.checkpoint steps with lr = 0 on zero gradients: nothing of that is in the curvature later."""
    model, other = small_net(), small_net()
    optimizer = build(optim_input, model, model=model, update_every=5)
    fresh = build(optim_input, other, model=other, update_every=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _init_optim_state(optimizer)
    assert all(optimizer.state[group["params"][0]] for group in optimizer.param_groups)
    assert_same(model, other)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3]
    assert [group["step"] for group in optimizer.param_groups] == [0]
    train(model, optimizer, range(1))
    train(other, fresh, range(1))
    for name in ("0.weight", "2.weight", "3.weight", "5.weight"):
        own, its = model.get_parameter(name), other.get_parameter(name)
        if optimizer.plan()[name].side == "none":
            torch.testing.assert_close(optimizer.state[own]["exp_avg_sq"], fresh.state[its]["exp_avg_sq"])
        else:
            torch.testing.assert_close(optimizer.curvature(own).matrix, fresh.curvature(its).matrix)


@each_optimizer
def test_step_hooks(optim_input: Setting) -> None:
    model, order = small_net(), []
    optimizer = build(optim_input, model)

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        order.append(("before", opt.param_groups[0]["step"]))

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        order.append(("after", opt.param_groups[0]["step"]))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    train(model, optimizer, range(2))
    assert order == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(2, 3))
    assert len(order) == 4


@each_optimizer
def test_a_pre_hook_may_replace_the_closure(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], lambda: 7.0), {}))
    loss_of(model).backward()
    assert optimizer.step() == 7.0


@each_optimizer
def test_state_dict_hooks(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(2))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "note": "mine"})
    optimizer.register_load_state_dict_pre_hook(lambda opt, saved: calls.append(saved["note"]))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "mine", "loaded"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 3])
@every_curvature
def test_a_copied_model_and_optimizer_go_on_alike(optim_input: Setting, steps: int, duplicate: Any) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(steps))
    other, twin = duplicate((model, optimizer))
    assert_same(twin.state_dict(), optimizer.state_dict())
    assert not {id(p) for p in model.parameters()} & {id(p) for group in twin.param_groups for p in group["params"]}
    train(model, optimizer, range(steps, steps + 3))
    train(other, twin, range(steps, steps + 3))
    assert_same(other, model)
    assert_same(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
@every_curvature
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_a_copied_optimizer_steps_its_own_parameters(optim_input: Setting, duplicate: Any) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(3))
    before = copies(model.parameters())
    twin = duplicate(optimizer)
    own = twin.param_groups[0]["params"]
    for p in own:
        p.grad = torch.ones_like(p)
    twin.step()
    assert_same(copies(model.parameters()), before)
    assert all(not torch.equal(p, b) for p, b in zip(own, before, strict=True))


def test_optimizer_can_be_printed() -> None:
    for optim_input in INPUTS:
        text = repr(build(optim_input, small_net()))
        assert text.startswith(f"{optim_input.kind.__name__} (")
        name, usual = ("curvature", "momentum") if optim_input.kind is NGPlus else ("betas", (0.9, 0.95))
        assert f"{name}: {optim_input.kwargs.get(name, usual)}" in text
