"""The file of a sweep: a line of JSON for each run, and one for the times of an optimizer's steps.

A line is written once what it tells of has ended. Files of earlier versions have less in a line: what is not there is
not known, and None.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngplus.lab.runs import Config, Run, RunError, plain
from ngplus.lab.study import TUNING_SEED

TRIAL, RESULT, RATE = "trial", "result", "rate"  # kinds of runs: of the tuning, of the comparison, of --rates
Key = tuple[Any, ...]
TIMED = "-time"  # ends the names of runs with budgets of equal time, in files of earlier versions


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        kind: TRIAL, RESULT or RATE.
        hyper: the hyper-parameters that are tuned.
        final: the measure at the last step; None where the run diverged.
        curve: steps and the measure on the validation set; not a number where that was not finite.
        scores: what is measured once, at the end of a run.
        milliseconds: of a training step; cpu_milliseconds: the same by the process's CPU clock.
        elapsed: seconds of the whole run, evaluations included; None where it was cut off and continued.
    """

    workload: str
    preset: str
    optimizer: str
    kind: str
    hyper: Mapping[str, float]
    seed: int
    final: float | None
    curve: tuple[tuple[int, float], ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    milliseconds: float | None = None
    cpu_milliseconds: float | None = None
    elapsed: float | None = None
    state_bytes: int | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None

    @property
    def key(self) -> Key:
        return key(self.workload, self.preset, self.optimizer, self.kind, self.seed, self.hyper)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a training step, a number for each round of blocks.

    Attributes:
        began: the time, in seconds; the same for the optimizers that took turns.
        load: how many cores other programs used.
    """

    workload: str
    preset: str
    optimizer: str
    hyper: Mapping[str, float]
    milliseconds: tuple[float, ...]
    cpu_milliseconds: tuple[float, ...]
    began: int
    load: float
    environment: Mapping[str, Any]


def read(path: Path) -> tuple[list[Row], list[Timing]]:
    """The runs and the times of a file; nothing where there is none. A last line that was cut short is left out."""
    if not path.exists():
        return [], []
    rows, timings = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            content = json.loads(line)
            if "timed" in content:
                timings.append(_timing(content))
            else:
                rows.append(parse(content, path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{path} is not a file of ngplus sweep: line {number}: {error!r}") from error
    return rows, timings


def append(path: Path, content: Mapping[str, Any]) -> str:
    """Adds a line and returns it. What a kill has left of a line is removed first."""
    text = json.dumps(plain(content), allow_nan=False) + "\n"
    with path.open("a+b") as file:
        file.seek(0)
        held = file.read()
        file.truncate(held.rfind(b"\n") + 1)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    return text


def line(run: Run, kind: str, hyper: Mapping[str, float], cpu: float | None, elapsed: float | None) -> dict[str, Any]:
    """A run that has ended, as its line."""
    config, result = run.config, run.result
    assert result is not None
    looks = [row for row in run.metrics if config.measure in row]
    return {
        "workload": config.workload,
        "preset": config.preset,
        "optimizer": config.optimizer,
        "kind": kind,
        "hyper": dict(hyper),
        "seed": config.seed,
        "status": result.status,
        "final": result.final if result.status == "finished" else None,
        "scores": dict(result.scores),
        "seconds": round(result.seconds, 3),
        "milliseconds": _rounded(result.milliseconds_per_step),
        "cpu_milliseconds": _rounded(cpu),
        "elapsed": _rounded(elapsed),
        "state_bytes": result.state_bytes,
        "curve": [[look["step"], _rounded(look[config.measure]), round(look["seconds"], 3)] for look in looks],
        "environment": {key: value for key, value in run.environment.items() if key != "command"},
        "config": config.as_dict(),
    }


def key(workload: str, preset: str, optimizer: str, kind: str, seed: int, hyper: Mapping[str, float]) -> Key:
    """What makes a run another one than the rest of its file."""
    return (workload, preset, optimizer, kind, seed, *sorted(hyper.items()))


def of(rows: Iterable[Row], workload: str, optimizer: str) -> list[Row]:
    return [row for row in rows if (row.workload, row.optimizer) == (workload, optimizer)]


def parse(content: Mapping[str, Any], path: Path) -> Row:
    """The run of a line of a file."""
    earlier = "kind" not in content
    seed = int(content["seed"])
    known = ("workload", "preset", "optimizer", "lr", "seed", "final", "milliseconds", "curve")
    scores = {k: v for k, v in content.items() if k not in known} if earlier else content["scores"]
    config = content.get("config")
    return Row(
        workload=content["workload"],
        preset=content["preset"],
        optimizer=content["optimizer"],
        kind=(TRIAL if seed == TUNING_SEED else RESULT) if earlier else content["kind"],
        hyper={"lr": content["lr"]} if earlier else dict(content["hyper"]),
        seed=seed,
        final=content["final"],
        curve=tuple((int(step), math.nan if value is None else float(value)) for step, value, *_ in content["curve"]),
        scores={name: value for name, value in scores.items() if value is not None},
        milliseconds=content["milliseconds"],
        cpu_milliseconds=content.get("cpu_milliseconds"),
        elapsed=content.get("elapsed"),
        state_bytes=content.get("state_bytes"),
        environment=content.get("environment", {}),
        config=None if config is None else Config.from_dict(config, path),
    )


def _timing(content: Mapping[str, Any]) -> Timing:
    return Timing(
        workload=content["timed"],
        preset=content["preset"],
        optimizer=content["optimizer"],
        hyper=dict(content["hyper"]),
        milliseconds=tuple(content["milliseconds"]),
        cpu_milliseconds=tuple(content["cpu_milliseconds"]),
        began=int(content["began"]),
        load=float(content["load"]),
        environment=content["environment"],
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
