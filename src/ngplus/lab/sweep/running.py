"""Makes the runs of a sweep, in processes of one thread each, and writes a line for each that has ended.

A run lives in a folder of its own until then, so that one which was cut off goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ngplus.lab import loop, settings, terminal, workloads
from ngplus.lab.report.summary import duration
from ngplus.lab.runs import RunError, begun, code_digest, load, locked, read_metrics
from ngplus.lab.sweep.plan import Chain, Job, Made, following
from ngplus.lab.sweep.rows import RESULT, append, line, parse, read
from ngplus.lab.workloads import DataError, Task

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from rich.console import Console

_stop: Event | None = None  # in a worker: set when the command is asked to end
_task: tuple[tuple[Any, ...], Task] | None = None  # in a worker: the last one that was opened


class Clocked:
    """A task, and the CPU seconds between the making of a batch and the end of its step."""

    def __init__(self, task: Task) -> None:
        self.task, self.start, self.seconds, self.steps = task, 0.0, 0.0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def batch(self, seed: int, step: int) -> Any:
        found = self.task.batch(seed, step)
        self.start = time.process_time()
        return found

    def on_step(self, step: int, loss: float, seconds: float) -> None:
        self.seconds += time.process_time() - self.start
        self.steps += 1
        if _stop is not None and _stop.is_set():
            signal.raise_signal(signal.SIGTERM)  # the loop ends after this step, with a checkpoint

    @property
    def milliseconds(self) -> float | None:
        return 1000 * self.seconds / self.steps if self.steps else None


def make(job: Job, root: Path, data: Path | None) -> dict[str, Any] | None:
    """A run from its beginning or its checkpoint, as its line; None where it was asked to end before."""
    folder = job.folder(root)
    if begun(folder):
        left = load(folder)
        if left.environment.get("code") != code_digest() or job.config.difference(left.config):
            shutil.rmtree(folder)  # half of a run by one version of the code and half by another is neither
    task, start = Clocked(_opened(job, data)), time.perf_counter()
    going_on = (folder / "checkpoint.pt").exists()
    asked = cast(Task, task)
    result = loop.run(job.config, asked, folder, resume=True, on_step=task.on_step, final=job.kind == RESULT)
    if not result.ended:
        return None
    elapsed = None if going_on else time.perf_counter() - start
    return line(load(folder), job.kind, job.hyper, task.milliseconds, elapsed)


def _opened(job: Job, data: Path | None) -> Task:
    global _task
    key = (job.where, job.size, data)
    if _task is None or _task[0] != key:
        _task = None
        _task = (key, settings.open_task(workloads.get(job.where), job.size, data))
    return _task[1]


def _begin(stop: Event) -> None:
    """What a worker does first. It ends with the process that has started it, however that ends."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which sets the event
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def run_all(chains: Sequence[Chain], out: Path, workers: int, data: Path | None, console: Console) -> tuple[bool, int]:
    """Makes the runs that are missing. False where Ctrl-C has ended it before the last one; and how many failed."""
    root = out.with_name(f"{out.stem}.runs")
    root.mkdir(parents=True, exist_ok=True)
    with locked(root):
        made = Made(read(out)[0])
        for chain in chains:  # what is not this sweep's is refused before anything is run
            chain.left(made)
        whole, failed = _Work(chains, made, out, root, data, console).run(workers)
        if whole and not failed:
            shutil.rmtree(root)
    return whole, failed


