"""Where the time of a step goes: torch's profiler over a step without and one with a refresh, summed by parts.

The profiler records the Python functions and torch's operations as nested intervals. The time in an interval that no
inner one covers is its own. It belongs to the part of the nearest function around it that names one: inside of ngplus,
the functions of the optimizer's frame below; else the phase of the training step. The recording itself makes Python
slower, so small parts look larger than they are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, record_function

from ngplus.lab import optimizers
from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.timing import Stopwatch
from ngplus.lab.bench.training import ADAPTIVE, INVERSE, Contender
from ngplus.lab.figures import common

# Within the step: the functions of the frame that CapturedOptimizer calls for each method, by their part.
FRAME = {
    "_refresh": "inverses",
    "_direction": "directions",
    "update_parameters": "update",
    "check_finite": "checks",
    "_check": "checks",
    "_advance": "arming",
}
PARTS = (
    "forward", "backward", "capture in forward", "capture products", "inverses", "directions", "update", "checks",
    "arming", "step, other",
)  # fmt: skip
METHODS = {"inverse": ("ngplus-paper", INVERSE), "adaptive": ("ngplus", ADAPTIVE)}


@dataclass
class Share:
    """The seconds of a part, and of the operations in it."""

    seconds: float = 0.0
    operations: dict[str, float] = field(default_factory=dict)


Shares = dict[str, Share]


def run(names: list[str], quick: bool, out: Path, console: Console) -> None:
    """Profiles the models of these names, ResNet-50 where none is given, with both scalings."""
    for name in names or ["resnet"]:
        optimizers.check_name(name, PROBLEMS, "model of the benchmark")
        shares: dict[str, Shares] = {}
        for scaling in METHODS:
            with console.status(f"{name}, {scaling}"):
                shares |= {f"{scaling}, {kind}": found for kind, found in profile(name, scaling, quick).items()}
        _print(PROBLEMS[name](quick).title, shares, console)
        paths = [*_draw(f"profile-{name}", PROBLEMS[name](quick).title, shares, out), out / f"profile-{name}.json"]
        content = {
            kind: {p: {"seconds": s.seconds, "operations": s.operations} for p, s in found.items()}
            for kind, found in shares.items()
        }
        paths[-1].write_text(json.dumps(common.plain(content), indent=1) + "\n", encoding="utf-8")
        console.print(", ".join(map(str, paths)), highlight=False, soft_wrap=True)


def profile(name: str, scaling: str, quick: bool) -> dict[str, Shares]:
    """The shares of a plain and of a refresh step, after one of each that warms up."""
    problem = PROBLEMS[name](quick)
    optimizer, hyper = METHODS[scaling]
    contender = Contender(problem, optimizer, {**hyper, "update_every": 2})
    for _ in range(2):
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
    mine.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
    shares = {part: Share() for part in PARTS}
    stack: list[_Interval] = []
    for event in mine:
        start = float(event["ts"])
        while stack and stack[-1].end <= start:
            stack.pop().close(shares)
        outer = stack[-1] if stack else None
        interval = _Interval(event, outer)
        if outer is not None:
            outer.inner += min(interval.end, outer.end) - start
        stack.append(interval)
    while stack:
        stack.pop().close(shares)
    return shares


class _Interval:
    def __init__(self, event: dict[str, Any], outer: _Interval | None) -> None:
        self.start, self.length = float(event["ts"]), float(event["dur"])
        self.end = self.start + self.length
        self.inner = 0.0
        name, kind = str(event["name"]), str(event["cat"])
        self.phase: str | None = outer.phase if outer else None
        self.operation: str | None = outer.operation if outer else None
        self.part: str | None = outer.part if outer else None
        if kind == "cpu_op":
            self.operation = name
        # A Python function's name is "path(line): function".
        path, _, function = name.rpartition(": ") if kind == "python_function" else ("", "", "")
        inside = "ngplus/" in path.replace("\\", "/") and "ngplus/lab/" not in path
        if name.startswith("bench:"):
            self.phase = name.removeprefix("bench:")
            self.part = "step, other" if self.phase == "step" else self.phase
        elif inside and self.phase == "step":
            self.part = FRAME.get(function, self.part)
        elif inside and self.phase is not None:
            self.part = "capture in forward" if self.phase == "forward" else "capture products"

    def close(self, shares: Shares) -> None:
        if self.part is None:
            return
        own = max(self.length - self.inner, 0.0) / 1e6
        share = shares[self.part]
        share.seconds += own
        name = self.operation or "Python"
        share.operations[name] = share.operations.get(name, 0.0) + own


# ------------------------------------------------------------------------------------------------ to look at


def _print(title: str, shares: dict[str, Shares], console: Console) -> None:
    table = common.table(f"{title}: milliseconds by part", "part", *shares, "most of it in a refresh step")
    for part in PARTS:
        last = [found[part] for kind, found in shares.items() if "refresh" in kind]
        busy = max(last, key=lambda share: share.seconds)
        top = sorted(busy.operations.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{name.removeprefix('aten::')} {1000 * s:,.1f}" for name, s in top)
        table.add_row(part, *(f"{1000 * found[part].seconds:,.1f}" for found in shares.values()), shown)
    table.add_section()
    table.add_row("all", *(f"{1000 * sum(s.seconds for s in found.values()):,.1f}" for found in shares.values()), "")
    console.print(table)


def _draw(name: str, title: str, shares: dict[str, Shares], out: Path) -> list[Path]:
    """Stacked bars, one for each kind of step; then the same without the model's own passes."""
    with common.conditions():
        figure, axes = common.canvas(2, 1, (10, 5.5), f"Where a step's time goes: {title}")
        for ax, left_out, label in zip(axes, ((), ("forward", "backward")), ("all", "what NG+ adds"), strict=True):
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
