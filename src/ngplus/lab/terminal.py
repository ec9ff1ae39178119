"""Output of the commands: errors in one sentence, progress bars, and the summary line of a run."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from ngplus.lab.loop import OnStep
    from ngplus.lab.runs import Config, Result


def paragraphs(command: Callable[..., None]) -> str:
    """A docstring as a help text: the terminal breaks the lines of a paragraph, not the source."""
    blocks = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(block.split("\n")) for block in blocks)


def make_console(as_json: bool = False) -> Console:
    """Standard output; standard error where that is for a JSON document."""
    console = Console(stderr=as_json)
    if not console.is_terminal:  # a file or a pipe: as wide as the tables
        console = Console(stderr=as_json, width=120)
    return console


def print_json(document: Any) -> None:
    from ngplus.lab.runs import plain

    print(json.dumps(plain(document), indent=1, allow_nan=False))


def is_first() -> bool:
    """Returns True in the one process of torchrun that prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def friendly(console: Console) -> Iterator[None]:
    """Prints an error that the user can mend as a sentence, with exit code 2. Ctrl-C and SIGTERM give exit code 130."""
    try:
        with _terminable():
            from ngplus.lab.runs import RunError
            from ngplus.lab.workloads import DataError

            yield
            sys.stdout.flush()
    except KeyboardInterrupt:  # the first clause: the errors below may not be imported yet
        Console(stderr=True).print("Interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever reads has seen enough, as head has: typer ends without a word
        raise
    except (DataError, RunError, ValueError, ModuleNotFoundError, OSError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            text = f"{error.name} is not installed: run pip install '.[lab,workloads]' in the project's folder"
        Console(stderr=True, width=console.width).print(
            f"[bold red]Error:[/bold red] {shown(text)}", highlight=False, soft_wrap=not console.is_terminal
        )
        raise typer.Exit(2) from error


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does. Processes of torchrun may wait for each other where no handler runs: it
    kills them."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def shown(text: str) -> str:
    """Text from a user or a file for the terminal, without markup and control characters."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text))


def count(number: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def sentence(config: Config, result: Result) -> str:
    """A run in a line."""
    final = "nothing measured" if result.final is None else f"{config.measure} {result.final:.4g}"
    if result.steps_to_target is not None and result.seconds_to_target is not None:
        steps = count(result.steps_to_target, "step")
        lost = ", and lost again" if result.collapsed else ""
        goal = f"target {config.target:g} after {steps}, {result.seconds_to_target:.1f} s{lost}"
    else:
        goal = f"target {config.target:g} not reached"
    why = f" ({shown(result.reason)})" if result.reason else ""
    cost = "" if result.milliseconds_per_step is None else f", {result.milliseconds_per_step:.1f} ms a step"
    return f"{result.status}{why} after {count(result.step, 'step')}, {final}, {goal}{cost}"


class Board:
    """Progress bars, one for each run that is under way, and one for a number of runs."""

    def __init__(self, progress: Progress | None, runs: int) -> None:
        self.progress, self.task = progress, TaskID(0)
        self.whole = (
            None if progress is None or runs < 2 else progress.add_task("all runs", total=runs, loss="", speed="")
        )

    def start(self, config: Config) -> OnStep | None:
        if self.progress is None:
            return None
        label = f"{config.optimizer}, seed {config.seed}"
        progress, task = self.progress, self.progress.add_task(shown(label), total=config.steps, loss="", speed="")
        self.task = task

        def on_step(step: int, loss: float, seconds: float) -> None:
            speed = step / seconds if seconds else 0.0
            progress.update(task, completed=step, loss=f"loss {loss:.4f}", speed=f"{speed:.0f} steps/s")

        return on_step

    def end(self, config: Config, result: Result) -> None:
        if self.progress is None:
            return
        self.progress.remove_task(self.task)
        if self.whole is not None:
            self.progress.advance(self.whole)
            label = f"{config.optimizer}, seed {config.seed}: {sentence(config, result)}"
            self.progress.console.print(label, highlight=False)


@contextmanager
def bars(console: Console, runs: int = 1) -> Iterator[Board]:
    if not is_first():
        yield Board(None, runs)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Board(progress, runs)
