"""Runs of the same workload and optimizer as one line of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ngplus.lab.runs import Run

TIMES = ("time to target", "ms a step")


def table(runs: Sequence[Run], times: bool = True) -> tuple[list[str], list[list[str]]]:
    """The headings and the lines; columns of times are left out where these mean nothing."""
    scores = sorted({name for run in runs if run.result is not None for name in run.result.scores})
    headings = ["optimizer", "steps to target", "time to target", "at the end", "best", *scores, "ms a step", "state"]
    kept = [k for k, heading in enumerate(headings) if times or heading not in TIMES]
    return [headings[k] for k in kept], [[row.cells(scores)[k] for k in kept] for row in rows(runs)]


@dataclass(frozen=True)
class Row:
    """An optimizer's runs, one for each seed."""

    optimizer: str
    runs: tuple[Run, ...]

    def cells(self, scores: Sequence[str] = ()) -> tuple[str, ...]:
        """``scores``: the names of what was measured once, at the end."""
        results = [run.result for run in self.runs if run.result is not None]
        reached = [r for r in results if r.steps_to_target is not None and r.seconds_to_target is not None]
        share = "" if len(reached) == len(self.runs) else f" ({len(reached)} of {len(self.runs)})"
        percent = _is_share(self.runs[0])
        steps = [float(r.steps_to_target) for r in reached if r.steps_to_target is not None]
        seconds = [r.seconds_to_target for r in reached if r.seconds_to_target is not None]
        diverged = sum(r.status == "diverged" for r in results)
        label = self.optimizer + (f" ({diverged} diverged)" if diverged else "")
        return (
            label,
            f"{statistics.mean(steps):.0f}{share}" if steps else "not reached",
            f"{duration(statistics.mean(seconds))}{share}" if seconds else "not reached",
            spread([r.final for r in results], percent),
            spread([r.best for r in results], percent),
            *(spread([r.scores.get(name) for r in results]) for name in scores),
            _mean([r.milliseconds_per_step for r in results], ".1f"),
            size(max((r.state_bytes for r in results), default=0)),
        )

    def rank(self) -> tuple[float, float, float]:
        """The order of the table: most runs at the target, fewest steps to it, best measure at the end."""
        results = [run.result for run in self.runs if run.result is not None]
        steps = [r.steps_to_target for r in results if r.steps_to_target is not None]
        finals = [r.final for r in results if r.final is not None]
        sign = -1.0 if self.runs[0].config.higher_is_better else 1.0
        final = sign * statistics.mean(finals) if finals else math.inf
        return (-len(steps) / len(self.runs), statistics.mean(steps) if steps else math.inf, final)


def rows(runs: Sequence[Run]) -> list[Row]:
    """A line for each optimizer, the fastest first."""
    names = dict.fromkeys(run.config.optimizer for run in runs)
    found = [Row(name, tuple(run for run in runs if run.config.optimizer == name)) for name in names]
    return sorted(found, key=Row.rank)


def caption(runs: Sequence[Run], times: bool = True) -> str:
    """What the table's columns are, and under what conditions they were made."""
    config = runs[0].config
    seeds = sorted({run.config.seed for run in runs})
    sign = "≥" if config.higher_is_better else "≤"
    percent = _is_share(runs[0])
    target = f"{100 * config.target:g} %" if percent else f"{config.target:g}"
    return (
        f"Measure: {config.measure} on the validation set, mean ± standard deviation of {len(seeds)} seed(s); target "
        f"{sign} {target}.\n{config.steps} steps of batch {config.batch_size}, {config.schedule} schedule"
        f"{f' with a warm-up of {config.warmup}' if config.warmup else ''}. "
        f"{'Time: forward, backward and step, without evaluation. ' if times else ''}State: of the optimizer."
    )


def spread(values: Sequence[float | None], percent: bool = False) -> str:
    """Mean, and standard deviation where there is more than one value."""
    known = [100 * v if percent else v for v in values if v is not None]
    if not known:
        return "–"
    form = ".2f" if percent else ".4g"
    text = format(statistics.mean(known), form)
    deviation = f" ± {format(statistics.stdev(known), '.2f' if percent else '.2g')}" if len(known) > 1 else ""
    return f"{text}{deviation}{' %' if percent else ''}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def _is_share(run: Run) -> bool:
    return run.config.measure in ("accuracy", "top1", "top-1")


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [v for v in values if v is not None]
    return format(statistics.mean(known), form) if known else "–"
