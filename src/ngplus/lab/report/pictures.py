"""The same charts as a PNG, for a README: on a light ground, and on a dark one."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from ngplus.lab.report.curves import COLOURS, Chart, Section

DASHES = ("solid", "dashed", "dotted", "dashdot")
LETTERS = 12.5  # points: a picture is also read at the width of a phone


@dataclass(frozen=True)
class Ground:
    """The colours of page.css, light or dark."""

    back: str
    front: str
    soft: str
    palette: tuple[str, ...]


LIGHT = Ground(
    "#ffffff", "#1c2430", "#5c6775",
    ("#c2185b", "#6b7280", "#1769c9", "#0b8043", "#e0571b", "#7a3fc4", "#0e8a9c", "#9a6a00", "#3f4b8c"),
)  # fmt: skip
DARK = Ground(
    "#12161c", "#e6eaf0", "#9aa5b3",
    ("#ff6fa5", "#a3adba", "#6cb0ff", "#56cf8a", "#ff9a5c", "#bd94ff", "#4fd3e6", "#e6bc4f", "#a3b1ff"),
)  # fmt: skip


def draw(section: Section, ground: Ground = LIGHT, brief: bool = False, times: bool = True) -> bytes:
    """Two charts a row: over steps, over time; those over steps alone where times mean nothing. ``brief``: those of the
    workload's measure, which come first."""
    from matplotlib import rc_context

    with rc_context({"font.size": LETTERS}):
        return _draw(section, ground, brief, times)


def _draw(section: Section, ground: Ground, brief: bool, times: bool) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = [chart for chart in section.charts if times or chart.x_label == "steps"]
    charts = charts[: 2 if times else 1] if brief else charts
    columns = max(1, min(2, len(charts)))
    rows = max(1, (len(charts) + 1) // columns) if columns > 1 else 1
    size = (10 if columns > 1 else 6.6, 3.3 * rows + 0.9)
    figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor=ground.back)
    FigureCanvasAgg(figure)
    lines: dict[str, Any] = {}
    for number, chart in enumerate(charts, start=1):
        _chart(figure.add_subplot(rows, columns, number), chart, lines, ground)
    names = [name for name in section.places if name in lines]
    if names:
        legend = figure.legend(
            [lines[name] for name in names],
            [_text(name) for name in names],
            loc="outside upper center",
            ncols=6 if columns > 1 else 4,
            frameon=False,
        )
        for text in legend.get_texts():
            text.set_color(ground.front)
            text.set_parse_math(False)  # a dollar sign in a name is a dollar sign
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _chart(axes: Any, chart: Chart, lines: dict[str, Any], ground: Ground) -> None:
    axes.set_facecolor(ground.back)
    for curve in sorted(chart.curves, key=lambda c: -c.place):
        colour, dash = ground.palette[curve.place % COLOURS], DASHES[curve.place // COLOURS % len(DASHES)]
        width = 2.4 if curve.place == 0 else 1.3
        (line,) = axes.plot(curve.x, curve.mean, color=colour, linestyle=dash, linewidth=width)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.14, linewidth=0)
        for run in curve.seeds:
            if run.diverged:
                axes.plot(run.x, run.y, color=colour, linestyle=dash, linewidth=0.8)
            if run.end is not None:
                axes.plot(*run.end, "x", color=colour, clip_on=False)
        lines.setdefault(curve.optimizer, line)
    if chart.target is not None:
        axes.axhline(chart.target, color=ground.front, linestyle=":", linewidth=1)
    if chart.logarithmic:
        axes.set_yscale("log")
    axes.set_ylim(chart.bottom, chart.top)
    axes.set_title(_text(chart.title), fontsize="medium", color=ground.front, parse_math=False)
    axes.set_xlabel(_text(chart.x_label), color=ground.soft, parse_math=False)
    axes.tick_params(which="both", colors=ground.soft)
    axes.grid(color=ground.soft, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ground.soft)


def _text(text: str) -> str:
    """Shortened, and without what a font cannot show."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= 60 else clean[:59] + "…"
