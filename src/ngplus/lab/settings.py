"""The settings of a run: the workload's preset, the optimizer's defaults, tuned values, and the user's options."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngplus.lab.optimizers import check_name
from ngplus.lab.terminal import count

if TYPE_CHECKING:
    from ngplus.lab.presets import Tuned
    from ngplus.lab.runs import Config
    from ngplus.lab.workloads import Preset, Task, Workload


def open_preset(
    workload: str, preset: str, changes: Mapping[str, Any], sets: Sequence[str], optimizer: str | None
) -> tuple[Workload, Preset]:
    """The workload, and its preset with the user's changes."""
    from ngplus.lab import workloads
    from ngplus.lab.runs import plain

    chosen = workloads.get(workload)
    workload = chosen.name
    check_name(preset, chosen.presets, f"preset of {workload}")
    if not math.isfinite(changes.get("target", 0.0)):
        raise ValueError(f"--target must be a finite number, not {changes['target']}")
    size = replace(chosen.presets[preset], **changes)
    options: dict[str, Any] = plain(size.options)
    known = known_options(chosen, preset)
    for key, value in assignments(sets):
        if not is_hyper(key, optimizer, list(known), workload):
            *path, last = key.split(".")
            place, sample = options, known
            for part in path:
                check_name(part, sample, f"group of options of {workload}")
                place, sample = place.setdefault(part, {}), sample[part]
                if not isinstance(sample, dict) or not isinstance(place, dict):
                    raise ValueError(
                        f"The option {part!r} of {workload} is not a group of options: use --set {part}=VALUE"
                    )
            check_name(last, sample, f"option of {'.'.join([workload, *path])}")
            check_option(key, value, sample[last])
            place[last] = value
    return chosen, replace(size, options=options)


def known_options(workload: Workload, preset: str) -> dict[str, Any]:
    """The options that a workload has, each with a value that shows its kind; None where any value is accepted."""
    known: dict[str, Any] = {}
    for size in (*workload.presets.values(), workload.presets[preset]):
        known = _merged(known, size.options)
    return _merged(known, workload.optional)


def _merged(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, group by group; where both have a value, the other's."""
    both = {
        key: _merged(first[key], value) if isinstance(value, Mapping) and isinstance(first.get(key), Mapping) else value
        for key, value in other.items()
    }
    return {**first, **both}


def check_option(key: str, value: Any, sample: Any) -> None:
    """ValueError for a value of another kind than the sample: 1.5 for a width would silently become 1."""
    kinds: list[tuple[Any, str]] = [  # bool comes first, since it is an int as well
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        (list | tuple, "a list, as in [1, 2]"),
        (Mapping, "a group of options, as in {...}"),
    ]
    anything: tuple[Any, str] = (object, "")
    kind, words = next((pair for pair in kinds if isinstance(sample, pair[0])), anything)
    wanted: Any = int | float if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind not in (bool, object)):
        raise ValueError(f"--set {key} takes {words}, not {json.dumps(value)}")
    if kind is Mapping:
        for name, entry in value.items():
            check_name(name, sample, f"option of {key}")
            check_option(f"{key}.{name}", entry, sample[name])
    if isinstance(sample, list | tuple) and sample:
        for entry in value:
            check_option(f"each number of {key}", entry, sample[0])


def open_task(workload: Workload, size: Preset, data: Path | None) -> Task:
    """The workload with its data; options that it cannot work with are an error in words."""
    from ngplus.lab.loop import with_settings

    with with_settings(workload.name):
        return workload.open(size, data)


def configure(
    workload: Workload,
    preset: str,
    size: Preset,
    optimizer: str,
    *,
    seed: int,
    lr: float | None = None,
    sets: Sequence[str] = (),
    hyper: Mapping[str, Any] | None = None,
    presets: Path | None = None,
) -> Config:
    """All settings of a run: the optimizer's defaults, over them the tuned ones, over them the user's.

    ``hyper`` replaces the tuned ones in a trial. A trial runs in one process: only the first process evaluates.
    """
    from ngplus.lab import optimizers, processes, schedules
    from ngplus.lab.presets import Tuned, lookup
    from ngplus.lab.runs import Config

    if hyper is not None and processes.started() > 1:
        raise ValueError(
            "ngplus tune does not run under torchrun: start it several times with the same --storage instead"
        )
    entry = optimizers.get(optimizer)
    tuned = lookup(workload.name, preset, optimizer, presets) or _recipe(workload, preset, optimizer) or Tuned()
    own = {
        key: value for key, value in assignments(sets) if is_hyper(key, optimizer, list(size.options), workload.name)
    }
    entry.check(own)
    if lr is not None:
        if not math.isfinite(lr):
            raise ValueError(f"--lr must be a finite number, not {lr}")
        own["lr"] = lr
    original = workload.presets[preset]
    # what the user has asked for comes before a recipe's own
    run = {key: value for key, value in tuned.run.items() if getattr(size, key, None) == getattr(original, key, None)}
    size = replace(size, **{key: value for key, value in run.items() if key != "damping_decay"})
    if entry.schedule is not None and "schedule" not in run and size.schedule == original.schedule:
        size = replace(size, schedule=entry.schedule)
    schedules.parse(size.schedule)
    chosen = {**(tuned.hyper if hyper is None else hyper), **own}
    settings = {**entry.defaults, "lr": entry.defaults["lr"] * size.rate, **chosen}
    if size.decay is not None and "weight_decay" in entry.options() and "weight_decay" not in chosen:
        settings["weight_decay"] = size.decay / settings["lr"]
    return Config(
        workload=workload.name,
        preset=preset,
        optimizer=optimizer,
        hyper=settings,
        seed=seed,
        steps=size.steps,
        batch_size=size.batch_size,
        evaluate_every=size.evaluate_every,
        target=size.target,
        measure=workload.measure,
        higher_is_better=workload.higher_is_better,
        schedule=size.schedule,
        warmup=size.warmup,
        options=size.options,
        damping_decay=float(run.get("damping_decay", 1.0)),
        processes=processes.started(),
        tuning=tuned.tuning if hyper is None and not own else None,
    )


def _recipe(workload: Workload, preset: str, optimizer: str) -> Tuned | None:
    """A published recipe that the workload knows."""
    from ngplus.lab.presets import Tuned

    recipe = getattr(workload, "recipes", {}).get(preset, {}).get(optimizer)
    return None if recipe is None else Tuned(dict(recipe.hyper), dict(recipe.run), {"recipe": "as published"})


def listed(workloads: str) -> list[str]:
    """Names separated by commas."""
    names = list(dict.fromkeys(name.strip() for name in workloads.split(",") if name.strip()))
    if not names:
        raise ValueError("No workload is named: see --help for the names")
    return names


def assignments(sets: Sequence[str]) -> list[tuple[str, Any]]:
    """KEY=VALUE with a value in JSON; what is not JSON is a string."""
    pairs = []
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, as in --set width=32, not {text!r}")
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        if isinstance(parsed, float) and not math.isfinite(parsed):
            raise ValueError(f"--set {key} takes a finite number, not {parsed}")
        pairs.append((key, parsed))
    return pairs


def is_hyper(key: str, optimizer: str | None, options: list[str], workload: str) -> bool:
    """Is it the optimizer's, or else an option of the workload? ValueError for neither."""
    from ngplus.lab import optimizers

    known = optimizers.get(optimizer).options() if optimizer is not None else []
    if key in known:
        return True
    owner = f"{optimizer} or {workload}" if optimizer is not None else workload
    optimizers.check_name(key.split(".")[0], [*known, *options], f"setting of {owner}")
    return False


def check_presets(folder: Path | None) -> None:
    """Raises ValueError if the folder of --presets does not exist."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--presets must be an existing folder, not {folder}")


def check_out(folder: Path) -> None:
    """Raises ValueError if a file is in the place of the folder for runs."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(
                f"--out {folder} cannot be created, since {place} is a file: choose a new folder, or one with runs"
            )


def use_threads(threads: int | None, preset: str) -> None:
    """Small models gain nothing by a second thread, and lose much where another process wants the core."""
    if threads is None and preset == "small":
        threads = 1
    if threads is not None:
        import torch

        cores = os.cpu_count() or 1
        if threads > (most := max(16, 4 * cores)):
            raise ValueError(f"--threads {threads} is too large for {count(cores, 'core')}: use {most} at most")
        torch.set_num_threads(threads)
