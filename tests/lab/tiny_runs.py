"""Runs of a tiny task, and comparisons of how they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from regression import Regression

from helpers.training import assert_same
from ngplus.lab import runs
from ngplus.lab.runs import Config


class Tiny(Regression):
    widths, samples = (8, 4), 8


def config(optimizer: str = "ngadam", **changes: Any) -> Config:
    base = Config(
        workload="tiny",
        preset="small",
        optimizer=optimizer,
        hyper={},
        seed=0,
        steps=30,
        batch_size=8,
        evaluate_every=5,
        target=0.2,
        measure="loss",
        higher_is_better=False,
        warmup=3,
    )
    return replace(base, **changes)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the clock."""
    rows = runs.read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def checkpoint(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return held


def without_clock(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: without_clock(value) for key, value in content.items() if key != "seconds"}
    return [without_clock(value) for value in content] if isinstance(content, list | tuple) else content


def assert_same_ending(one: Path, other: Path) -> None:
    """The same curve and the same checkpoint, bit for bit; the clock aside."""
    assert curve(one) == curve(other)
    assert_same(without_clock(checkpoint(one)), without_clock(checkpoint(other)))


class Killed(BaseException):
    """Stands for a kill at that point of the program."""


def kill_at(last: int) -> Callable[[int, float, float], None]:
    def on_step(step: int, loss: float, seconds: float) -> None:
        if step == last:
            raise Killed

    return on_step
