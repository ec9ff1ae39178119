"""Short runs of tools/reliability; docs/reliability.md has the long ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.project import ROOT

pytest.importorskip("tensorboard")
pytest.importorskip("typer")
TOOLS = ROOT / "tools" / "reliability"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> object:
    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(TOOLS))
        for module in ("kills", "load", "configurations", "files"):
            sys.modules.pop(module, None)
        return importlib.import_module(name)

    return load


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.parametrize("optimizer", ["ngplus", "ngadam"])
def test_killed_runs_end_as_if_nobody_had_killed_them(tool: object, tmp_path: Path, optimizer: str) -> None:
    found = tool("kills").kill_many(4, 0, tmp_path, optimizer)  # type: ignore[operator]
    assert found["kills"] == 4
    assert found["different"] == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_and_handles_stay_flat(tool: object) -> None:
    load = tool("load")  # type: ignore[operator]
    rows = load.train(600, parts=3)
    assert load.growth(rows) < 0.01
    assert rows[-1]["handles"] <= rows[0]["handles"]


def test_random_configurations_are_right_or_refused(tool: object) -> None:
    seen = tool("configurations").try_many(150)  # type: ignore[operator]
    assert sum(seen.values()) >= 150
    assert seen["right"] > 20


def test_mutated_files_are_read_or_refused(tool: object, tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    seen = tool("files").try_many(400, 1, tmp_path)  # type: ignore[operator]
    assert sum(seen.values()) == 400
    assert seen["checkpoint.pt refused"] > 30


TORCHRUN = """
import os, signal, sys
sys.path.insert(0, {tools!r})
from dataclasses import replace
from pathlib import Path
from kills import Small, config
from ngplus.lab import loop

class Deadly(Small):
    def batch(self, seed, step):
        # batch numbers count both ranks: rank 1 dies in step 7, the first time that the job gets there
        if {kill} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and step == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(seed, step)

made = replace(config("ngplus"), processes=2, steps=12)
loop.run(made, Deadly(), Path({folder!r}), resume=True, checkpoint_every=2)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_rank_killed_under_torchrun_goes_on_from_the_last_checkpoint(tool: object, tmp_path: Path) -> None:
    kills = tool("kills")  # type: ignore[operator]
    for name, kill in (("whole", False), ("killed", True)):
        script = tmp_path / f"{name}.py"
        script.write_text(TORCHRUN.format(tools=str(TOOLS), folder=str(tmp_path / name), kill=kill))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "--max-restarts", "3", str(script)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert ("exitcode: -9" in done.stderr) == kill
    assert kills.same(kills.ending(tmp_path / "killed"), kills.ending(tmp_path / "whole"))
