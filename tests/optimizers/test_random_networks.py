"""Properties over random layer settings, random small networks and random options: always the reference's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.steps import PAPER

Draw = Callable[..., Any]


def cases(count: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, suppress_health_check=slow)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    flat = output.reshape(len(target), -1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1]).to(flat)
    return ((flat * weights).tanh() + flat.square() * target).sum(1).mean()


def units_of(model: nn.Module) -> list[tuple[tuple[str, ...], Callable[..., Tensor]]]:
    """The matrices of a model of known layers, by the paper's rules and none of the package's code."""
    units = []
    for name, module in model.named_modules():
        own = tuple(f"{name}.{n}" if name else n for n, p in module._parameters.items() if p is not None)
        if not own:
            continue
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            units.append((own, ref.grouped(module.groups)))
        elif isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d):
            units.append((own, ref.transposed(module.groups)))
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.InstanceNorm1d):
            units.append((own, ref.columns))
        else:
            units.append((own, ref.rows))
    return units


def check(model: nn.Module, x: Tensor, side: str = "smaller") -> None:
    """gfim() of every parameter against the loop over samples."""
    target = torch.rand(len(x), 1, dtype=torch.float64)
    grads = ref.per_sample_gradients(model, loss_fn, [(x[i : i + 1], target[i : i + 1]) for i in range(len(x))])
    found = ngplus.gfim(model, loss_fn, x, target, side=side)
    for names, lay in units_of(model):
        stack = torch.stack([lay(*(g[n] for n in names)) for g in grads])
        taken = ref.side_of(stack[0]) if side == "smaller" else side
        wanted = ref.gfim(stack, taken)
        for name in names:
            assert found[name].side == taken
            got = found[name].matrix.reshape(wanted.shape)
            assert float((got - wanted).norm()) <= 1e-6 * float(wanted.norm()) + 1e-14, name


@st.composite
def convolutions(draw: Draw) -> tuple[nn.Module, Tensor]:
    dim = draw(st.sampled_from([1, 2]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 4))
    per_dim = st.integers(1, 3)
    kernel = tuple(draw(per_dim) for _ in range(dim))
    stride = tuple(draw(per_dim) for _ in range(dim))
    dilation = tuple(draw(per_dim) for _ in range(dim))
    size = [draw(st.integers(1, 7)) for _ in range(dim)]
    bias = draw(st.booleans())
    if draw(st.booleans()):
        padding: Any = tuple(draw(st.integers(0, 3)) for _ in range(dim))
        mode = draw(st.sampled_from(["zeros", "zeros", "replicate", "circular", "reflect"]))
        if mode in ("circular", "reflect"):
            assume(all(p < s for p, s in zip(padding, size, strict=True)))
        if draw(st.integers(0, 3)) == 0 and all(s == 1 for s in stride):
            padding = "same"
            reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            assume(mode == "zeros" or all(r < s for r, s in zip(reach, size, strict=True)))
        options = {"padding": padding, "padding_mode": mode}
        kind = nn.Conv1d if dim == 1 else nn.Conv2d
        out = [
            1 if padding == "same" else (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, p, d, k, t in zip(
                size, padding if padding != "same" else size, dilation, kernel, stride, strict=True
            )
        ]
        assume(all(o >= 1 for o in out))
    else:
        kind = nn.ConvTranspose1d if dim == 1 else nn.ConvTranspose2d
        padding = tuple(draw(st.integers(0, 2)) for _ in range(dim))
        extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        options = {"padding": padding, "output_padding": extra}
        out = [
            (s - 1) * t - 2 * p + d * (k - 1) + e + 1
            for s, t, p, d, k, e in zip(size, stride, padding, dilation, kernel, extra, strict=True)
        ]
        assume(all(o >= 1 for o in out))
    torch.manual_seed(draw(st.integers(0, 2**16)))
    layer = kind(inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups, bias=bias, **options)
    return layer.double(), torch.randn(draw(st.integers(1, 4)), inputs, *size, dtype=torch.float64)


@cases(250)
@given(convolutions(), st.sampled_from(["smaller", "left", "right"]))
def test_convolutions_of_any_setting(case: tuple[nn.Module, Tensor], side: str) -> None:
    check(*case, side=side)


@st.composite
def networks(draw: Draw) -> tuple[nn.Module, Tensor]:
    """A chain of layers of fitting sizes; now and then the same layer twice in a row."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    samples, length = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    width = draw(st.integers(1, 5))
    layers: list[nn.Module] = []
    if draw(st.booleans()):
        rows = draw(st.integers(1, 7))
        layers.append(nn.Embedding(rows, width, padding_idx=draw(st.sampled_from([None, 0]))))
        x = torch.randint(0, rows, (samples, length))
    else:
        x = torch.randn(samples, length, width, dtype=torch.float64)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "linear", "norm", "tanh", "relu", "repeat", "conv"]))
        if kind == "linear":
            after = draw(st.integers(1, 6))
            layers.append(nn.Linear(width, after, bias=draw(st.booleans())))
            width = after
        elif kind == "norm":
            layers.append(nn.LayerNorm(width, bias=draw(st.booleans())))
        elif kind == "tanh":
            layers.append(nn.Tanh())
        elif kind == "relu":
            layers += [nn.Linear(width, width), nn.LeakyReLU(inplace=True)]
        elif kind == "repeat":
            shared = nn.Linear(width, width)
            layers += [shared, nn.Tanh(), shared]
        else:
            layers.append(nn.Conv1d(length, length, 3, padding=1))
    assume(any(True for layer in layers for _ in layer.parameters()))
    return nn.Sequential(*layers).double(), x


