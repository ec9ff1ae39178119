"""``ngplus bench``: the cost of NG+ beside other optimizers, measured in one run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ngplus.lab import options, terminal

if TYPE_CHECKING:
    from rich.console import Console


def register(app: typer.Typer) -> None:
    app.command(help=terminal.paragraphs(bench))(bench)


def bench(
    rows: Annotated[
        list[str] | None, typer.Argument(metavar="[ROW]...", help="Rows to measure (default: all).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use small models, to see that the benchmark works.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Number of rounds of each measurement.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads (default: torch's choice).")] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.json and the pictures.")] = Path("bench"),
    resume: Annotated[bool, typer.Option("--resume", help="Measure only what bench.json does not have.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what bench.json has; measure nothing.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Print the table in Markdown; measure nothing.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the rows and the measurements they need.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Profile a step instead: where its time goes.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure what a step, a refresh and the state of NGPlus and NGAdam cost beside other optimizers.

    The methods take turns. The table has medians and quartiles of their ratios, and the project's bounds. It is
    written to bench.json, bench.png and bench.svg, with --quick to bench-quick.json and its pictures. A measurement
    stays in the file until it is made again. Let nothing else run.

    --json prints the rows, as bench.json has them.

    ngplus bench

    ngplus bench step memory --repeats 9

    ngplus bench --table > table.md
    """
    import torch

    console = terminal.make_console(as_json)
    with terminal.friendly(console):
        from ngplus.lab.bench import measuring
        from ngplus.lab.bench import show as showing

        if as_json and (names or table or profile):
            raise ValueError("--json prints the rows: it cannot be used with --list, --table or --profile")
        if names:
            console.print(showing.groups())
            return
        threads_before = torch.get_num_threads()
        try:
            if threads is not None:
                torch.set_num_threads(threads)
            if profile:
                from ngplus.lab.bench import profiling

                profiling.run(rows or [], quick, out, console)
                return
            chosen = measuring.chosen(rows or [])
            path = out / ("bench-quick.json" if quick else "bench.json")
            if not (show or table):
                _measure(chosen, path, quick, repeats, resume, console)
            _present(chosen, path, table, not (show or table), console)
            if as_json:
                terminal.print_json({"rows": measuring.documents(chosen, path)})
        finally:
            torch.set_num_threads(threads_before)


def _measure(groups: list[str], path: Path, quick: bool, repeats: int | None, resume: bool, console: Console) -> None:
    from ngplus.lab.bench import measuring

    for name in measuring.needed(groups, path, quick, resume):
        start = time.perf_counter()
        with console.status(name) as status:
            measuring.measure(name, path, quick, repeats, lambda text, n=name: status.update(f"{n}: {text}"))  # type: ignore[misc]
        console.print(f"{name}: {time.perf_counter() - start:.0f} s", highlight=False)


def _present(groups: list[str], path: Path, as_markdown: bool, draw: bool, console: Console) -> None:
    """The table of these rows, and the pictures of all that the file has, beside it."""
    from ngplus.lab.bench import record, show
    from ngplus.lab.bench.rows import rows_of

    measurements = record.load(path)
    rows = rows_of(measurements, groups)
    if not rows:
        raise ValueError(f"{path} has no measurements of these rows: run ngplus bench first")
    if as_markdown:
        print(show.markdown(rows, measurements))  # not rich: lines are as long as they are
        return
    console.print(show.table(rows, "ngplus bench"))
    for line in show.circumstances({row.of: measurements[row.of] for row in rows}):
        console.print(line, highlight=False)
    if draw:
        pictures = show.picture(rows_of(measurements), measurements, path)
        console.print(", ".join(map(str, [path, *pictures])), highlight=False, soft_wrap=True)
