"""examples/first_steps.ipynb: its code cells run in order, and print what it shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.project import ROOT, same_but_for_numbers

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_cells_run_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NGPLUS_WRITE_OUTPUT=1 writes what they print now."""
    content = json.loads(NOTEBOOK.read_text())
    assert content["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown, printed = [], []
    for number, cell in enumerate(cell for cell in content["cells"] if cell["cell_type"] == "code"):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        shown.append("".join(line for output in cell["outputs"] for line in output["text"]))
        printed.append(capsys.readouterr().out)
        stream = {"name": "stdout", "output_type": "stream", "text": printed[-1].splitlines(keepends=True)}
        cell["outputs"], cell["execution_count"] = [stream] * bool(printed[-1]), number + 1
    if "NGPLUS_WRITE_OUTPUT" in os.environ:
        NOTEBOOK.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return
    assert "goes on bit for bit: True" in "".join(printed)
    assert all(map(same_but_for_numbers, printed, shown)), "the notebook is old; NGPLUS_WRITE_OUTPUT=1 writes it"
