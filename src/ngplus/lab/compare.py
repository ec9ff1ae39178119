"""``ngplus compare``: several optimizers on one workload, over several seeds, with a table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ngplus.lab import train as shared

if TYPE_CHECKING:
    from rich.console import Console

    from ngplus.lab.runs import Config, Run
    from ngplus.lab.workloads import Task

DEFAULT = "sgd,adamw,muon,soap,kfac,ngplus-paper,ngplus"


def register(app: typer.Typer) -> None:
    app.command(name="compare", help=shared.paragraphs(compare))(compare)


def compare(
    workload: shared.WorkloadName,
    optimizers: Annotated[str, typer.Option("--optimizers", "-o", help="Names with commas between, or all.")] = DEFAULT,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, 2, …")] = 3,
    preset: shared.PresetName = "small",
    sets: shared.Sets = None,
    data: shared.Data = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the runs; runs/WORKLOAD-PRESET else.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Make all runs again, in place of those there.")] = False,
    steps: shared.Steps = None,
    batch_size: shared.BatchSize = None,
    evaluate_every: shared.EvaluateEvery = None,
    target: shared.Target = None,
    schedule: shared.ScheduleName = None,
    warmup: shared.Warmup = None,
    threads: shared.Threads = None,
    device: shared.Device = "cpu",
    presets: shared.PresetFolder = None,
) -> None:
    """Compare optimizers on a workload: the same weights, batches, schedule and budget for each, settings tuned alike.

    Runs are interleaved, so that a busy moment of the machine hits all of them. Runs that have ended are kept and not
    made again: break off at any time, and the same command goes on. --set here is for options of the workload.

    ngplus compare digits

    ngplus compare autoencoder --optimizers adamw,soap,ngplus --seeds 5
    """
    console = shared.make_console()
    with shared.friendly(console):
        from ngplus.lab import optimizers as rivals
        from ngplus.lab import training

        shared.use_threads(threads, preset)
        changes = shared.overrides(
            steps=steps,
            batch_size=batch_size,
            evaluate_every=evaluate_every,
            target=target,
            schedule=schedule,
            warmup=warmup,
        )
        chosen, size = shared.open_preset(workload, preset, changes, sets or [], None)
        wanted = rivals.names() if optimizers == "all" else [n.strip() for n in optimizers.split(",") if n.strip()]
        if not wanted:
            raise ValueError("--optimizers names none")
        for name in wanted:
            rivals.get(name).load()  # what cannot be made is said before the first run
        root = out or Path("runs") / f"{workload}-{preset}"
        configs = {
            root / f"{name}-seed{seed}": shared.configure(chosen, preset, size, name, seed=seed, presets=presets)
            for seed in range(seeds)
            for name in dict.fromkeys(wanted)
        }
        _check_folders(configs, fresh)
        task = chosen.open(size, data)
        with training.process_group(device):
            runs = _make(configs, task, device, console)
        if shared.is_first():
            _show(console, chosen.title, runs, len(configs), root)


def _check_folders(configs: dict[Path, Config], fresh: bool) -> None:
    """Before the first run: is every folder free, or a run with the same settings?"""
    from ngplus.lab import runs

    for folder, config in configs.items():
        if not (folder / "config.json").exists():
            continue
        if fresh and shared.is_first():
            with runs.locked(folder):
                for path in [*folder.glob("events.out.*"), *(folder / name for name in runs.FILES)]:
                    path.unlink(missing_ok=True)
        elif not fresh and (difference := config.difference(runs.load(folder).config)):
            raise runs.RunError(
                f"{folder} has a run with other settings: {difference}.\n"
                "--fresh makes the runs again; --out takes another folder"
            )


def _make(configs: dict[Path, Config], task: Task, device: str, console: Console) -> list[Run]:
    """The runs that are not there yet, one after the other; all that could be made, as they are on disk."""
    from ngplus.lab import runs, training

    done: list[Path] = []
    with shared.bars(console, len(configs)) as board:
        for folder, config in configs.items():
            on_step = board.start(config)
            try:
                result = training.run(config, task, folder, resume=True, device=device, on_step=on_step)
            except runs.Busy as error:
                console.print(shared.shown(f"{error}: left to it"), highlight=False)
                continue
            except KeyboardInterrupt:  # between two runs, or for the second time: show what there is
                break
            board.end(config, result)
            done.append(folder)
            if result.status == "interrupted":
                break
    return [runs.load(folder) for folder in done]


def _show(console: Console, title: str, runs: list[Run], wanted: int, root: Path) -> None:
    from rich.table import Table

    from ngplus.lab.report.summary import HEADINGS, caption, rows

    if not runs:
        return
    table = Table(title=shared.shown(title), caption=shared.shown(caption(runs)), caption_justify="left")
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows(runs):
        table.add_row(*(shared.shown(cell) for cell in row.cells()))
    console.print(table)
    if len(runs) < wanted or any(run.result is None or not run.result.ended for run in runs):
        console.print("Not all runs are there yet: the same command goes on with them.")
    console.print(f"As a page: ngplus report {shared.shown(str(root))} --out report.html", highlight=False)
