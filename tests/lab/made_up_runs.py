"""Made-up runs, for the tests of what is made of runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngplus.lab import runs
from ngplus.lab.runs import Config, Run, summarise

HOSTILE = '"><script>document.title="hacked"</script><img src=x onerror=alert(1)>$\\frac{&#x27;\x1b[31m\u202e'


def run(optimizer: str = "ngadam", seed: int = 0, rate: float = 0.1, **changes: Any) -> Run:
    """A made-up run whose loss falls as exp(-rate * step)."""
    config = Config(
        workload="digits",
        preset="small",
        optimizer=optimizer,
        hyper={"lr": 0.01},
        seed=seed,
        steps=50,
        batch_size=8,
        evaluate_every=5,
        target=0.9,
        measure="accuracy",
        higher_is_better=True,
        tuning={"study": "s", "trials": [{"hyper": {"lr": 0.01}, "score": 0.5}]},
    )
    config = replace(config, **changes)
    metrics: runs.Metrics = []
    for step in range(51):
        row: dict[str, Any] = {
            "step": step,
            "seconds": 0.02 * step,
            "train_loss": math.exp(-rate * step) + 0.001 * seed,
        }
        if step % 5 == 0:
            row |= {"loss": 2 * math.exp(-rate * step), config.measure: 1 - math.exp(-rate * step) - 0.01 * seed}
        metrics.append(row)
    result = summarise(config, metrics, 50, 1.0, 12345, "finished")
    return Run(Path(f"{optimizer}-{seed}"), config, {"torch": "2"}, metrics, result)


def diverged(optimizer: str, seed: int = 0, after: int = 12) -> Run:
    """A made-up run whose loss grows tenfold with each step from some step on, up to 1e17."""
    made = run(optimizer, seed)
    metrics: runs.Metrics = []
    for row in made.metrics[: after + 18]:
        factor = 10.0 ** max(0, row["step"] - after)
        grown = {name: row[name] * factor for name in ("train_loss", "loss") if name in row}
        worse = {"accuracy": row["accuracy"] / factor} if "accuracy" in row else {}
        metrics.append({**row, **grown, **worse})
    last = int(metrics[-1]["step"])
    result = summarise(made.config, metrics, last, 0.02 * last, 12345, "diverged", "the loss became inf")
    return replace(made, metrics=metrics, result=result)


def save(folder: Path, made: Run) -> None:
    place = folder / f"run{len(list(folder.glob('run*')))}"
    place.mkdir(parents=True)
    runs.write_json(place / "config.json", made.config.as_dict())
    runs.write_json(place / "environment.json", made.environment)
    assert made.result is not None
    runs.write_json(place / "result.json", vars(made.result))
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.metrics))
