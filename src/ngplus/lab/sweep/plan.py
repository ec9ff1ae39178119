"""Which runs a sweep has, and which of them comes next. docs/laboratory.md has the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngplus.lab import settings
from ngplus.lab.optimizers import OptimizerEntry
from ngplus.lab.runs import Config, RunError
from ngplus.lab.search import Scales, hyper, points, rounded
from ngplus.lab.study import TUNING_SEED
from ngplus.lab.sweep import numbers
from ngplus.lab.sweep.rows import RATE, RESULT, TRIAL, Key, Row, key, of
from ngplus.lab.workloads import Preset, Workload

FIRST = ("adamw", "ngadam", "muon", "soap")  # what a partial sweep should have
FACTORS = (0.25, 0.5, 2.0, 4.0)  # of the best learning rate, for --rates


@dataclass(frozen=True)
class Job:
    """A run to be made. ``where`` is the workload as the user has named it."""

    where: str
    size: Preset
    kind: str
    hyper: Mapping[str, float]
    config: Config

    @property
    def key(self) -> Key:
        config = self.config
        return key(config.workload, config.preset, config.optimizer, self.kind, config.seed, self.hyper)

    def folder(self, root: Path) -> Path:
        """Where the run lives until it has ended."""
        workload, preset, optimizer, kind, seed, *hyper = self.key
        settings = "-".join(f"{name}={value:g}" for name, value in hyper)
        return root / f"{workload}-{preset}-{optimizer}-{kind}-{settings}-seed{seed}"


class Made:
    """The runs that are there."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self.held = {row.key: row for row in self.rows}
        self.checked: set[Key] = set()
        if any(row.config is None for row in self.rows):
            raise RunError("The file of --out has runs of an earlier version, by other rules: choose another file")

    def get(self, job: Job) -> Row | None:
        """The run of a job. RunError where it was made with other settings."""
        row = self.held.get(job.key)
        if row is None or row.config is None or job.key in self.checked:
            return row
        if difference := job.config.difference(row.config):
            name = f"{row.workload} with {row.optimizer}"
            raise RunError(
                f"The file of --out has runs of {name} with other settings: {difference}. Choose another file, or "
                "remove their lines"
            )
        self.checked.add(job.key)
        return row

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.held[row.key] = row


@dataclass
class Chain:
    """The runs of an optimizer on a workload: the trials, then the best of them on the seeds of the comparison, then,
    with ``rates``, other learning rates."""

    where: str
    workload: Workload
    preset: str
    size: Preset
    optimizer: str
    points: Sequence[Mapping[str, float]]
    seeds: int
    rates: bool
    known: dict[tuple[Any, ...], Job] = field(default_factory=dict)  # they are asked for again and again

    @property
    def trials(self) -> list[Job]:
        return [self.job(TRIAL, point, TUNING_SEED) for point in self.points]

    def results(self, made: Made) -> list[Job]:
        """Nothing before all trials are there."""
        best = self.best(made)
        return [] if best is None else [self.job(RESULT, best, seed) for seed in range(self.seeds)]

    def other_rates(self, made: Made) -> list[Job]:
        best = self.best(made) if self.rates else None
        if best is None:
            return []
        return [self.job(RATE, {**best, "lr": rounded(best["lr"] * factor)}, TUNING_SEED) for factor in FACTORS]

    def best(self, made: Made) -> dict[str, float] | None:
        """The hyper-parameters of the best trial; None before all trials are there, or where all of them diverged."""
        if any(made.get(job) is None for job in self.trials):
            return None
        own = of(made.rows, self.workload.name, self.optimizer)
        best = numbers.best_trial(row for row in own if row.preset == self.preset)
        return None if best is None else dict(best.hyper)

    def count(self, made: Made) -> int:
        """Its runs, those that are there included."""
        ended = all(made.get(job) is not None for job in self.trials)
        if ended and self.best(made) is None:  # all trials diverged
            return len(self.trials)
        return len(self.trials) + self.seeds + len(FACTORS) * self.rates

    def left(self, made: Made) -> int:
        jobs = [*self.trials, *self.results(made), *self.other_rates(made)]
        return self.count(made) - sum(made.get(job) is not None for job in jobs)

    def job(self, kind: str, point: Mapping[str, float], seed: int) -> Job:
        key = (kind, seed, *point.items())
        if key not in self.known:
            config = settings.configure(self.workload, self.preset, self.size, self.optimizer, seed=seed, hyper=point)
            self.known[key] = Job(self.where, self.size, kind, point, config)
        return self.known[key]


def order(names: Iterable[str]) -> list[str]:
    """The optimizers in the order in which their runs are made."""
    found = list(names)
    return [name for name in FIRST if name in found] + [name for name in found if name not in FIRST]


def trials_of(entry: OptimizerEntry, number: int, scales: Scales) -> list[dict[str, float]]:
    """The hyper-parameters of the first ``number`` trials, the same whenever they are asked for."""
    return [hyper(entry.ranges, point, scales) for point in points(entry.ranges, number)]


def following(chains: Sequence[Chain], made: Made, left_out: Iterable[Job]) -> Job | None:
    """The next run: of the first chain that has one; rates come after all else. None where none can begin yet.

    ``left_out``: the runs under way, and those that have failed.
    """
    others = {job.key for job in left_out}
    parts: list[Callable[[Chain], list[Job]]] = [
        lambda chain: [*chain.trials, *chain.results(made)],
        lambda chain: chain.other_rates(made),
    ]
    for part in parts:
        for chain in chains:
            for job in part(chain):
                if job.key not in others and made.get(job) is None:
                    return job
    return None


def make_chains(
    opened: Mapping[str, tuple[Workload, Preset]],
    preset: str,
    entries: Sequence[OptimizerEntry],
    trials: int,
    seeds: int,
    rates: bool,
    scales: Callable[[str], Scales],
) -> list[Chain]:
    """For each workload a chain for each optimizer. ``scales``: of a workload, where a range is relative to them."""
    found = []
    for where, (workload, size) in opened.items():
        for entry in entries:
            relative = any(r.unit for r in entry.ranges.values())
            held = trials_of(entry, trials, scales(where) if relative else Scales())
            found.append(Chain(where, workload, preset, size, entry.name, held, seeds, rates))
    return found
