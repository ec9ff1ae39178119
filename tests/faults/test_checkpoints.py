"""Checkpoints: an earlier layout loads; a later, damaged or foreign one is refused by name, and nothing half loaded."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus.optimizers import checkpoints

STORED = Path(__file__).parent / "stored"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for k in steps:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", ["adaptive", "inverse", "momentum"])
def test_a_checkpoint_from_before_there_were_versions_loads(name: str) -> None:
    """The file was written by ngplus 0.1.0.dev0, when groups had no ``state_version``."""
    held = torch.load(STORED / "layout0.pt", weights_only=True)[name]
    assert "state_version" not in held["optimizer"]["param_groups"][0]
    model = net()
    model.load_state_dict(held["model"])
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=2, **held["options"])
    optimizer.load_state_dict(held["optimizer"])
    group = optimizer.param_groups[0]
    assert (group["step"], group["state_version"]) == (3, checkpoints.VERSION)
    kept = held["optimizer"]["state"][0]
    for key in ("basis", "exp_avg", "inverse", "curvature"):
        if key in kept:
            assert torch.equal(optimizer.state[model[0].weight][key], kept[key])
    before = parameters(model)
    train(model, optimizer, range(3, 6))
    assert optimizer.health().good
    assert not same(before, parameters(model))


def spoilt(change: Any) -> Any:
    model = net()
    optimizer = ngplus.NGPlus(model, lr=0.01, momentum=0.9, scaling="inverse")
    train(model, optimizer, range(2))
    content = copy.deepcopy(optimizer.state_dict())
    change(content)
    return content


def adam() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, range(1))
    return optimizer.state_dict()


def set_group(content: Any, **changes: Any) -> None:
    content["param_groups"][0].update(changes)


REFUSED: dict[str, tuple[Any, str]] = {
    "a later layout": (lambda: spoilt(lambda c: set_group(c, state_version=99)), "layout 99"),
    "a layout that is none": (lambda: spoilt(lambda c: set_group(c, state_version="new")), "layout 'new'"),
    "Adam's": (adam, "not of NGPlus: its groups have no damping"),
    "no state_dict": (lambda: {"model": {}}, "not the state_dict of an optimizer"),
    "a list": (lambda: [1, 2], "not the state_dict"),
    "another model's": (
        lambda: ngplus.NGPlus(nn.Linear(2, 2)).state_dict(),
        r"has \[2\] parameters in its groups, this NGPlus has \[4\]",
    ),
    "a bad option": (lambda: spoilt(lambda c: set_group(c, damping=-1.0)), "Invalid damping"),
    "a bad step": (lambda: spoilt(lambda c: set_group(c, step=-3)), "step=-3"),
    "not finite": (
        lambda: spoilt(lambda c: c["state"][0]["inverse"].fill_(math.nan)),
        "inverse of parameter 0.weight is not finite",
    ),
    "a wrong shape": (
        lambda: spoilt(lambda c: c["state"][0].update(momentum_buffer=torch.zeros(7))),
        r"momentum_buffer of parameter 0.weight is \(7,\)",
    ),
    "a wrong type": (
        lambda: spoilt(lambda c: c["state"][0].update(inverse="x")),
        "inverse of parameter 0.weight is a str",
    ),
    "no dict": (lambda: spoilt(lambda c: c["state"].update({0: [1]})), "state of parameter 0.weight"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_half_loaded(make: Any, message: str) -> None:
    model = net()
    optimizer = ngplus.NGPlus(model, lr=0.01, momentum=0.9, scaling="inverse")
    train(model, optimizer, range(3))
    before = copy.deepcopy(optimizer.state_dict())
    content = make()
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(content)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, entries in before["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(after["state"][i][key]), torch.as_tensor(value)), key
    train(model, optimizer, range(3, 5))


def test_a_checkpoint_loads_without_executing_code() -> None:
    model = net()
    optimizer = ngplus.NGPlus(model)
    train(model, optimizer, range(1))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("this must not be run",)

    evil = io.BytesIO()
    torch.save({**optimizer.state_dict(), "extra": Evil()}, evil)
    evil.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(evil, weights_only=True)


def test_no_reader_of_the_package_loads_with_pickle() -> None:
    """Every torch.load says weights_only, every np.load allow_pickle=False; the one Unpickler builds arrays only."""
    source = Path(ngplus.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        for call, word in (("torch.load(", "weights_only=True"), ("np.load(", "allow_pickle=False")):
            for part in text.split(call)[1:]:
                assert word in part[:120], f"{path}: {call}"
        assert "pickle.load" not in text, path
