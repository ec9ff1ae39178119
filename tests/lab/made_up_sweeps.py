"""Made-up lines of a sweep's file, for the tests of what is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_runs import config

from ngplus.lab.sweep.rows import Row, parse

STEPS = (100, 200, 300, 400)


def line(optimizer: str = "adamw", seed: int = 0, curve: Sequence[float | None] = (), **changes: Any) -> dict[str, Any]:
    """A run; of the kind result, but for the tuning's seed 100. Where the curve ends in None it diverged."""
    looks = [[step, value, 0.1 * step] for step, value in zip(STEPS, curve, strict=False)]
    final = looks[-1][1]
    plain = {
        "workload": "task",
        "preset": "standard",
        "optimizer": optimizer,
        "kind": "trial" if seed == 100 else "result",
        "hyper": {"lr": 0.01},
        "seed": seed,
        "status": "diverged" if final is None else "finished",
        "final": final,
        "scores": {},
        "milliseconds": 100.0,
        "cpu_milliseconds": 90.0,
        "elapsed": 50.0,
        "state_bytes": 1000,
        "curve": looks,
        "environment": {"code": "abc", "torch": "2", "processor": "P"},
    }
    made: dict[str, Any] = {**plain, **changes}
    settings = config(made["optimizer"], workload=made["workload"], preset="standard", seed=seed, steps=400)
    return {**made, "config": settings.as_dict()}


def lines_of(optimizer: str, curves: Iterable[Sequence[float | None]], **changes: Any) -> list[dict[str, Any]]:
    """A trial and a run for each seed."""
    held = list(curves)
    return [line(optimizer, seed, curve, **changes) for seed, curve in [(100, held[0]), *enumerate(held)]]


def timing(optimizer: str, milliseconds: Sequence[float], **changes: Any) -> dict[str, Any]:
    plain = {
        "timed": "task",
        "preset": "standard",
        "optimizer": optimizer,
        "hyper": {"lr": 0.01},
        "milliseconds": list(milliseconds),
        "cpu_milliseconds": list(milliseconds),
        "began": 1,
        "load": 0.0,
        "environment": {},
    }
    return {**plain, **changes}


def rows(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    return [parse(one, Path("made up")) for one in lines]


def save(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path
