"""Measures how many steps ``roots-1`` to ``roots-20`` make in the time of the standard preset of ``roots-5``.

    python tools/equal_time.py --out budgets.json
    python tools/standard_runs.py --optimizers roots-1 roots-2 roots-10 --budgets budgets.json --out runs.jsonl

A round is two training steps on one thread: one makes roots, one does not. A training step with roots every T steps
takes the time of the forward and backward pass plus ((T - 1) plain + refresh) / T. Let nothing else run.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path

import torch

from ngplus.lab import settings
from ngplus.lab.bench.timing import Spread, Stopwatch, amortised, take_turns
from ngplus.lab.candidates import Roots
from ngplus.reference import is_refresh

WORKLOADS = ("shakespeare", "multi30k", "cifar10", "qm9", "materials")
EVERY = (1, 2, 5, 10, 20)
COMPARED = 5  # T of the budget that the others get


def measure(workload: str, repeats: int, data: Path | None) -> dict[str, int]:
    chosen, size = settings.open_preset(workload, "standard", {}, [], None)
    task = settings.open_task(chosen, size, data)
    torch.manual_seed(0)
    model = task.model()
    optimizer = Roots(model, lr=1e-6, update_every=2)
    done = 0

    def step(watch: Stopwatch) -> None:
        nonlocal done
        batch = task.batch(0, done)
        done += 1
        with watch.time("pass"):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
        with watch.time("refresh" if is_refresh(done, 2) else "plain"):
            optimizer.step()

    def round_of_two(watch: Stopwatch) -> None:
        step(watch)
        step(watch)

    times = take_turns({workload: round_of_two}, repeats, warmup=5)  # roots are made in each of the first steps
    wall = {name: value[:, 0] for name, value in times.items()}
    both = wall["pass"].reshape(-1, 2).mean(1)
    cost = {every: both + amortised(wall["plain"], wall["refresh"], every) for every in EVERY}
    shares = {every: Spread.of(cost[every] / cost[COMPARED]) for every in EVERY}
    cells = " | ".join(f"{own.median:.3f} ({own.low:.3f} to {own.high:.3f})" for own in shares.values())
    print(f"| {workload} | {cells} |", flush=True)
    return {f"roots-{every}": round(size.steps / own.median) for every, own in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--data", type=Path, default=os.environ.get("NGPLUS_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"| a training step against T = {COMPARED} | " + " | ".join(f"T = {every}" for every in EVERY) + " |")
    print("| --- " * (len(EVERY) + 1) + "|")
    asked.out.write_text(json.dumps({name: measure(name, asked.repeats, asked.data) for name in asked.workloads}))


if __name__ == "__main__":
    main()
