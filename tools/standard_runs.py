"""Tunes and runs optimizers on the ``standard`` and ``small`` presets; makes the tables of docs/decision.md.

    python tools/standard_runs.py shakespeare qm9 --optimizers adamw muon --out runs.jsonl    # runs what is missing
    python tools/standard_runs.py --show --out runs.jsonl                                      # prints the tables

Each optimizer gets four learning rates, each twice the last, on one seed. More rates are added until the best one has a
neighbour on both sides; --rates gives the rates to try instead. The best rate is then run on three other seeds. On the
preset ``small``, the best rate is the one with the fewest steps to the workload's target. With --budgets, a file of
tools/equal_time.py, each optimizer is run at its best rate for the steps that the file gives it; these runs have
``-time`` in their name. Every run is a line of JSON with its validation curve. A run that was interrupted is made
again; all others are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from ngplus.lab import loop, settings, workloads
from ngplus.lab.study import TUNING_SEED

WORKLOADS = ("shakespeare", "multi30k", "cifar10", "qm9", "materials")
BASELINE, RIVALS = "adamw", ("adamw", "soap", "muon")
CHOSEN = "roots-5-decay"  # the form of NGAdam
SEEDS = (0, 1, 2)
TIMED = "-time"  # ends the names of runs with budgets of equal time
SCORES = {"whole_loss": "loss on the whole validation text", "bleu": "BLEU on the test set"}
FIRST_RATES = {"adamw": (0.001, 0.002, 0.004, 0.008)}
OTHER_RATES = (0.0025, 0.005, 0.01, 0.02)

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--optimizers", nargs="*", default=RIVALS)
    parser.add_argument("--preset", default="standard")
    parser.add_argument("--rates-only", action="store_true", help="leave out the three seeds of the comparison")
    parser.add_argument("--rates", type=float, nargs="*", help="the learning rates to try")
    parser.add_argument("--budgets", type=Path, help="steps by workload and optimizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--data", type=Path, default=os.environ.get("NGPLUS_DATA"))
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    rows = read(asked.out)
    if not asked.show:
        suffix = TIMED if asked.budgets else ""
        chains = [(w, o + suffix) for w in asked.workloads for o in asked.optimizers]
        seeds = () if asked.rates_only else SEEDS
        budgets = json.loads(asked.budgets.read_text()) if asked.budgets else {}
        run_all(rows, chains, asked.preset, seeds, asked.out, asked.workers, asked.data, budgets, asked.rates)
    shown = [row for row in rows if row["preset"] == asked.preset and row["workload"] in asked.workloads]
    print("\n".join(tables(shown)))


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------------------ running


def run_all(
    rows: list[Row],
    chains: Sequence[tuple[str, str]],
    preset: str,
    seeds: Sequence[int],
    out: Path,
    workers: int,
    data: Path | None,
    budgets: Mapping[str, Mapping[str, int]],
    rates: Sequence[float] | None = None,
) -> None:
    """Makes the missing runs of all pairs of workload and optimizer; each is written as soon as it has ended."""
    with ProcessPoolExecutor(workers) as pool:
        pending: dict[Future[Row], tuple[str, str]] = {}
        waiting = list(chains)
        while waiting or pending:
            while waiting and len(pending) < workers:
                chain = waiting.pop(0)
                following = missing(rows, *chain, preset, seeds, rates)
                if following is not None:
                    steps = budgets.get(chain[0], {}).get(chain[1].removesuffix(TIMED))
                    pending[pool.submit(measured, *chain, preset, *following, data, steps)] = chain
            ended, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in ended:
                waiting.insert(0, pending.pop(future))
                row = future.result()
                rows.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                last = "diverged" if row["final"] is None else f"{row['final']:.4f}"
                name = f"{row['workload']} {row['optimizer']} lr {row['lr']:g} seed {row['seed']}"
                print(f"{name}: {last}, {row['milliseconds']:.0f} ms a step", file=sys.stderr, flush=True)


def missing(
    rows: Iterable[Row],
    workload: str,
    optimizer: str,
    preset: str,
    seeds: Sequence[int],
    rates: Sequence[float] | None = None,
) -> tuple[float, int] | None:
    """The rate and the seed of the run that comes next; None where all are there. ``rates`` are those to try."""
    chain = (workload, optimizer.removesuffix(TIMED), preset)
    own = [row for row in rows if (row["workload"], row["optimizer"], row["preset"]) == chain]
    tried = {row["lr"] for row in own if row["seed"] == TUNING_SEED}
    for rate in FIRST_RATES.get(optimizer, OTHER_RATES) if rates is None else rates:
        if rate not in tried:
            return rate, TUNING_SEED
    best = best_rate(own)
    for rate in (best / 2, 2 * best) if rates is None else ():
        if rate not in tried:
            return rate, TUNING_SEED
    names = (workload, optimizer, preset)
    done = {
        row["seed"] for row in rows if (row["workload"], row["optimizer"], row["preset"], row["lr"]) == (*names, best)
    }
    return next(((best, seed) for seed in seeds if seed not in done), None)


def best_rate(rows: Iterable[Row]) -> float:
    """By the measure at the end of the tuning seed's runs, all of one workload and optimizer."""
    tuning = [row for row in rows if row["seed"] == TUNING_SEED]
    return float(min(tuning, key=badness)["lr"])


