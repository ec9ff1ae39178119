"""The figures of docs/theory.md: wide and narrow, light and dark."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
from helpers.project import load_tool
from ngplus.lab import figures
from ngplus.lab.figures.common import conditions


def test_four_files_of_a_figure() -> None:
    with conditions():
        outcome = figures.module("sketch").compute(seed=0, small=True)
    drawn = load_tool("theory_figures").drawings("sketch", outcome)
    assert list(drawn) == ["sketch.svg", "sketch-dark.svg", "sketch-narrow.svg", "sketch-narrow-dark.svg"]
    widths = {name: float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1]) for name, svg in drawn.items()}  # type: ignore[index]
    assert widths["sketch-narrow.svg"] == widths["sketch-narrow-dark.svg"] == widths["sketch.svg"] / 2
    for name, svg in drawn.items():
        paper, ink = ("#1b1e27", "#e6e8ee") if "dark" in name else ("#ffffff", "#1f2937")
        assert f"fill: {paper}" in svg
        assert ink in svg
        assert ("#ffffff" in svg) is ("dark" not in name)
        assert "least squares: m =" in svg  # text stays text
