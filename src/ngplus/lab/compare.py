"""``ngplus compare``: several optimizers on one workload, over several seeds, with a table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options, settings, terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ngplus.lab.runs import Config, Run
    from ngplus.lab.workloads import Task

DEFAULT = "sgd,adamw,muon,soap,kfac,ngplus,ngadam"

SPARE = ("best", "state", "ms a step")  # columns that a narrow terminal does without, in this order


def register(app: typer.Typer) -> None:
    app.command(name="compare", help=terminal.paragraphs(compare))(compare)


@options.with_changes
def compare(
    workload: options.WorkloadNames,
    optimizers: options.OptimizerNames = DEFAULT,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, 2, …")] = 3,
    preset: options.PresetName = "small",
    sets: options.WorkloadSets = None,
    data: options.Data = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/WORKLOAD-PRESET).")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Make all runs again and replace those in the folder.")
    ] = False,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    presets: options.PresetFolder = None,
    as_json: options.Json = False,
    *,
    changes: dict[str, Any],
) -> None:
    """Compare optimizers on a workload, with the same weights, batches, schedule and budget.

    Only a published recipe, as in imagenet's preset paper, keeps its own budget and schedule; the table says so.

    Runs are interleaved, so that a busy moment of the machine affects all optimizers. After an interruption the same
    command continues: runs that have ended are not made again. It reports runs that another version of the code made;
    --fresh makes them again. Several workloads run one after the other, each in a folder of its own in --out.

    --json prints the table of each workload, and its runs.

    ngplus compare digits

    ngplus compare autoencoder --optimizers adamw,soap,ngplus --seeds 5
    """
    console = terminal.make_console(as_json)
    with terminal.friendly(console):
        from ngplus.lab import optimizers as known
        from ngplus.lab import processes

        settings.use_threads(threads, preset)
        settings.check_presets(presets)
        wanted = known.pick(optimizers)
        parts = []
        for name in settings.listed(workload):
            chosen, size = settings.open_preset(name, preset, changes, sets or [], None)
            root = out / chosen.name if out and "," in workload else out or Path("runs") / f"{chosen.name}-{preset}"
            configs = {
                root / f"{optimizer}-seed{seed}": settings.configure(
                    chosen, preset, size, optimizer, seed=seed, presets=presets
                )
                for seed in range(seeds)
                for optimizer in wanted
            }
            settings.check_out(root)
            _check_folders(configs, fresh)
            parts.append((chosen, settings.open_task(chosen, size, data), configs, root))
        done: list[list[Run]] = []
        with processes.group(device):
            for chosen, task, configs, root in parts:
                runs, going_on = _make(configs, task, device, console)
                done.append(runs)
                if terminal.is_first():
                    _show(console, chosen.title, runs, len(configs), root)
                if not going_on:
                    break
        if as_json and terminal.is_first():
            terminal.print_json([_document(runs) for runs in done if runs])
        if not going_on:
            raise typer.Exit(130)


def _document(runs: list[Run]) -> dict[str, Any]:
    from ngplus.lab.report import summary

    return {**summary.document(runs), "runs": [run.as_dict() for run in runs]}


def _check_folders(configs: dict[Path, Config], fresh: bool) -> None:
    """Before the first run: is every folder free, or a run with the same settings?"""
    from ngplus.lab import runs

    for folder, config in configs.items():
        if not runs.begun(folder):
            continue
        if fresh and terminal.is_first():
            with runs.locked(folder):
                for path in [*folder.glob("events.out.*"), *(folder / name for name in runs.FILES)]:
                    path.unlink(missing_ok=True)
        elif not fresh and (difference := config.difference(runs.load(folder).config)):
            raise runs.RunError(
                f"{folder} has a run with other settings: {difference}.\n"
                "Make the runs again with --fresh, or choose another folder with --out"
            )


def _make(configs: dict[Path, Config], task: Task, device: str, console: Console) -> tuple[list[Run], bool]:
    """The runs that are not there yet, one after the other. All that could be made, as they are on disk; and whether
    nobody has asked for an end."""
    from ngplus.lab import loop, runs

    done: list[Path] = []
    going_on = True
    with terminal.bars(console, len(configs)) as board:
        for folder, config in configs.items():
            on_step = board.start(config)
            try:
                result = loop.run(config, task, folder, resume=True, device=device, on_step=on_step)
            except runs.Busy as error:
                console.print(terminal.shown(f"{error}. This run is skipped"), highlight=False)
                continue
            except KeyboardInterrupt:  # between two runs, or for the second time: show what there is
                going_on = False
                break
            board.end(config, result)
            done.append(folder)
            if result.status == "interrupted":
                going_on = False
                break
    return [runs.load(folder) for folder in done], going_on


def _table(console: Console, title: str, runs: list[Run]) -> Table:
    """The results, with as many columns as the terminal has room for: no name and no number is cut."""
    from ngplus.lab.report import summary

    headings, lines = summary.table(runs)
    for number in range(len(SPARE) + 1):
        kept = [k for k, heading in enumerate(headings) if heading not in SPARE[:number]]
        names = [headings[k].replace(" to ", " to\n") if number else headings[k] for k in kept]
        found = _drawn(title, summary.caption(runs), names, [[line[k] for k in kept] for line in lines])
        if console.measure(found, options=console.options.update(max_width=1000)).maximum <= console.width:
            break
    return found


def _drawn(title: str, caption: str, headings: list[str], lines: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(title=terminal.shown(title), caption=terminal.shown(caption), caption_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(terminal.shown(heading), justify="left" if number == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(terminal.shown(cell) for cell in line))
    return table


def _show(console: Console, title: str, runs: list[Run], wanted: int, root: Path) -> None:
    from ngplus.lab.runs import code_digest

    if not runs:
        return
    console.print(_table(console, title, runs))
    if len(runs) < wanted or any(run.result is None or not run.result.ended for run in runs):
        console.print("Some runs are missing: the same command continues with them.")
    if others := sum(run.environment.get("code") != code_digest() for run in runs):
        which = "This run comes" if len(runs) == 1 else f"Of these {len(runs)} runs {others} come"
        console.print(
            f"{which} from another version of the code, or from an unknown one: --fresh makes "
            f"{'it' if others == 1 else 'them'} again."
        )
    console.print(f"For a page of them: ngplus report {terminal.shown(str(root))} --out report.html", highlight=False)
