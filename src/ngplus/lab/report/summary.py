"""Runs of the same workload and optimizer as one line of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ngplus.lab.amounts import amount
from ngplus.lab.runs import Result, Run, is_number

TIMES = ("time to target", "ms a step")
SHARED = ("steps", "batch_size", "target", "schedule", "warmup", "options", "processes")  # by runs that are compared
MACHINE = ("threads", "processor", "device")  # of the environment


def table(runs: Sequence[Run], times: bool = True) -> tuple[list[str], list[list[str]]]:
    """The headings and the lines; columns of times are left out where these mean nothing."""
    scores = score_names(runs)
    headings = ["optimizer", "steps to target", "time to target", "at the end", "best", *scores, "ms a step", "state"]
    kept = [k for k, heading in enumerate(headings) if times or heading not in TIMES]
    return [headings[k] for k in kept], [[row.cells(scores)[k] for k in kept] for row in rows(runs)]


def sort_keys(runs: Sequence[Run]) -> list[list[str]]:
    """By what each cell of the table but the first sorts: numbers with spaces between, empty where there is none. The
    optimizers that reach the target with most of their seeds come first in the columns of the target."""
    found = []
    for row in rows(runs):
        numbers = row.numbers(score_names(runs))
        missed = 1 - numbers["reached"] / numbers["runs"]
        to_target = [numbers["steps_to_target"], numbers["seconds_to_target"]]
        others = [numbers["final"], numbers["best"], *numbers["scores"].values()]
        others += [numbers["milliseconds_per_step"], numbers["state_bytes"]]
        keys = ["" if value is None else f"{missed!r} {value!r}" for value in to_target]
        found.append(keys + ["" if value is None else repr(value) for value in others])
    return found


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """The table and its conditions, for a program. ``runs`` are of one workload and size."""
    config, scores = runs[0].config, score_names(runs)
    conditions = {name: getattr(config, name) for name in ("workload", "preset", "measure", "higher_is_better")}
    targets = {run.config.target for run in runs}
    return {
        **conditions,
        "target": targets.pop() if len(targets) == 1 else None,
        "differing": differing(runs),
        "optimizers": [row.numbers(scores) for row in rows(runs)],
    }


def score_names(runs: Sequence[Run]) -> list[str]:
    """What was measured once, at the end."""
    return sorted({name for run in runs if run.result is not None for name in run.result.scores})


@dataclass(frozen=True)
class Row:
    """An optimizer's runs, one for each seed."""

    optimizer: str
    runs: tuple[Run, ...]

    def cells(self, scores: Sequence[str] = ()) -> tuple[str, ...]:
        """``scores``: the names of what was measured once, at the end."""
        reached = self.reached()
        share = "" if len(reached) == len(self.runs) else f" ({len(reached)} of {len(self.runs)})"
        percent = _is_share(self.runs[0])
        steps, seconds, counted = self._steps(), self._seconds(), self._counted()
        return (
            self.optimizer + self.notes(),
            f"{statistics.mean(steps):.0f}{share}" if steps else "not reached",
            f"{duration(statistics.mean(seconds))}{share}" if seconds else "not reached",
            spread([r.final for r in counted], percent),
            spread([r.best for r in counted], percent),
            *(spread([r.scores.get(name) for r in counted]) for name in scores),
            _shown_mean([r.milliseconds_per_step for r in counted], ".1f"),
            amount(max(r.state_bytes for r in counted), "B") if counted else "–",
        )

    def notes(self) -> str:
        """The runs that did not go as planned, in brackets."""
        found = [f"{number} {what}" for what, number in self.exceptions().items() if number]
        return f" ({', '.join(found)})" if found else ""

    def numbers(self, scores: Sequence[str] = ()) -> dict[str, Any]:
        """The cells for a program: means over the seeds, None where there is no value."""
        counted = self._counted()
        return {
            "optimizer": self.optimizer,
            "runs": len(self.runs),
            "reached": len(self.reached()),
            **{what.replace(" ", "_"): number for what, number in self.exceptions().items()},
            "steps_to_target": mean(self._steps()),
            "seconds_to_target": mean(self._seconds()),
            "final": mean([r.final for r in counted]),
            "best": mean([r.best for r in counted]),
            "scores": {name: mean([r.scores.get(name) for r in counted]) for name in scores},
            "milliseconds_per_step": mean([r.milliseconds_per_step for r in counted]),
            "state_bytes": max((r.state_bytes for r in counted), default=None),
        }

    def exceptions(self) -> dict[str, int]:
        """How many runs did not go as planned, by what happened."""
        results = [run.result for run in self.runs]
        return {
            "diverged": sum(r is not None and r.status == "diverged" for r in results),
            "lost the target again": sum(r is not None and r.collapsed and r.status != "diverged" for r in results),
            "interrupted": sum(r is not None and r.status == "interrupted" for r in results),
            "without result": sum(r is None for r in results),
        }

    def reached(self) -> list[Result]:
        """The runs that reached the target and did not lose it again."""
        results = [run.result for run in self.runs if run.result is not None]
        return [r for r in results if r.steps_to_target is not None and not r.collapsed]

    def _steps(self) -> list[float]:
        return [float(r.steps_to_target) for r in self.reached() if r.steps_to_target is not None]

    def _seconds(self) -> list[float]:
        return [r.seconds_to_target for r in self.reached() if r.seconds_to_target is not None]

    def _counted(self) -> list[Result]:
        """The results whose measures are shown: those of interrupted runs only where there are no others. Runs that
        diverged ended anywhere, at the first step maybe."""
        results = [run.result for run in self.runs if run.result is not None and run.result.status != "diverged"]
        return [r for r in results if r.status != "interrupted"] or results

    def rank(self) -> tuple[float, float, float]:
        """The order of the table: most runs at the target, fewest steps to it, best measure at the end."""
        steps = self._steps()
        finals = [r.final for r in self._counted() if r.final is not None]
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
    configs = [run.config for run in runs]
    seeds = {config.seed for config in configs}
    warmup = either(config.warmup for config in configs)
    different = differing(runs)
    diverged = any(run.result is not None and run.result.status == "diverged" for run in runs)
    seeds_of = "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return (
        f"Measure: {configs[0].measure} on the validation set, mean ± standard deviation of {seeds_of}; "
        f"target {goal(runs)}.\n{either(config.steps for config in configs)} steps of batch "
        f"{either(config.batch_size for config in configs)}, {either(config.schedule for config in configs)} schedule"
        f"{f' with a warm-up of {warmup}' if warmup != '0' else ''}. "
        f"{f'Not the same for all: {different}. ' if different else ''}"
        f"{'Runs that diverged count for the target alone. ' if diverged else ''}"
        f"{'Time: forward, backward and step, without evaluation. ' if times else ''}State: of the optimizer."
    )


