"""``ngplus plan``: what NG+ does with each parameter of a model, and what it costs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ngplus.lab import options, settings, terminal
from ngplus.lab.amounts import amount

if TYPE_CHECKING:
    from torch import nn

    from ngplus import Load, Plan


def register(app: typer.Typer) -> None:
    app.command(name="plan", help=terminal.paragraphs(plan))(plan)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A workload, or module:function that returns a model.")],
    preset: options.PresetName = "small",
    optimizer: Annotated[
        str, typer.Option("--optimizer", "-o", help="ngadam, ngplus, ngplus-paper, kfac or seng.")
    ] = "ngadam",
    sets: options.Sets = None,
    data: options.Data = None,
    batch_size: options.BatchSize = None,
    positions: Annotated[int, typer.Option(min=1, help="Positions of a sample, for module:function.")] = 1,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Print the load of the busiest of so many ranks. May be repeated."),
    ] = None,
    distribution: Annotated[
        list[str] | None, typer.Option(help="With --ranks: communication, memory or sharded (FSDP2). May be repeated.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print the plan of a model: shapes, sides, solvers, bytes of state, FLOPs of a step and of a refresh.

    The plan of a workload is that of its model after one step. Any other model is planned without data.

    ngplus plan digits

    ngplus plan torch.nn:Transformer --batch-size 32 --positions 50

    With --ranks, print the load of the busiest rank, by the cost model. The model is made on the meta device, where
    nothing is allocated; module:function may return a tuple of the model and the inputs of a rank's batch.

    ngplus plan ngplus.lab.scale:transformer_1b3 --ranks 8 --ranks 512 --distribution sharded
    """
    console = terminal.make_console(as_json)
    with terminal.friendly(console):
        if distribution and not ranks:
            raise ValueError("--distribution can only be used with --ranks")
        if ":" in model:
            found = _of_model(model, optimizer, sets or [], batch_size, positions, on_meta=bool(ranks))
        else:
            found = _of_workload(model, preset, optimizer, sets or [], data, batch_size)
        # print, not rich: the table is as wide as it is
        if ranks:
            loads = [found.on_ranks(count, how) for how in distribution or ["communication"] for count in ranks]
        if as_json:
            terminal.print_json([asdict(load) for load in loads] if ranks else found.as_dicts())
        else:
            print(_table(loads) if ranks else found)


def _of_model(
    where: str, optimizer: str, sets: list[str], batch_size: int | None, positions: int, on_meta: bool
) -> Plan:
    import torch

    from ngplus.lab import scale

    with torch.device("meta" if on_meta else "cpu"):
        model, inputs = build(where)
        seen: int | dict[str, int] = positions
        if inputs:
            seen, batch_size = scale.positions(model, inputs), batch_size or len(inputs[0])
    found: Plan = _plan_of(model, optimizer, sets).plan(batch_size, seen)
    return found


def _table(loads: Sequence[Load]) -> str:
    """Markdown, one line for each number of ranks and distribution."""
    head = ["ranks", "distribution", "parameters", "state", "sums", "step", "refresh", "sent a step", "sent a refresh"]
    lines = [head, ["---"] * len(head)]
    for load in loads:
        sizes = [load.parameter_bytes, load.state_bytes, load.sum_bytes]
        lines.append([
            str(load.ranks), load.distribution, *(amount(x, "B") for x in sizes),
            amount(load.step_flops, "FLOP"), amount(load.refresh_flops, "FLOP"),
            amount(load.step_bytes, "B"), amount(load.refresh_bytes, "B"),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def build(where: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model that ``module:function`` makes without arguments, and the inputs that it may give beside it."""
    from torch import nn

    module, _, name = where.partition(":")
    try:
        thing: Any = importlib.import_module(module)
        for part in name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where!r} cannot be imported: {error}") from error
    try:
        made = thing if isinstance(thing, nn.Module) else thing()
    except TypeError as error:
        raise ValueError(f"{where} must return a model without arguments: {error}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where} must return a torch.nn.Module, or one and its inputs, not a {type(model).__name__}")
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def _plan_of(model: nn.Module, optimizer: str, sets: list[str]) -> Any:
    from ngplus.lab import optimizers

    entry = optimizers.get(optimizer)
    made = entry.make(model, dict(settings.assignments(sets)))
    if not hasattr(made, "plan"):
        known = [name for name in optimizers.names() if name in ("ngplus", "ngplus-paper", "ngadam", "kfac", "seng")]
        raise ValueError(f"{optimizer} has no plan: use one of {', '.join(known)}")
    return made


def _of_workload(name: str, preset: str, optimizer: str, sets: list[str], data: Any, batch_size: int | None) -> Plan:
    import torch

    from ngplus.lab import optimizers
    from ngplus.lab.loop import with_settings

    changes = {} if batch_size is None else {"batch_size": batch_size}
    workload, size = settings.open_preset(name, preset, changes, sets, optimizer)
    own = [text for text in sets if text.partition("=")[0] in optimizers.get(optimizer).options()]
    task = settings.open_task(workload, size, data)
    torch.manual_seed(0)
    with with_settings(f"{name} with {optimizer}"):
        model = task.model()
        made = _plan_of(model, optimizer, own)
        task.loss(model, task.batch(0, 0)).backward()
        made.step()
    found: Plan = made.plan()
    return found
