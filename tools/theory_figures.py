"""Writes the figures of docs/theory.md: light and dark, each wide and, for a phone, with all panels in one column.

python tools/theory_figures.py             all of them, about two minutes
python tools/theory_figures.py gfim steps  some of them
"""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import matplotlib

from ngplus.lab import figures
from ngplus.lab.figures.common import conditions, dark

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"


def drawings(name: str, outcome: figures.Outcome) -> dict[str, str]:
    """The four files of a figure: their names, and SVG."""
    drawn = {}
    for end, narrow in (("", False), ("-narrow", True)):
        with conditions(narrow):
            text = StringIO()
            matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size
            figures.module(name).draw(outcome).savefig(text, format="svg", metadata={"Date": None}, dpi=110)
        svg = compact(text.getvalue())
        drawn |= {f"{name}{end}.svg": svg, f"{name}{end}-dark.svg": dark(svg)}
    return drawn


def compact(svg: str) -> str:
    """Coordinates with two decimals, a short list of fonts, no blanks at the ends of lines."""
    svg = re.sub(r"(\d+\.\d\d)\d{2,}", r"\1", svg)
    svg = re.sub(r"'DejaVu Sans', 'Bitstream[^;\"]*", "'DejaVu Sans', Verdana, sans-serif", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def main(names: list[str]) -> None:
    for name in names or figures.FIGURES:
        with conditions():
            outcome = figures.module(name).compute(seed=0, small=False)
        for file, svg in drawings(name, outcome).items():
            (FOLDER / file).write_text(svg)


if __name__ == "__main__":
    main(sys.argv[1:])
