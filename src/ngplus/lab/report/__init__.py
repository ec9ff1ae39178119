"""``ngplus report``: one self-contained page of any set of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ngplus.lab import train as shared


def register(app: typer.Typer) -> None:
    app.command(name="report", help=shared.paragraphs(report))(report)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or files of --json.")],
    out: Annotated[Path, typer.Option(help="The page; pictures go beside it.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "Optimizers compared",
    png: Annotated[bool, typer.Option(help="Write pictures for each workload as well, light and dark.")] = True,
    brief: Annotated[bool, typer.Option("--brief", help="Pictures of the measure alone, for a README.")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write all runs into one file as well.")] = None,
) -> None:
    """Make one HTML page of any set of runs: curves over steps and over time, tables, settings and how they were tuned.

    The page needs no network, no scripts and no other file. Runs are found in the folders and below them.

    ngplus report runs/digits-small --out report.html
    """
    console = shared.make_console()
    with shared.friendly(console):
        from ngplus.lab.report.curves import groups
        from ngplus.lab.report.page import render
        from ngplus.lab.runs import RunError, collect, find, write_atomically

        found = find(runs)
        sections = groups(found)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, render(sections, title).encode())
            written = [out]
            if png:
                from ngplus.lab.report.pictures import DARK, LIGHT, draw

                for number, section in enumerate(sections, start=1):
                    stem = f"{out.stem}-{number}" if len(sections) > 1 else out.stem
                    for end, ground in (("", LIGHT), ("-dark", DARK)):
                        path = out.with_name(f"{stem}{end}.png")
                        write_atomically(path, draw(section, ground, brief))
                        written.append(path)
            if as_json is not None:
                collect(as_json, found)
                written.append(as_json)
        except OSError as error:
            raise RunError(f"The report cannot be written: {error}") from error
        names = ", ".join(shared.shown(str(path)) for path in written)
        console.print(f"{len(found)} runs in {names}", highlight=False)
