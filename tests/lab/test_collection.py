"""Collections of runs and the files of a run: thinned, and refused by name where they are damaged."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from made_up_runs import run, save

from ngplus.lab import collection
from ngplus.lab.runs import Config, RunError


def test_a_thinned_run_has_its_looks_and_the_mean_training_loss() -> None:
    made = run()
    made = replace(
        made, metrics=[{k: v for k, v in row.items() if k != "train_loss" or row["step"]} for row in made.metrics]
    )
    made = replace(made, environment={"torch": "2", "command": ["ngplus", "/home/me"]})
    assert collection.thinned(made).environment == {"torch": "2"}
    kept = collection.thinned(made).metrics
    assert [row["step"] for row in kept] == list(range(0, 51, 5))
    assert "train_loss" not in kept[0]
    want = sum(math.exp(-0.1 * step) for step in range(6, 11)) / 5
    assert kept[2]["train_loss"] == pytest.approx(want, rel=1e-5)
    assert kept[2]["accuracy"] == pytest.approx(1 - math.exp(-1), rel=1e-5)


@pytest.mark.parametrize("change", [{"runs": [7]}, {"tuning": []}, {"format": 9}])
def test_a_damaged_collection_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    collection.write(path, [run()])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=re.escape(str(path))):
        collection.find([path])


@pytest.mark.parametrize(
    "metrics", [[], {"step": [0]}, {"step": [0], "seconds": [0, 1]}, {"step": ["x"], "seconds": [0]}]
)
def test_damaged_metrics_of_a_collection_are_named(metrics: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    collection.write(path, [run()])
    held = json.loads(path.read_text())
    held["runs"][0]["metrics"] = metrics
    path.write_text(json.dumps(held))
    with pytest.raises(RunError, match=re.escape(str(path))):
        collection.find([path])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("config.json", '{"format": 2}'),
        ("config.json", '{"format": 1}'),
        ("config.json", "[" * 100_000),
        ("result.json", '{"status": "finished"}'),
        ("result.json", "7"),
        ("metrics.jsonl", "{}\n"),
        ("metrics.jsonl", '{"step": "x", "seconds": 1}\n'),
        ("metrics.jsonl", "\x00\n"),
    ],
)
def test_damaged_files_are_named(name: str, content: str, tmp_path: Path) -> None:
    save(tmp_path, run())
    (tmp_path / "run0" / name).write_text(content)
    with pytest.raises(RunError, match=re.escape(name)):
        collection.find([tmp_path])


def test_a_configuration_of_wrong_types_is_refused(tmp_path: Path) -> None:
    for key, value in {"steps": "many", "hyper": 3, "optimizer": None, "higher_is_better": 1, "seed": True}.items():
        content = {**run().config.as_dict(), key: value}
        with pytest.raises(RunError, match=key):
            Config.from_dict(content, tmp_path)
