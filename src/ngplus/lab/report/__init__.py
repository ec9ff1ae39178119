"""``ngplus report``: one self-contained page of any set of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ngplus.lab import terminal

if TYPE_CHECKING:
    from ngplus.lab.report.curves import Section
    from ngplus.lab.runs import Run


SHOWN = 5  # of the runs that are left out, by name


def register(app: typer.Typer) -> None:
    app.command(name="report", help=terminal.paragraphs(report))(report)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders with runs, or files of --json.")],
    out: Annotated[
        Path | None, typer.Option(help="File of the page (default: report.html); pictures go beside it.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Optimizers compared",
    png: Annotated[bool, typer.Option(help="Write pictures of each workload, light and dark.")] = True,
    brief: Annotated[bool, typer.Option("--brief", help="Draw the measure alone in the pictures.")] = False,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", help="Write all runs and tables to this file; - prints them."),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            help="Write a Markdown page of where NGAdam wins, ties and loses; pictures and runs go beside it."
        ),
    ] = None,
    timed: Annotated[
        list[Path] | None, typer.Option(help="Runs made with nothing else running, for the times of --summary.")
    ] = None,
) -> None:
    """Make one HTML page of any set of runs: curves over steps and over time, tables, settings.

    The page needs no network and no other file. Runs are found in the folders and below them. Of several runs of the
    same workload, optimizer and seed the first counts.

    ngplus report runs/digits-small --out report.html

    ngplus report runs docs/results-small/steps/*.json --timed runs/timed --summary docs/results-small.md
    """
    printed = as_json == Path("-")
    console = terminal.make_console(printed)
    with terminal.friendly(console):
        from ngplus.lab import collection
        from ngplus.lab.report.curves import groups
        from ngplus.lab.report.page import render
        from ngplus.lab.report.summary import document
        from ngplus.lab.runs import RunError, write_atomically

        if timed and summary is None:
            raise ValueError("--timed can only be used with --summary")
        all_of_them, all_timed = collection.find(runs), collection.find(timed or [])
        found, clocked = collection.first(all_of_them), collection.first(all_timed)
        over = collection.passed_over(all_of_them, found) + collection.passed_over(all_timed, clocked)
        sections = groups(found)
        written: list[Path] = []
        try:
            if out is not None or summary is None:
                page = out or Path("report.html")
                page.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(page, render(sections, title).encode())
                written = [page, *(_pictures(sections, page, brief) if png else [])]
            if as_json is not None:
                content = collection.text(found, [document(section.runs) for section in sections])
                if printed:
                    print(content, end="")
                else:
                    write_atomically(as_json, content.encode())
                    written.append(as_json)
            if summary is not None:
                shown, times = _ended(found), _ended(clocked)
                written += _summary(summary, groups(shown), times)
                if left := len(found) + len(clocked) - len(shown) - len(times):
                    which = "1 run that has" if left == 1 else f"{left} runs that have"
                    console.print(f"Left out of the summary: {which} not ended", highlight=False)
        except OSError as error:
            raise RunError(f"The report cannot be written: {error}") from error
        names = ", ".join(terminal.shown(str(path)) for path in written)
        console.print(f"{terminal.count(len(found), 'run')} in {names}", highlight=False)
        if over:
            told = ", ".join(str(run.path) for run in over[:SHOWN]) + (", …" if len(over) > SHOWN else "")
            console.print(
                f"Left out {terminal.count(len(over), 'run')}, since one of the same workload, preset, optimizer and "
                f"seed comes before: {terminal.shown(told)}. Make a report of each folder to see them",
                highlight=False,
                soft_wrap=True,
            )


def _ended(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.result is not None and run.result.ended]


def _pictures(sections: Sequence[Section], page: Path, brief: bool) -> list[Path]:
    from ngplus.lab.report.pictures import DARK, LIGHT, draw
    from ngplus.lab.runs import write_atomically

    written = []
    for number, section in enumerate(sections, start=1):
        stem = f"{page.stem}-{number}" if len(sections) > 1 else page.stem
        for end, ground in (("", LIGHT), ("-dark", DARK)):
            path = page.with_name(f"{stem}{end}.png")
            write_atomically(path, draw(section, ground, brief))
            written.append(path)
    return written


def _summary(page: Path, sections: Sequence[Section], timed: Sequence[Run]) -> list[Path]:
    """The page, and in the folder of its name pictures, the runs as they are shown (``steps``) and those timed."""
    from ngplus.lab import collection
    from ngplus.lab.report.curves import groups
    from ngplus.lab.report.pictures import DARK, LIGHT, draw
    from ngplus.lab.report.results import markdown
    from ngplus.lab.runs import write_atomically

    folder = page.with_suffix("")
    (folder / "steps").mkdir(parents=True, exist_ok=True)
    command = f"ngplus report {folder}/steps/*.json --summary {page}"
    pictures = {}
    for section in sections:
        name = "".join(c if c.isalnum() else "-" for c in f"{section.workload}-{section.preset}")
        collection.write(folder / "steps" / f"{name}.json", [collection.thinned(run) for run in section.runs])
        for end, ground in (("", LIGHT), ("-dark", DARK)):
            write_atomically(folder / f"{name}{end}.png", draw(section, ground, brief=True, times=False))
        pictures[section.workload, section.preset] = f"{folder.name}/{name}.png"
    if timed:
        collection.write(folder / "timed.json", [collection.thinned(run) for run in timed])
        command += f" --timed {folder}/timed.json"
    write_atomically(page, markdown(sections, groups(timed), pictures, command).encode())
    return [page]
