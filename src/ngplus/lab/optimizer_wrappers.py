"""Wrappers that give the training loop one interface to several optimizers, or to one from another library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


class Wrapper:
    """An optimizer as it is."""

    def __init__(self, inner: Trainer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def optimizer(self) -> Any:
        """The optimizer itself, of whatever library."""
        return self.inner.optimizer if isinstance(self.inner, Wrapper) else self.inner

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class AsMatrices(Wrapper):
    """Convolution weights for a method of matrices: it sees a view of each as the matrix (out, in * kernel)."""

    def __init__(self, params: list[nn.Parameter], make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.params = params
        self.views = [nn.Parameter(p.detach().flatten(1)) if p.ndim > 2 else p for p in params]
        super().__init__(make(self.views))

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        for param, view in zip(self.params, self.views, strict=True):
            if view is not param:
                view.grad = None if param.grad is None else param.grad.flatten(1)
        super().step()


class Averaged(Wrapper):
    """An optimizer whose ``eval`` puts averaged weights in the place of those that it trains."""

    @contextmanager
    def averages(self) -> Iterator[None]:
        """The averaged weights; afterwards those of before, bit for bit, which ``train`` gives up to rounding."""
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                for param, value in zip(params, before, strict=True):
                    param.copy_(value)


class ExactState(Wrapper):
    """HeavyBall's state, in the dtypes that it was saved in. Of what it keeps beside, a pickled function among it, only
    the counters are saved and loaded; the rest is the new optimizer's own."""

    COUNTERS = "inner_group"

    def step(self) -> None:
        for group in self.param_groups:
            group["base_lr"] = group["lr"]  # it warns of a schedule that it does not make itself
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return self._plain(self.inner.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(self._plain(state_dict))  # torch casts float64 to the parameter's dtype
        params = [p for group in self.param_groups for p in group["params"]]
        for k, param in enumerate(params):
            if k in state_dict["state"]:
                self.optimizer.state[param] = _copied(state_dict["state"][k], param.device)

    def _plain(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "heavyball": {self.COUNTERS: dict(state_dict["heavyball"][self.COUNTERS])}}


def _copied(value: Any, device: torch.device) -> Any:
    """With copies of its tensors on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(part, device) for key, part in value.items()}
    return type(value)(_copied(part, device) for part in value) if isinstance(value, list | tuple) else value


class PlainState(Wrapper):
    """pytorch-optimizer's Shampoo keeps objects in its state; here they are saved and loaded as their tensors."""

    TENSORS = ("statistics", "pre_conditioners", "momentum")

    def state_dict(self) -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        states = [
            {k: v if isinstance(v, Tensor) else self._tensors(v) for k, v in self.optimizer.state.get(p, {}).items()}
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
            self.optimizer.init_group(group)
        for param, saved in zip(params, state_dict["states"], strict=True):
            param.grad = None
            for key, value in saved.items():
                if isinstance(value, Tensor):
                    self.optimizer.state[param][key] = value
                else:
                    vars(self.optimizer.state[param][key]).update(value)

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
