"""The rows as a table in the terminal, as Markdown for the documents, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from rich.table import Table

from ngplus.lab.bench.record import Measurement
from ngplus.lab.bench.rows import RIVALS, ROWS, Row, rival_steps
from ngplus.lab.bench.timing import Spread
from ngplus.lab.figures import common
from ngplus.lab.terminal import count

HEADINGS = ("row", "what", "asked", "measured", "quartiles", "by CPU time", "reached")
LEAST = 0.03  # of what was asked: the left edge of the picture


def cells(row: Row) -> tuple[str, ...]:
    spread = row.spread
    limits = f"{number(spread.low, row)} to {number(spread.high, row)}" if len(row.values) > 1 else ""
    return (
        row.group,
        row.what,
        "" if row.asked is None else number(row.asked, row),
        number(spread.median, row),
        limits,
        "" if row.cpu is None else number(row.cpu, row),
        {None: "", True: "yes", False: "no"}[row.reached],
    )


def number(value: float, row: Row) -> str:
    if row.unit == "MB":
        return f"{value:,.0f} MB"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def table(rows: list[Row], title: str) -> Table:
    out = Table(title=title, title_justify="left")
    for i, heading in enumerate(HEADINGS):
        out.add_column(heading, justify="left" if i < 2 else "right", no_wrap=i != 1, overflow="fold")
    group = None
    for row in rows:
        style = {None: "", True: "green", False: "red"}[row.reached]
        *first, reached = cells(row)
        if row.group == group:
            first[0] = ""
        elif group is not None:
            out.add_section()
        group = row.group
        what = f"{first[1]}\n[dim]{row.note}[/dim]" if row.note else first[1]
        out.add_row(first[0], what, *first[2:], f"[{style}]{reached}[/{style}]" if style else reached)
    return out


def markdown(rows: list[Row], measurements: Mapping[str, Measurement]) -> str:
    """The table in Markdown, and the circumstances of its measurements."""
    lines = ["| " + " | ".join(HEADINGS) + " | |", "| --- " * (len(HEADINGS) + 1) + "|"]
    lines += ["| " + " | ".join((*cells(row), row.note)) + " |" for row in rows]
    return "\n".join([*lines, "", *circumstances({row.of: measurements[row.of] for row in rows})])


def circumstances(measurements: Mapping[str, Measurement]) -> list[str]:
    """One line for each set of measurements that were taken on the same machine in the same way."""
    same: dict[str, list[str]] = {}
    for name, one in measurements.items():
        e = one.environment
        kind = "quick models, " if one.quick else ""
        cores, threads = count(e["cores"], "core"), count(e["threads"], "thread")
        where = f"{e['processor']}, {cores}, {threads}, torch {e['torch']}, Python {e['python']}"
        same.setdefault(f"{kind}{where}", []).append(f"{name} ({count(one.repeats, 'round')}, {one.when[:16]}Z)")
    return [f"Measured on {where}: {', '.join(names)}." for where, names in same.items()]


# ------------------------------------------------------------------------------------------------ the picture


def picture(rows: list[Row], measurements: Mapping[str, Measurement], path: Path) -> list[Path]:
    """PNG and SVG beside the file: what was measured over what was asked; the rivals' steps over SGD's."""
    asked = [row for row in rows if row.asked is not None]
    rivals = {name: one for name, one in measurements.items() if name.startswith("rivals-")}
    panels = [panel for panel, there in (("asked", asked), ("rivals", rivals)) if there]
    if not panels:
        return []
    with common.conditions():
        height = max(3.0, 0.34 * len(asked) + 1.2)
        figure, axes = common.grid(1, len(panels), (7.5 * len(panels), height), "ngplus bench")
        for panel, ax in zip(panels, axes, strict=True):
            if panel == "asked":
                _asked(ax, asked)
            else:
                _rivals(ax, rivals)
        return common.save_pictures(path.stem, figure, path.parent)


def _asked(ax: Axes, rows: list[Row]) -> None:
    """Each row's measured value over the asked one: left of the line is reached."""
    for y, row in enumerate(reversed(rows)):
        assert row.asked is not None
        spread = row.spread
        middle, low, high = (max(x / row.asked, LEAST) for x in (spread.median, spread.low, spread.high))
        colour = {None: common.GREY, True: common.GREEN, False: common.VERMILION}[row.reached]
        ax.plot([low, high], [y, y], color=colour, linewidth=3, alpha=0.4, solid_capstyle="butt")
        ax.plot([middle], [y], "o", color=colour)
        ax.annotate(
            number(spread.median, row), (middle, y), (0, 5), textcoords="offset points", ha="center", fontsize=7
        )
    ax.axvline(1.0, color=common.INK, linewidth=1)
    ax.set_yticks(range(len(rows)), [_short(row) for row in reversed(rows)], fontsize=7.5)
    _logarithmic(ax)
    ax.set_xlabel("measured / asked")
    ax.set_title("what was asked (quartiles as bars)")


def _logarithmic(ax: Axes) -> None:
    """Ticks in plain numbers, few enough to be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _short(row: Row) -> str:
    detail = row.what.rpartition(": ")[2] if ": " in row.what else row.what
    text = f"{row.group}: {detail}"
    return text if len(text) <= 58 else text[:57] + "…"


def _rivals(ax: Axes, measurements: Mapping[str, Measurement]) -> None:
    for i, (colour, one) in enumerate(zip(common.PALETTE, measurements.values(), strict=False)):
        ratios = rival_steps(one.times)
        for y, method in enumerate(reversed(ratios)):
            spread, place = Spread.of(ratios[method][:, 0]), y + 0.18 * (1 - i)
            ax.plot([spread.low, spread.high], [place, place], color=colour, linewidth=3, alpha=0.4)
            label = one.numbers["problem"] if y == 0 else None
            ax.plot([spread.median], [place], "o", color=colour, label=label)
    methods = list(reversed(RIVALS.values()))
    ax.set_yticks(range(len(methods)), methods)
    _logarithmic(ax)
    ax.axvline(1.0, color=common.INK, linewidth=1)
    ax.set_xlabel("training step / SGD's (T = 20)")
    ax.set_title("other optimizers")
    ax.legend(loc="upper left", bbox_to_anchor=(0.0, -0.09))


def groups() -> Table:
    """The names that the command takes."""
    out = common.table("rows of the benchmark", "name", "what", "measurements")
    for name, group in ROWS.items():
        out.add_row(name, group.title, ", ".join(group.makers))
    return out
