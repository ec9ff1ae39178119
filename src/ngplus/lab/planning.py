"""``ngplus plan``: what NG+ does with each parameter of a model, and what it costs."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options
from ngplus.lab import train as shared

if TYPE_CHECKING:
    from torch import nn

    from ngplus import Plan


def register(app: typer.Typer) -> None:
    app.command(name="plan", help=shared.paragraphs(plan))(plan)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A workload, or module:function that makes a model.")],
    preset: options.PresetName = "small",
    optimizer: Annotated[str, typer.Option("--optimizer", "-o", help="One of the ngplus ones.")] = "ngplus",
    sets: options.Sets = None,
    data: options.Data = None,
    batch_size: options.BatchSize = None,
    positions: Annotated[int, typer.Option(min=1, help="Positions of a sample, for a model without data.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show NG+'s plan for a model: shapes, sides, solvers, bytes of state, FLOPs of a step and of a refresh.

    For a workload the plan is that of its model after one step. Any other model is planned without data.

    ngplus plan digits

    ngplus plan torch.nn:Transformer --batch-size 32 --positions 50
    """
    console = shared.make_console()
    with shared.friendly(console):
        if ":" in model:
            found = _plan_of(_build(model), optimizer, sets or []).plan(batch_size, positions)
        else:
            found = _of_workload(model, preset, optimizer, sets or [], data, batch_size)
        # print, not rich: the table is as wide as it is
        print(json.dumps(found.as_dicts(), indent=1) if as_json else found)


def _build(where: str) -> nn.Module:
    """The model that ``module:function`` makes without arguments."""
    from torch import nn

    module, _, name = where.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where!r} is not there: {error}") from error
    try:
        model = thing if isinstance(thing, nn.Module) else thing()
    except TypeError as error:
        raise ValueError(f"{where} does not make a model without arguments: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where} makes a {type(model).__name__}, not a torch.nn.Module")
    return model


def _plan_of(model: nn.Module, optimizer: str, sets: list[str]) -> Any:
    from ngplus.lab import optimizers

    rival = optimizers.get(optimizer)
    made = rival.make(model, dict(shared.assignments(sets)))
    if not hasattr(made, "plan"):
        known = [name for name in optimizers.names() if name.startswith("ngplus")]
        raise ValueError(f"{optimizer} has no plan; these have: {', '.join(known)}")
    return made


def _of_workload(name: str, preset: str, optimizer: str, sets: list[str], data: Any, batch_size: int | None) -> Plan:
    import torch

    from ngplus.lab import optimizers

    changes = {} if batch_size is None else {"batch_size": batch_size}
    workload, size = shared.open_preset(name, preset, changes, sets, optimizer)
    own = [text for text in sets if text.partition("=")[0] in optimizers.get(optimizer).options()]
    task = workload.open(size, data)
    torch.manual_seed(0)
    model = task.model()
    made = _plan_of(model, optimizer, own)
    task.loss(model, task.batch(0, 0)).backward()
    made.step()
    found: Plan = made.plan()
    return found
