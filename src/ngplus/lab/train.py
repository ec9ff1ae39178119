"""``ngplus train``: one run. Also what the other commands share: options, settings, errors and progress bars."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ngplus.lab import options
from ngplus.lab.optimizers import check_name

if TYPE_CHECKING:
    from ngplus.lab.presets import Tuned
    from ngplus.lab.runs import Config, Result
    from ngplus.lab.training import OnStep
    from ngplus.lab.workloads import Preset, Task, Workload

SEED_HELP = "Of the initial weights, the batches and dropout."


def register(app: typer.Typer) -> None:
    app.command(name="train", help=paragraphs(train))(train)


@options.with_changes
def train(
    workload: options.WorkloadName,
    optimizer: options.OptimizerName = "ngadam",
    preset: options.PresetName = "small",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help=SEED_HELP)] = 0,
    lr: Annotated[float | None, typer.Option(help="The learning rate; the tuned one where not given.")] = None,
    sets: options.Sets = None,
    data: options.Data = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/… where not given.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder, if there is one.")
    ] = False,
    checkpoint_every: Annotated[int | None, typer.Option(min=1, help="Steps; at each look where not given.")] = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    presets: options.PresetFolder = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Train a workload with one optimizer, and leave a folder with everything that was measured.

    Killed? The same command with --resume goes on to the same curve. Ctrl-C ends it after the step it is in. Many
    processes: torchrun --nproc-per-node 2 --no-python ngplus train WORKLOAD …

    ngplus train digits --optimizer adamw --lr 0.01 --seed 1
    """
    console = make_console()
    with friendly(console):
        from ngplus.lab import training

        use_threads(threads, preset)
        check_presets(presets)
        chosen, size = open_preset(workload, preset, changes, sets or [], optimizer)
        config = configure(chosen, preset, size, optimizer, seed=seed, lr=lr, sets=sets or [], presets=presets)
        folder = out or Path("runs") / f"{chosen.name}-{preset}" / f"{optimizer}-seed{seed}"
        check_out(folder)
        there = (folder / "result.json").exists()
        task = open_task(chosen, size, data)
        with bars(console) as board:
            on_step = board.start(config)
            result = training.run(
                config,
                task,
                folder,
                resume=resume,
                checkpoint_every=checkpoint_every,
                device=device,
                on_step=on_step,
            )
            board.end(config, result)
        if is_first():
            line = f"{shown(str(folder))}: [bold]{sentence(config, result)}[/bold]"
            console.print(line, highlight=False, soft_wrap=True)
            settings = ", ".join(f"{key} {value}" for key, value in config.hyper.items() if value is not None)
            console.print(f"With {shown(settings)} ({_origin(config, lr, sets)})", highlight=False, soft_wrap=True)
            if there and not resume:
                console.print("It was there already, and nothing was trained: --out takes another folder")
            if result.status == "interrupted":
                console.print("Go on with it: the same command with [bold]--resume[/bold]", highlight=False)
        if result.status == "diverged":
            raise typer.Exit(1)
        if result.status == "interrupted":
            raise typer.Exit(130)


def _origin(config: Config, lr: float | None, sets: Sequence[str] | None) -> str:
    """Where the settings of a run come from."""
    if config.tuning is None:
        return "given here, others tuned or defaults" if lr is not None or sets else "defaults"
    return "tuned" if "recipe" not in config.tuning else "as published"


# ------------------------------------------------------------------------------------------------ settings


def open_preset(
    workload: str, preset: str, changes: Mapping[str, Any], sets: Sequence[str], optimizer: str | None
) -> tuple[Workload, Preset]:
    """The workload, and its preset with the user's changes."""
    from ngplus.lab import workloads
    from ngplus.lab.runs import plain

    chosen = workloads.get(workload)
    workload = chosen.name
    check_name(preset, chosen.presets, f"preset of {workload}")
    if not math.isfinite(changes.get("target", 0.0)):
        raise ValueError(f"--target is a finite number, not {changes['target']}")
    size = replace(chosen.presets[preset], **changes)
    held: dict[str, Any] = plain(size.options)
    known = known_options(chosen, preset)
    for key, value in assignments(sets):
        if not is_hyper(key, optimizer, list(known), workload):
            *path, last = key.split(".")
            place, sample = held, known
            for part in path:
                check_name(part, sample, f"group of options of {workload}")
                place, sample = place.setdefault(part, {}), sample[part]
                if not isinstance(sample, dict) or not isinstance(place, dict):
                    raise ValueError(f"The option {part!r} of {workload} is no group: --set {part}=VALUE")
            check_name(last, sample, f"option of {'.'.join([workload, *path])}")
            check_option(key, value, sample[last])
            place[last] = value
    return chosen, replace(size, options=held)