def goal(runs: Sequence[Run]) -> str:
    """The target of the measure."""
    configs, percent = [run.config for run in runs], _is_share(runs[0])
    values = either(f"{100 * config.target:g} %" if percent else f"{config.target:g}" for config in configs)
    return f"{'≥' if configs[0].higher_is_better else '≤'} {values}"


def differing(runs: Sequence[Run]) -> str:
    """What the runs do not share, each value with its optimizers; empty where a comparison is one of like with like."""
    parts = []
    for name in (*SHARED, "tuning", *MACHINE):
        held: dict[str, list[str]] = {}
        for run in runs:
            value = _tuning(run) if name == "tuning" else getattr(run.config, name, run.environment.get(name))
            if value is not None:  # what an older version has not written down is not known to differ
                held.setdefault(str(value), []).append(run.config.optimizer)
        if len(held) > 1:
            ordered = sorted(held.items(), key=lambda item: (-len(set(item[1])), item[0]))
            told = (f"{value} ({', '.join(dict.fromkeys(who))})" for value, who in ordered)
            parts.append(f"{name.replace('_', ' ')} {', '.join(told)}")
    return "; ".join(parts)


def _tuning(run: Run) -> str:
    """How much was done to find the settings."""
    tuning = run.config.tuning
    if not tuning:
        return "none"
    if not isinstance(trials := tuning.get("trials"), list):
        return str(tuning.get("recipe", "unknown"))
    steps, target = tuning.get("steps"), tuning.get("target")
    budget = f" of {steps} steps" if is_number(steps) and steps != run.config.steps else ""
    budget += f" to {target:g}" if is_number(target) and target != run.config.target else ""
    return f"{len(trials)} {'trial' if len(trials) == 1 else 'trials'}{budget}"


def either(values: Iterable[object]) -> str:
    """The different ones among them, with "or" between."""
    return " or ".join(dict.fromkeys(map(str, values)))


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


def _is_share(run: Run) -> bool:
    return run.config.measure == "accuracy"


def mean(values: Sequence[float | None]) -> float | None:
    """Of the values that are known."""
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known else None


def _shown_mean(values: Sequence[float | None], form: str) -> str:
    found = mean(values)
    return "–" if found is None else format(found, form)
