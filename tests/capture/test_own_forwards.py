"""Modules that do other things than the rule of their class expects, and outputs that are used in unusual ways.

On a refresh as on any other pass, outputs and gradients stay those of the model alone; where the samples cannot be told
apart, mini-batch curvature takes their place, and plan() says why.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ngplus
from helpers import reference as ref
from helpers.steps import PAPER


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))


class PaddedInside(nn.Conv1d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(F.pad(x, (2, 0)), weight, bias)


class Shortened(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :, :-2]


class Heads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), 2, -1)


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Silent(nn.Linear):
    def forward(self, *, rows: int = 5) -> Tensor:  # type: ignore[override]
        return super().forward(torch.ones(rows, self.in_features))


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Places(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]).expand(len(ids), -1))


class Unwrapped(nn.Embedding):
    def forward(self, index: Tensor) -> Tensor:
        return super().forward(index)[0]


class Count(nn.Embedding):
    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return super().forward(torch.arange(length))


class Called(nn.Module):
    """A module called in a way of its own, between two plain layers."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(width, 2)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.inner, self.first(x)).flatten(1))


def ids(x: Tensor) -> Tensor:
    return (x.detach().abs() * 10).long() % 20


MODULES: dict[str, Callable[[], nn.Module]] = {
    "pads": lambda: Called(Causal(2, 4, 3), lambda m, x: m(x.view(-1, 2, 3)), 12),
    "pads inside": lambda: Called(PaddedInside(2, 4, 3), lambda m, x: m(x.view(-1, 2, 3)), 12),
    "cuts": lambda: Called(Shortened(2, 4, 3, padding=2), lambda m, x: m(x.view(-1, 2, 3)), 12),
    "views": lambda: Called(Heads(6, 4), lambda m, x: m(x), 4),
    "gives two": lambda: Called(Pair(6, 4), lambda m, x: m(x)[0], 4),
    "takes nothing": lambda: Called(Silent(6, 4), lambda m, x: x[:, :4] * m(), 4),
    "permutes": lambda: Called(ChannelNorm(2), lambda m, x: m(x.view(-1, 2, 3)), 6),
    "looks up places": lambda: Called(
        Places(7, 2), lambda m, x: x.view(-1, 3, 2) + m(ids(x.view(-1, 3, 2)[..., 0])), 6
    ),
    "drops a dimension": lambda: Called(Unwrapped(7, 2), lambda m, x: x.view(-1, 3, 2) + m(torch.arange(3)[None]), 6),
    "takes a number": lambda: Called(Count(7, 2), lambda m, x: x.view(-1, 3, 2) + m(3), 6),
}


# The rule is applied to the call of torch's function inside the forward, whatever is around it.
BY_FUNCTION = {"pads", "pads inside", "cuts", "views", "gives two", "permutes"}


