"""The bytes that each method keeps between two steps, by the names under which they lie in its state_dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.record import Setting, Taken
from ngplus.lab.bench.timing import Stopwatch
from ngplus.lab.bench.training import NGADAM, NGPLUS, Contender
from ngplus.lab.optimizer_wrappers import state_bytes

# What SGD and Adam keep as well: it is shown, but it is not curvature.
MOMENTS = ("momentum_buffer", "momentum", "graft", "step")  # and all whose name begins with exp_avg

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sample": ("ngplus", NGPLUS),
    "momentum": ("ngplus", {**NGPLUS, "curvature": "momentum"}),
    "ngadam": ("ngadam", NGADAM),
    "sgd": ("sgd", {}),
    "adamw": ("adamw", {}),
    "kfac": ("kfac", {}),
    "kfac-sample": ("kfac", {"beta": 0.0}),
    "shampoo": ("shampoo", {}),
    "soap": ("soap", {}),
}


def measure(setting: Setting) -> Taken:
    """One training step of each method on ResNet-50, then a look at its state_dict.

    The batch matters to "sample" alone, which keeps U in place of an inverse where that is smaller; all others get a
    small one.
    """
    problem = PROBLEMS["resnet"](setting.quick)
    states: dict[str, dict[str, int]] = {}
    gradients = 0
    for name, (optimizer, hyper) in METHODS.items():
        setting.say(name)
        batch = problem if name == "sample" else replace(problem, loss=problem.small_loss)
        contender = Contender(batch, optimizer, hyper)
        contender.train(Stopwatch(), name)
        gradients = sum(state_bytes(p.grad) for p in contender.model.parameters())
        states[name] = bytes_by_name(contender.optimizer.state_dict())
        del contender
    return Taken({}, {"problem": problem.title, "gradients": gradients, "states": states})


def bytes_by_name(state: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of all tensors under each name, over all parameters."""
    found: dict[str, int] = {}
    for name, tensor in _tensors(state, ""):
        found[name] = found.get(name, 0) + state_bytes(tensor)
    return found


def curvature_bytes(state: Mapping[str, int]) -> int:
    """The bytes that are not momentum or Adam's moments."""
    return sum(size for name, size in state.items() if not any(map(_is_moment, name.split("/"))))


def _is_moment(part: str) -> bool:
    return part in MOMENTS or part.startswith("exp_avg")


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts and lists, named by the keys that are words."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            inner = isinstance(key, str) and key not in ("state", "states", "parts", "param_groups", "groups")
            yield from _tensors(item, f"{name}/{key}".strip("/") if inner else name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, name)
