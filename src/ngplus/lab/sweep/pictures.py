"""A task's curves as PNG pictures, on a light and on a dark ground."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngplus.lab.report.pictures import DARK, LETTERS, LIGHT, Ground
from ngplus.lab.runs import write_atomically
from ngplus.lab.sweep.numbers import BASELINE, Standing, higher_is_better, label, mean_curve, measure, standings
from ngplus.lab.sweep.plan import FIRST
from ngplus.lab.sweep.rows import Row, Timing
from ngplus.lab.sweep.tables import tasks_of

CURVES = 5  # at most, in a picture
SHOWN_FROM = 0.08  # of the budget: what the baseline has reached by then is the end of the vertical axis
GROUNDS = {"": LIGHT, "-dark": DARK}


def write(folder: Path, rows: Sequence[Row], task: str) -> list[Path]:
    """The curves of a task over steps."""
    shown = standings(rows, task)[:CURVES]
    return [_save(folder / f"{task}{end}.png", [(shown, None, "steps")], ground) for end, ground in GROUNDS.items()]


def write_wide(path: Path, rows: Sequence[Row], timings: Sequence[Timing]) -> list[Path]:
    """The curves of one task over steps and over time. ValueError for runs of several."""
    tasks = tasks_of(rows)
    if len(tasks) != 1:
        raise ValueError(f"--picture draws one workload that has runs of {BASELINE}, not {len(tasks)}: name one")
    shown = standings(rows, tasks[0])[:CURVES]
    seconds, words = _clock(shown, [timing for timing in timings if timing.workload == tasks[0]])
    panels = [(shown, None, "steps"), (shown, seconds, words)]
    path.parent.mkdir(parents=True, exist_ok=True)
    return [_save(path.with_name(f"{path.stem}{end}.png"), panels, ground) for end, ground in GROUNDS.items()]


def _clock(shown: Sequence[Standing], timings: Sequence[Timing]) -> tuple[dict[str, float], str]:
    """Seconds of a training step of each optimizer by the best clock that all of them have, and what it is called."""
    timed: dict[str, float | None] = {timing.optimizer: statistics.median(timing.milliseconds) for timing in timings}
    cpu = {one.name: _median([row.cpu_milliseconds for row in one.runs]) for one in shown}
    wall = {one.name: _median([row.milliseconds for row in one.runs]) for one in shown}
    clocks: dict[str, dict[str, float | None]] = {
        "seconds": timed,
        "CPU seconds": cpu,
        "seconds, beside other runs": wall,
    }
    for words, held in clocks.items():
        if all(held.get(one.name) is not None for one in shown):
            return {name: value / 1000 for name, value in held.items() if value is not None}, words
    raise ValueError("The runs have no times of their steps")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


Panel = tuple[Sequence[Standing], "dict[str, float] | None", str]


def _save(path: Path, panels: Sequence[Panel], ground: Ground) -> Path:
    from matplotlib import rc_context

    with rc_context({"font.size": LETTERS}):
        write_atomically(path, _picture(panels, ground))
    return path


def _picture(panels: Sequence[Panel], ground: Ground) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(panels) + 1.6, 3.4), dpi=120, layout="constrained", facecolor=ground.back)
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for number, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(1, len(panels), number), panel, lines, ground)
    legend = figure.legend(list(lines.values()), list(lines), loc="outside right upper", frameon=False)
    for text in legend.get_texts():
        text.set_color(ground.front)
        text.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _places(names: Sequence[str]) -> dict[str, int]:
    """Colours: the same for an optimizer in each picture where it is one of the first."""
    first = [names[0], BASELINE, *FIRST]
    known = list(dict.fromkeys([*first, *names]))
    return {name: known.index(name) for name in names}


def _draw(axes: Any, panel: Panel, lines: dict[str, Any], ground: Ground) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    shown, seconds, x_label = panel
    row, low, high = shown[0].runs[0], math.inf, -math.inf
    places = _places([one.name for one in shown])
    for place, one in enumerate(shown):
        unit = 1.0 if seconds is None else seconds[one.name]
        mean = mean_curve(one.runs)
        x = [unit * step for step, _ in mean]
        columns = [[run.curve[k][1] for run in one.runs if k < len(run.curve)] for k in range(len(mean))]
        colour, width = ground.palette[places[one.name]], 2.4 if place == 0 else 1.4
        (line,) = axes.plot(x, [value for _, value in mean], color=colour, linewidth=width, zorder=9 - place)
        axes.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.16, linewidth=0)
        lines.setdefault(label(one.name), line)
        ends = [value for _, value in mean if math.isfinite(value)]
        low, high = min([low, *ends]), max([high, *ends])
    base = next((one for one in shown if one.name == BASELINE), shown[0])
    curve = mean_curve(base.runs)
    early = next(value for step, value in curve if step >= SHOWN_FROM * curve[-1][0])
    rising = higher_is_better(row)
    bottom, top = (early, high) if rising else (low, early)
    if not rising and low > 0 and early > 3 * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(0.95 * bottom, top)
    else:
        margin = 0.04 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)
    if math.isfinite(base.final):
        axes.axhline(base.final, color=ground.soft, linestyle=":", linewidth=1)
    _style(axes, f"{row.workload}: {measure(row)} on the validation set", x_label, ground)


def _style(axes: Any, title: str, x_label: str, ground: Ground) -> None:
    axes.set_facecolor(ground.back)
    axes.set_xlim(left=0)
    axes.set_title(title, fontsize="medium", color=ground.front, parse_math=False)
    axes.set_xlabel(x_label, color=ground.soft)
    axes.tick_params(which="both", colors=ground.soft)
    axes.grid(color=ground.soft, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ground.soft)
