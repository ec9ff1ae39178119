"""Do the results hold in longer runs? The measure at the end of seven to ten times the budget of the small presets.

    python tools/longer_runs.py multi30k qm9 --out longer.json    # runs what the file does not have yet
    python tools/longer_runs.py --show --out longer.json          # the table of docs/longer-runs.md

Every optimizer gets the rates 0.003 and 0.01, and further ones, each about three times the last, as long as the best is
at the end of what was tried: one run each, of a seed that tuning may see. The best by the workload's measure is run on
three other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from ngplus.lab import train, training
from ngplus.lab.tune import TUNING_SEED
from ngplus.lab.workloads import Workload

STEPS = {"multi30k": 3000, "qm9": 3000, "cifar10": 2000, "materials": 2000}
OPTIMIZERS = ("ngplus", "soap", "muon", "adamw")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
LOOKS, SEEDS = 20, (0, 1, 2)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=", ".join(STEPS))
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=os.environ.get("NGPLUS_DATA"))
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    if unknown := [name for name in asked.workloads if name not in STEPS]:
        parser.error(f"no longer run is set for {', '.join(unknown)}: there are {', '.join(STEPS)}")
    torch.set_num_threads(1)
    rows: list[Row] = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for workload in () if asked.show else asked.workloads:
        for optimizer in asked.optimizers:
            while (following := missing(rows, workload, optimizer)) is not None:
                rows.append(measured(workload, optimizer, *following, asked.data))
                asked.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print("\n".join(table(rows)))


def missing(rows: list[Row], workload: str, optimizer: str) -> tuple[float, int] | None:
    """The rate and the seed of the run that comes next; None where all are there."""
    own = [row for row in rows if (row["workload"], row["optimizer"]) == (workload, optimizer)]
    tried = {row["lr"]: row for row in own if row["seed"] == TUNING_SEED}
    for rate in RATES[3:5]:
        if rate not in tried:
            return rate, TUNING_SEED
    best = best_rate(rows, workload, optimizer)
    place = RATES.index(best)
    for rate in RATES[max(place - 1, 0) : place + 2]:
        if rate not in tried:
            return rate, TUNING_SEED
    done = [row["seed"] for row in own if row["lr"] == best]
    return next(((best, seed) for seed in SEEDS if seed not in done), None)


def best_rate(rows: list[Row], workload: str, optimizer: str) -> float:
    """By the workload's measure at the end of the tuning seed's runs; one that has diverged has none."""
    own = [r for r in rows if (r["workload"], r["optimizer"], r["seed"]) == (workload, optimizer, TUNING_SEED)]
    sign = -1 if opened(workload)[0].higher_is_better else 1
    best: float = min(own, key=lambda row: float("inf") if row["final"] is None else sign * row["final"])["lr"]
    return best


def opened(workload: str) -> tuple[Workload, Any]:
    steps = STEPS[workload]
    return train.open_preset(workload, "small", {"steps": steps, "evaluate_every": steps // LOOKS}, [], None)


def measured(workload: str, optimizer: str, rate: float, seed: int, data: Path | None) -> Row:
    chosen, size = opened(workload)
    config = train.configure(chosen, "small", size, optimizer, seed=seed, lr=rate)
    result = training.run(config, train.open_task(chosen, size, data), final=seed in SEEDS)
    if not result.ended:
        raise SystemExit(f"{workload}, {optimizer} at {rate:.3g}: {result.status}")
    final = result.final if result.status == "finished" else None
    which = {"workload": workload, "optimizer": optimizer, "lr": rate, "seed": seed}
    return {**which, "final": final, "seconds": round(result.seconds, 2), **result.scores}


def table(rows: list[Row]) -> list[str]:
    names = [o for o in OPTIMIZERS if any(row["optimizer"] == o for row in rows)]
    lines = ["| workload, steps | measure | " + " | ".join(names) + " |", "| --- " * (len(names) + 2) + "|"]
    for workload, steps in STEPS.items():
        measure = opened(workload)[0].measure
        for key, title in (("final", measure), ("bleu", "BLEU"), ("lr", "learning rate")):
            cells = [cell(rows, workload, optimizer, key) for optimizer in names]
            if any(cells):
                lines.append(f"| {workload}, {steps:,} | {title} | " + " | ".join(cells) + " |")
    return lines


def cell(rows: list[Row], workload: str, optimizer: str, key: str) -> str:
    """The mean and the standard deviation over the seeds of the comparison."""
    own = [r for r in rows if (r["workload"], r["optimizer"]) == (workload, optimizer)]
    if not own:
        return ""
    rate = best_rate(rows, workload, optimizer)
    values = [row.get(key) for row in own if row["seed"] in SEEDS and row["lr"] == rate]
    if not values or None in values:
        return ""
    if key == "lr":
        return f"{rate:g}"
    return f"{statistics.mean(values):.4g} ± {statistics.stdev(values) if len(values) > 1 else 0:.2g}"


if __name__ == "__main__":
    main()
