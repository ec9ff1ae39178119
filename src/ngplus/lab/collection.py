"""Many runs: found in folders, and kept in one JSON file.

A collection has a line for each run, its metrics as columns, and each way of tuning once::

    {"format": 1,
     "tuning": [{...}],
     "runs": [
    {"name": "adam-seed0", "config": {..., "tuning": 0}, "environment": {...}, "metrics": {"step": [...], ...}, ...}
    ]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ngplus.lab.runs import (
    ANEW,
    FORMAT,
    Config,
    Metrics,
    Run,
    RunError,
    is_number,
    load,
    plain,
    read_json,
    read_result,
    write_atomically,
)


def find(places: Iterable[Path]) -> list[Run]:
    """All runs in these folders and below them, and in collections."""
    found: list[Run] = []
    for place in places:
        if place.is_file():
            found += read(place)
            continue
        if not place.is_dir():
            raise RunError(f"There is no folder {place}: name a folder with runs, or a file of ngplus report --json")
        # other things have a config.json as well; a result without metrics is a damaged run, and load says so
        files = [path for name in ("metrics.jsonl", "result.json") for path in place.rglob(name)]
        folders = {path.parent for path in files if path.with_name("config.json").exists()}
        here = [load(folder) for folder in sorted(folders)]
        if not here:
            raise RunError(
                f"There are no runs in {place}: no config.json with a metrics.jsonl, neither there nor below. "
                "ngplus compare WORKLOAD makes some"
            )
        found += here
    return found


def first(runs: Iterable[Run]) -> list[Run]:
    """Of runs of the same workload, size, optimizer and seed the first: new runs are named before old ones."""
    held: dict[tuple[str, str, str, int], Run] = {}
    for run in runs:
        config = run.config
        held.setdefault((config.workload, config.preset, config.optimizer, config.seed), run)
    return list(held.values())


def passed_over(runs: Iterable[Run], kept: Iterable[Run]) -> list[Run]:
    """The runs that :func:`first` leaves out, but for copies of those that it keeps."""
    held = [(run.config, run.result) for run in kept]
    return [run for run in runs if (run.config, run.result) not in held]


def thinned(run: Run) -> Run:
    """The run at its evaluations alone, in six digits, each with the mean training loss since the one before."""
    kept: Metrics = []
    total, weight, last = 0.0, 0, 0
    for row in run.metrics:
        count, last = row["step"] - last, row["step"]
        if is_number(row.get("train_loss")):
            total, weight = total + count * row["train_loss"], weight + count
        if run.config.measure in row:
            mean = {"train_loss": total / weight} if weight else {}
            kept.append({key: six_digits(value) for key, value in {**row, **mean}.items()})
            total, weight = 0.0, 0
    return replace(without_command(run), metrics=kept)


def without_command(run: Run) -> Run:
    """The command has paths of the machine."""
    return replace(run, environment={key: value for key, value in run.environment.items() if key != "command"})


def six_digits(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(path: Path, runs: Iterable[Run]) -> None:
    """All runs in one file, to keep or to send."""
    write_atomically(path, text(runs).encode())


def text(runs: Iterable[Run], tables: Any = None) -> str:
    """The content of a collection. ``tables``: what was made of the runs, for who reads them."""
    tuning: list[Any] = []
    lines = []
    for run in runs:
        config = run.config.as_dict()
        if config["tuning"] is not None:
            if config["tuning"] not in tuning:
                tuning.append(config["tuning"])
            config["tuning"] = tuning.index(config["tuning"])
        names = dict.fromkeys(name for row in run.metrics for name in row)
        entry = {
            "name": run.path.name,
            "config": config,
            "environment": dict(run.environment),
            "metrics": {name: [row.get(name) for row in run.metrics] for name in names},
            "result": None if run.result is None else asdict(run.result),
        }
        lines.append(json.dumps(plain(entry), allow_nan=False))
    told = json.dumps(plain(tuning), allow_nan=False)
    more = "" if tables is None else f'"tables": {json.dumps(plain(tables), allow_nan=False)},\n'
    return f'{{"format": {FORMAT},\n{more}"tuning": {told},\n"runs": [\n' + ",\n".join(lines) + "\n]}\n"


def read(path: Path) -> list[Run]:
    """The runs of a collection."""
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("runs"), list):
        raise RunError(
            f"{path} is not a collection of runs in format {FORMAT}: make one with ngplus report RUNS --json FILE"
        )
    told = content.get("tuning")
    return [_entry(entry, told if isinstance(told, list) else [], path) for entry in content["runs"]]


def _entry(entry: Any, told: list[Any], path: Path) -> Run:
    if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
        raise RunError(f"{path} has a run without a configuration. {ANEW}")
    config, surroundings, result = dict(entry["config"]), entry.get("environment"), entry.get("result")
    number = config.get("tuning")
    if number is not None:
        if not isinstance(number, int) or not 0 <= number < len(told):
            raise RunError(f"{path} has a run whose tuning is missing. {ANEW}")
        config["tuning"] = told[number]
    return Run(
        path=path / str(entry.get("name")),
        config=Config.from_dict(config, path),
        environment=surroundings if isinstance(surroundings, dict) else {},
        metrics=_rows(entry.get("metrics"), path),
        result=None if result is None else read_result(result, path),
    )


def _rows(columns: Any, path: Path) -> Metrics:
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise RunError(f"{path} has a run without metrics. {ANEW}")
    if len({len(column) for column in columns.values()}) > 1:
        raise RunError(f"{path} has metrics of different lengths. {ANEW}")
    if columns and not all(is_number(x) for name in ("step", "seconds") for x in columns.get(name, [None])):
        raise RunError(f"{path} has metrics without step and seconds. {ANEW}")
    count = len(columns.get("step", []))
    return [{name: column[k] for name, column in columns.items() if column[k] is not None} for k in range(count)]
