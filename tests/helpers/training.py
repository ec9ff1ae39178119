"""Small networks, the optimizers to train them with, and exact comparisons of what comes out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ngplus import NGAdam, NGPlus

Method = Callable[..., Any]  # makes an optimizer of a model
METHODS: dict[str, Method] = {
    "sample": partial(NGPlus, curvature="sample"),
    "momentum": partial(NGPlus, curvature="momentum"),
    "batch": partial(NGPlus, curvature="batch"),
    "NGAdam": NGAdam,
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both = pytest.mark.parametrize("kind", [NGPlus, NGAdam])


def described(method: Any) -> str | None:
    """A test's id; None for what is no method."""
    if isinstance(method, partial):
        return "-".join([method.func.__name__, *(f"{key}={value}" for key, value in method.keywords.items())])
    return method.__name__ if isinstance(method, type) else None


# ------------------------------------------------------------------------------------------------ a classification


def small_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices of 4 x 10, 10 x 17 (low rank for batches of 4), 10 x 2 (right side) and 3 x 11."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, k: int = 0, samples: slice = slice(None)) -> Tensor:
    """The loss on the k-th batch of four samples, or on a part of it."""
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(4, 1, 4, 4, generator=generator), torch.randint(3, (4,), generator=generator)
    return F.cross_entropy(model(x[samples].to(next(model.parameters()).dtype)), y[samples])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], sign: float = 1.0) -> None:
    """Trains on the batches of these numbers."""
    for k in steps:
        optimizer.zero_grad()
        (sign * loss_of(model, k)).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ any model

Inputs = Callable[[int], Tensor]  # the inputs of a step


def floats(*shape: int) -> Inputs:
    return lambda step: torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def indices(top: int, *shape: int) -> Inputs:
    return lambda step: torch.randint(top, shape, generator=torch.Generator().manual_seed(step))


def train_to_zero(model: nn.Module, optimizer: Any, inputs: Inputs, steps: Iterable[int]) -> None:
    """Trains outputs towards zero, in the precision of the model."""
    for step in steps:
        x = inputs(step)
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).dtype) if x.is_floating_point() else x).square().mean().backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------ comparisons


def parameters(model: nn.Module) -> list[Tensor]:
    """Copies; whole ones of sharded parameters."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def all_finite(model: nn.Module) -> bool:
    return all(bool(p.isfinite().all()) for p in model.parameters())


def equal(a: Any, b: Any) -> bool:
    """Tensors in the same order, or the parameters of modules, bit for bit."""
    a, b = (list(x.parameters()) if isinstance(x, nn.Module) else x for x in (a, b))
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Exactly equal: modules by their parameters, nested dicts and lists by their leaves, tensors with their dtype."""
    if isinstance(a, nn.Module):
        a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, f"{path}: {a.dtype} and {b.dtype}"
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"
    else:
        assert a == b, path


class Unchanged:
    """Holds copies of a model's parameters; leaving the block checks that they are still what they were."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            assert_same({name: p.detach() for name, p in self.model.named_parameters()}, self.before)


def through_file(content: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def failing_eigh(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    """torch.linalg.eigh converges for matrices of other types alone."""
    real = torch.linalg.eigh

    def eigh(x: Tensor) -> Any:
        if x.dtype in dtypes:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return real(x)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
