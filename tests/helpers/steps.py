"""Small models, one step, and the same step by brute force."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference

# Algorithm 1 to the letter, but for its momentum, damping and update_every.
PAPER: dict[str, Any] = {
    "relative_damping": 0.0, "curvature": "sample", "side": "smaller", "block_size": None, "graft": None,
}  # fmt: skip
EXACT: dict[str, Any] = {**PAPER, "lr": 0.5, "momentum": 0.0, "damping": 0.1, "update_every": 1}
N = 6


def data(*shape: int, outputs: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, *shape, generator=generator), torch.randn(N, outputs, generator=generator)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean()


def one_by_one(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [tuple(t[i : i + 1] for t in tensors) for i in range(len(tensors[0]))]


def brute_force(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = loss_fn,
    skip: str = "\0",
    lr: float = EXACT["lr"],
    damping: float = EXACT["damping"],
    gradients: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The parameters after one step, from a loop over samples: a bias goes with its weight, a norm is two columns.

    ``gradients`` by name, where those of the step are not the means of the samples'.
    """
    grads = reference.per_sample_gradients(model, loss, one_by_one(x, y))
    params = dict(model.named_parameters())
    out: dict[str, Tensor] = {}
    for name in params:
        owner, _, last = name.rpartition(".")
        bias = f"{owner}.bias" if owner else "bias"
        if name in out or skip in name or (last == "bias" and params.get(name[:-4] + "weight") is not None):
            continue
        group = [n for n in (name, bias) if n in params] if last == "weight" else [name]
        group = [n for n in dict.fromkeys(group) if params[n].requires_grad]
        if last == "weight" and bias in params and params[bias].requires_grad and not group:
            group = [bias]
        if not group:
            continue
        lay = reference.columns if params[group[0]].dim() == 1 else reference.rows
        stack = torch.stack([lay(*(g[n] for n in group)) for g in grads])
        gradient = stack.mean(0) if gradients is None else lay(*(gradients[n] for n in group))
        side = reference.side_of(gradient)
        direction = reference.direction(gradient, reference.gfim(stack, side), side, damping)
        step = direction[0].split([1 if params[n].dim() == 1 else params[n][0].numel() for n in group], dim=1)
        for n, part in zip(group, step, strict=True):
            out[n] = (params[n] - lr * part.reshape(params[n].shape)).detach()
    return out


def assert_equal(model: nn.Module, before: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Compares the steps, not the parameters."""
    assert expected
    old, new = dict(before.named_parameters()), dict(model.named_parameters())
    for name, want in expected.items():
        error = reference.relative_error((new[name] - old[name]).detach(), (want - old[name]).detach())
        assert error < tolerance, f"{name}: {error:.2e}"


Train = Callable[[nn.Module, Any, Tensor, Tensor], None]


def one_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()


def several_steps(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(3):
        one_step(model, optimizer, x, y)


def check(model: nn.Module, x: Tensor, y: Tensor, train: Train = one_step, **options: Any) -> ngplus.NGPlus:
    """One step of ``train`` equals brute force, with no warning and with per-sample curvature for every parameter."""
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y)
    optimizer = ngplus.NGPlus(model, **{**EXACT, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="No per-sample curvature")
        train(model, optimizer, x, y)
    assert_equal(model, before, expected)
    return optimizer


LAMBDA = 0.3


def plain(kind: Any, model: Any, **options: Any) -> Any:
    """An optimizer whose update is the direction."""
    return kind(model, **{"lr": 1.0, "momentum": 0.0, "damping": LAMBDA, **options})


def update_of(model: nn.Module, optimizer: Any, *losses: Callable[[], Tensor]) -> dict[str, Tensor]:
    """What a step takes away from each parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    for loss in losses:
        loss().backward()
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------ models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


def conv_net() -> nn.Sequential:
    """Takes ``data(2, 4, 4)``."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


class Recurrent(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = (
            nn.Linear(4, 5),
            nn.Linear(5, 4),
            nn.LayerNorm(4),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.drop(self.down(torch.tanh(self.up(x)))))


class Model(nn.Module):
    """A model from a plain function of itself."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Tensor:
        return self._forward(self, *args)


BOTH = pytest.mark.parametrize("model", [mlp, Recurrent], ids=["mlp", "called thrice"])
Make = Callable[[], nn.Module]
