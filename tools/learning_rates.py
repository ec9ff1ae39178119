"""How wide a range of learning rates does: the validation loss at the end of a run over the learning rate.

    python tools/learning_rates.py digits autoencoder --out rates.json    # runs what the file does not have yet
    python tools/learning_rates.py --show --out rates.json                # the table of docs/ablations.md

For each workload and optimizer, rates a factor of sqrt(2) apart around the tuned one, four to each side; further ones
as long as the range is not closed. Its width is that of the interval around the best rate in which the loss, on
straight lines over the logarithm of the rate, stays within 2 % of the best. With several seeds it is their mean. The
last column is the same for the bound of AdamW's best loss, as far as rates were tried.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ngplus.lab import train, training

OPTIMIZERS = ("ngadam", "adamw", "sgd")
STEP, WITHIN, FURTHEST = math.sqrt(2), 1.02, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=os.environ.get("NGPLUS_DATA"))
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for workload in () if asked.show else asked.workloads:
        for optimizer in asked.optimizers:
            measure(workload, optimizer, asked.seeds, rows, asked.out, asked.data)
    print("\n".join(table(rows)))


def measure(
    workload: str, optimizer: str, seeds: int, rows: list[dict[str, Any]], out: Path, data: Path | None
) -> None:
    chosen, size = train.open_preset(workload, "small", {}, [], None)
    task = None
    tuned = train.configure(chosen, "small", size, optimizer, seed=0).hyper["lr"]
    old = [r for r in rows if (r["workload"], r["optimizer"]) == (workload, optimizer) and r["tuned"] != tuned]
    for row in old:  # of a preset that has changed since
        rows.remove(row)
    done = {(r["workload"], r["optimizer"], r["k"], r["seed"]) for r in rows}
    known = {r["k"] for r in rows if (r["workload"], r["optimizer"]) == (workload, optimizer)}  # maybe of fewer seeds
    asked = sorted({*range(-4, 5), *known})
    while asked:
        for k in asked:
            for seed in range(seeds):
                if (workload, optimizer, k, seed) in done:
                    continue
                rate = tuned * STEP**k
                config = train.configure(chosen, "small", size, optimizer, seed=seed, lr=rate)
                config = replace(config, evaluate_every=config.steps)  # what is asked for is the end
                task = task or chosen.open(size, data)
                seen: dict[int, float] = {}
                evaluate = task.evaluate

                def look(model: torch.nn.Module, seen: dict[int, float] = seen, evaluate: Any = evaluate) -> Any:
                    found = evaluate(model)
                    seen[len(seen)] = float(found["loss"])
                    return found

                task.evaluate = look  # type: ignore[method-assign]
                try:
                    status = training.run(config, task, final=False).status
                finally:
                    task.evaluate = evaluate  # type: ignore[method-assign]
                if status not in ("finished", "diverged"):
                    raise SystemExit(f"{workload}, {optimizer} at {rate:.3g}: {status}")
                loss = seen[len(seen) - 1] if status == "finished" else None
                which = {"workload": workload, "optimizer": optimizer, "tuned": tuned, "k": k, "seed": seed}
                rows.append({**which, "lr": rate, "loss": loss})
                out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        curve = curves(rows)[workload, optimizer]
        low, high = interval(curve)
        first, last = min(curve), max(curve)
        more = [first - 1] if low <= first and first > -FURTHEST else []
        asked = more + ([last + 1] if high >= last and last < FURTHEST else [])


def curves(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[int, float]]:
    """The loss by the number of steps from the tuned rate, for each workload and optimizer."""
    by_key: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in rows:
        loss = math.inf if row["loss"] is None or not math.isfinite(row["loss"]) else row["loss"]
        by_key.setdefault((row["workload"], row["optimizer"]), {}).setdefault(row["k"], []).append(loss)
    return {key: {k: sum(v) / len(v) for k, v in sorted(curve.items())} for key, curve in by_key.items()}


def interval(curve: dict[int, float], bound: float | None = None) -> tuple[float, float]:
    """The ends, in steps of the rate, of the interval around the best one in which the loss is below the bound, or
    within 2 % of the best."""
    best = min(curve, key=lambda k: curve[k])
    bound = curve[best] * WITHIN if bound is None else bound

    def end(direction: int) -> float:
        k = best
        while (following := k + direction) in curve:
            if curve[following] > bound:
                rise = curve[following] - curve[k]
                return k + direction * ((bound - curve[k]) / rise if math.isfinite(rise) else 0.0)
            k = following
        return float(k)

    return end(-1), end(1)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| workload | optimizer | best loss | at lr | within 2 % | a factor of | below AdamW's best | a factor of |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    found = curves(rows)
    for (workload, optimizer), curve in found.items():
        best = min(curve, key=lambda k: curve[k])
        tuned = next(r["tuned"] for r in rows if (r["workload"], r["optimizer"]) == (workload, optimizer))
        low, high = (tuned * STEP**k for k in interval(curve))
        line = (
            f"| {workload} | {optimizer} | {curve[best]:.4g} | {tuned * STEP**best:.2g} "
            f"| {low:.2g} to {high:.2g} | {high / low:.2f} "
        )
        bound = min(found.get((workload, "adamw"), {0: -math.inf}).values())
        if optimizer != "adamw" and curve[best] < bound:
            low, high = (tuned * STEP**k for k in interval(curve, bound))
            line += f"| {low:.2g} to {high:.2g} | {high / low:.2f} |"
        else:
            line += "| | |"
        lines.append(line)
    return lines


if __name__ == "__main__":
    main()
