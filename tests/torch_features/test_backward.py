"""Several backward passes, and other ways to a gradient: what .grad holds is what curvature counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.steps import BOTH, Make, check, data, loss_fn, mlp, one_step

pytestmark = pytest.mark.usefixtures("double")


@BOTH
def test_two_losses_on_one_graph(model: Make) -> None:
    """Two backward passes through the same forward pass bring the same samples, not more of them."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        error = (model(x) - y).square()
        error[:, 0].mean().backward(retain_graph=True)
        error[:, 1:].sum(1).mean().backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_one_loss_backward_twice(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y) / 2
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_forward_passes_without_backward(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        model(x[:2] * 3)
        loss = loss_fn(model(x), y)
        model(x[:4] + 1)
        loss.backward()
        model(x)
        optimizer.step()

    check(model(), *data(4), train)


@BOTH
def test_forward_pass_that_fails(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(2, 9))
        one_step(model, optimizer, x, y)

    check(model(), *data(4), train)


@BOTH
def test_zero_grad_between_forward_and_backward(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


DISCARD = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad to zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "grad.zero_": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()],
    "grad = zeros": lambda model, optimizer: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
}


def in_parts(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The layers of a Sequential by themselves."""
    return lambda x: reduce(lambda h, layer: layer(h), model, x)  # type: ignore[arg-type, no-any-return]


@BOTH
@pytest.mark.parametrize("discard", DISCARD)
def test_gradients_thrown_away(model: Make, discard: str) -> None:
    """A backward pass whose gradients are dropped leaves no trace, whoever drops them."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_fn(model(x.flip(0) * 2), y).backward()
        DISCARD[discard](model, optimizer)
        loss_fn(model(x), y).backward()
        optimizer.step()

    check(model(), *data(4), train)


@pytest.mark.parametrize("parts", [False, True], ids=["model", "parts"])
@pytest.mark.parametrize("retain", [False, True], ids=["", "retained"])
@pytest.mark.parametrize("when", ["before forward", "before backward"])
@pytest.mark.parametrize("discard", DISCARD)
def test_gradients_thrown_away_at_any_time(discard: str, when: str, retain: bool, parts: bool) -> None:
    """Also where a graph was retained, and where the parts of the model are called in its place."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        call = in_parts(model) if parts else model
        thrown = loss_fn(call(x.flip(0) * 2), y)
        if when == "before forward":
            thrown.backward(retain_graph=retain)
            DISCARD[discard](model, optimizer)
            loss = loss_fn(call(x), y)
        else:
            loss = loss_fn(call(x), y)
            thrown.backward(retain_graph=retain)
            DISCARD[discard](model, optimizer)
        loss.backward()
        optimizer.step()

    check(mlp(), *data(4), train)


@pytest.mark.parametrize("discard", DISCARD)
def test_the_same_graph_after_its_gradients_were_thrown_away(discard: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        output = model(x)
        (3 * loss_fn(output, y.flip(0))).backward(retain_graph=True)
        DISCARD[discard](model, optimizer)
        loss_fn(output, y).backward()
        optimizer.step()

    check(mlp(), *data(4), train)


@BOTH
def test_gradients_that_stay_are_not_looked_at(model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """To see whether they are zero would be to wait for an accelerator."""

    def look(grad: Tensor) -> bool:
        raise AssertionError

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        for i in range(0, len(x), 2):
            (loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3).backward()
        optimizer.step()

    monkeypatch.setattr("ngplus.capture.collector._is_zero", look)
    check(model(), *data(4), train)


@BOTH
def test_gradient_of_the_input_alone(model: Make) -> None:
    """Adversarial examples: autograd.grad for the input passes through the layers, and concerns no parameter."""

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        probe = x.clone().requires_grad_()
        torch.autograd.grad(loss_fn(model(probe), y) * 3, probe)
        one_step(model, optimizer, x, y)

    def grad_after_zero_grad(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        probe = x.clone().requires_grad_()
        torch.autograd.grad(loss_fn(model(probe), y) * 3, probe)
        loss_fn(model(x), y).backward()
        optimizer.step()

    check(model(), *data(4), train)
    check(model(), *data(4), grad_after_zero_grad)


@BOTH
@pytest.mark.parametrize("kind", ["autograd.grad", "backward(inputs=)", "closure"])
def test_other_ways_to_a_gradient(model: Make, kind: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            return loss

        params = list(model.parameters())
        if kind == "closure":
            assert optimizer.step(closure) > 0
            return
        if kind == "autograd.grad":
            for p, g in zip(params, torch.autograd.grad(loss_fn(model(x), y), params), strict=True):
                p.grad = g
        else:
            loss_fn(model(x), y).backward(inputs=params)
        optimizer.step()

    check(model(), *data(4), train)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph() -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    check(mlp(), *data(4), train)
