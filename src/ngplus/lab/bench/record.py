"""What was measured, and its file: each measurement by its name, with when and how it was taken.

The file keeps the times themselves; the rows of the table are worked out from them. A measurement that is taken again
replaces the old one, all others stay, so that a benchmark can be done in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from ngplus.lab import runs
from ngplus.lab.bench.timing import Times

FORMAT = 1


@dataclass(frozen=True)
class Setting:
    """How to measure."""

    repeats: int
    quick: bool = False
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Taken:
    """What a measurement gives: times [rounds, 2], and numbers that are not times."""

    times: Times
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """A measurement with its circumstances."""

    taken: Taken
    when: str
    repeats: int
    quick: bool
    environment: Mapping[str, Any]

    @property
    def times(self) -> Times:
        return self.taken.times

    @property
    def numbers(self) -> dict[str, Any]:
        return self.taken.numbers

    @classmethod
    def now(cls, taken: Taken, setting: Setting) -> Measurement:
        surroundings = {key: value for key, value in runs.environment().items() if key != "command"}
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(taken, when, setting.repeats, setting.quick, surroundings)

    def as_dict(self) -> dict[str, Any]:
        times = {name: {"wall": x[:, 0].tolist(), "cpu": x[:, 1].tolist()} for name, x in self.times.items()}
        return {
            "when": self.when,
            "repeats": self.repeats,
            "quick": self.quick,
            "environment": dict(self.environment),
            "numbers": self.numbers,
            "times": times,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Measurement:
        times = {name: np.stack([x["wall"], x["cpu"]], axis=1) for name, x in content["times"].items()}
        taken = Taken(times, dict(content["numbers"]))
        return cls(taken, content["when"], content["repeats"], content["quick"], content["environment"])


def load(path: Path) -> dict[str, Measurement]:
    """The measurements of a file; none where it is not there. RunError where it is not one of a benchmark."""
    if not path.exists():
        return {}
    content = runs.read_json(path)
    try:
        if content["format"] != FORMAT:
            raise runs.RunError(
                f"{path} has format {content['format']}, but this version reads {FORMAT}: remove it and measure again"
            )
        return {name: Measurement.from_dict(item) for name, item in content["measurements"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise runs.RunError(f"{path} is not the file of a benchmark: {error!r}") from error


def save(path: Path, measurements: Mapping[str, Measurement], rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: one.as_dict() for name, one in measurements.items()}
    runs.write_json(path, {"format": FORMAT, "rows": rows, "measurements": content})
