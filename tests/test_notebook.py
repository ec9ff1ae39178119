"""examples/first_steps.ipynb: its code cells run in order, and it is committed without output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.project import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text())
    assert found["nbformat"] == 4
    return [cell for cell in found["cells"] if cell["cell_type"] == "code"]


def test_cells_run(
    cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "5.weight" in said
    assert "goes on bit for bit: True" in said


def test_it_is_committed_without_output(cells: list[dict[str, Any]]) -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
