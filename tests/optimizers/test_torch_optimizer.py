"""What torch's own test_optim.py asks of an optimizer, asked of NGPlus and NGAdam with torch's own tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch_inputs import (
    BASIC,
    ERRORS,
    INFOS,
    Setting,
    build,
    copies,
    every_curvature,
    every_input,
)

from helpers.training import Method, assert_same, both, loss_of, small_net, train
from ngplus import NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def loss_now(model: nn.Module) -> float:
    return float(loss_of(model))


# ------------------------------------------------------------------------------------------------------ errors


@both
@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case.optimizer_error_input.desc)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_errors(case: Any, kind: Method) -> None:
    """What torch asks of all optimizers; the options of these two are in test_options.py."""
    params, kwargs = case.optimizer_error_input.params, case.optimizer_error_input.kwargs
    # a set of parameters: since torch 2.15 a warning
    expected = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
    with expected(case.error_type, match=case.error_regex):
        kind(params, **kwargs, **({"curvature": "batch"} if kind is NGPlus else {}))


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
@pytest.mark.parametrize(
    ("loss", "complains"),
    [
        (
            lambda model: model(torch.randn(4, 1, 4, 4)).sum() * float("nan"),
            pytest.warns(UserWarning, match="not finite"),
        ),
        (
            lambda model: (model(torch.randn(4, 1, 4, 4)).detach() * torch.ones((), requires_grad=True)).sum(),
            pytest.raises(RuntimeError, match="reach"),
        ),
    ],
    ids=["nan loss", "loss that reaches no parameter"],
)
def test_a_step_that_sees_bad_input_changes_nothing_and_can_be_made_again(
    loss: Callable[[nn.Module], Tensor], complains: Any, curvature: str
) -> None:
    model, other = small_net(), small_net()
    optimizer, untouched = (NGPlus(m, lr=1e-3, curvature=curvature) for m in (model, other))
    loss(model).backward()
    with copy.copy(complains):
        optimizer.step()
    assert_same(model, other)
    train(model, optimizer, range(2))
    train(other, untouched, range(2))
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ the step


@every_input
def test_goes_in_the_right_direction(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    before = loss_now(model)
    train(model, optimizer, [0] * 10)
    fell = loss_now(model) < before
    assert fell != optim_input.kwargs.get("maximize", False)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@every_curvature
def test_a_tensor_lr_steps_like_its_number(optim_input: Setting, shape: tuple[int, ...]) -> None:
    model, other = (small_net(dtype=torch.float64) for _ in range(2))
    train(model, build(optim_input, model, lr=1 / 128, weight_decay=0.1), range(2))
    train(other, build(optim_input, other, lr=torch.full(shape, 1 / 128), weight_decay=0.1), range(2))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@every_input
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    optimizer, plain = build(optim_input, model), build(optim_input, other)
    losses = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(loss_of(model, len(losses)))
        losses[-1].backward()
        return losses[-1]

    for k in range(3):
        with torch.no_grad():
            assert optimizer.step(closure) is losses[k]
    assert len(losses) == 3
    train(other, plain, range(3))
    assert_same(model, other)


@every_input
def test_step_leaves_gradients_alone(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    for k in range(3):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        grads = [p.grad for p in model.parameters()]
        before, versions = copies(grads), [grad._version for grad in grads]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert_same(copies(grads), before)
        assert [grad._version for grad in grads] == versions


@pytest.mark.parametrize("forward", [True, False], ids=["from a loss", "set by hand"])
@every_input
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_step_is_noop_for_zero_grads(optim_input: Setting, forward: bool) -> None:
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.0)
    before = copies(model.parameters())
    for _ in range(3):
        if forward:
            (0 * loss_of(model)).backward()
        else:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same(copies(model.parameters()), before)


@every_input
def test_step_is_noop_when_params_have_no_grad(optim_input: Setting) -> None:
    """Neither parameters nor state move, with momentum and weight decay waiting."""
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.1)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    before, state = copies(model.parameters()), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert_same(copies(model.parameters()), before)
    assert_same(optimizer.state_dict(), state)


@every_curvature
def test_parameters_without_gradient_stay_beside_those_that_have_one(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.1)
    train(model, optimizer, range(2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    before, head = copies(model[0].parameters()), copies(model[5].parameters())
    train(model, optimizer, range(2, 5))
    assert_same(copies(model[0].parameters()), before)
    assert all(not torch.equal(p, h) for p, h in zip(model[5].parameters(), head, strict=True))


@every_input
def test_maximize_is_minimising_the_negative(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    train(model, build(optim_input, model, maximize=True), range(4))
    train(other, build(optim_input, other, maximize=False), range(4), sign=-1.0)
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (3, 4), (2, 3, 2, 2)], ids=lambda shape: f"{len(shape)}-D {shape}"
)
@every_curvature
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_parameters_of_any_shape(optim_input: Setting, shape: tuple[int, ...]) -> None:
    """As bare parameters of a module, which no layer rule covers."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape), torch.randn(2)])
    optimizer = build(optim_input, model)

    def loss() -> Tensor:
        return sum((p - 5).square().sum() for p in model)

    before = [float((p.detach() - 5).square().sum()) for p in model]
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    for p, start in zip(model, before, strict=True):
        assert p.isfinite().all()
        assert p.numel() == 0 or float((p.detach() - 5).square().sum()) < start


