"""The measurements by name: which there are, which a choice of rows needs, and how one is taken and kept."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ngplus.lab import optimizers
from ngplus.lab.bench import record
from ngplus.lab.bench.record import Measurement, Setting, Taken
from ngplus.lab.bench.rows import ROWS, rows_of

# Where each is taken, and in how many rounds where nothing else is asked for.
MEASUREMENTS: dict[str, tuple[str, int]] = {
    "resnet": ("training:resnet", 7),
    "ngadam": ("training:ngadam_resnet", 5),
    "ngadam-transformer": ("training:ngadam_transformer", 9),
    "ngadam-mlp": ("training:ngadam_mlp", 15),
    "transformer": ("training:transformer", 9),
    "mlp": ("training:mlp", 15),
    "bare": ("bare:measure", 15),
    "memory": ("processes:memory", 1),
    "state": ("state:measure", 1),
    "embedding": ("embedding:measure", 15),
    "growth": ("growth:measure", 9),
    "import": ("processes:imports", 15),
    "rivals-resnet": ("rivals:resnet", 3),
    "rivals-transformer": ("rivals:transformer", 3),
    "rivals-mlp": ("rivals:mlp", 5),
}
QUICK_REPEATS = 2  # at most


def chosen(names: list[str]) -> list[str]:
    """The rows of these names, or all; ValueError with the nearest name for one that is not there."""
    for name in names:
        optimizers.check_name(name, ROWS, "row of the benchmark")
    return list(dict.fromkeys(names)) or list(ROWS)


def needed(groups: list[str], path: Path, quick: bool, resume: bool) -> list[str]:
    """The measurements that these rows need; with ``resume`` without those that the file has."""
    names = list(dict.fromkeys(name for group in groups for name in ROWS[group].makers))
    there = {name for name, one in record.load(path).items() if one.quick == quick} if resume else set()
    return [name for name in names if name not in there]


def measure(name: str, path: Path, quick: bool, repeats: int | None, say: Callable[[str], None]) -> None:
    """Takes one measurement and puts it into the file, beside those that are there."""
    where, usual = MEASUREMENTS[name]
    setting = Setting(repeats or (min(usual, QUICK_REPEATS) if quick else usual), quick, say)
    module, _, function = where.partition(":")
    take: Callable[[Setting], Taken] = getattr(importlib.import_module(f"ngplus.lab.bench.{module}"), function)
    one = Measurement.now(take(setting), setting)
    keep(path, {**record.load(path), name: one})


def keep(path: Path, measurements: dict[str, Measurement]) -> None:
    record.save(path, measurements, [row.as_dict(measurements[row.of]) for row in rows_of(measurements)])


def documents(groups: list[str], path: Path) -> list[dict[str, Any]]:
    """The rows of these groups, for a program."""
    measurements = record.load(path)
    return [row.as_dict(measurements[row.of]) for row in rows_of(measurements, groups)]
