"""Where the time of a step goes: torch's profiler over a step without and one with a refresh, summed by parts.

The profiler records the Python functions and torch's operations as intervals. Each moment is the own time of the
interval that began last, of those that have not ended. It belongs to the part of the nearest function around it that
names one: inside of ngplus, the functions of the optimizer's frame below; else the phase of the training step. The
recording itself makes Python slower, so small parts look larger than they are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, record_function

from ngplus.lab import optimizers
from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.timing import Stopwatch
from ngplus.lab.bench.training import NGADAM, NGPLUS, Contender
from ngplus.lab.figures import common

# Within the step: the functions of the optimizer's frame, by their part.
FRAME = {
    "_check": "checks",
    "_with_finite_gradients": "checks",
    "_prepare": "checks",
    "_updates": "gradients",
    "_refresh": "inverses",
    "update": "averages",
    "precondition": "directions",
    "by_parameter": "directions",
    "update_parameters": "update",
    "_advance": "arming",
}
PARTS = (
    "forward", "backward", "capture in forward", "capture products", "checks", "gradients", "averages", "inverses",
    "directions",
    "update", "arming", "step, other",
)  # fmt: skip
METHODS = {"ngplus": NGPLUS, "ngadam": NGADAM}


@dataclass
class Share:
    """The seconds of a part, and of the operations in it."""

    seconds: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)

    def add(self, operation: str, seconds: float) -> None:
        self.seconds += seconds
        self.operations[operation] = self.operations.get(operation, 0.0) + seconds


Shares = dict[str, Share]


def run(names: list[str], quick: bool, out: Path, console: Console) -> None:
    """Profiles the models of these names, ResNet-50 where none is given, with NGPlus and NGAdam."""
    for name in names or ["resnet"]:
        optimizers.check_name(name, PROBLEMS, "model of the benchmark")
        shares: dict[str, Shares] = {}
        for method in METHODS:
            with console.status(f"{name}, {method}"):
                shares |= {f"{method}, {kind}": found for kind, found in profile(name, method, quick).items()}
        _print(PROBLEMS[name](quick).title, shares, console)
        paths = [*_draw(f"profile-{name}", PROBLEMS[name](quick).title, shares, out), out / f"profile-{name}.json"]
        content = {
            kind: {p: {"seconds": s.seconds, "operations": s.operations} for p, s in found.items()}
            for kind, found in shares.items()
        }
        paths[-1].write_text(json.dumps(common.plain(content), indent=1) + "\n", encoding="utf-8")
        console.print(", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def profile(name: str, method: str, quick: bool) -> dict[str, Shares]:
    """The shares of a plain and of a refresh step, after some that warm up."""
    problem = PROBLEMS[name](quick)
    contender = Contender(problem, method, {**METHODS[method], "update_every": 2})
    for _ in range(6):  # NGAdam refreshes in all of its first steps
        contender.train(Stopwatch(), "")
    return {kind: _recorded(contender) for kind in ("refresh", "plain")}


def _recorded(contender: Contender) -> Shares:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        contender.optimizer.zero_grad()
        with record_function("bench:forward"):
            loss = contender.problem.loss(contender.model)
        with record_function("bench:backward"):
            loss.backward()
        with record_function("bench:step"):
            contender.optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return shares_of(events)


# ------------------------------------------------------------------------------------------------ intervals to parts


def shares_of(events: Iterable[dict[str, Any]]) -> Shares:
    """The time by parts of a trace's complete events (``ph`` "X"; ``ts`` and ``dur`` in microseconds).

    Only the thread of the phases counts: what torch's own threads do at the same time is in the time of their caller.
    """
    whole = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "python_function", "user_annotation")
    ]
    phases = [e for e in whole if str(e["name"]).startswith("bench:")]
    thread = {(e["pid"], e["tid"]) for e in phases}
    mine = [e for e in whole if (e["pid"], e["tid"]) in thread]
    shares = {part: Share() for part in PARTS}
    # Ends before beginnings at the same moment, and of those the longest first.
    marks = [(float(e["ts"]), 1, -float(e["dur"]), i) for i, e in enumerate(mine)]
    marks += [(float(e["ts"]) + float(e["dur"]), 0, 0.0, i) for i, e in enumerate(mine)]
    # An annotation begins inside of the function that makes it and outlives it: what ends need not be the innermost.
    stack: dict[int, Place] = {}
    before = 0.0
    for moment, begins, _, i in sorted(marks):
        here = stack[next(reversed(stack))] if stack else OUTSIDE
        if here.part is not None:
            shares[here.part].add(here.operation, (moment - before) / 1e6)
        before = moment
        if begins:
            stack[i] = here.enter(str(mine[i]["name"]), str(mine[i]["cat"]))
        else:
            stack.pop(i, None)  # one of no length has not begun
    return shares


class Place(NamedTuple):
    """Where in the training step an interval is."""

    phase: str | None
    part: str | None
    operation: str

    def enter(self, name: str, kind: str) -> Place:
        """The place of an interval that begins here."""
        if name.startswith("bench:"):
            phase = name.removeprefix("bench:")
            return Place(phase, "step, other" if phase == "step" else phase, name)
        if kind != "python_function":
            return Place(self.phase, self.part, name if kind == "cpu_op" else self.operation)
        path, colon, function = name.rpartition(": ")  # "path(line): function", or "<built-in method …>"
        part = self.part
        if "ngplus/" in path.replace("\\", "/") and "ngplus/lab/" not in path:
            captures = {"forward": "capture in forward", "backward": "capture products"}
            part = FRAME.get(function, part) if self.phase == "step" else captures.get(str(self.phase))
            if function == self.phase == "backward":  # of a layer, for which the capture has made a part of it
                part = "backward"
        # A built-in is called from the function that matters; its name has an address in it.
        return Place(self.phase, part, f"Python {function}" if colon else self.operation)


OUTSIDE = Place(None, None, "")


# ------------------------------------------------------------------------------------------------ to look at


def _print(title: str, shares: dict[str, Shares], console: Console) -> None:
    """Milliseconds of each part, and below, what takes most of the larger parts that are NG+'s own."""
    table = common.table(f"{title}: milliseconds by part", "part", *shares)
    for part in PARTS:
        table.add_row(part, *(f"{1000 * found[part].seconds:,.1f}" for found in shares.values()))
    table.add_section()
    table.add_row("all", *(f"{1000 * sum(s.seconds for s in found.values()):,.1f}" for found in shares.values()))
    console.print(table)
    for kind, found in shares.items():
        own = sum(found[part].seconds for part in PARTS[2:])
        for part in (part for part in PARTS[2:] if found[part].seconds > 0.05 * own):
            top = sorted(found[part].operations.items(), key=lambda item: -item[1])[:5]
            shown = ", ".join(f"{name.removeprefix('aten::')} {1000 * s:,.1f}" for name, s in top)
            console.print(f"{kind}, {part}: {shown}", highlight=False, markup=False)


def _draw(name: str, title: str, shares: dict[str, Shares], out: Path) -> list[Path]:
    """Stacked bars, one for each kind of step; then the same without the model's own passes."""
    with common.conditions():
        figure, axes = common.grid(2, 1, (10, 5.5), f"Where a step's time goes: {title}")
        for ax, left_out, label in zip(axes, ((), ("forward", "backward")), ("all", "NG+'s own work"), strict=True):
            kinds = list(reversed(shares))
            start = dict.fromkeys(kinds, 0.0)
            for i, part in enumerate(PARTS):
                if part in left_out:
                    continue
                widths = [shares[kind][part].seconds for kind in kinds]
                colour = common.PALETTE[i % len(common.PALETTE)]
                hatch = "//" if i >= len(common.PALETTE) else None
                ax.barh(
                    kinds, widths, left=list(start.values()), color=colour, hatch=hatch, edgecolor="white", label=part
                )
                start = {kind: start[kind] + width for kind, width in zip(kinds, widths, strict=True)}
            ax.set_xlabel("seconds")
            ax.set_title(label)
        axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return common.save_pictures(name, figure, out)
