"""``ngplus sweep``: tunes and runs optimizers on several workloads by one rule, and makes the page of results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options, settings, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from ngplus.lab.search import Scales
    from ngplus.lab.sweep.rows import Row, Timing


def register(app: typer.Typer) -> None:
    app.command(name="sweep", help=terminal.paragraphs(sweep))(sweep)


@options.with_changes
def sweep(
    workload: Annotated[
        str, typer.Argument(metavar="[WORKLOAD]", help="Workloads or module:Class, separated by commas.")
    ] = "",
    optimizers: options.OptimizerNames = "adamw,ngadam,muon,soap",
    trials: Annotated[int, typer.Option(min=1, help="Tuning runs of each optimizer.")] = 6,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds on which the best trial runs: 0, 1, 2, …")] = 3,
    rates: Annotated[
        bool, typer.Option("--rates", help="Also run 1/4, 1/2, 2 and 4 times the best learning rate.")
    ] = False,
    timed: Annotated[
        bool, typer.Option("--timed", help="Also time the steps of the chosen settings; let nothing else run.")
    ] = False,
    load: Annotated[float, typer.Option(min=0, help="With --timed: cores that other programs may use.")] = 0.2,
    workers: Annotated[int, typer.Option(min=1, max=2, help="Runs at a time, with one thread each.")] = 2,
    out: Annotated[Path, typer.Option(help="File of the runs, with a line of JSON for each.")] = Path("sweep.jsonl"),
    preset: options.PresetName = "standard",
    sets: options.WorkloadSets = None,
    data: options.Data = None,
    show: Annotated[bool, typer.Option("--show", help="Print the tables of --out; run nothing.")] = False,
    summary: Annotated[
        Path | None, typer.Option(help="Write the page of results of --out, with pictures beside it; run nothing.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the workload's curves over steps and over time; run nothing.")
    ] = None,
    *,
    changes: dict[str, Any],
) -> None:
    """Tune and run optimizers on several workloads, by the same rules for all.

    Each optimizer gets the same number of trials, at quasi-random points of its ranges. The best trial, by the measure
    at the end, is then run on other seeds. Schedule and budget are the workload's.

    After Ctrl-C or a kill the same command continues, each run from its last checkpoint. AdamW runs first, then NGAdam,
    Muon and SOAP, so that a page can be made early.

    ngplus sweep shakespeare,qm9 --optimizers adamw,muon,soap,ngadam --trials 6 --rates --out sweep.jsonl

    ngplus sweep --out sweep.jsonl --summary results.md
    """
    console = terminal.make_console()
    with terminal.friendly(console):
        if show or summary is not None or picture is not None:
            _read(console, out, preset, workload, show, summary, picture)
            return
        from ngplus.lab import optimizers as known
        from ngplus.lab.search import measure
        from ngplus.lab.study import TUNING_SEED
        from ngplus.lab.sweep import plan, running, timing

        settings.use_threads(1, preset)  # for what is measured here; the runs have processes of their own
        entries = [known.get(name) for name in plan.order(known.pick(optimizers))]
        opened = {
            name: settings.open_preset(name, preset, changes, sets or [], None) for name in settings.listed(workload)
        }

        def scales(where: str) -> Scales:
            return measure(settings.open_task(*opened[where], data), TUNING_SEED)

        chains = plan.make_chains(opened, preset, entries, trials, seeds, rates, scales)
        out.parent.mkdir(parents=True, exist_ok=True)
        whole, failed = running.run_all(chains, out, workers, data, console)
        if not whole:
            console.print("Some runs are missing: the same command continues with them")
            raise typer.Exit(130)
        if failed:
            console.print(f"{terminal.count(failed, 'run')} failed: the same command tries again")
            raise typer.Exit(1)
        if timed:
            timing.measure_all(chains, out, data, load, lambda text: console.print(text, highlight=False))
        console.print(f"All runs are in {terminal.shown(str(out))}", highlight=False)


def _read(
    console: Console, out: Path, preset: str, workload: str, show: bool, summary: Path | None, picture: Path | None
) -> None:
    """What is made of the runs that are there."""
    from ngplus.lab.sweep import numbers, page, pictures, tables
    from ngplus.lab.sweep.rows import read

    if not out.exists():
        raise ValueError(f"There is no file {out}: --out must be the file of a sweep")
    wanted = settings.listed(workload) if workload else None

    def asked(one: Row | Timing) -> bool:
        return one.preset == preset and (wanted is None or one.workload in wanted)

    every, clocked = read(out)
    rows, timings = [row for row in every if asked(row)], [timing for timing in clocked if asked(timing)]
    if not rows:
        raise ValueError(f"{out} has no runs of the preset {preset}{f' of {workload}' if workload else ''}")
    if show:
        for line in tables.tables(rows):
            print(line)
    if summary is not None:
        written = page.write(summary, out, rows, timings)
        console.print(f"{terminal.count(len(rows), 'run')} in {terminal.shown(str(written))}", highlight=False)
    if picture is not None:
        for path in pictures.write_wide(picture, numbers.of_today(rows), timings):
            console.print(terminal.shown(str(path)), highlight=False)
