"""Runs as curves: for each optimizer the mean over its seeds, with the range between the worst and the best.

A run that diverged is in no mean and in no range: it is a line of its own, which ends where it leaves the others.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
class Line:
    """Values of one metric in one run."""

    seed: int
    diverged: bool
    x: tuple[float, ...]
    y: tuple[float, ...]
    end: tuple[float, float] | None = None  # of a run that diverged: its last point in the chart


@dataclass(frozen=True)
class Curve:
    """Values of one metric over the seeds that did not diverge. ``low`` and ``high`` are the ends of the spread."""

    optimizer: str
    place: int  # which colour and dash
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: tuple[Line, ...]


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

    @property
    def name(self) -> str:
        return self.workload if self.preset == "small" else f"{self.workload} ({self.preset})"


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
                shown = tuple(_cut(curve, bottom, top, rising, log) for curve in curves)
                charts.append(Chart(title, x_label, shown, target, log, bottom, top))
    return Section(workload, preset, tuple(runs), tuple(charts), places)


def _curve(runs: Sequence[Run], metric: str, over: str, places: dict[str, int]) -> Curve | None:
    """At each step at which any run was evaluated, the mean over the runs that were, and their mean time."""
    values: dict[float, list[float]] = defaultdict(list)
    times: dict[float, list[float]] = defaultdict(list)
    window = max(1, len(runs[0].metrics) // 60) if metric == "train_loss" else 1
    seeds = []
    for run in runs:
        looks = [row for row in run.metrics if _finite(row.get(metric)) and _finite(row.get("seconds"))]
        found = [row[metric] for row in looks]
        # the loss of single batches is too ragged to read
        smooth = [statistics.mean(found[max(0, k + 1 - window) : k + 1]) for k in range(len(found))]
        diverged = run.result is not None and run.result.status == "diverged"
        if looks:
            seeds.append(Line(run.config.seed, diverged, tuple(float(row[over]) for row in looks), tuple(smooth)))
        if not diverged:
            for row, value in zip(looks, smooth, strict=True):
                values[row["step"]].append(value)
                times[row["step"]].append(row["seconds"])
    if not seeds:
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
        seeds=tuple(seeds),
    )


def _window(curves: Sequence[Curve], target: float | None, rising: bool, log: bool) -> tuple[float, float]:
    """The limits of the vertical axis, chosen so that a run that diverges does not flatten the others."""
    low, high = _range(curves)
    first = max(c.mean[0] if c.mean else c.seeds[0].y[0] for c in curves)
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


def _cut(curve: Curve, bottom: float, top: float, rising: bool, log: bool) -> Curve:
    """Each run that diverged ends with the first value by which it leaves the chart for the worse."""
    edge = bottom if rising else top

    def beyond(y: float) -> bool:
        return y < edge if rising else y > edge

    def cut(line: Line) -> Line:
        x, y = line.x, line.y
        leaves = next((k for k in range(1, len(y)) if beyond(y[k]) and not beyond(y[k - 1])), None)
        if leaves is None:
            return replace(line, end=(x[-1], y[-1]) if bottom <= y[-1] <= top else None)
        before, after, limit = (_logarithm(v) if log else v for v in (y[leaves - 1], y[leaves], edge))
        part = (limit - before) / (after - before)
        crossing = (1 - part) * x[leaves - 1] + part * x[leaves]
        return replace(line, x=x[: leaves + 1], y=y[: leaves + 1], end=(crossing, edge))

    return replace(curve, seeds=tuple(cut(line) if line.diverged else line for line in curve.seeds))


def _logarithm(value: float) -> float:
    return math.log(max(value, 1e-300))


def _spans_decades(curves: Sequence[Curve]) -> bool:
    low, high = _range(curves)
    return low > 0 and high / low > 20


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The least and the greatest value of the runs that did not diverge; of all runs where all of them did."""
    lows, highs = [y for c in curves for y in c.low], [y for c in curves for y in c.high]
    every = [y for c in curves for line in c.seeds for y in line.y]
    return min(lows or every), max(highs or every)


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