def badness(row: Row) -> tuple[float, float]:
    """Less is better: the final measure, on the preset ``small`` after the steps to the target. A run that has diverged
    is worst."""
    if row["final"] is None:
        return math.inf, math.inf
    steps = steps_to_target(row) if row["preset"] == "small" else 0.0
    return steps, -row["final"] if higher_is_better(row["workload"]) else row["final"]


def steps_to_target(row: Row) -> float:
    target = workloads.get(row["workload"]).presets[row["preset"]].target
    curve = [(step, math.nan if value is None else value) for step, value in row["curve"]]
    return steps_to(curve, target, higher_is_better(row["workload"]))


def higher_is_better(workload: str) -> bool:
    return workloads.get(workload).higher_is_better


def measured(
    workload: str, optimizer: str, preset: str, rate: float, seed: int, data: Path | None, steps: int | None
) -> Row:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen, size = settings.open_preset(workload, preset, {"steps": steps} if steps else {}, [], None)
    config = settings.configure(chosen, preset, size, optimizer.removesuffix(TIMED), seed=seed, lr=rate)
    curve: list[tuple[int, float | None]] = []

    def look(step: int, value: float | None) -> str:
        curve.append((step, None if value is None else float(f"{value:.5g}")))
        return ""

    result = loop.run(config, settings.open_task(chosen, size, data), on_evaluation=look, final=seed in SEEDS)
    if not result.ended:
        raise SystemExit(f"{workload}, {optimizer} at {rate:.3g}: {result.status}")
    return {
        "workload": workload,
        "preset": preset,
        "optimizer": optimizer,
        "lr": rate,
        "seed": seed,
        "final": result.final if result.status == "finished" else None,
        **result.scores,
        "milliseconds": round(result.milliseconds_per_step or 0.0, 2),
        "curve": curve,
    }


# ------------------------------------------------------------------------------------------------ tables


def compared(rows: Iterable[Row], workload: str, optimizer: str) -> list[Row]:
    """The runs at the best rate on the seeds of the comparison."""
    own = [row for row in rows if (row["workload"], row["optimizer"]) == (workload, optimizer)]
    tuned = any(row["seed"] == TUNING_SEED for row in own)  # those with -time have one rate
    best = best_rate(own) if tuned else own[0]["lr"] if own else None
    return [row for row in own if row["seed"] in SEEDS and row["lr"] == best]


def mean_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """The mean over the seeds at each evaluation; not a number where a run has diverged."""
    length = min(len(row["curve"]) for row in rows)
    columns = zip(*(row["curve"][:length] for row in rows), strict=True)
    return [(c[0][0], statistics.mean(math.nan if value is None else value for _, value in c)) for c in columns]


def steps_to(curve: Iterable[tuple[int, float]], level: float, higher_is_better: bool) -> float:
    """The step at which a curve first is at a level, by linear interpolation between evaluations; infinite if never."""
    sign = -1.0 if higher_is_better else 1.0
    before: tuple[float, float] | None = None
    for step, value in curve:
        if sign * value <= sign * level:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - level) / (before[1] - value)
        before = (step, value)
    return math.inf


def share_of_budget(rows: Sequence[Row], level: float) -> float:
    """Steps of the mean curve to a level, as a part of all its steps."""
    curve = mean_curve(rows)
    return steps_to(curve, level, higher_is_better(rows[0]["workload"])) / curve[-1][0]


def error(value: float, workload: str) -> float:
    """What a geometric mean over workloads is taken of: the loss or error itself, or 1 - accuracy."""
    return 1 - value if higher_is_better(workload) else value


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.mean(math.log(value) if value < math.inf else math.inf for value in values))


