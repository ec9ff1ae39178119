"""docs/decision.md against the runs in docs/results."""

from __future__ import annotations

from types import ModuleType

import pytest

from helpers.project import ROOT, load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("decision_tables")


def test_the_page_has_the_comparison(tool: ModuleType) -> None:
    lines = (ROOT / "docs" / "decision.md").read_text().splitlines()
    found = {name: f"| {errors[-1]:.3f} | {steps[-1]:.3f} |" for name, errors, steps in tool.comparison()}
    shown = [line for line in lines if line.startswith("| `") and line.split("`")[1] in found]
    assert len(shown) == 10
    assert all(line.endswith(found[line.split("`")[1]]) for line in shown)


def test_the_page_has_the_screening(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "decision.md").read_text()
    losses = {label: f"{final:.3f}" for label, _, final in tool.screening()}
    for label in (
        "base", "base, seed 101", "exponents 0.4 and 0.4", "exponents 0.25 and 0.25, rate 0.01",
        "left side alone, exponent 1", "right side alone, exponent 1", "blocks of 64", "no blocks",
        "no blocks, 1,000 steps, seed 100", "shakespeare, seed 100",
    ):  # fmt: skip
        assert losses[label] in page, label


def test_the_page_has_the_ideas(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "decision.md").read_text()
    table = page[page.index("**Other ideas**") :]
    shown = [(idea, task, width, f"{final:.3f}") for idea, task, width, _, final in tool.ideas() if final is not None]
    assert len(shown) == 58
    assert [one for one in shown if one[0] != "length by width" and one[3] not in table] == []


def test_the_tables_are_printed(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main()
    out = capsys.readouterr().out
    assert "| soap | 0.899; 0.503 |" in out
    assert "| no blocks | block=1000 | 2.094 |" in out
    assert '| digits | sgd {"lr": 0.1} |' in out
