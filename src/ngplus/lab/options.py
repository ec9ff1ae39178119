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
    str, typer.Argument(metavar="WORKLOAD", help=f"One of {_WORKLOADS}; or module:Class; several with commas between.")
]
OptimizerName = Annotated[str, typer.Option("--optimizer", "-o", help=f"One of {_OPTIMIZERS}.")]
OptimizerNames = Annotated[
    str,
    typer.Option("--optimizers", "--optimizer", "-o", help=f"all, or some of {_OPTIMIZERS}, with commas between."),
]
PresetName = Annotated[
    str, typer.Option("--preset", help="The size: small, seconds on one core; standard, minutes; or paper.")
]
Data = Annotated[
    Path | None,
    typer.Option("--data", envvar="NGPLUS_DATA", help="The folder with the data sets, one folder for each workload."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A hyper-parameter of the optimizer, or an option of the workload, in JSON: --set update_every=10",
    ),
]
WorkloadSets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the workload, in JSON: --set width=32"),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads; 1 for the preset small where not given, torch's choice for others."),
]
Device = Annotated[str, typer.Option(help="Where the model lives: cpu, cuda, cuda:1, …")]
PresetFolder = Annotated[
    Path | None, typer.Option("--presets", help="The folder of tuned settings; ./presets where not given.")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on standard output; all else goes to standard error."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Examples of a batch, for each process.")]

# What a user may change of a workload's preset.
CHANGES: dict[str, Any] = {
    "steps": Annotated[int | None, typer.Option(min=1, help="Steps of training; the preset's where not given.")],
    "batch_size": BatchSize,
    "evaluate_every": Annotated[int | None, typer.Option(min=1, help="Steps between two looks at the validation set.")],
    "target": Annotated[float | None, typer.Option(help="The value of the measure that counts as reached.")],
    "schedule": Annotated[
        str | None,
        typer.Option("--schedule", help="constant, cosine, linear, polynomial:POWER or inverse-sqrt:UNIT:OFFSET."),
    ],
    "warmup": Annotated[int | None, typer.Option(min=0, help="Steps in which the learning rate rises from 0.")],
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
