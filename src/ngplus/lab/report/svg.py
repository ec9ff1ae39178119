"""A chart as SVG: colours come from the page's style, so it follows light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ngplus.lab.report.curves import COLOURS, Chart, Curve

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 12, 44
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def draw(chart: Chart) -> str:
    """``<svg>…</svg>``; every text in it is escaped."""
    axis = _Axes(chart)
    label = escape(f"{chart.title} over {chart.x_label}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for value in axis.y_ticks:
        y = axis.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for value in axis.x_ticks:
        x = axis.x(value)
        # the last number must not stick out
        x, anchor = (x, "middle") if x < WIDTH - 2 * RIGHT else (WIDTH - 2, "end")
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{number(value)}</text>')
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(chart.x_label)}</text>"
    )
    if chart.target is not None and axis.bottom <= chart.target <= axis.top:
        y = axis.y(chart.target)
        parts.append(f'<line class="target" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT + 3}" y="{y - 4 if y > TOP + 16 else y + 13:.1f}">target</text>')
    # A picture in the picture: what is outside of its frame is cut off. NG+ is drawn last, on top.
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    frame = f'x="{LEFT}" y="{TOP}" width="{width}" height="{height}"'
    parts.append(f'<svg {frame} viewBox="{LEFT} {TOP} {width} {height}">')
    parts += [_curve(curve, axis) for curve in sorted(chart.curves, key=lambda c: -c.place)]
    return "".join([*parts, "</svg></svg>"])


def _curve(curve: Curve, axis: _Axes) -> str:
    line = _path(axis, curve.x, curve.mean)
    band = ""
    if curve.low != curve.high:
        low = _path(axis, tuple(reversed(curve.x)), tuple(reversed(curve.low)))
        band = f'<path class="band" d="{_path(axis, curve.x, curve.high)}L{low[1:]}Z"/>'
    dash = DASHES[curve.place // COLOURS % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<g class="curve c{curve.place % COLOURS} o{curve.place}"><title>{escape(curve.optimizer)}</title>{band}'
        f'<path class="line" d="{line}"{dashes}/></g>'
    )


def _path(axis: _Axes, xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in zip(xs, ys, strict=True))


class _Axes:
    """From values to places in the picture."""

    def __init__(self, chart: Chart) -> None:
        self.log, self.bottom, self.top = chart.logarithmic, chart.bottom, chart.top
        self.right = max(max(c.x) for c in chart.curves) or 1.0
        self.x_ticks = _ticks(0.0, self.right)
        self.y_ticks = _log_ticks(self.bottom, self.top) if self.log else _ticks(self.bottom, self.top)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.right

    def y(self, value: float) -> float:
        low, high = self.bottom, self.top
        if self.log:
            value, low, high = (math.log(max(v, 1e-300)) for v in (value, low, high))
        part = (value - low) / ((high - low) or 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(part, -1.0), 2.0)


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between the ends."""
    width = (high - low) / count
    if not (math.isfinite(width) and width > 0):
        return [low]
    unit = 10.0 ** math.floor(math.log10(width))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= width * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, first + 3 * count) if k * step <= high + 1e-9 * step]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (1,) if len(powers) > 4 else (1, 2, 5)
    every = max(1, len(powers) // 6)
    return [m * 10.0**p for p in powers[::every] for m in marks if low <= m * 10.0**p <= high]


def number(value: float) -> str:
    """Short, for an axis."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
