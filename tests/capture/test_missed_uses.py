"""The check of the first refresh: do the parts that were captured add up to the gradients? What is left over comes from
a use that no hook has seen, and such a matrix gets mini-batch curvature."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, Model, assert_equal, brute_force, data, loss_fn, one_step

pytestmark = pytest.mark.usefixtures("double")


def step_that_leaves_out(model: nn.Module, part: str) -> ngplus.NGPlus:
    """A step that is exact but for a part of the model, of which it warns."""
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, skip=f"{part}.")
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match=f"{part}.weight"):
        one_step(model, optimizer, x, y)
    assert_equal(model, before, expected)
    return optimizer


@pytest.mark.parametrize("scale", [1.0, 0.2])
def test_functional_use_of_a_weight_is_noticed(scale: float) -> None:
    """No hook sees F.linear: the step says so, and takes the mini-batch's curvature."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(x) + scale * F.linear(x.flip(1), m.a.weight)

    model = Model(forward, a=nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, **EXACT)
    with pytest.warns(UserWarning, match=r"a\.weight"):
        one_step(model, optimizer, *data(4))
    assert optimizer.plan()["a.weight"].source == "batch"


def test_a_module_that_is_never_called() -> None:
    """Its weight is used by a function alone."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(F.linear(x, m.a.weight)))

    model = Model(forward, a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 3))
    optimizer = step_that_leaves_out(model, "a")
    assert optimizer.plan()["a.weight"].note.startswith("its module was not called")


class Unit(nn.LayerNorm):
    """Its weight is no factor of the output, and its bias is none of it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape) * F.normalize(self.weight, dim=0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_is_looked_at_without_its_bias(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), Unit(3, bias=bias))
    optimizer = step_that_leaves_out(model, "1")
    assert [row.source for row in optimizer.plan()] == ["sample", "batch"]


def test_a_bias_whose_gradient_comes_later() -> None:
    """It is looked at then."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x))

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    x, y = data(4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss_fn(model(x), y).backward(inputs=[model.a.weight, *model.b.parameters()])
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}
    optimizer.zero_grad()
    (loss_fn(model(x), y) + model.a.bias.sum()).backward()
    with pytest.warns(UserWarning, match="a.weight"):
        optimizer.step()
    assert [row.source for row in optimizer.plan()] == ["batch", "sample"]


def by_hand(model: nn.Module, loss: Tensor) -> None:
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g


def into_zeros(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad(set_to_none=False)
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
        p.grad = g if p.grad is None else p.grad.add_(g)


def decayed(model: nn.Module, loss: Tensor) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad.mul_(0.9)
    loss.backward()


def after_a_failure(model: nn.Module, loss: Tensor) -> None:
    """Of a backward pass, half-way through the model."""
    x, y = data(4)

    def fail(grad: Tensor) -> None:
        raise KeyError("stop")

    model.zero_grad()
    h = model[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(KeyError):
        loss_fn(model(x), y).backward()
    h.remove()
    loss_fn(model(x), y).backward()


BY_OTHER_WAYS = {"autograd.grad": by_hand, "into zeros": into_zeros, "decayed": decayed, "failed": after_a_failure}


@pytest.mark.parametrize("way", BY_OTHER_WAYS)
def test_gradients_that_are_not_those_of_the_captured_pass_alone(way: str) -> None:
    """No verdict comes of comparing them; one comes of the next pass that can tell."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Plain(5, 3))
    x, y = data(4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    for _ in range(3):
        before = copy.deepcopy(model)
        BY_OTHER_WAYS[way](model, loss_fn(model(x), y))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        expected = brute_force(before, x, y, gradients=gradients)
        optimizer.step()
        if way != "failed":  # whose samples are counted in, as they are in .grad
            assert_equal(model, before, expected)
        assert {row.source for row in optimizer.plan()} == {"sample"}
    optimizer.zero_grad()
    (loss_fn(model(x), y) + model[2].weight.sum()).backward()
    with pytest.warns(UserWarning, match="2.weight"):
        optimizer.step()
    assert [row.source for row in optimizer.plan()] == ["sample", "batch"]


class Plain(nn.Linear):
    """As its class has it, by a forward of its own, which is looked at in every refresh."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)