def known_options(workload: Workload, preset: str) -> dict[str, Any]:
    """The options that a workload has, each with a value that shows its kind; None where anything may stand."""
    held: dict[str, Any] = {}
    for size in (*workload.presets.values(), workload.presets[preset]):
        held = _merged(held, size.options)
    return _merged(held, workload.optional)


def _merged(held: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Both, group by group; where both have a value, the other's."""
    both = {
        key: _merged(held[key], value) if isinstance(value, Mapping) and isinstance(held.get(key), Mapping) else value
        for key, value in other.items()
    }
    return {**held, **both}


def check_option(key: str, value: Any, sample: Any) -> None:
    """ValueError for a value of another kind than the sample: 1.5 for a width would be cut to 1, without a word."""
    kinds: list[tuple[Any, str]] = [  # bool comes first, since it is an int as well
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a number"),
        (str, "a text"),
        (list | tuple, "a list, as in [1, 2]"),
        (Mapping, "a group of options, as in {...}"),
    ]
    anything: tuple[Any, str] = (object, "")
    kind, words = next((pair for pair in kinds if isinstance(sample, pair[0])), anything)
    wanted: Any = int | float if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind not in (bool, object)):
        raise ValueError(f"--set {key} takes {words}, not {json.dumps(value)}")
    if kind is Mapping:
        for name, entry in value.items():
            check_name(name, sample, f"option of {key}")
            check_option(f"{key}.{name}", entry, sample[name])
    if isinstance(sample, list | tuple) and sample:
        for entry in value:
            check_option(f"each number of {key}", entry, sample[0])


def open_task(workload: Workload, size: Preset, data: Path | None) -> Task:
    """The workload with its data; options that it cannot work with are an error in words."""
    from ngplus.lab.training import with_settings

    with with_settings(workload.name):
        return workload.open(size, data)


def configure(
    workload: Workload,
    preset: str,
    size: Preset,
    optimizer: str,
    *,
    seed: int,
    lr: float | None = None,
    sets: Sequence[str] = (),
    hyper: Mapping[str, Any] | None = None,
    presets: Path | None = None,
) -> Config:
    """All settings of a run: the optimizer's defaults, over them the tuned ones, over them the user's.

    With ``hyper`` in place of the tuned ones it is a trial, which a look may end: the first process alone looks.
    """
    from ngplus.lab import optimizers, processes, schedules
    from ngplus.lab.presets import Tuned, lookup
    from ngplus.lab.runs import Config

    if hyper is not None and processes.started() > 1:
        raise ValueError(
            "ngplus tune does not run under torchrun: start it by itself, several times with the same --storage for "
            "several processes"
        )
    rival = optimizers.get(optimizer)
    tuned = lookup(workload.name, preset, optimizer, presets) or _recipe(workload, preset, optimizer) or Tuned()
    own = {
        key: value for key, value in assignments(sets) if is_hyper(key, optimizer, list(size.options), workload.name)
    }
    rival.check(own)
    if lr is not None:
        if not math.isfinite(lr):
            raise ValueError(f"--lr is a finite number, not {lr}")
        own["lr"] = lr
    original = workload.presets[preset]
    # what the user has asked for comes before a recipe's own
    run = {key: value for key, value in tuned.run.items() if getattr(size, key, None) == getattr(original, key, None)}
    size = replace(size, **{key: value for key, value in run.items() if key != "damping_decay"})
    schedules.parse(size.schedule)
    settings = {**rival.defaults, **(tuned.hyper if hyper is None else hyper), **own}
    if size.decay is not None and "weight_decay" in rival.options() and "weight_decay" not in own:
        settings["weight_decay"] = size.decay / settings["lr"]
    return Config(
        workload=workload.name,
        preset=preset,
        optimizer=optimizer,
        hyper=settings,
        seed=seed,
        steps=size.steps,
        batch_size=size.batch_size,
        evaluate_every=size.evaluate_every,
        target=size.target,
        measure=workload.measure,
        higher_is_better=workload.higher_is_better,
        schedule=size.schedule,
        warmup=size.warmup,
        options=size.options,
        damping_decay=float(run.get("damping_decay", 1.0)),
        processes=processes.started(),
        tuning=tuned.tuning if hyper is None and not own else None,
    )


