"""The tables of a sweep, in Markdown: final measures, steps to the baseline's and to the best other optimizer's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ngplus.lab.optimizers import OPTIMIZERS
from ngplus.lab.sweep.numbers import (
    BASELINE,
    NO_RIVALS,
    compared,
    error,
    final,
    geometric_mean,
    is_budgeted,
    share_of_budget,
    spread,
)  # fmt: skip
from ngplus.lab.sweep.rows import Row

WORKLOADS = ("shakespeare", "multi30k", "cifar10", "qm9", "materials")  # first, in this order
SCORES = {"whole_loss": "Loss on the whole validation text", "bleu": "BLEU on the test set"}


def tasks_of(rows: Sequence[Row]) -> list[str]:
    """The workloads on which the baseline, which the others are compared with, has runs of the comparison."""
    names = dict.fromkeys((*WORKLOADS, *(row.workload for row in rows)))
    return [name for name in names if compared(rows, name, BASELINE)]


def tables(rows: Sequence[Row]) -> list[str]:
    """The lines of all tables, of the optimizers that have runs on each of the workloads."""
    tasks = tasks_of(rows)
    if not tasks:
        return [f"{BASELINE}, which the others are compared with, has no runs on the seeds of the comparison yet"]
    held = {name: {t: compared(rows, t, name) for t in tasks} for name in dict.fromkeys(row.optimizer for row in rows)}
    held = {name: runs for name, runs in held.items() if all(runs.values())}
    timed = [name for name in held if is_budgeted(name)]
    names = [name for name in held if name not in timed]
    finals = {name: {task: final(runs[task]) for task in tasks} for name, runs in held.items()}
    one = {task: held[BASELINE][task][0] for task in tasks}

    def errors(name: str) -> list[float]:
        return [error(finals[name][t], one[t]) / error(finals[BASELINE][t], one[t]) for t in tasks]

    def final_line(name: str) -> str:
        cells = [final_cell(held[name][task]) for task in tasks]
        return f"| {name} | " + " | ".join(cells) + f" | {geometric_mean(errors(name)):.3f} |"

    head = ("optimizer", *tasks, "geometric mean")
    lines = ["Final measure: mean and standard deviation over the seeds; error against the baseline's", "", *top(head)]
    lines += [final_line(name) for name in names]
    rivals = [name for name in names if name in OPTIMIZERS and name not in NO_RIVALS]
    best = {task: min(rivals, key=lambda name: error(finals[name][task], one[task])) for task in tasks}
    levels = {task: finals[name][task] for task, name in best.items()}
    for title, level in (
        ("the baseline's final measure", finals[BASELINE]),
        ("the final measure of the best other optimizer", levels),
    ):
        lines += ["", f"Steps to {title}, as a part of its budget", "", *top(head)]
        for name in names:
            parts = [share_of_budget(held[name][t], level[t]) for t in tasks]
            lines.append(f"| {name} | " + " | ".join(map(shown, parts)) + f" | {geometric_mean(parts):.3f} |")
    if timed:
        title = "At equal time: final measure; error against the baseline's; time to the baseline's final measure"
        lines += ["", title, "", *top((*head, "time"))]
    for name in timed:
        time = geometric_mean([share_of_budget(held[name][t], finals[BASELINE][t]) for t in tasks])
        lines.append(f"{final_line(name)} {time:.3f} |")
    return lines + [
        line for t in tasks for told in scores({name: held[name][t] for name in names}) for line in ("", f"{t}: {told}")
    ]


def top(headings: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]


def shown(part: float) -> str:
    return f"{part:.3f}" if part < math.inf else "not reached"


def final_cell(runs: Sequence[Row]) -> str:
    """The final measure over the seeds, with the settings."""
    return f"{measure_cell(runs)} ({settings_cell(runs)})"


def measure_cell(runs: Sequence[Row]) -> str:
    own = [row.final for row in runs]
    if lost := own.count(None):
        return f"{lost} of {len(own)} diverged"
    return f"{final(runs):.4g} ± {spread(own):.2g}"


def settings_cell(runs: Sequence[Row]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in runs[0].hyper.items())


def scores(held: Mapping[str, Sequence[Row]]) -> list[str]:
    """What is measured once, at the end of a run: the mean and the standard deviation over the seeds, by name."""
    told = []
    for key, title in SCORES.items():
        cells = []
        for name, runs in held.items():
            own = [row.scores[key] for row in runs if key in row.scores]
            if len(own) > 1:
                cells.append(f"{name} {statistics.mean(own):.4g} ± {statistics.stdev(own):.2g}")
        if cells:
            told.append(f"{title}: {'; '.join(cells)}")
    return told
