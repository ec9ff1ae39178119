"""Prints the tables behind docs/decision.md, from the runs in docs/results/*.jsonl.

python tools/decision_tables.py    # all of them: the comparison, the screening, the defaults of NGPlus
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TASKS = ("shakespeare", "multi30k", "cifar10", "qm9", "materials")
ACCURACY = {"cifar10"}  # where more is better; its error is 1 - accuracy
BASELINE, TUNING_SEED, SEEDS = "adamw", 100, (0, 1, 2)

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def error(task: str, value: float | None) -> float:
    return math.inf if value is None else 1 - value if task in ACCURACY else value


def compared(rows: list[Row], task: str, optimizer: str) -> list[Row]:
    """The runs on the seeds of the comparison, at the rate that is best on the tuning seed."""
    own = [row for row in rows if (row["workload"], row["optimizer"]) == (task, optimizer)]
    tuning = [row for row in own if row["seed"] == TUNING_SEED] or own  # the runs at equal time have one rate
    best = min(tuning, key=lambda row: error(task, row["final"]), default={"lr": None})["lr"]
    return [row for row in own if row["seed"] in SEEDS and row["lr"] == best]


def curve(task: str, rows: list[Row]) -> list[tuple[int, float]]:
    """Step and mean error over the seeds."""
    columns = zip(*(row["curve"] for row in rows), strict=True)
    return [(points[0][0], statistics.mean(error(task, value) for _, value in points)) for points in columns]


def part_of_budget(points: list[tuple[int, float]], level: float) -> float:
    """Where a curve is first at a level, by linear interpolation, as a part of its length; infinite if never."""
    for i, (step, value) in enumerate(points):
        if value <= level:
            before, above = points[i - 1] if i else (step, value)
            share = 0.0 if above == value else (above - level) / (above - value)
            return (before + (step - before) * share) / points[-1][0]
    return math.inf


def comparison() -> list[tuple[str, list[float], list[float]]]:
    """Each optimizer that has run on all tasks: its errors over those of tuned AdamW, and the part of the budget that
    it takes to AdamW's final measure. The geometric mean is the last of each."""
    rows = read("standard.jsonl")
    found = []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        curves = [curve(task, own) for task in TASKS if (own := compared(rows, task, name))]
        if len(curves) < len(TASKS):
            continue
        levels = [curve(task, compared(rows, task, BASELINE))[-1][1] for task in TASKS]
        errors = [points[-1][1] / level for points, level in zip(curves, levels, strict=True)]
        steps = [part_of_budget(points, level) for points, level in zip(curves, levels, strict=True)]
        found.append((name, [*errors, math.prod(errors) ** 0.2], [*steps, math.prod(steps) ** 0.2]))
    return found


def screening() -> list[tuple[str, str, float]]:
    """Variants of NGAdam on shakespeare: label, options and final loss."""
    return [(row["label"], " ".join(row["set"]), row["final"]) for row in read("screening.jsonl")]


def defaults() -> list[tuple[str, str, str, list[float | None], list[int | None]]]:
    """Runs with options of NGPlus and others: task, optimizer, options, final measures and steps to the target."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in read("ngplus_defaults.jsonl"):
        groups[row["task"], row["optimizer"], json.dumps(row["hyper"])].append(row)
    return [(*key, [r["final"] for r in own], [r["steps_to_target"] for r in own]) for key, own in groups.items()]


def main() -> None:
    print("Error over that of tuned AdamW; steps to AdamW's final measure, as a part of the budget\n")
    print("| optimizer | " + " | ".join([*TASKS, "geometric mean"]) + " |")
    for name, errors, steps in comparison():
        cells = [f"{e:.3f}; {s:.3f}" for e, s in zip(errors, steps, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nVariants of NGAdam: loss on shakespeare\n")
    for label, options, final in screening():
        print(f"| {label} | {options} | {final:.4g} |")
    print("\nOptions of NGPlus: measure at the end; steps to the target\n")
    for task, optimizer, options, finals, steps in defaults():
        print(f"| {task} | {optimizer} {options} | {finals} | {steps} |")


if __name__ == "__main__":
    main()
