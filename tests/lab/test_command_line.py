"""The ngplus command itself: help, completion, interruptions, and output for programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("optuna")
pytest.importorskip("plotly")
pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")
pytest.importorskip("typer")

from commands import SHORT, document, ngplus, trials_of
from typer.testing import CliRunner

from ngplus import lab
from ngplus.lab import loop, presets, runs, settings
from ngplus.lab.cli import COMMANDS, app, load

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_called_so(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the terminal, in the table, in result.json and by the exit code; the same command goes on."""
    real = loop._train_step

    def interrupted(*arguments: Any) -> float:
        signal.raise_signal(number)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_train_step", interrupted)
        said = ngplus("train", "digits", *SHORT, code=130)
        assert "interrupted after" in said
        assert "the same command with --resume" in said
        compare = ["compare", "digits", "--optimizers", "sgd,adam", "--seeds", "1", *SHORT]
        said = ngplus(*compare, code=130)
        assert "sgd (1 interrupted)" in said
        assert "the same command continues" in said
        for name in ("ngadam", "sgd"):
            result = runs.load(Path(f"runs/digits-small/{name}-seed0")).result
            assert result is not None
            assert result.status == "interrupted"
        said = ngplus("tune", "digits", "-o", "adam", "--trials", "2", "--finalists", "1", *SHORT, code=130)
        assert "Interrupted: tuning.db has the trials that ended, and the same command continues" in said
    assert "finished" in ngplus("train", "digits", "--resume", *SHORT)
    assert "interrupted" not in ngplus(*compare)
    said = ngplus("tune", "digits", "-o", "adam", "--trials", "2", "--finalists", "1", *SHORT)
    assert "the best of 2 trials" in said
    assert len(trials_of("adam")) == 2


def test_an_end_before_the_first_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SIGTERM is while data are read."""
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "open_task", lambda *arguments: signal.raise_signal(signal.SIGTERM))
        for name in ("train", "compare", "tune"):
            assert "Interrupted" in ngplus(name, "digits", *SHORT, code=130)
    monkeypatch.setitem(sys.modules, "ngplus.lab.workloads", Slow("ngplus.lab.workloads"))  # torch is being imported
    assert "Interrupted" in ngplus("plan", "digits", code=130)
    assert signal.getsignal(signal.SIGTERM) is before


def test_json_is_one_document_on_standard_output() -> None:
    made = document("train", "digits", "-o", "adam", *SHORT)
    assert made["folder"] == "runs/digits-small/adam-seed0"
    assert (made["config"]["optimizer"], made["result"]["status"], made["result"]["step"]) == ("adam", "finished", 6)
    wild = document("train", "digits", "-o", "sgd", "--lr", "1e9", "--out", "wild", *SHORT, code=1)
    assert wild["result"]["status"] == "diverged"
    (table,) = document("compare", "digits", "-o", "sgd,adam", "--seeds", "2", *SHORT)
    assert [(row["optimizer"], row["runs"], row["diverged"]) for row in table["optimizers"]] in (
        [("adam", 2, 0), ("sgd", 2, 0)],
        [("sgd", 2, 0), ("adam", 2, 0)],
    )
    assert (table["workload"], table["measure"], table["target"]) == ("digits", "accuracy", 0.97)
    for row in table["optimizers"]:
        finals = [run["result"]["final"] for run in table["runs"] if run["config"]["optimizer"] == row["optimizer"]]
        assert row["final"] == pytest.approx(sum(finals) / 2)
    tuned = document("tune", "digits", "-o", "adam", "--trials", "2", "--finalists", "1", *SHORT)
    assert [(study["optimizer"], len(study["tuning"]["trials"])) for study in tuned] == [("adam", 2)]
    assert tuned[0]["hyper"] == presets.lookup("digits", "small", "adam").hyper
    assert document("plan", "digits")[0]["shape"]
    result = CliRunner().invoke(app, ["report", "runs", "--no-png", "--json", "-"])
    held = json.loads(result.stdout)
    assert len(held["runs"]) == 4
    assert held["tables"][0] == {key: value for key, value in table.items() if key != "runs"}
    assert "report.html" in result.stderr


def test_json_is_in_the_help() -> None:
    for name in ("train", "compare", "tune", "plan", "bench", "report"):
        assert "--json" in ngplus(name, "--help")
    for name in ("train", "compare", "tune"):
        result = CliRunner().invoke(app, [name, "nowhere", "--json"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "nowhere" in result.stderr


class Slow(ModuleType):
    """A module that is interrupted while it is imported."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ngplus.lab.cli", Slow("ngplus.lab.cli"))
    with pytest.raises(SystemExit) as ended:
        lab.main()
    assert ended.value.code == 130


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "ngplus", "plan", "digits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as made:
        assert made.stdout is not None
        assert made.stderr is not None
        made.stdout.close()
        assert made.stderr.read() == b""


def test_help_and_completion_do_not_import_torch() -> None:
    code = """
import sys
from typer.testing import CliRunner
from ngplus.lab.cli import COMMANDS, app
for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments
completed = CliRunner().invoke(
    app, [], prog_name="ngplus", env={"_NGPLUS_COMPLETE": "complete_bash", "COMP_WORDS": "ngplus t", "COMP_CWORD": "1"}
)
print(completed.output.split())
print("torch" in sys.modules)
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split("\n")[:2] == ["['train', 'tune']", "False"], made


def test_the_list_of_commands_has_the_first_sentence_of_their_help() -> None:
    for name, (_, summary) in COMMANDS.items():
        assert load(name).help.split("\n")[0] == summary
        assert summary[:40] in ngplus("--help").replace("│", "")


def test_flags_have_no_value_in_the_help() -> None:
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        assert "<bool>" not in ngplus(*arguments)


def test_an_unknown_command_is_answered_by_the_nearest_one() -> None:
    assert "Did you mean 'train'?" in ngplus("trian", code=2)
