"""The command line: ``ngplus train | compare | tune | sweep | report | plan | bench | figure | claims``.

Each command is in a module of its own with a ``register(app)`` that adds it. The module is imported when its command
is called, so that ``ngplus --help`` and the completion of names do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# name: the module with the command, and the first sentence of its help
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "Train a workload with one optimizer, and write everything that was measured to a folder."),
    "compare": (
        "compare",
        "Compare optimizers on a workload, with the same weights, batches, schedule and budget.",
    ),
    "tune": (
        "tune",
        "Tune an optimizer on a workload with Optuna.",
    ),
    "sweep": ("sweep", "Tune and run optimizers on several workloads, by the same rules for all."),
    "report": (
        "report",
        "Make one HTML page of any set of runs: curves over steps and over time, tables, settings.",
    ),
    "plan": (
        "planning",
        "Print the plan of a model: shapes, sides, solvers, bytes of state, FLOPs of a step and of a refresh.",
    ),
    "bench": (
        "bench",
        "Measure what a step, a refresh and the state of NGPlus and NGAdam cost beside other optimizers.",
    ),
    "figure": ("figure", "Make a figure of the paper's theory from new experiments."),
    "claims": (
        "claims",
        "Compare the numbers of the paper's Section 5 with runs: reproduced, level, not reproduced, or not runnable "
        "here.",
    ),
}


def load(name: str) -> Any:
    """A command with its options."""
    part = typer.Typer(add_completion=False)
    importlib.import_module(f"ngplus.lab.{COMMANDS[name][0]}").register(part)
    command: Any = typer.main.get_command(part)
    get_params = command.get_params
    command.get_params = lambda ctx: without_type_of_flags(get_params(ctx))
    return command


def without_type_of_flags(params: list[Any]) -> list[Any]:
    """typer shows <bool> beside an option that takes no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class LazyGroup(TyperGroup):
    """Imports the module of a command when that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else command, rest

    def get_params(self, ctx: Any) -> list[Any]:
        return without_type_of_flags(super().get_params(ctx))


app = typer.Typer(
    name="ngplus",
    cls=LazyGroup,
    help="Compare, tune and measure optimizers for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        import torch

        import ngplus

        print(f"ngplus {ngplus.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit."),
    ] = False,
) -> None:
    """Keeps the commands under their names, however many there are."""
