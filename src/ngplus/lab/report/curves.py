"""Runs as curves: for each optimizer the mean over its seeds, with the range between the worst and the best."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from ngplus.lab.report.summary import rows
from ngplus.lab.runs import Run

COLOURS = 9  # different colours of the page; after them they begin again, with dashes
# An optimizer has the same colour in every report.
_PLACES = {
    name: number
    for number, name in enumerate(
        (
            *("ngadam", "sgd", "adamw", "soap", "ngplus", "muon", "shampoo", "kfac", "adam"),
            *(
                "seng",
                "lars",
                "adagrad",
                "soap-1",
                "kl-soap",
                "kl-shampoo",
                "psgd",
                "splus",
                "schedule-free",
                "ademamix",
            ),
        )
    )
}


@dataclass(frozen=True)
class Curve:
    """Values of one metric. ``low`` and ``high`` are the ends of the spread at each point."""

    optimizer: str
    place: int  # which colour and dash
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    curves: tuple[Curve, ...]
    target: float | None
    logarithmic: bool
    bottom: float  # the part of the values that is worth showing
    top: float


@dataclass(frozen=True)
class Section:
    """The runs of one workload and size. Where their budgets differ, as with published recipes, the caption says so."""

    workload: str
    preset: str
    runs: tuple[Run, ...]
    charts: tuple[Chart, ...]
    places: dict[str, int]  # by optimizer


def groups(runs: Sequence[Run]) -> list[Section]:
    """A section for each workload and preset, in the order in which they first come."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.config.workload, run.config.preset].append(run)
    return [_section(*key, members) for key, members in found.items()]


def _section(workload: str, preset: str, runs: list[Run]) -> Section:
    config = runs[0].config
    goal = config.target if len({run.config.target for run in runs}) == 1 else None
    names = [row.optimizer for row in rows(runs)]
    unknown = [name for name in names if name not in _PLACES]
    places = {name: _PLACES.get(name, len(_PLACES) + unknown.index(name) if name in unknown else 0) for name in names}
    metrics = {"train_loss": "Training loss", "loss": "Validation loss"}
    metrics[config.measure] = f"Validation {config.measure}"
    charts = []
    for metric, title in reversed(metrics.items()):
        for over, x_label in (("step", "steps"), ("seconds", "seconds")):
            curves = [c for row in rows(runs) if (c := _curve(row.runs, metric, over, places)) is not None]
            if curves:
                target = goal if metric == config.measure else None
                rising = metric == config.measure and config.higher_is_better
                log = not rising and _spans_decades(curves)
                bottom, top = _window(curves, target, rising, log)
                charts.append(Chart(title, x_label, tuple(curves), target, log, bottom, top))
    return Section(workload, preset, tuple(runs), tuple(charts), places)


def _curve(runs: Sequence[Run], metric: str, over: str, places: dict[str, int]) -> Curve | None:
    """At each step that any run has looked at, the mean over the runs that have; time is the mean time of that step."""
    values: dict[float, list[float]] = defaultdict(list)
    times: dict[float, list[float]] = defaultdict(list)
    window = max(1, len(runs[0].metrics) // 60) if metric == "train_loss" else 1
    for run in runs:
        recent: list[float] = []
        for row in run.metrics:
            value, seconds = row.get(metric), row.get("seconds")
            if not _finite(value) or not _finite(seconds):
                continue
            recent = [*recent, value][-window:]  # the loss of single batches is too ragged to read
            values[row["step"]].append(statistics.mean(recent))
            times[row["step"]].append(seconds)
    if not values:
        return None
    steps = sorted(values)
    name = runs[0].config.optimizer
    return Curve(
        optimizer=name,
        place=places[name],
        x=tuple(float(step) if over == "step" else statistics.mean(times[step]) for step in steps),
        mean=tuple(statistics.mean(values[step]) for step in steps),
        low=tuple(min(values[step]) for step in steps),
        high=tuple(max(values[step]) for step in steps),
    )


def _window(curves: Sequence[Curve], target: float | None, rising: bool, log: bool) -> tuple[float, float]:
    """The ends of the vertical axis. A run that goes astray must not press the others flat."""
    low, high = min(min(c.low) for c in curves), max(max(c.high) for c in curves)
    first = max(c.mean[0] for c in curves)
    if target is not None and (target > 0 or not log):
        low, high = min(low, target), max(high, target)
    if rising and target is not None:
        low = max(low, target - 0.4 * (target - low))  # what happens near the target decides
    elif not rising and first > 0:
        high = min(high, 1.5 * first)
    if log:
        return low, max(high, 1.01 * low)
    margin = 0.04 * ((high - low) or abs(low) or 1.0)
    return low - margin, high + margin


def _spans_decades(curves: Sequence[Curve]) -> bool:
    low, high = min(min(c.low) for c in curves), max(max(c.high) for c in curves)
    return low > 0 and high / low > 20


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
