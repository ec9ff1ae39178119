"""Text tables."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]