def _recipe(workload: Workload, preset: str, optimizer: str) -> Tuned | None:
    """A published recipe that the workload knows."""
    from ngplus.lab.presets import Tuned

    recipe = getattr(workload, "recipes", {}).get(preset, {}).get(optimizer)
    return None if recipe is None else Tuned(dict(recipe.hyper), dict(recipe.run), {"recipe": "as published"})


def listed(workloads: str) -> list[str]:
    """Names with commas between."""
    names = list(dict.fromkeys(name.strip() for name in workloads.split(",") if name.strip()))
    if not names:
        raise ValueError("No workload is named: --help has their names")
    return names


def assignments(sets: Sequence[str]) -> list[tuple[str, Any]]:
    """KEY=VALUE with a value in JSON; what is not JSON is a string."""
    pairs = []
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, as in --set width=32, not {text!r}")
        try:
            held = json.loads(value)
        except (ValueError, RecursionError):
            held = value
        if isinstance(held, float) and not math.isfinite(held):
            raise ValueError(f"--set {key} takes a finite number, not {held}")
        pairs.append((key, held))
    return pairs


def is_hyper(key: str, optimizer: str | None, options: list[str], workload: str) -> bool:
    """Is it the optimizer's, or else an option of the workload? ValueError for neither."""
    from ngplus.lab import optimizers

    known = optimizers.get(optimizer).options() if optimizer is not None else []
    if key in known:
        return True
    owner = f"{optimizer} or {workload}" if optimizer is not None else workload
    optimizers.check_name(key.split(".")[0], [*known, *options], f"setting of {owner}")
    return False


def check_presets(folder: Path | None) -> None:
    """A folder of tuned settings that was asked for has to be there."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--presets {folder} is not a folder")


def check_out(folder: Path) -> None:
    """No file may stand where the folder for runs is to be."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--out {folder} cannot be made: {place} is a file. Name a folder, new or with runs")


def use_threads(threads: int | None, preset: str) -> None:
    """Small models gain nothing by a second thread, and lose much where another process wants the core."""
    if threads is None and preset == "small":
        threads = 1
    if threads is not None:
        import torch

        cores = os.cpu_count() or 1
        if threads > (most := max(16, 4 * cores)):
            raise ValueError(f"--threads {threads} is too many for {count(cores, 'core')}: it takes {most} at most")
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------ errors, words, bars


def paragraphs(command: Callable[..., None]) -> str:
    """A docstring as a help text: the terminal breaks the lines of a paragraph, not the source."""
    blocks = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(block.split("\n")) for block in blocks)


def make_console() -> Console:
    console = Console(stderr=False)
    return console if console.is_terminal else Console(width=120)  # into a file or a pipe: as wide as the tables


def is_first() -> bool:
    """The one process of torchrun's that speaks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def friendly(console: Console) -> Iterator[None]:
    """What the user can mend becomes a sentence, and the exit code 2."""
    from ngplus.lab.runs import RunError
    from ngplus.lab.workloads import DataError

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, as head has: typer ends without a word
        raise
    except (DataError, RunError, ValueError, ModuleNotFoundError, OSError) as error:
        text = str(error)
        if isinstance(error, ModuleNotFoundError):
            text = (
                f"{error.name} is not installed: in the project's folder, pip install '.[lab,workloads]' brings all "
                "that workloads need"
            )
        Console(stderr=True, width=console.width).print(
            f"[bold red]Error:[/bold red] {shown(text)}", highlight=False, soft_wrap=not console.is_terminal
        )
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def shown(text: str) -> str:
    """Somebody's text for the terminal: no markup and no control characters of its own."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text))


def count(number: int, what: str) -> str:
    """1 step, 2 steps."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def sentence(config: Config, result: Result) -> str:
    """A run in a line."""
    final = "nothing measured" if result.final is None else f"{config.measure} {result.final:.4g}"
    if result.steps_to_target is not None and result.seconds_to_target is not None:
        steps = count(result.steps_to_target, "step")
        goal = f"target {config.target:g} after {steps}, {result.seconds_to_target:.1f} s"
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