def passed(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output and the gradients of a pass."""
    model.zero_grad()
    output = model(x)
    output.square().mean().backward()
    return output.detach(), [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("options", [{}, {"curvature": "momentum"}, {"side": "right"}], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_a_forward_that_no_rule_fits(double: None, kind: str, options: dict[str, Any]) -> None:
    model, x = MODULES[kind](), torch.randn(5, 6)
    output, gradients = passed(model, x)
    optimizer = ngplus.NGPlus(model, lr=1e-3, **options)
    found, of_refresh = passed(model, x)
    torch.testing.assert_close(found, output, rtol=0, atol=0)
    torch.testing.assert_close(of_refresh, gradients)
    optimizer.step()
    for _ in range(3):
        passed(model, x)
        optimizer.step()
    rows = {row.name: row for row in optimizer.plan()}
    assert rows["first.weight"].source == "sample"
    inner = rows["inner.weight"]
    assert inner.source == ("sample" if kind in BY_FUNCTION else "batch")
    assert bool(inner.note) == (kind not in BY_FUNCTION)


@pytest.mark.parametrize("kind", sorted(BY_FUNCTION))
def test_what_is_done_with_inputs_and_outputs_is_exact(double: None, kind: str) -> None:
    model, x = MODULES[kind](), torch.randn(5, 6)
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, **PAPER)
    passed(model, x)
    optimizer.step()
    own = [model.inner.weight, model.inner.bias]
    grads = [torch.autograd.grad(model(row[None]).square().mean(), own) for row in x]
    stack = torch.stack([ref.rows(*each) for each in grads])
    wanted = ref.gfim(stack, "left")[0]
    assert ref.relative_error(optimizer.curvature("inner.weight").matrix, wanted) < 1e-12


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@ngplus.register_layer(Odd)
class OddRule(ngplus.layers.LinearRule):
    def factors(self, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError


def test_an_error_of_the_rule_for_the_class_itself_is_not_hidden() -> None:
    model = Odd(3, 2)
    optimizer = ngplus.NGPlus(model)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, 3)).sum().backward()
    assert optimizer.plan()["weight"].source == "sample"


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x)[0]
        return attended


class Shifted(nn.MultiheadAttention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:  # type: ignore[override]
        return super().forward(0.5 * query + 1, key, value)


def shift_inputs(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return (0.5 * args[0] + 1, *args[1:])


def shift_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (2 * output[0] + 1, *output[1:])


def double_gradients(module: nn.Module, given: Any, got: Any) -> Any:
    return tuple(None if g is None else 2 * g for g in given)


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("how", ["subclass", "pre-hook", "hook in front", "backward hook", "parametrized", "tensor"])
def test_attention_with_something_around_it(double: None, how: str) -> None:
    """The rule replaces torch's function alone, so hooks on the module see what they would see without it."""
    watched = SelfAttention((Shifted if how == "subclass" else nn.MultiheadAttention)(8, 2, batch_first=True))
    if how == "parametrized":
        nn.utils.parametrizations.weight_norm(watched.attention.out_proj)
    alone = copy.deepcopy(watched)
    optimizer = ngplus.NGPlus(watched)
    for model in (watched, alone):
        if how == "backward hook":
            model.attention.register_full_backward_hook(double_gradients)
        if how == "tensor":
            weight = model.attention.out_proj.weight.detach()
            del model.attention.out_proj.weight
            model.attention.out_proj.weight = weight
        if how == "pre-hook":
            model.attention.register_forward_pre_hook(shift_inputs)
        elif how == "hook in front":
            model.attention.register_forward_hook(shift_output, prepend=True)
    x = torch.randn(4, 5, 8)
    torch.testing.assert_close(passed(watched, x), passed(alone, x))
    optimizer.step()
    attention = [row for row in optimizer.plan() if "original" not in row.name and "out_proj" not in row.name]
    assert attention
    wanted = {"batch", "none"} if how in ("subclass", "backward hook") else {"sample"}
    assert {row.source for row in attention} <= wanted
    assert passed(watched, x)[0].shape == x.shape


class Positions(nn.Module):
    """Position vectors, looked up once for all samples, and something that is done with them."""

    def __init__(self, used: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(20, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.used = used

    def forward(self, index: Tensor) -> Tensor:
        positions = self.positions(torch.arange(index.shape[1])[None])
        return self.head(self.used(self.tokens(index), positions).double())


def with_first_set(p: Tensor) -> Tensor:
    p[:, 0] = 0
    return p


ADDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "x - p": lambda x, p: x - p,
    "x * p": lambda x, p: x * p,
    "x += p": lambda x, p: x.clone().add_(p),
    "expand": lambda x, p: x + p.expand(len(x), -1, -1),
    "twice": lambda x, p: (x + p) * p,
    "to and fro": lambda x, p: x + p.to(x.device).contiguous(),
}
OTHERWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "repeat": lambda x, p: x + p.repeat(len(x), 1, 1),
    "view": lambda x, p: x + p.view(p.shape[1:]),
    "sum": lambda x, p: x + p.sum(0),
    "norm": lambda x, p: x + p / p.norm(),
    "first": lambda x, p: x + p[0],
    "cat": lambda x, p: x + torch.cat([p, p]).mean(0),
    "also its mean": lambda x, p: x + p + p.mean(),
    "another precision": lambda x, p: x.float() + p.float(),
    "written to": lambda x, p: x + p.clone().mul_(2),
    "written to in place": lambda x, p: x + p.mul_(2),
    "a part of a copy set": lambda x, p: x + with_first_set(p.contiguous()),
}


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("how", [*ADDED, *OTHERWISE])
def test_vectors_that_all_samples_share(double: None, how: str) -> None:
    """Exact where they are added to each sample; never another output or gradient, whatever is done with them."""
    model = Positions({**ADDED, **OTHERWISE}[how])
    index, wanted = torch.randint(20, (5, 6)), torch.randn(5, 6, 3)
    alone = passed(model, index)
    optimizer = ngplus.NGPlus(model, lr=0.0, damping=0.3, **PAPER)
    torch.testing.assert_close(passed(model, index), alone)
    model.zero_grad()
    (model(index) - wanted).square().mean().backward()
    optimizer.step()
    row = optimizer.plan()["positions.weight"]
    if how in OTHERWISE:
        assert row.source == "batch"
        assert row.note
        return
    assert row.source == "sample"
    each = [
        torch.autograd.grad((model(i[None]) - y).square().mean(), model.positions.weight)[0]
        for i, y in zip(index, wanted, strict=True)
    ]
    expected = torch.stack([g.mT @ g for g in each]).mean(0)
    assert ref.relative_error(optimizer.curvature("positions.weight").matrix, expected) < 1e-12


@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_many_gradients_at_once_and_derivatives_forward(layer: str) -> None:
    """As of a vectorised Jacobian: they are for no step, and pass by."""
    first = nn.Flatten() if layer == "linear" else nn.Conv2d(1, 2, 3)
    model = nn.Sequential(first, nn.Flatten(), nn.Linear(16 if layer == "linear" else 8, 2))
    optimizer, x = ngplus.NGPlus(model, update_every=1), torch.randn(5, 1, 4, 4)
    plain = copy.deepcopy(model)
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        found, wanted = (
            torch.autograd.grad(m(x).sum(0), list(m.parameters()), torch.eye(2), is_grads_batched=True)
            for m in (model, plain)
        )
        torch.testing.assert_close(found, wanted)
        jacobians = [
            torch.autograd.functional.jacobian(lambda v, m=m: m(v).sum(0), x, vectorize=True) for m in (model, plain)
        ]
        torch.testing.assert_close(*jacobians)
        with forward_ad.dual_level():
            tangents = [
                forward_ad.unpack_dual(m(forward_ad.make_dual(x, torch.ones_like(x)))).tangent for m in (model, plain)
            ]
            torch.testing.assert_close(*tangents)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


class Gated(nn.BatchNorm1d):
    """As its rule has it as long as the gate is 1."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("gate", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate


def test_a_forward_that_fits_its_rule_at_first_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Gated(4))
    optimizer = ngplus.NGPlus(model, update_every=1)
    sources = []
    for gate in (1.0, 3.0):
        model[2].gate.fill_(gate)
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        sources.append([row.source for row in optimizer.plan()])
    assert sources == [["sample", "sample"], ["sample", "batch"]]


def test_positions_inside_a_checkpoint(double: None) -> None:
    """The forward that is run again in backward takes them as it did at first."""

    class Checkpointed(Positions):
        def forward(self, index: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, index, use_reentrant=False)
            return found

    model, index = Checkpointed(lambda x, p: x * p), torch.randint(20, (5, 6))
    alone = passed(model, index)
    optimizer = ngplus.NGPlus(model)
    torch.testing.assert_close(passed(model, index), alone)
    optimizer.step()
    assert optimizer.plan()["positions.weight"].source == "sample"
