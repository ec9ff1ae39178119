"""The command line: ``ngplus train | compare | tune | report | plan | bench | figure | claims``.

Each command lives in a module of its own with a ``register(app)`` that adds it. torch is imported with them, for the
names in the help; what else takes long to import (matplotlib, Optuna, the workloads) is imported where it is needed.
"""

from __future__ import annotations

import importlib
from typing import Annotated

import torch
import typer

import ngplus

app = typer.Typer(
    name="ngplus",
    help="NG+ for PyTorch: compare optimizers, tune them, measure them, look at the theory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

# The modules that have commands, in the order of the help.
COMMANDS: tuple[str, ...] = (
    "train", "compare", "tune", "report", "planning", "bench", "figure", "claims",
)  # fmt: skip


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ngplus {ngplus.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """Keeps the commands under their names, however many there are."""


for _module in COMMANDS:
    importlib.import_module(f"ngplus.lab.{_module}").register(app)
