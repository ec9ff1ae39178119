"""How long a training step takes with each optimizer: blocks of steps in turns, in this process, on one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ngplus.lab import loop, optimizers, schedules, settings, workloads
from ngplus.lab.bench.timing import Stopwatch, Turn, take_turns
from ngplus.lab.runs import Config, RunError, code_digest, environment
from ngplus.lab.study import TUNING_SEED
from ngplus.lab.sweep.plan import Chain, Job, Made
from ngplus.lab.sweep.rows import TRIAL, append, read
from ngplus.lab.workloads import Task

STEPS = 20  # of a block: a multiple of the steps between two refreshes of NGAdam and SOAP
ROUNDS = 12


def measure_all(
    chains: Sequence[Chain], out: Path, data: Path | None, allowed: float, say: Callable[[str], None]
) -> None:
    """Times the chosen settings of each workload whose times are not there yet, and writes a line for each optimizer.

    RunError where other programs use more than ``allowed`` cores.
    """
    made = Made(read(out)[0])
    for where in dict.fromkeys(chain.where for chain in chains):
        chosen = [(chain, chain.best(made)) for chain in chains if chain.where == where]
        jobs = [chain.job(TRIAL, best, TUNING_SEED) for chain, best in chosen if best is not None]
        measure(jobs, out, data, allowed, say)


def measure(jobs: Sequence[Job], out: Path, data: Path | None, allowed: float, say: Callable[[str], None]) -> None:
    """Times the settings of these runs, all of one workload, in turns. Nothing where all of these times are there."""
    times_there = [
        (t.workload, t.preset, t.optimizer, t.hyper) for t in read(out)[1] if t.environment.get("code") == code_digest()
    ]
    if all((j.config.workload, j.config.preset, j.config.optimizer, j.hyper) in times_there for j in jobs):
        return
    if (load := busy_cores()) > allowed:
        raise RunError(
            f"Other programs use {load:.1f} cores, which would distort the times: stop them, or allow it with "
            f"--load {load + 0.1:.1f}"
        )
    torch.set_num_threads(1)
    task = settings.open_task(workloads.get(jobs[0].where), jobs[0].size, data)
    began = int(time.time())
    turns = {job.config.optimizer: _block(task, job.config) for job in jobs}
    times = take_turns(turns, ROUNDS, say=partial(_told, say, jobs[0].config.workload))
    load = max(load, busy_cores())
    about = {key: value for key, value in environment().items() if key != "command"}
    for job in jobs:
        wall, cpu = (1000 * times[job.config.optimizer]).T.tolist()
        append(
            out,
            {
                "timed": job.config.workload,
                "preset": job.config.preset,
                "optimizer": job.config.optimizer,
                "hyper": job.hyper,
                "milliseconds": [round(value, 3) for value in wall],
                "cpu_milliseconds": [round(value, 3) for value in cpu],
                "began": began,
                "load": round(load, 2),
                "environment": about,
            },
        )


def _told(say: Callable[[str], None], workload: str, text: str) -> None:
    say(f"{workload}: {text}")


def _block(task: Task, config: Config) -> Turn:
    """The first steps of a run, a block of them in each turn. Making a batch is outside of the clock."""
    torch.manual_seed(config.seed)
    model = task.model().train()
    optimizer = optimizers.get(config.optimizer).make(model, loop._tuples(config.hyper))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    done = 0

    def turn(watch: Stopwatch) -> None:
        nonlocal done
        batches = [task.batch(config.seed, done + k) for k in range(STEPS)]
        with watch.time(config.optimizer, STEPS):
            for batch in batches:
                part = schedules.factor(config.schedule, done, config.steps, config.warmup)
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * part
                loop._train_step(task, model, optimizer, batch)
                done += 1

    return turn


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores other programs use; the load of the last minute where the system does not say more."""
    place = Path("/proc/stat")
    if not place.exists():
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    def ticks() -> tuple[int, int]:
        fields: list[Any] = place.read_text().split("\n")[0].split()[1:9]
        numbers = [int(value) for value in fields]
        return sum(numbers), numbers[3] + numbers[4]  # all of them; idle, and waiting for a disk

    before = ticks()
    time.sleep(seconds)
    after = ticks()
    whole, idle = after[0] - before[0], after[1] - before[1]
    return (os.cpu_count() or 1) * (whole - idle) / whole if whole else 0.0
