"""Checkpoints: an earlier layout loads; a later, damaged or foreign one is refused by name, and nothing half loaded."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from helpers.training import both, equal, floats, parameters, through_file, train_to_zero
from ngplus.optimizers import checkpoints

STORED = Path(__file__).parent / "stored"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def stored(name: str) -> Any:
    """Written by ngplus 0.1.0.dev0, when groups had no ``state_version``."""
    held = torch.load(STORED / "layout0.pt", weights_only=True)[name]
    assert "state_version" not in held["optimizer"]["param_groups"][0]
    return held


@pytest.mark.parametrize("name", ["inverse", "momentum"])
@pytest.mark.parametrize("version", [None, *range(1, checkpoints.VERSION)])
def test_an_earlier_layout_loads(name: str, version: int | None) -> None:
    """It goes on as a run that was not interrupted, with the options that it had."""
    held = stored(name)
    (old,) = held["optimizer"]["param_groups"]
    if version is not None:
        old["state_version"] = version
    model, twin = net(), net()
    for own in (model, twin):
        own.load_state_dict(held["model"])
    options = {key: value for key, value in held["options"].items() if key != "scaling"}
    optimizer, other = (ngplus.NGPlus(own, lr=0.01, update_every=2, **options) for own in (model, twin))
    optimizer.load_state_dict(held["optimizer"])
    group = optimizer.param_groups[0]
    assert (group["step"], group["state_version"]) == (3, checkpoints.VERSION)
    assert group.keys() == other.param_groups[0].keys()  # what is gone is not kept
    assert (group["side"], group["gamma"]) == ("smaller", pytest.approx(0.1))
    kept = held["optimizer"]["state"][0]
    compared = [key for key in ("inverse", "curvature", "momentum_buffer") if key in kept]
    assert len(compared) == (2 if name == "inverse" else 3)
    for key in compared:
        assert torch.equal(optimizer.state[model[0].weight][key], kept[key])
    before = parameters(model)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # in today's layout
    for own, its in ((model, optimizer), (twin, other)):
        train_to_zero(own, its, floats(6, 5), range(3, 6))
        assert its.health().good
    assert not equal(before, parameters(model))
    assert equal(parameters(twin), parameters(model))


@both
def test_an_adaptive_state_of_an_earlier_layout_is_refused(kind: Any) -> None:
    model = net()
    optimizer = kind(model, lr=0.01, update_every=2)
    train_to_zero(model, optimizer, floats(6, 5), range(2))
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    message = "scaling='adaptive'.*NGAdam" if kind is ngplus.NGPlus else "not one of NGAdam: its groups have no betas"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(stored("adaptive")["optimizer"])
    assert optimizer.state_dict()["param_groups"] == before
    train_to_zero(model, optimizer, floats(6, 5), range(2, 4))
    assert optimizer.health().good


def spoilt(change: Any, kind: Any = ngplus.NGPlus) -> Any:
    model = net()
    optimizer = kind(model, lr=0.01)
    train_to_zero(model, optimizer, floats(6, 5), range(2))
    content = copy.deepcopy(optimizer.state_dict())
    change(content)
    return content


def adam() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    train_to_zero(model, optimizer, floats(6, 5), range(1))
    return optimizer.state_dict()


def adamw_of_groups() -> dict[str, Any]:
    """It has other groups, too, which is not what is wrong."""
    return torch.optim.AdamW(ngplus.decay_groups(net(), 0.1)).state_dict()


def set_group(content: Any, **changes: Any) -> None:
    content["param_groups"][0].update(changes)


def removed(**options: Any) -> Any:
    """A state of layout 4 with an option that is gone."""
    return lambda: spoilt(lambda content: set_group(content, state_version=4, **options))


REFUSED: dict[str, tuple[Any, str]] = {
    "a later layout": (lambda: spoilt(lambda c: set_group(c, state_version=99)), "layout 99"),
    "a layout that is none": (lambda: spoilt(lambda c: set_group(c, state_version="new")), "layout 'new'"),
    "Adam's": (adam, "not one of NGPlus: its groups have no damping.* load the model and begin with a new NGPlus"),
    "no state_dict": (lambda: {"model": {}}, "not a state_dict of NGPlus"),
    "a list": (lambda: [1, 2], "not a state_dict of NGPlus"),
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
    "adaptive": (removed(scaling="adaptive"), "scaling='adaptive'.*NGAdam"),
    "relative damping": (removed(damping_mode="relative"), "damping_mode='relative'"),
    "decoupled decay": (removed(decoupled_weight_decay=True), "decoupled_weight_decay=True"),
    "early refreshes": (removed(early_refreshes=True), "early_refreshes=True"),
    "another second beta": (removed(graft="adam", beta2=0.9), "beta2=0.9"),
    "another epsilon": (removed(graft="adam", eps=1e-4), "eps=0.0001"),
    "both sides": (removed(side="both"), "Invalid side: 'both'"),
}


def spoilt_ngadam(change: Any) -> Any:
    return lambda: spoilt(change, ngplus.NGAdam)


REFUSED_BY_NGADAM: dict[str, tuple[Any, str]] = {
    "a later layout": (spoilt_ngadam(lambda c: set_group(c, state_version=99)), "layout 99"),
    "NGPlus's": (lambda: spoilt(lambda c: None), "not one of NGAdam: its groups have no betas"),
    "AdamW's, of groups": (adamw_of_groups, "not one of NGAdam: its groups have no update_every, step"),
    "a bad option": (spoilt_ngadam(lambda c: set_group(c, betas=(0.9, 1.0))), "Invalid beta parameter at index 1"),
    "a bad step": (spoilt_ngadam(lambda c: set_group(c, step=-3)), "step=-3"),
    "not finite": (
        spoilt_ngadam(lambda c: c["state"][0]["left"].fill_(math.nan)),
        "left of parameter 0.weight is not finite",
    ),
    "a wrong type": (
        spoilt_ngadam(lambda c: c["state"][0].update(right_root="x")),
        "right_root of parameter 0.weight is a str",
    ),
}


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [pytest.param(ngplus.NGPlus, *case, id=name) for name, case in REFUSED.items()]
    + [pytest.param(ngplus.NGAdam, *case, id=f"NGAdam: {name}") for name, case in REFUSED_BY_NGADAM.items()],
)
def test_what_does_not_fit_is_refused_and_nothing_is_half_loaded(kind: Any, make: Any, message: str) -> None:
    model = net()
    optimizer = kind(model, lr=0.01)
    train_to_zero(model, optimizer, floats(6, 5), range(3))
    before = copy.deepcopy(optimizer.state_dict())
    content = make()
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.load_state_dict(content)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, entries in before["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(after["state"][i][key]), torch.as_tensor(value)), key
    train_to_zero(model, optimizer, floats(6, 5), range(3, 5))


@both
def test_a_checkpoint_loads_without_executing_code(kind: Any) -> None:
    model = net()
    optimizer = kind(model)
    train_to_zero(model, optimizer, floats(6, 5), range(1))
    optimizer.load_state_dict(through_file(optimizer.state_dict()))

    class Evil:
        def __reduce__(self) -> Any:
            return print, ("this must not be run",)

    with pytest.raises(pickle.UnpicklingError):
        through_file({**optimizer.state_dict(), "extra": Evil()})


def test_no_reader_of_the_package_loads_with_pickle() -> None:
    """Every torch.load says weights_only, every np.load allow_pickle=False; the one Unpickler builds arrays only."""
    source = Path(ngplus.__file__).parent
    for path in source.rglob("*.py"):
        text = path.read_text()
        for call, word in (("torch.load(", "weights_only=True"), ("np.load(", "allow_pickle=False")):
            for part in text.split(call)[1:]:
                assert word in part[:120], f"{path}: {call}"
        assert "pickle.load" not in text, path