@every_input
def test_non_contiguous_parameters_step_like_contiguous_ones(optim_input: Setting) -> None:
    model, other = (small_net(dtype=torch.float64) for _ in range(2))  # roots enlarge the last bits of float32
    for module in other.modules():
        for name, p in module.named_parameters(recurse=False):
            spread = p.new_empty(*p.shape, 2).copy_(p.detach()[..., None].expand(*p.shape, 2))[..., 0]
            assert not spread.is_contiguous()
            setattr(module, name, nn.Parameter(spread))
    train(model, build(optim_input, model), range(3))
    train(other, build(optim_input, other), range(3))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@every_curvature
def test_named_parameters_step_like_plain_ones(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    plain = build(optim_input, model.parameters(), model=model)
    named = build(optim_input, other.named_parameters(), model=other)
    train(model, plain, range(3))
    train(other, named, range(3))
    assert_same(model, other)
    assert named.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in other.named_parameters()]

    # Either loads the other's state, and keeps its own way of naming.
    plain_state, named_state = copy.deepcopy(plain.state_dict()), copy.deepcopy(named.state_dict())
    plain.load_state_dict(named_state)
    named.load_state_dict(plain_state)
    assert "param_names" in named.param_groups[0]
    train(model, plain, range(3, 6))
    train(other, named, range(3, 6))
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize("split", ["by layer", "weights and biases"])
@every_curvature
def test_param_groups_lr(optim_input: Setting, split: str) -> None:
    """The same first step for all, times each group's own learning rate."""
    model, other = small_net(), small_net()
    shares = {True: 1.0, False: 3.0}

    def first(name: str, p: nn.Parameter) -> bool:
        return name.startswith("0.") if split == "by layer" else p.dim() > 1

    of_group = {name: shares[first(name, p)] for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if of_group[name] == share], "lr": 0.01 * share}
        for share in shares.values()
    ]
    start = dict(zip(of_group, copies(model.parameters()), strict=True))
    train(model, build(optim_input, groups, model=model), range(1))
    train(other, build(optim_input, other, model=other, lr=0.01), range(1))
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p - start[name], of_group[name] * (q - start[name]), rtol=1e-3, atol=1e-6)


@every_curvature
def test_a_group_with_lr_0_stays(optim_input: Setting) -> None:
    model = small_net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1:].parameters()}]
    before = copies(model.parameters())
    train(model, build(optim_input, groups, model=model), range(3))
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False] * 2 + [True] * 6


@every_curvature
def test_param_groups_weight_decay(optim_input: Setting) -> None:
    """The first step with decay is the one without, less lr * decay * W."""
    model, other = small_net(), small_net()
    kwargs = {"lr": 0.01, "model": model, "weight_decay": 0.0}
    groups = [{"params": model[:3].parameters(), "weight_decay": 0.5}, {"params": model[3:].parameters()}]
    decays = [0.5] * 4 + [0.0] * 4
    start = copies(model.parameters())
    train(model, build(optim_input, groups, **kwargs), range(1))
    train(other, build(optim_input, other.parameters(), **{**kwargs, "model": other}), range(1))
    for p, q, w, decay in zip(model.parameters(), other.parameters(), start, decays, strict=True):
        torch.testing.assert_close(p, q - 0.01 * decay * w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedulers", INFOS[0].scheduler_inputs, ids=["step", "plateau", "warm-up", "polynomial"])
@pytest.mark.parametrize("optim_input", BASIC[::3], ids=lambda optim_input: optim_input.desc)
def test_lr_schedulers(optim_input: Setting, schedulers: list[Any], tensor_lr: bool) -> None:
    model = small_net()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 5e-4}]
    optimizer = build(optim_input, groups, model=model, lr=torch.tensor(1e-3) if tensor_lr else 1e-3)
    running = [scheduler(optimizer) for scheduler in schedulers]
    before = loss_now(model)
    rates = []
    for _ in range(6):
        train(model, optimizer, [0])
        for scheduler in running:
            scheduler.step(*([loss_now(model)] if isinstance(scheduler, ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    assert loss_now(model) < before
    assert rates[0] != rates[-1]
    for first, second in rates:
        assert second == pytest.approx(first / 2)

    # The step takes what the scheduler has left in the group.
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if tensor_lr else 0.0
    stay = copies(model.parameters())
    train(model, optimizer, [0])
    assert_same(copies(model.parameters()), stay)