@cases(250)
@given(networks(), st.sampled_from(["smaller", "smaller", "left", "right"]))
def test_random_networks(case: tuple[nn.Module, Tensor], side: str) -> None:
    check(*case, side=side)


@st.composite
def option_sets(draw: Draw) -> dict[str, Any]:
    """Settings that are exact, by whatever way the direction is found."""
    return {
        "solver": draw(st.sampled_from(["auto", "dense", "woodbury"])),
        "block_size": draw(st.sampled_from([None, 1, 2, 3, 50])),
        "update_every": draw(st.integers(1, 3)),
        "momentum": draw(st.sampled_from([0.0, 0.5])),
        "damping": draw(st.floats(0.01, 10.0)),
        "side": draw(st.sampled_from(["smaller", "left", "right"])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "lr": draw(st.floats(0.001, 0.1)),
    }


class PlainNGPlus:
    """The whole method on per-sample gradients, dense and slow."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model, self.o, self.k = model, options, 0
        self.kept: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def step(self, x: Tensor, target: Tensor) -> None:
        samples = [(x[i : i + 1], target[i : i + 1]) for i in range(len(x))]
        grads = ref.per_sample_gradients(self.model, loss_fn, samples)
        params = dict(self.model.named_parameters())
        for names, lay in units_of(self.model):
            stack = torch.stack([lay(*(g[n] for n in names)) for g in grads])
            side = ref.side_of(stack[0]) if self.o["side"] == "smaller" else self.o["side"]
            if self.k % self.o["update_every"] == 0:
                full = ref.gfim(stack, side)
                owner = torch.arange(full.shape[-1]) // (self.o["block_size"] or full.shape[-1])
                self.kept[names[0]] = full * (owner[:, None] == owner[None, :])
            direction = ref.direction(stack.mean(0), self.kept[names[0]], side, self.o["damping"])
            weights = lay(*(params[n].detach() for n in names))
            step = direction + self.o["weight_decay"] * weights
            if self.o["momentum"]:
                old = self.buffers.get(names[0])
                step = self.buffers[names[0]] = step if old is None else self.o["momentum"] * old + step
            self._write(names, lay, weights - self.o["lr"] * step, params)
        self.k += 1

    @staticmethod
    def _write(names: tuple[str, ...], lay: Callable[..., Tensor], matrix: Tensor, params: dict[str, Any]) -> None:
        """The inverse of a layout, by laying out the numbers of the entries."""
        total = sum(params[n].numel() for n in names)
        numbers = list(torch.arange(total).split([params[n].numel() for n in names]))
        places = lay(*(k.reshape(params[n].shape) for k, n in zip(numbers, names, strict=True)))
        flat = torch.empty(total, dtype=matrix.dtype)
        flat[places.flatten()] = matrix.flatten()
        with torch.no_grad():
            for n, part in zip(names, flat.split([params[n].numel() for n in names]), strict=True):
                params[n].copy_(part.reshape(params[n].shape))


@cases(100)
@given(networks(), option_sets())
def test_training_with_random_options(case: tuple[nn.Module, Tensor], options: dict[str, Any]) -> None:
    model, x = case
    plain = PlainNGPlus(copy.deepcopy(model), options)
    optimizer = ngplus.NGPlus(model, **{**PAPER, **options})
    for _ in range(3):
        target = torch.rand(len(x), 1, dtype=torch.float64)
        optimizer.zero_grad()
        loss_fn(model(x), target).backward()
        # A norm layer of zeros multiplies gradients by 1/sqrt(eps): then no way to solve keeps the digits asked for.
        assume(all(float(p.grad.square().sum()) < 1e8 * options["damping"] for p in model.parameters()))
        optimizer.step()
        plain.step(x, target)
    for ours, theirs in zip(model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
