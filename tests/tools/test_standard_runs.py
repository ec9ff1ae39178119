"""tools/standard_runs.py: which run comes next, and the numbers of its tables."""

from __future__ import annotations

import json
import math
from types import ModuleType
from typing import Any

import pytest

from helpers.project import ROOT, load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("standard_runs")


def row(lr: float, final: float | None, seed: int = 100, optimizer: str = "muon", **more: Any) -> dict[str, Any]:
    plain = {"workload": "shakespeare", "preset": "standard", "optimizer": optimizer, "lr": lr, "seed": seed}
    return {**plain, "final": final, "curve": [[100, 3.0], [200, final]], **more}


def test_rates_first_then_seeds(tool: ModuleType) -> None:
    losses = {0.0025: 2.0, 0.005: 1.9, 0.01: 1.8, 0.02: 1.7, 0.04: 1.75}
    rows: list[dict[str, Any]] = []
    asked = []
    while (following := tool.missing(rows, "shakespeare", "muon", "standard", (0, 1))) is not None:
        asked.append(following)
        rows.append(row(following[0], losses[following[0]], following[1]))
    # the best of the first four rates is the last one, so that a fifth is tried
    assert asked == [(rate, 100) for rate in losses] + [(0.02, 0), (0.02, 1)]
    other = tool.missing(rows, "shakespeare", "adamw", "standard", (0, 1))
    assert other == (0.001, 100)


def test_a_diverged_run_is_never_the_best(tool: ModuleType) -> None:
    assert tool.best_rate([row(0.01, None), row(0.005, 2.0), row(0.0025, 2.1)]) == 0.005
    accuracy = [row(0.01, 0.5, workload="digits"), row(0.005, 0.9, workload="digits")]
    assert tool.best_rate(accuracy) == 0.005


def test_small_presets_go_by_the_steps_to_the_target(tool: ModuleType) -> None:
    small = {"workload": "digits", "preset": "small"}  # whose target is an accuracy of 0.97
    early = row(0.01, 0.975, **small, curve=[[5, 0.5], [10, 0.98], [15, 0.975]])
    late = row(0.005, 0.99, **small, curve=[[5, 0.5], [10, 0.9], [15, 0.99]])
    never = row(0.02, 0.9, **small, curve=[[5, 0.5], [15, 0.9]])
    assert tool.best_rate([early, late, never]) == 0.01
    assert tool.steps_to_target(never) == math.inf
    runs = [{**one, "seed": seed, "optimizer": "adamw"} for one in (early,) for seed in (100, 0, 1)]
    assert "| adamw | 10 |" in "\n".join(tool.target_table(runs, ["digits"], ["adamw"]))


def test_steps_are_interpolated(tool: ModuleType) -> None:
    curve = [(100, 3.0), (200, 2.0), (300, 1.0)]
    assert tool.steps_to(curve, 1.5, False) == pytest.approx(250)
    assert tool.steps_to(curve, 3.5, False) == 100
    assert tool.steps_to(curve, 0.5, False) == math.inf
    assert tool.steps_to([(10, 0.2), (20, 0.6)], 0.5, True) == pytest.approx(17.5)
    assert tool.steps_to([(10, 3.0), (20, math.nan)], 2.0, False) == math.inf


def test_tables_compare_with_the_baseline(tool: ModuleType) -> None:
    rows = [row(0.004, 2.0, seed, "adamw") for seed in (100, 0, 1, 2)]
    rows += [row(0.01, value, seed) for seed, value in ((100, 1.0), (0, 1.0), (1, 0.9), (2, 1.1))]
    text = "\n".join(tool.tables(rows))
    assert "| muon | 1 ± 0.1 (lr 0.01) | 0.500 |" in text  # half of the baseline's loss
    assert "| adamw | 1.000 | 1.000 |" in text
    assert "| muon | 0.750 | 0.750 |" in text  # from 3 to 1 in the second half: at 2 after 150 of 200 steps
    assert "| adamw | not reached | inf |" in text


def test_the_readme_has_the_steps_of_the_runs(tool: ModuleType) -> None:
    rows = [json.loads(line) for line in (ROOT / "docs" / "results" / "standard.jsonl").read_text().splitlines()]
    lines = tool.tables(rows)
    start = next(i for i, line in enumerate(lines) if line.startswith("Steps to the baseline's"))
    shown = (ROOT / "README.md").read_text().splitlines()
    for label, name in {"NGAdam": tool.CHOSEN, "SOAP": "soap", "Muon": "muon"}.items():
        row = next(line for line in lines[start:] if line.startswith(f"| {name} |"))
        assert row.replace(f"| {name} |", f"| {label} |") in shown
