"""The options that the commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ngplus.lab import optimizers, workloads

_WORKLOADS, _OPTIMIZERS = ", ".join(workloads.names()), ", ".join(optimizers.names())

WorkloadName = Annotated[str, typer.Argument(metavar="WORKLOAD", help=f"One of {_WORKLOADS}; or module:Class.")]
WorkloadNames = Annotated[
    str, typer.Argument(metavar="WORKLOAD", help=f"One of {_WORKLOADS}; or module:Class. Separate several by commas.")
]
OptimizerName = Annotated[str, typer.Option("--optimizer", "-o", help=f"One of {_OPTIMIZERS}.")]
OptimizerNames = Annotated[
    str,
    typer.Option("--optimizers", "--optimizer", "-o", help=f"all, or names separated by commas: {_OPTIMIZERS}."),
]
PresetName = Annotated[
    str, typer.Option("--preset", help="Size of the runs: small (seconds), standard (minutes) or paper.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", envvar="NGPLUS_DATA", help="Folder with the data sets, one folder for each workload."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An argument of the optimizer or an option of the workload, in JSON: --set update_every=10",
    ),
]
WorkloadSets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the workload, in JSON: --set width=32"),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Number of CPU threads (default: 1 for the preset small, else torch's choice)."),
]
Device = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, cuda:1, …")]
PresetFolder = Annotated[Path | None, typer.Option("--presets", help="Folder of tuned settings (default: ./presets).")]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on standard output, all else on standard error."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Examples in a batch of each process.")]

# What a user may change of a workload's preset.
CHANGES: dict[str, Any] = {
    "steps": Annotated[int | None, typer.Option(min=1, help="Training steps (default: the preset's).")],
    "batch_size": BatchSize,
    "evaluate_every": Annotated[int | None, typer.Option(min=1, help="Steps between two evaluations.")],
    "target": Annotated[float | None, typer.Option(help="Value of the measure to reach.")],
    "schedule": Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help="Learning-rate schedule: constant, cosine, linear, polynomial:POWER, inverse-sqrt:UNIT:OFFSET.",
        ),
    ],
    "warmup": Annotated[
        int | None, typer.Option(min=0, help="Warm-up: steps in which the learning rate rises from 0.")
    ],
}


def with_changes(command: Callable[..., None]) -> Callable[..., None]:
    """Adds ``--steps``, ``--batch-size``, … to a command; it gets those that were given as the mapping ``changes``."""

    @wraps(command)
    def wrapped(**given: Any) -> None:
        asked = {name: given.pop(name) for name in CHANGES}
        command(**given, changes={name: value for name, value in asked.items() if value is not None})

    signature = inspect.signature(command, eval_str=True)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "changes"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in CHANGES.items()
    ]
    parameters = [*own, *added]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped
