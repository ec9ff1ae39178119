"""Wrappers that give the training loop one interface to several optimizers, or to one from another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Trainer(Protocol):
    """What the training loop asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    def zero_grad(self) -> None: ...
    def step(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


class Together:
    """Several optimizers, each with parameters of its own, as one."""

    def __init__(self, *parts: Trainer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


class AsMatrices:
    """Muon on convolution weights as well: it sees a view of each as the matrix (out, in * kernel)."""

    def __init__(self, params: list[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.params = params
        self.views = [nn.Parameter(p.detach().flatten(1), requires_grad=True) for p in params]
        self.inner = make(self.views)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        for param, view in zip(self.params, self.views, strict=True):
            view.grad = None if param.grad is None else param.grad.flatten(1)
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class PlainState:
    """pytorch-optimizer's Shampoo keeps objects in its state; here they are saved and loaded as their tensors."""

    TENSORS = ("statistics", "pre_conditioners", "momentum")

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        states = [
            {k: v if isinstance(v, Tensor) else self._tensors(v) for k, v in self.inner.state.get(p, {}).items()}
            for group in self.param_groups
            for p in group["params"]
        ]
        return {"groups": groups, "states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        for param, saved in zip(params, state_dict["states"], strict=True):
            param.grad = torch.zeros_like(param) if saved else None  # init_group makes state for what has a gradient
        for group, saved in zip(self.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
            self.inner.init_group(group)  # type: ignore[attr-defined]
        for param, saved in zip(params, state_dict["states"], strict=True):
            param.grad = None
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    self.inner.state[param][key] = value
                else:
                    vars(self.inner.state[param][key]).update(value)

    def _tensors(self, thing: object) -> dict[str, Any]:
        return {key: value for key, value in vars(thing).items() if key in self.TENSORS}


def state_bytes(state: object) -> int:
    """The bytes of all tensors in an optimizer's state_dict."""
    if isinstance(state, Tensor):
        values = state._values() if state.is_sparse else state
        return values.numel() * values.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(value) for value in state)
    return 0
