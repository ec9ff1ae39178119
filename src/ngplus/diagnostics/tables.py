"""Tables as text, and the table of a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngplus.diagnostics.plan import Plan, PlanRow

WIDTH = 80

# Columns of a plan with amounts: the attribute of each heading.
AMOUNTS = {"state": "state_bytes", "step": "step_flops", "refresh": "refresh_flops"}
AMOUNTS_ON_RANKS = {"wire": "wire_bytes", "inverse sent": "inverse_bytes", "each step": "step_bytes"}
BRIEF = ("parameter", "m x n", "curvature", "side", *AMOUNTS, "owner")  # the columns without verbose=True
LEGEND = {
    "curvature": "from samples (sample, vmap) or mini-batches (batch)",
    "seen": "samples x positions of the last refresh",
    "side": "L (left), R (right) or both",
    "solver": "how the inverse or the roots are computed",
    "blocks": "diagonal blocks of L and R",
    "form": "how the products of samples are computed",
    "state": "bytes of curvature and moments",
    "step": "FLOPs of every step",
    "refresh": "FLOPs of a refresh",
    "wire": "bytes that a refresh reduces over ranks",
    "inverse sent": "bytes that the owner broadcasts at a refresh",
    "each step": "bytes that ranks communicate in every step",
    "owner": "the rank that computes the inverse",
}


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def within_width(table: Sequence[Sequence[str]]) -> list[str]:
    """The same in 80 columns: names in the first column are abbreviated if they are too long."""
    room = WIDTH - max(map(len, aligned([["", *line[1:]] for line in table])))
    return aligned([[abbreviated(line[0], room), *line[1:]] for line in table])


def abbreviated(name: str, width: int) -> str:
    """The name of a parameter in so many characters, with all numbers of layers if they fit: from the left, modules are
    given by their first letters. "weight + bias" becomes "weight +".
    """
    if len(name) > width and " + " in name:
        name = f"{name.partition(' + ')[0]} +"
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) > width:
            parts[i] = part if part.isdigit() else part[:1]
    name = ".".join(parts)
    return name if len(name) <= width else f"...{name[3 - width :]}"


def legend(parts: Sequence[str]) -> list[str]:
    """Explanations of columns, in lines of 80 columns."""
    return textwrap.wrap("; ".join(parts), WIDTH, break_on_hyphens=False)


def plan_table(plan: Plan) -> str:
    """The rows of a plan, their sums, a legend and the notes. Empty columns are left out."""
    on_ranks = any(row.owner is not None for row in plan.rows)
    columns = {**AMOUNTS, **AMOUNTS_ON_RANKS} if on_ranks else AMOUNTS

    def amounts(source: PlanRow | Plan) -> list[str]:
        return [_amount(getattr(source, name)) for name in columns.values()]

    heads = ["parameter", "m x n", "curvature", "seen", "side", "solver", "blocks", "form", *columns, "owner"]
    rows = []
    for row in plan.rows:
        name = row.name + "".join(f" + {name.rpartition('.')[2]}" for name in row.parameters[1:])
        shape = (f"{row.groups} x " if row.groups > 1 else "") + f"{row.shape[0]} x {row.shape[1]}"
        seen = "" if row.seen is None else f"{row.seen[0]} x {row.seen[1]}"
        blocks = str(row.blocks) if row.blocks > row.groups else ""
        form = "" if row.source == "batch" else row.form
        owner = "" if row.owner is None else str(row.owner)
        rows.append([name, shape, row.source, seen, row.side, row.solver, blocks, form, *amounts(row), owner])
    total = ["total", *[""] * 7, *amounts(plan), ""]
    shown = [
        i
        for i, head in enumerate(heads)
        if (plan.verbose or head in BRIEF) and (any(row[i] for row in rows) or (not rows and head != "owner"))
    ]
    table = [[line[i] for i in shown] for line in (heads, *rows, total)]
    lines = aligned(table) if plan.verbose else within_width(table)
    rule = "-" * max(map(len, lines))
    notes = [f"{row.name}: {row.note}" for row in plan.rows if row.note]
    if not plan.verbose:
        notes = [line for note in notes for line in textwrap.wrap(note, WIDTH, subsequent_indent="  ")]
    parts = [f"{heads[i]}: {LEGEND[heads[i]]}" for i in shown if heads[i] in LEGEND]
    if not plan.verbose:
        parts.append("plan(verbose=True) has whole names and more columns")
    explained = legend(parts)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *explained, *notes])


def _amount(number: float) -> str:
    """With three digits or so: 980, 9.8k, 98k, 980k."""
    for prefix in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.{1 if prefix and number < 9.95 else 0}f}{prefix}"
        number /= 1000
    return f"{number:.1f}T"
