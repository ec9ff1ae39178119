"""Prints the tables behind docs/decision.md, from the runs in docs/results/*.jsonl.

python tools/decision_tables.py    # all of them: the comparison, the screening, the defaults of NGPlus
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from ngplus.lab.sweep import numbers
from ngplus.lab.sweep import rows as sweep

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
TASKS = ("shakespeare", "multi30k", "cifar10", "qm9", "materials")
BASELINE = "adamw"

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def comparison() -> list[tuple[str, list[float], list[float]]]:
    """Each optimizer that has run on all tasks: its errors over those of tuned AdamW, and the part of the budget that
    it takes to AdamW's final measure. The geometric mean is the last of each."""
    rows, _ = sweep.read(RESULTS / "standard.jsonl")
    found = []
    for name in dict.fromkeys(row.optimizer for row in rows):
        runs = [numbers.compared(rows, task, name) for task in TASKS]
        if not all(runs):
            continue
        levels = [numbers.final(numbers.compared(rows, task, BASELINE)) for task in TASKS]
        pairs = list(zip(runs, levels, strict=True))
        errors = [numbers.error(numbers.final(r), r[0]) / numbers.error(level, r[0]) for r, level in pairs]
        steps = [numbers.share_of_budget(r, level) for r, level in pairs]
        found.append((name, *([*parts, numbers.geometric_mean(parts)] for parts in (errors, steps))))
    return found


def screening() -> list[tuple[str, str, float]]:
    """Variants of NGAdam on shakespeare: label, options and final loss."""
    return [(row["label"], " ".join(row["set"]), row["final"]) for row in read("screening.jsonl")]


def ideas() -> list[tuple[str, str, int | None, float, float | None]]:
    """Changes of NGAdam on whole runs: idea, task, width of the model where it is not the preset's, rate and final
    measure; None where the run diverged."""
    rows = read("ideas.jsonl")
    return [(row["idea"], row["workload"], row.get("width"), row["lr"], row["final"]) for row in rows]


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
    print("\nIdeas for NGAdam: measure at the end\n")
    for idea, task, width, lr, final in ideas():
        shown = "diverged" if final is None else f"{final:.4g}"
        print(f"| {idea} | {task}{f', width {width}' if width else ''} | lr {lr:g} | {shown} |")
    print("\nOptions of NGPlus: measure at the end; steps to the target\n")
    for task, optimizer, options, finals, steps in defaults():
        print(f"| {task} | {optimizer} {options} | {finals} | {steps} |")


if __name__ == "__main__":
    main()
