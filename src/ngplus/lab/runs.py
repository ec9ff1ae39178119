"""A run on disk: a folder with all that is needed to understand it, repeat it and go on with it.

=================== ==================================================================================================
config.json         what was asked for: workload, sizes, optimizer, hyper-parameters, seed, and how they were tuned
environment.json    where it ran: versions, a digest of the code, threads, processor
metrics.jsonl       a line of JSON for each evaluation, and for steps between: step, seconds, training loss
events.out.*        the same for TensorBoard
checkpoint.pt       the state after an evaluation or every so many steps, written atomically
result.json         there once the run has ended: how, and the summary
=================== ==================================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

FORMAT = 1
# The modules of the lab that a curve depends on.
CURVE = ("loop", "optimizers", "optimizer_wrappers", "schedules", "processes", "runs")
FILES = ("result.json", "checkpoint.pt", "metrics.jsonl", "environment.json", "config.json")
Metrics = list[dict[str, Any]]
ANEW = "Remove it and make it again"
WHOLE = "Remove the folder, or make the run again with ngplus compare --fresh"


class RunError(Exception):
    """A run that cannot be made, read or gone on with; the message says why and what to do."""


@dataclass(frozen=True)
class Config:
    """What a run is. Two runs with the same configuration have the same curve."""

    workload: str
    preset: str
    optimizer: str
    hyper: Mapping[str, Any]
    seed: int
    steps: int
    batch_size: int
    evaluate_every: int
    target: float
    measure: str
    higher_is_better: bool
    schedule: str = "cosine"
    warmup: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the workload's model and data
    damping_decay: float = 1.0  # what is left of the damping at the end: damping * damping_decay^(step / steps)
    processes: int = 1
    tuning: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Returns a dict of plain values, as JSON gives them back."""
        content: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return content

    def reached(self, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        return value >= self.target if self.higher_is_better else value <= self.target

    @classmethod
    def from_dict(cls, content: Any, where: Path) -> Config:
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise RunError(f"{where} is not the configuration of a run in format {FORMAT}. {ANEW}")
        known = {f.name: f for f in fields(cls)}
        try:
            config = cls(**{name: value for name, value in content.items() if name in known})
        except TypeError as error:
            raise RunError(f"{where} is not complete: {error}. {ANEW}") from error
        wanted: dict[str, Any] = {"str": str, "int": int, "float": int | float, "bool": bool}
        for name, entry in known.items():
            kind = wanted.get(str(entry.type), Mapping | None if name == "tuning" else Mapping)
            value = getattr(config, name)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise RunError(f"{where} has {name}={value!r}, which is not a {entry.type}. {ANEW}")
        return config

    def difference(self, other: Config) -> str:
        """The first thing that differs, in words; empty where nothing does. How it was tuned does not count."""
        mine, theirs = self.as_dict(), other.as_dict()
        for name in mine:
            if name != "tuning" and mine[name] != theirs[name]:
                return f"{name} {_short(theirs[name])} there and {_short(mine[name])} now"
        return ""


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it came to. ``status``: finished, diverged, interrupted, or stopped by the caller."""

    status: str
    reason: str
    step: int
    seconds: float
    final: float | None  # the measure at the last look
    best: float | None
    steps_to_target: int | None
    seconds_to_target: float | None
    milliseconds_per_step: float | None
    state_bytes: int
    scores: Mapping[str, float | None] = field(default_factory=dict)  # what is measured once, at the end, such as BLEU
    collapsed: bool = False  # reached the target and lost it again: see collapsed()

    @property
    def ended(self) -> bool:
        """Returns True if the run finished or diverged. An interrupted run can continue."""
        return self.status in ("finished", "diverged")


@dataclass(frozen=True)
class Run:
    """A run as it was left."""

    path: Path
    config: Config
    environment: Mapping[str, Any]
    metrics: Metrics
    result: Result | None

    def as_dict(self) -> dict[str, Any]:
        """Without the metrics."""
        return {
            "folder": str(self.path),
            "config": self.config.as_dict(),
            "environment": dict(self.environment),
            "result": None if self.result is None else asdict(self.result),
        }


def summarise(
    config: Config, metrics: Metrics, step: int, seconds: float, state_bytes: int, status: str, reason: str = ""
) -> Result:
    """The result of what was measured."""
    looks = [row for row in metrics if isinstance(row.get(config.measure), int | float)]
    values = [float(row[config.measure]) for row in looks]
    first = next((row for row in looks if config.reached(row[config.measure])), None)
    lost = first is not None and (status == "diverged" or collapsed(config, values))
    return Result(
        status=status,
        reason=reason,
        step=step,
        seconds=seconds,
        final=values[-1] if values else None,
        best=(max if config.higher_is_better else min)(values) if values else None,
        steps_to_target=None if first is None else int(first["step"]),
        seconds_to_target=None if first is None else float(first["seconds"]),
        milliseconds_per_step=1000 * seconds / step if step else None,
        state_bytes=state_bytes,
        collapsed=lost,
    )


def collapsed(config: Config, values: Sequence[float]) -> bool:
    """Has a run that reached its target lost it again? Then its last measure is not finite, or worse than the target by
    more than a tenth of the way from its first measure to the target."""
    if not values or not math.isfinite(values[-1]):
        return True
    behind = config.target - values[-1] if config.higher_is_better else values[-1] - config.target
    return behind > 0.1 * abs(config.target - values[0])


# ------------------------------------------------------------------------------------------------ files


def write_atomically(path: Path, content: bytes) -> None:
    """The file has its old content or all of the new one, whenever the process or the machine dies."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as part:
        try:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, 0o666 & ~_umask())
            os.replace(part.name, path)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(plain(content), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {error}. {ANEW}") from error


def read_metrics(path: Path) -> Metrics:
    """The lines of metrics.jsonl. A last line that a kill has cut short is left out."""
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error}. {ANEW}") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # each whole line ends in a line feed
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(is_number(row.get(key)) for key in ("step", "seconds")):
                raise ValueError("no step and seconds")
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is damaged in line {number}: {error}. {ANEW}") from error
        rows.append(row)
    return rows


