"""``ngplus train``: one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options, settings, terminal

if TYPE_CHECKING:
    from ngplus.lab.runs import Config

SEED_HELP = "Seed of the initial weights, the batches and dropout."


def register(app: typer.Typer) -> None:
    app.command(name="train", help=terminal.paragraphs(train))(train)


@options.with_changes
def train(
    workload: options.WorkloadName,
    optimizer: options.OptimizerName = "ngadam",
    preset: options.PresetName = "small",
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help=SEED_HELP)] = 0,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the tuned one).")] = None,
    sets: options.Sets = None,
    data: options.Data = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run (default: runs/…).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder, if there is one.")] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints (default: at each evaluation).")
    ] = None,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    presets: options.PresetFolder = None,
    as_json: options.Json = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Train a workload with one optimizer, and write everything that was measured to a folder.

    After a kill the same command with --resume continues to the same curve. Ctrl-C ends the run after the current step.
    For many processes: torchrun --nproc-per-node 2 --no-python ngplus train WORKLOAD …

    --json prints the run: its folder, config, environment and result. Its metrics are in the folder.

    ngplus train digits --optimizer adamw --lr 0.01 --seed 1
    """
    console = terminal.make_console(as_json)
    with terminal.friendly(console):
        from ngplus.lab import loop, runs

        settings.use_threads(threads, preset)
        settings.check_presets(presets)
        chosen, size = settings.open_preset(workload, preset, changes, sets or [], optimizer)
        config = settings.configure(chosen, preset, size, optimizer, seed=seed, lr=lr, sets=sets or [], presets=presets)
        folder = out or Path("runs") / f"{chosen.name}-{preset}" / f"{optimizer}-seed{seed}"
        settings.check_out(folder)
        there = (folder / "result.json").exists()
        task = settings.open_task(chosen, size, data)
        with terminal.bars(console) as board:
            on_step = board.start(config)
            result = loop.run(
                config,
                task,
                folder,
                resume=resume,
                checkpoint_every=checkpoint_every,
                device=device,
                on_step=on_step,
            )
            board.end(config, result)
        if terminal.is_first():
            if as_json:
                terminal.print_json(runs.load(folder).as_dict())
            line = f"{terminal.shown(str(folder))}: [bold]{terminal.sentence(config, result)}[/bold]"
            console.print(line, highlight=False, soft_wrap=True)
            hyper = ", ".join(f"{key} {value}" for key, value in config.hyper.items() if value is not None)
            console.print(
                f"With {terminal.shown(hyper)} ({_origin(config, lr, sets)})", highlight=False, soft_wrap=True
            )
            if there and not resume:
                console.print("This run had ended already, so nothing was trained: choose another folder with --out")
            if result.status == "interrupted":
                console.print("Continue it with the same command with [bold]--resume[/bold]", highlight=False)
        if result.status == "diverged":
            raise typer.Exit(1)
        if result.status == "interrupted":
            raise typer.Exit(130)


def _origin(config: Config, lr: float | None, sets: Sequence[str] | None) -> str:
    """Where the settings of a run come from."""
    if config.tuning is None:
        return "given here, others tuned or defaults" if lr is not None or sets else "defaults"
    return "tuned" if "recipe" not in config.tuning else "as published"
