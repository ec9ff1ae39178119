"""``ngplus figure NAME``: what the paper proves or draws, as a picture with its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_HELP = """Make a figure of the paper's theory from new experiments.

NAME is gfim, convergence, regret, costs, sketch, blocks, steps or all.

Writes NAME.png, NAME.svg and NAME.json, and prints a short table. docs/theory.md explains the figures."""


def figure(
    name: Annotated[str, typer.Argument(help="Name of the figure, or all.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("figures"),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    small: Annotated[bool, typer.Option("--small", help="Make a small version, in seconds.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="For costs: a known model, or module:function that returns a model and its inputs."),
    ] = None,
) -> None:
    import time

    from rich.console import Console

    from ngplus.lab import figures
    from ngplus.lab.optimizers import check_name

    try:
        check_name(name, [*figures.FIGURES, "all"], "figure")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if model is not None and name != "costs":
        raise typer.BadParameter("--model can only be used with the figure costs")
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"--out must be a folder, but {out} is a file")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # into a file or a pipe: as wide as the tables
    for one in figures.FIGURES if name == "all" else (name,):
        start = time.perf_counter()
        options = {"model": model} if model is not None else {}
        with console.status(f"{one}: {figures.FIGURES[one]}"):
            try:
                outcome, paths = figures.make(one, out, seed, small, **options)
            except (figures.FigureError, OSError) as error:
                raise typer.BadParameter(str(error)) from error
        console.print(figures.module(one).summary(outcome))
        shown = ", ".join(str(path) for path in paths)
        console.print(f"{one}: {shown} ({time.perf_counter() - start:.0f} s)", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command(help=_HELP)(figure)