def plain(value: Any) -> Any:
    """For JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone. The lock goes with the process, however it ends. (Not on Windows.)"""
    with (folder / ".lock").open("a") as handle:
        _lock(handle, folder)
        yield


def _lock(handle: IO[str], folder: Path) -> None:
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Busy(f"Another process is working on {folder}: wait for it, or choose another folder") from error


class Busy(RunError):
    """Another process has the run."""


def _sync_folder(folder: Path) -> None:
    """A rename is kept once its folder is on disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------------------------------------ reading runs


@functools.cache
def code_digest(package: Path = Path(__file__).parents[1]) -> str:
    """A digest of the code that a curve comes from: the library, the workloads and the training loop as they are now.

    Runs with the same settings have the same curve only where this is the same, too.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] != "lab" or name.parts[1] == "workloads" or name.stem in CURVE:
            digest.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> dict[str, Any]:
    import torch

    import ngplus

    return {
        "ngplus": ngplus.__version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def begun(folder: Path) -> bool:
    """Returns True if the folder has more of a run than its settings, which are all that a refused run leaves."""
    return any((folder / name).exists() for name in ("result.json", "checkpoint.pt", "metrics.jsonl"))


def load(folder: Path) -> Run:
    """The run in a folder; a run of which a file is gone is refused, since it would be taken for another one."""
    if begun(folder) and not (folder / "config.json").exists():
        raise RunError(f"{folder} has a run without config.json. {WHOLE}")
    config = Config.from_dict(read_json(folder / "config.json"), folder / "config.json")
    place, ending = folder / "environment.json", folder / "result.json"
    surroundings = read_json(place) if place.exists() else {}
    if ending.exists() and not (folder / "metrics.jsonl").exists():
        raise RunError(f"{folder} has a result.json without metrics.jsonl. {WHOLE}")
    return Run(
        path=folder,
        config=config,
        environment=surroundings if isinstance(surroundings, dict) else {},
        metrics=read_metrics(folder / "metrics.jsonl"),
        result=read_result(read_json(ending), ending) if ending.exists() else None,
    )


def read_result(content: Any, where: Path) -> Result:
    numbers = {f.name for f in fields(Result)} - {"status", "reason", "scores", "collapsed"}
    try:
        result = Result(**content)
    except TypeError as error:
        raise RunError(f"{where} is not the result of a run: {error}. {ANEW}") from error
    for name in numbers:
        value = getattr(result, name)
        optional = name not in ("step", "seconds", "state_bytes")
        if not (is_number(value) or (optional and value is None)):
            raise RunError(f"{where} has {name}={_short(value)}, which is not a number. {ANEW}")
    if not isinstance(result.status, str) or not isinstance(result.reason, str):
        raise RunError(f"{where} has no status. {ANEW}")
    if not isinstance(result.collapsed, bool):
        raise RunError(f"{where} has collapsed={_short(result.collapsed)}, which is not true or false. {ANEW}")
    scores = result.scores
    if not isinstance(scores, dict) or not all(x is None or is_number(x) for x in scores.values()):
        raise RunError(f"{where} has scores={_short(scores)}, which are not numbers. {ANEW}")
    return result
