"""The layout of an optimizer's state_dict: its version, and the checks before one is loaded.

======= =========================================================================================================
version layout
======= =========================================================================================================
0 to 4  ``NGPlus`` with the former option ``scaling``. Loads if every removed option has its value in ``REMOVED``;
        raises an error that names the option otherwise
5       ``NGPlus``, where ``damping`` may be "auto", and ``NGAdam``
6       ``NGPlus`` with ``relative_damping``
======= =========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ngplus.utils.dtensor import is_dtensor, local

VERSION = 6

# Removed options, with the values that mean what is done today.
REMOVED: dict[str, Any] = {
    "scaling": "inverse", "damping_mode": "absolute", "decoupled_weight_decay": False, "early_refreshes": False,
    "beta2": 0.95, "eps": 1e-8, "second_moment": None, "drift": None, "background": None, "rate_gain": None,
}  # fmt: skip


def check(
    given: Any,
    params: Sequence[Sequence[tuple[str, Tensor]]],
    whose: str,
    check_options: Callable[[Mapping[str, Any]], None],
    needed: Sequence[str],
) -> None:
    """Raises ValueError, before anything changes, if this is not a state_dict of this kind of optimizer and model.

    ``params`` are the parameters of each group with their names, ``check_options`` refuses options that make no
    sense, ``needed`` are options that every group of this optimizer has.
    """
    groups, state = _parts(given, whose)
    for group in groups:
        missing = [key for key in needed if key not in group]
        if missing:
            raise ValueError(
                f"The state_dict is not one of {whose}: its groups have no {', '.join(missing)}. To change the "
                f"optimizer of a run, load the model and begin with a new {whose}"
            )
    if [len(group["params"]) for group in groups] != [len(own) for own in params]:
        raise ValueError(
            f"The state_dict has {[len(group['params']) for group in groups]} parameters in its groups, "
            f"this {whose} has {[len(own) for own in params]}: create it with the same model and "
            "parameter groups as the one that was saved"
        )
    for group, own in zip(groups, params, strict=True):
        saved, names = list(group.get("param_names") or ()), [name for name, _ in own]
        if saved != names and sorted(saved) == sorted(names):
            raise ValueError(
                "The state_dict has its parameters in another order than this optimizer, and state is assigned by "
                "position: pass the parameters in the order in which they were saved"
            )
    for group in groups:
        version = group.get("state_version", 0)
        if not isinstance(version, int) or not 0 <= version <= VERSION:
            raise ValueError(
                f"The state_dict has layout {version!r}, and this ngplus reads layouts 0 to {VERSION}: "
                "load it with the version of ngplus that wrote it, or a newer one"
            )
        needed_by_graft = ("beta2", "eps") if group.get("graft") == "adam" else ()
        for key in ("scaling", "damping_mode", "decoupled_weight_decay", "early_refreshes", *needed_by_graft):
            if version < VERSION and group.get(key, REMOVED[key]) != REMOVED[key]:
                raise ValueError(
                    f"The state_dict has {key}={group[key]!r}, which this version of ngplus does not have: continue "
                    "with the version that wrote it, or start a new optimizer (NGAdam for scaling='adaptive')"
                )
        if not isinstance(group["step"], int) or group["step"] < 0:
            raise ValueError(f"The state_dict is damaged: step={group['step']!r}")
        check_options(group)
    ids = [i for group in groups for i in group["params"]]
    by_id = dict(zip(ids, [named for own in params for named in own], strict=True))
    for i, entries in state.items():
        if i in by_id:
            name, param = by_id[i]
            _check_entries(name, param, entries)


def renewed(group: Mapping[str, Any]) -> dict[str, Any]:
    """A saved group's options under their present names."""
    if group.get("state_version", 0) == VERSION or "betas" in group:  # NGAdam has not changed
        return {**group, "state_version": VERSION}
    old = {"relative_damping": 0.0, **{key: value for key, value in group.items() if key not in REMOVED}}
    if old.get("damping") == "auto":
        old |= {"damping": 0.0, "relative_damping": 0.1}
    if old.get("side") == "auto":
        old["side"] = "smaller"
    if "gamma" in old and old["gamma"] is None:
        old["gamma"] = 1 - old["beta"]
    return {**old, "state_version": VERSION}


def _parts(given: Any, whose: str) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    groups = given.get("param_groups") if isinstance(given, Mapping) else None
    state = given.get("state") if isinstance(given, Mapping) else None
    fit = isinstance(state, Mapping) and isinstance(groups, list | tuple)
    if not fit or not all(isinstance(g, Mapping) and isinstance(g.get("params"), list | tuple) for g in groups or ()):
        raise ValueError(
            f"This is not a state_dict of {whose}: it has no 'state' and 'param_groups'. From a checkpoint with "
            "several entries, pass the optimizer's"
        )
    assert isinstance(state, Mapping)
    return list(groups or ()), state


def _check_entries(name: str, param: Tensor, entries: Any) -> None:
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise ValueError(f"The state_dict is damaged: the state of parameter {name} is not a dict with names as keys")
    for key, value in entries.items():
        if isinstance(value, Tensor):
            if key == "momentum_buffer" and value.shape != param.shape:
                raise ValueError(
                    f"The state_dict does not fit the model: {key} of parameter {name} is {tuple(value.shape)}, "
                    f"the parameter {tuple(param.shape)}"
                )
            if key == "momentum_buffer" and is_dtensor(param) and not is_dtensor(value):
                raise ValueError(
                    f"The state_dict does not fit the model: {key} of parameter {name} is whole, and the parameter is "
                    "sharded. Load it with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )
            if value.is_floating_point() and not bool(local(value).isfinite().all()):
                raise ValueError(f"The state_dict is damaged: {key} of parameter {name} is not finite")
        elif not isinstance(value, int | float | Mapping):
            raise ValueError(f"The state_dict is damaged: {key} of parameter {name} is a {type(value).__name__}")