def tables(rows: list[Row]) -> list[str]:
    """Final measure, steps to the baseline's final measure, and steps to that of the best rival, of each optimizer."""
    tasks = [w for w in dict.fromkeys((*WORKLOADS, *(row["workload"] for row in rows))) if compared(rows, w, BASELINE)]
    if not tasks:
        return [f"{BASELINE}, which the others are compared with, has no runs on the seeds of the comparison yet"]
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    names = [name for name in names if all(compared(rows, task, name) for task in tasks)]
    timed = [name for name in names if name.endswith(TIMED)]
    names = [name for name in names if name not in timed]
    head = "| optimizer | " + " | ".join(tasks) + " | geometric mean |"
    rule = "| --- " * (len(tasks) + 2) + "|"
    finals = {task: {n: mean_curve(compared(rows, task, n))[-1][1] for n in [*names, *timed]} for task in tasks}
    ratios = {
        name: geometric_mean([error(finals[t][name], t) / error(finals[t][BASELINE], t) for t in tasks])
        for name in [*names, *timed]
    }
    lines = ["Final measure: mean and standard deviation over the seeds; error against the baseline's", "", head, rule]
    lines += [final_measures(rows, tasks, name, ratios[name]) for name in names]
    rivals = [name for name in RIVALS if name in names]
    levels = {
        "the baseline's final measure, as a part of its budget": lambda t: finals[t][BASELINE],
        "the final measure of the best rival, as a part of its budget": lambda t: min(
            (finals[t][r] for r in rivals), key=lambda value: error(value, t)
        ),
    }
    for title, level in levels.items():
        lines += ["", f"Steps to {title}", "", head, rule]
        for name in names:
            own_steps = [share_of_budget(compared(rows, t, name), level(t)) for t in tasks]
            cells = [f"{value:.3f}" if value < math.inf else "not reached" for value in own_steps]
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {geometric_mean(own_steps):.3f} |")
    if rows[0]["preset"] == "small":
        lines += target_table(rows, tasks, names)
    if timed:
        title = "At equal time: final measure; error against the baseline's; time to the baseline's final measure"
        lines += ["", title, "", f"{head} time |", f"{rule} --- |"]
    for name in timed:
        time = geometric_mean([share_of_budget(compared(rows, t, name), finals[t][BASELINE]) for t in tasks])
        lines.append(f"{final_measures(rows, tasks, name, ratios[name])} {time:.3f} |")
    return lines + scores(rows, tasks, names)


def final_measures(rows: list[Row], tasks: Sequence[str], name: str, ratio: float) -> str:
    """A line of a table: the final measures of an optimizer, and their geometric mean against the baseline's."""
    cells = []
    for task in tasks:
        runs = compared(rows, task, name)
        own = [row["final"] for row in runs if row["final"] is not None]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        cells.append(f"{mean_curve(runs)[-1][1]:.4g} ± {spread:.2g} (lr {runs[0]['lr']:g})")
    return f"| {name} | " + " | ".join(cells) + f" | {ratio:.3f} |"


def target_table(rows: list[Row], tasks: Sequence[str], names: Sequence[str]) -> list[str]:
    """Steps to the workload's target: the mean over the seeds that reach it, and how many do."""
    lines = [
        "",
        "Steps to the target",
        "",
        "| optimizer | " + " | ".join(tasks) + " |",
        "| --- " * (len(tasks) + 1) + "|",
    ]
    for name in names:
        cells = []
        for task in tasks:
            steps = [steps_to_target(row) for row in compared(rows, task, name)]
            reached = [value for value in steps if value < math.inf]
            mean = f"{statistics.mean(reached):.0f}" if reached else "not reached"
            cells.append(mean if len(reached) in (0, len(steps)) else f"{mean} ({len(reached)} of {len(steps)})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def scores(rows: list[Row], tasks: Sequence[str], names: Sequence[str]) -> list[str]:
    """What is measured once, at the end of a run: the mean and the standard deviation over the seeds."""
    lines = []
    for task in tasks:
        for key in SCORES:
            cells = {}
            for name in names:
                own = [row[key] for row in compared(rows, task, name) if row.get(key) is not None]
                if len(own) > 1:
                    cells[name] = f"{name} {statistics.mean(own):.4g} ± {statistics.stdev(own):.2g}"
            if cells:
                lines += ["", f"{task}, {SCORES[key]}: " + "; ".join(cells.values())]
    return lines


if __name__ == "__main__":
    main()
