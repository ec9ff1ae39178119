"""What capture sees is what training does: the update equals brute force however the model is called."""

from __future__ import annotations

import copy
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers.steps import (
    EXACT,
    Block,
    Model,
    Recurrent,
    assert_equal,
    brute_force,
    check,
    data,
    loss_fn,
    mlp,
    one_step,
)

pytestmark = pytest.mark.usefixtures("double")


# ------------------------------------------------------------------------------------------------ in place


def test_in_place_activations_and_residuals() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.relu_(m.a(x))
        z = m.b(h)
        z += h
        z.mul_(1.5).tanh_()
        return m.c(z)

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 3)), *data(4))


def test_norm_then_in_place_activation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    check(model, *data(4))


def test_in_place_change_of_an_input_that_torch_has_not_saved() -> None:
    """With a frozen weight torch needs no input, so a model may overwrite it; so it may with NG+."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x * 2
        z = m.a(h)
        h.add_(1.0)
        return m.b(z + h)

    model = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3))
    model.a.weight.requires_grad_(False)
    check(model, *data(4))


class Shift(nn.Module):
    """A layer that no rule knows and that saves nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_in_place_change_of_the_input_of_an_unknown_layer() -> None:
    """Per-sample curvature may be lost, the training step may not."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        z = m.shift(h)
        h.add_(1.0)
        return m.b(z * 2 + h)

    model = Model(forward, a=nn.Linear(4, 4), shift=Shift(), b=nn.Linear(4, 3))
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, skip="shift")
    one_step(model, ngplus.NGPlus(model, **EXACT), x, y)
    assert_equal(model, before, expected)


# ------------------------------------------------------------------------------------------------ several uses


def test_module_called_several_times() -> None:
    check(Recurrent(), *data(4))


def test_module_called_with_unlike_numbers_of_positions() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)).mean(1) + m.a(x.mean(1)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(5, 4))


def test_shared_module() -> None:
    block = Block()
    check(nn.Sequential(block, nn.Linear(4, 4), block, nn.Linear(4, 3)), *data(4))


def test_output_that_the_loss_does_not_use() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a(x.flip(0))
        return m.b(torch.tanh(m.a(x)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(4))


def test_flattened_positions() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(torch.tanh(m.a(x.flatten(0, 1))))
        return m.b(h).unflatten(0, (len(x), -1)).mean(1)

    check(Model(forward, a=nn.Linear(4, 4), norm=nn.LayerNorm(4), b=nn.Linear(4, 3)), *data(5, 4))


@pytest.mark.parametrize("kind", ["states", "words"])
@pytest.mark.parametrize("rows", [1, 5])
def test_flattened_output(kind: str, rows: int) -> None:
    """A language model that gives its logits as [batch * length, words]."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x)).flatten(0, 1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output.unflatten(0, (len(target), -1)).mean(1), target)

    x, y = data(rows, 4)
    words = kind == "words"
    x = (10 * x[..., 0]).long() % 11 if words else x
    model = Model(forward, a=nn.Embedding(11, 4) if words else nn.Linear(4, 4), b=nn.Linear(4, 3))
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, loss)
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss(model(x), y).backward()
    optimizer.step()
    assert_equal(model, before, expected)
    assert {row.source for row in optimizer.plan()} == {"sample"}


def test_several_calls_in_one_backward_pass() -> None:
    """Nothing says whether both calls have the same samples, as those of a Siamese network, or others."""
    model = mlp()
    x, y = data(4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    (loss_fn(model(x), y) + loss_fn(model(-x), y)).backward()
    with pytest.warns(UserWarning, match="several calls of its module take part in one backward pass"):
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}


class TwoOutputs(nn.Module):
    """A layer that no rule knows, with two outputs: the second alone depends on ``v``."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.w.mT, x @ self.v.mT


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_unknown_layer_with_two_outputs() -> None:
    """Exact, or mini-batch curvature: never a part of the gradient taken for the whole."""

    def forward(m: Any, x: Tensor) -> Tensor:
        first, second = m.two(torch.tanh(m.a(x)))
        return first + second.square()

    model = Model(forward, a=nn.Linear(4, 4), two=TwoOutputs())
    x, y = data(4)
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    optimizer = ngplus.NGPlus(model, **EXACT)
    one_step(model, optimizer, x, y)
    sampled = {n: e for n, e in expected.items() if optimizer.plan()[n].source != "batch"}
    assert "a.weight" in sampled
    assert_equal(model, before, sampled)


# ------------------------------------------------------------------------------------------------ the same outputs


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", ["attention", "encoder layer", "decoder layer"])
def test_a_refresh_changes_no_output(layer: str, batch_first: bool) -> None:
    """Dropout on, the same seed: a step that watches computes what a step that does not watch computes."""
    make = {
        "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=batch_first),
        "encoder layer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=batch_first),
        "decoder layer": lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.3, batch_first=batch_first),
    }[layer]
    model = make()
    x, _ = data(5, 4)
    count = {"attention": 3, "encoder layer": 1, "decoder layer": 2}[layer]

    def run() -> Tensor:
        torch.manual_seed(7)
        output = model(*[x] * count)
        return (output[0] if isinstance(output, tuple) else output).detach()

    plain = run()
    optimizer = ngplus.NGPlus(model, **EXACT)
    assert torch.allclose(run(), plain, rtol=0, atol=1e-12)
    assert optimizer.plan()


class Memory(bytearray):
    """Bytes that can be seen to go."""


class InMemory(torch.autograd.Function):
    """The identity, whose output lies in memory of its own."""

    held: ClassVar[list[weakref.ref[Memory]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = Memory(x.numel() * x.element_size())
        InMemory.held.append(weakref.ref(memory))
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape).copy_(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def test_captured_inputs_go_when_their_layer_is_done() -> None:
    """Backward has freed the input of the last layer when it gets to the first one, with a refresh as without."""

    class Known(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return InMemory.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    model = nn.Sequential(nn.Linear(5, 4), Known(), nn.Linear(4, 2))
    optimizer = ngplus.NGPlus(model, update_every=2)
    alive: list[bool] = []

    def look_back(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda grad: alive.append(InMemory.held[-1]() is not None))

    model[0].register_forward_hook(look_back)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 5)).square().mean()
        assert InMemory.held[-1]() is not None
        loss.backward()
        optimizer.step()
    assert alive == [False] * 4
