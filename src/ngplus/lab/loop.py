"""The training loop: a run from its first step, or its checkpoint, to its result.

Batches, dropout and the learning rate depend on the seed and the step alone, so that a run which was killed at any
moment goes on from its last checkpoint to the same curve. The clock runs during the forward and backward pass and the
optimizer's step, refreshes included; the making of a batch and the evaluation are outside of it.

Under torchrun the model is wrapped in DistributedDataParallel, each process takes batches of its own, and the first one
writes. ``batch_size`` is that of one process.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ngplus.lab import averaging, optimizers, processes, schedules
from ngplus.lab.optimizer_wrappers import Trainer, state_bytes
from ngplus.lab.runs import (
    FORMAT,
    Config,
    Metrics,
    Result,
    RunError,
    begun,
    load,
    locked,
    plain,
    read_metrics,
    summarise,
    write_atomically,
    write_json,
)
from ngplus.lab.runs import environment as surroundings
from ngplus.lab.workloads import DataError, Task

OnStep = Callable[[int, float, float], None]  # steps done, loss, seconds of training
OnEvaluation = Callable[[int, float | None], str]  # steps done, the measure; returns a reason to end the run, or ""
DAMPINGS = ("damping", "relative_damping")  # what lambda is made of
_ANEW = "Remove it; then ngplus train --resume or ngplus compare starts the run again"


class Divergence(Exception):
    """The numbers are no longer finite."""


def run(
    config: Config,
    task: Task,
    folder: Path | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    device: str = "cpu",
    on_step: OnStep | None = None,
    on_evaluation: OnEvaluation | None = None,
    final: bool = True,
) -> Result:
    """Trains, and leaves what it measured in the folder.

    With ``resume`` it goes on from the folder's checkpoint, or begins where there is none; a run that has ended is
    given back as it is. Checkpoints are written every ``checkpoint_every`` steps, at each evaluation where that is
    None. Ctrl-C ends the run after the current step. Where ``on_evaluation`` returns a reason, the run is "stopped"
    after that evaluation. With ``final``, a run that reaches its last step is measured by the task's ``final``.
    """
    device = processes.own(device)
    _check_device(device)
    with ExitStack() as stack:
        stack.enter_context(processes.group(device))
        if folder is not None and processes.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            _check(config, folder, resume)
        if folder is not None:
            processes.barrier()
            ended = load(folder).result if begun(folder) else None
            if ended is not None and ended.ended:
                return ended
        stopping = stack.enter_context(processes.stop_signals())
        session = _Session(config, task, folder, device)
        stack.callback(session.close)
        if folder is not None and processes.rank() == 0 and not begun(folder):
            _claim(config, folder, device)  # after the settings have been found to work
        session.begin()
        status, reason = session.train(stopping, checkpoint_every or config.evaluate_every, on_step, on_evaluation)
        return session.end(status, reason, final)


def _check_device(device: str) -> None:
    if device.partition(":")[0] == "meta":
        raise RunError("--device meta holds no values, so nothing can be trained on it: use cpu or cuda")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"--device {device} cannot be used with torch {torch.__version__}: {reason}") from error


@contextmanager
def with_settings(what: str) -> Iterator[None]:
    """Raises errors of a model, an optimizer or a first step as a RunError that names the settings."""
    try:
        yield
    except (RunError, DataError, Divergence, ImportError, OSError):  # they say themselves what is wrong
        raise
    except Exception as error:  # a size that is negative, a missing option: each library has errors of its own
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error).strip().partition("\n")[0]
        raise RunError(f"{what} does not work with these settings: {text or type(error).__name__}") from error


def _check(config: Config, folder: Path, resume: bool) -> None:
    """Makes sure that the folder is free, or the run in it this one."""
    for left in folder.glob(".*.part"):  # by a kill in the middle of writing
        left.unlink(missing_ok=True)
    if begun(folder):
        found = load(folder)
        if difference := config.difference(found.config):
            raise RunError(f"{folder} has a run with other settings: {difference}. Remove it, or choose another --out")
        if not resume and not (found.result is not None and found.result.ended):
            raise RunError(f"{folder} has an unfinished run: continue it with --resume, or choose another --out")


def _claim(config: Config, folder: Path, device: str) -> None:
    """Makes a new run of the folder."""
    write_json(folder / "environment.json", {**surroundings(), "device": device})
    write_json(folder / "config.json", config.as_dict())


def _seed(seed: int) -> None:
    """torch.manual_seed; without what that does for accelerators where there is none, most of a millisecond."""
    torch.manual_seed(seed) if torch.accelerator.is_available() else torch.default_generator.manual_seed(seed)


class _Session:
    """A run in progress: the model, its optimizer and what was measured."""

    def __init__(self, config: Config, task: Task, folder: Path | None, device: str) -> None:
        self.config, self.task, self.device = config, task, device
        self.rank, self.world = processes.rank(), processes.world()
        self.folder = folder if self.rank == 0 else None
        self.source = folder
        self.step, self.seconds = 0, 0.0
        self.loss_sum, self.loss_count = 0.0, 0  # of the steps since the last line of metrics
        self.metrics: Metrics = []
        self.state_bytes = 0
        self.events: Any = None
        self._warm_up(device)
        self.model, self.optimizer = self._make(device)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.dampings = [{k: group[k] for k in DAMPINGS if k in group} for group in self.optimizer.param_groups]
        self.module: nn.Module = self.model
        if self.world > 1:
            self.module = nn.parallel.DistributedDataParallel(self.model)

    def _make(self, device: str) -> tuple[nn.Module, Trainer]:
        torch.manual_seed(self.config.seed)
        with with_settings(self.config.workload):
            model = self.task.model().to(device)
        model.train()
        with with_settings(self.config.optimizer):
            return model, optimizers.get(self.config.optimizer).make(model, _tuples(self.config.hyper))

    def _warm_up(self, device: str) -> None:
        """One step on a model that is thrown away: no run pays for what a process does at its first step only. What
        first happens at a later step, such as Shampoo's first inverse roots, is paid by the run."""
        model, optimizer = self._make(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said again by the first step that counts
            # a divergence is met again by the first step that counts
            with suppress(Divergence), with_settings(f"{self.config.workload} with {self.config.optimizer}"):
                _train_step(self.task, model, optimizer, self.task.batch(self.config.seed, self.rank))

    # ---------------------------------------------------------------------------------------------- begin and go on

    def begin(self) -> None:
        path = None if self.source is None else self.source / "checkpoint.pt"
        if path is not None and path.exists():
            self._load(path)
        if self.folder is not None:
            if self.step > 0:
                self.metrics = [x for x in read_metrics(self.folder / "metrics.jsonl") if x["step"] <= self.step]
            write_atomically(self.folder / "metrics.jsonl", b"".join(_line(row) for row in self.metrics))
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(self.folder), purge_step=self.step + 1 if self.step else None)
        if self.step == 0:
            self._evaluate()

    def _load(self, path: Path) -> None:
        """Everything is read and checked before anything is changed."""
        try:
            raw = io.BytesIO(path.read_bytes())
            with zipfile.ZipFile(raw) as archive:  # torch.load does not check the checksums of torch.save
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the check sum of {damaged} is wrong")
            raw.seek(0)
            saved = torch.load(raw, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises what it likes for a file that is none of its own
            reason = str(error).partition(". ")[0]  # torch goes on to advise against weights_only
            raise RunError(f"{path} is damaged, or not a checkpoint: {reason}. {_ANEW}") from error
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise RunError(f"{path} is not a checkpoint in format {FORMAT}. {_ANEW}")
        if difference := self.config.difference(Config.from_dict(saved.get("config"), path)):
            raise RunError(f"{path} is of a run with other settings: {difference}. {_ANEW}")
        before = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        try:
            step, seconds = int(saved["step"]), float(saved["seconds"])
            loss_sum, loss_count = float(saved["loss_sum"]), int(saved["loss_count"])
            held_bytes = state_bytes(saved["optimizer"])
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            self.model.load_state_dict(before[0])
            self.optimizer.load_state_dict(before[1])
            raise RunError(f"{path} does not match this run: {error}. {_ANEW}") from error
        self.step, self.seconds, self.state_bytes = step, seconds, held_bytes
        self.loss_sum, self.loss_count = loss_sum, loss_count

    def close(self) -> None:
        if self.events is not None:
            self.events.close()

    # ---------------------------------------------------------------------------------------------- the loop

    def train(
        self,
        stopping: Callable[[], bool],
        checkpoint_every: int,
        on_step: OnStep | None,
        on_evaluation: OnEvaluation | None,
    ) -> tuple[str, str]:
        """How it ended, and why."""
        config = self.config
        log_every = max(1, config.steps // 500)
        status, reason = "finished", ""
        while self.step < config.steps:
            if processes.any_of(stopping()):
                status = "interrupted"
                break
            try:
                loss = self._one_step()
            except Divergence as error:
                status, reason = "diverged", str(error)
                break
            if on_step is not None:
                on_step(self.step, loss, self.seconds)
            last = self.step == config.steps
            if last or self.step % config.evaluate_every == 0:
                self._evaluate()
                if on_evaluation is not None and (
                    reason := on_evaluation(self.step, self.metrics[-1].get(config.measure))
                ):
                    status = "stopped"
                    break
            elif self.step % log_every == 0:
                self._record({})
            if last or self.step % checkpoint_every == 0:
                self._save()
        if status == "interrupted":
            self._save()
        return status, reason

    def end(self, status: str, reason: str, final: bool) -> Result:
        result = summarise(self.config, self.metrics, self.step, self.seconds, self.state_bytes, status, reason)
        if final and status == "finished" and self.rank == 0:
            found = averaging.measured(self.task.final, self.task, self.model, self.optimizer, self.config.seed)
            result = replace(result, scores={name: float(value) for name, value in found.items()})
        if self.folder is not None:
            write_json(self.folder / "result.json", asdict(result))
        processes.barrier()
        return result

    def _one_step(self) -> float:
        config = self.config
        batch = self.task.batch(config.seed, self.step * self.world + self.rank)
        part = schedules.factor(config.schedule, self.step, config.steps, config.warmup)
        decay = config.damping_decay ** (self.step / config.steps)
        for group, rate, dampings in zip(self.optimizer.param_groups, self.rates, self.dampings, strict=True):
            group["lr"] = rate * part
            if decay != 1.0:
                group.update({name: damping * decay for name, damping in dampings.items()})
        # dropout: other numbers in every step and process, the same after a kill
        _seed((config.seed * 1_000_003 + self.step) * 1_009 + self.rank)
        start = self._now()
        loss = _train_step(self.task, self.module, self.optimizer, batch)
        seconds = self._now() - start
        _check_health(self.optimizer)  # outside of the clock: nobody else's step is asked for it
        self.seconds += seconds
        self.step += 1
        self.loss_sum += loss
        self.loss_count += 1
        return loss

    # ---------------------------------------------------------------------------------------------- measuring

    def _now(self) -> float:
        """The time, after a GPU has finished its work."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _evaluate(self) -> None:
        """A validation, and a line of metrics with its results."""
        processes.check_alike(self.model)
        if self.rank == 0:
            found = averaging.measured(self.task.evaluate, self.task, self.model, self.optimizer, self.config.seed)
            self.model.train()
            self._record({name: float(value) for name, value in found.items()})
            self.state_bytes = state_bytes(self.optimizer.state_dict())

    def _record(self, found: dict[str, float]) -> None:
        row = {"step": self.step, "seconds": self.seconds}
        if self.loss_count:
            row["train_loss"] = self.loss_sum / self.loss_count
        self.loss_sum, self.loss_count = 0.0, 0
        row = plain({**found, **row})
        self.metrics.append(row)
        if self.folder is None:
            return
        with (self.folder / "metrics.jsonl").open("ab") as file:
            file.write(_line(row))
        for name, value in row.items():
            if name != "step" and value is not None:
                self.events.add_scalar(name, value, self.step)

    def _save(self) -> None:
        """Writes the metrics before the checkpoint, so that no checkpoint is ahead of the metrics."""
        if self.folder is None:
            return
        with (self.folder / "metrics.jsonl").open("ab") as file:
            os.fsync(file.fileno())
        buffer = io.BytesIO()
        content = {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(content, buffer)
        write_atomically(self.folder / "checkpoint.pt", buffer.getvalue())


def _train_step(task: Task, model: nn.Module, optimizer: Trainer, batch: Any) -> float:
    """The mean loss over all processes; :class:`Divergence` where it is not finite, before anything is changed."""
    optimizer.zero_grad()
    value = 0.0
    for weight, part in task.split(batch):
        loss = weight * task.loss(model, part)
        value += processes.mean(loss)
        if not math.isfinite(value):
            raise Divergence(f"the loss became {value}")
        loss.backward()
    if math.isfinite(task.max_grad_norm):
        nn.utils.clip_grad_norm_(model.parameters(), task.max_grad_norm)
    try:
        optimizer.step()
    except RuntimeError as error:  # torch's own LinAlgError is one
        broken = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        if broken or not _finite(model):
            raise Divergence(str(error)) from error
        raise
    return value


def _check_health(optimizer: Trainer) -> None:
    """:class:`Divergence` where a method has left the step out, in place of numbers that are not finite."""
    if (health := getattr(optimizer, "health", None)) is not None and health().skipped:
        raise Divergence("gradients that are not finite, or whose norm overflows")


def _finite(model: nn.Module) -> bool:
    """Are all parameters and gradients finite, and small enough for a norm?"""
    tensors = [t for p in model.parameters() for t in (p.detach(), p.grad) if t is not None]
    return all(bool((t.coalesce().values() if t.is_sparse else t).float().norm().isfinite()) for t in tensors)


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False) + "\n").encode()


def _tuples(hyper: Any) -> dict[str, Any]:
    """JSON has lists where torch wants tuples: betas, coefficients."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in hyper.items()}