class _Work:
    """The runs under way."""

    def __init__(
        self, chains: Sequence[Chain], made: Made, out: Path, root: Path, data: Path | None, console: Console
    ) -> None:
        self.chains, self.made, self.out, self.root, self.data = chains, made, out, root, data
        self.console, self.workers = console, 1
        self.pending: dict[Future[dict[str, Any] | None], Job] = {}
        self.failed: list[Job] = []

    def run(self, workers: int) -> tuple[bool, int]:
        """False where it was asked to end; and how many runs failed."""
        self.workers = workers
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        stop = context.Event()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rest]}"),
        )
        with (
            Progress(*columns, console=self.console, transient=True) as progress,
            ProcessPoolExecutor(workers, context, _begin, (stop,)) as pool,
        ):
            bars = {"": progress.add_task("all runs", total=None, rest="")}
            try:
                while True:
                    try:
                        self._fill(pool, 0 if stop.is_set() else workers)
                        if not self.pending:
                            return not stop.is_set(), len(self.failed)
                        ended, _ = wait(self.pending, timeout=1.0, return_when=FIRST_COMPLETED)
                        for future in ended:
                            self._end(self.pending.pop(future), future)
                        self._show(progress, bars)
                    except KeyboardInterrupt:
                        if stop.is_set():  # for the second time
                            raise
                        stop.set()
                        self.console.print("Interrupted: ends after the current steps")
            finally:
                stop.set()  # after an error the other runs end as well

    def _fill(self, pool: ProcessPoolExecutor, workers: int) -> None:
        while len(self.pending) < workers:
            job = following(self.chains, self.made, [*self.pending.values(), *self.failed])
            if job is None:
                return
            self.pending[pool.submit(make, job, self.root, self.data)] = job

    def _end(self, job: Job, future: Future[dict[str, Any] | None]) -> None:
        try:
            content = future.result()
        except BrokenProcessPool as error:
            raise RunError(
                "A process of the sweep was killed, perhaps for lack of memory: the same command continues"
            ) from error
        except (DataError, ModuleNotFoundError):  # the others of the workload would fail as well
            raise
        except Exception as error:  # each library has errors of its own; other runs go on
            self.failed.append(job)
            text = terminal.shown(f"{_name(job)}: {type(error).__name__}: {error}")
            self.console.print(f"[bold red]Failed:[/bold red] {text}", highlight=False, soft_wrap=True)
            return
        if content is None:
            return
        row = parse(json.loads(append(self.out, content)), self.out)
        self.made.add(row)
        shutil.rmtree(job.folder(self.root), ignore_errors=True)
        last = "diverged" if row.final is None else f"{job.config.measure} {row.final:.4g}"
        done, whole = self._counts()
        self.console.print(
            terminal.shown(
                f"{done} of {terminal.count(whole, 'run')}, {self.remaining()}: {_name(job)}: {last}, "
                f"{row.milliseconds or 0:.1f} ms a step"
            ),
            highlight=False,
            soft_wrap=True,
        )

    def _counts(self) -> tuple[int, int]:
        whole = sum(chain.count(self.made) for chain in self.chains)
        return whole - sum(chain.left(self.made) for chain in self.chains), whole

    def remaining(self) -> str:
        """How long the rest will take, by the runs that are there."""
        seconds, unknown = 0.0, False
        for chain in self.chains:
            cost, left = self._cost(chain.workload.name, chain.optimizer), chain.left(self.made)
            seconds += left * (cost or 0.0)
            unknown = unknown or (left > 0 and cost is None)
        for job in self.pending.values():
            cost = self._cost(job.config.workload, job.config.optimizer) or 0.0
            seconds -= cost * min(1.0, self._step(job) / job.config.steps)
        return f"{'more than' if unknown else 'about'} {duration(max(seconds, 0.0) / self.workers)} left"

    def _cost(self, workload: str, optimizer: str) -> float | None:
        """Seconds of a run: the median of those of the optimizer on the workload, or of the workload."""
        held = [row for row in self.made.rows if row.workload == workload and row.elapsed is not None]
        own = [row for row in held if row.optimizer == optimizer] or held
        return statistics.median(row.elapsed or 0.0 for row in own) if own else None

    def _step(self, job: Job) -> int:
        """How far a run is that is under way."""
        metrics = read_metrics(job.folder(self.root) / "metrics.jsonl")
        return int(metrics[-1]["step"]) if metrics else 0

    def _show(self, progress: Progress, bars: dict[str, TaskID]) -> None:
        done, whole = self._counts()
        progress.update(bars[""], total=whole, completed=done, rest=self.remaining())
        running = {_name(job): job for job in self.pending.values()}
        for name in set(bars) - set(running) - {""}:
            progress.remove_task(bars.pop(name))
        for name, job in running.items():
            if name not in bars:
                bars[name] = progress.add_task(terminal.shown(name), total=job.config.steps, rest="")
            progress.update(bars[name], completed=self._step(job))


def _name(job: Job) -> str:
    hyper = ", ".join(f"{name} {value:g}" for name, value in job.hyper.items())
    return f"{job.config.workload}, {job.config.optimizer}, {job.kind}, {hyper}, seed {job.config.seed}"
