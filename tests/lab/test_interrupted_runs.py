"""Runs that are killed, interrupted or damaged: the next one goes on bit for bit, or says which file is wrong."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorboard")
pytest.importorskip("typer")

from tiny_runs import Killed, Tiny, assert_same_ending, checkpoint, config, curve, kill_at

from ngplus.lab import loop, optimizers, runs
from ngplus.lab.runs import RunError

pytestmark = pytest.mark.usefixtures("one_thread")


ALL = [name for name in optimizers.names() if name not in ("kfac", "seng")]


@pytest.mark.parametrize("optimizer", [*ALL, "kfac", "seng"])
def test_every_optimizer_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    pytest.importorskip(optimizers.get(optimizer).where.partition(":")[0])
    made = config(optimizer)
    loop.run(made, Tiny(), tmp_path / "whole")
    with pytest.raises(Killed):
        loop.run(made, Tiny(), tmp_path / "cut", on_step=kill_at(18), checkpoint_every=7)
    assert checkpoint(tmp_path / "cut")["step"] == 14
    loop.run(made, Tiny(), tmp_path / "cut", resume=True, checkpoint_every=7)
    assert_same_ending(tmp_path / "cut", tmp_path / "whole")
    first, last = (curve(tmp_path / "whole")[k]["loss"] for k in (0, -1))
    assert last != first  # it trains


def killed_process(folder: str) -> None:
    torch.set_num_threads(1)
    loop.run(config(steps=300, evaluate_every=4), Tiny(), Path(folder), resume=True, checkpoint_every=3)


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a POSIX system")
def test_sigkill_at_random_moments_gives_the_same_curve(tmp_path: Path) -> None:
    """Real processes, real kills; the last one is left to end."""
    loop.run(config(steps=300, evaluate_every=4), Tiny(), tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")  # imports once, then forks
    context.set_forkserver_preload(["torch.utils.tensorboard", "ngplus.lab.loop", "ngplus.optimizers.ngplus"])
    chance = random.Random(0)
    kills = 0
    for attempt in range(20):
        process = context.Process(target=killed_process, args=(str(tmp_path / "cut"),))
        process.start()
        if kills < 6:
            while not (tmp_path / "cut" / "metrics.jsonl").exists():  # the first one starts slowly
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.5))
            process.kill()
        process.join(timeout=120)
        kills += process.exitcode == -signal.SIGKILL
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, attempt
    assert kills >= 2
    assert not list((tmp_path / "cut").glob(".*.part"))  # nothing left of files that a kill has cut short
    assert_same_ending(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill at any call that touches the disk leaves the old file or the new one."""
    path = tmp_path / "checkpoint.pt"
    for call in ("fsync", "chmod", "replace"):
        runs.write_atomically(path, b"old")
        with monkeypatch.context() as patch:

            def die(*args: Any, **kwargs: Any) -> None:
                raise Killed

            patch.setattr(os, call, die)
            with pytest.raises(Killed):
                runs.write_atomically(path, b"new, and longer")
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]
    runs.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_metrics_past_the_checkpoint_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    loop.run(config(), Tiny(), tmp_path / "whole")
    with pytest.raises(Killed):
        loop.run(config(), Tiny(), tmp_path / "cut", on_step=kill_at(17))
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "sec')
    loop.run(config(), Tiny(), tmp_path / "cut", resume=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "other", "foreign", "pickle"])
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    made = config()
    with pytest.raises(Killed):
        loop.run(made, Tiny(), tmp_path, on_step=kill_at(12))
    path = tmp_path / "checkpoint.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "other":
        torch.save({"format": 99}, path)
    elif damage == "foreign":
        held = checkpoint(tmp_path)
        held["config"]["seed"] = 5
        torch.save(held, path)
    else:  # a pickle that would run code

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return (os.mkdir, (str(tmp_path / "ran"),))

        torch.save(Evil(), path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"(?s)checkpoint\.pt.* train --resume or ngplus compare starts the run again"):
        loop.run(made, Tiny(), tmp_path, resume=True)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_ctrl_c_ends_after_the_step_with_what_was_measured(tmp_path: Path) -> None:
    def interrupt(step: int, loss: float, seconds: float) -> None:
        if step == 13:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = loop.run(config(), Tiny(), tmp_path / "cut", on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert (result.status, result.step) == ("interrupted", 13)
    assert curve(tmp_path / "cut")[-1]["step"] == 13
    assert loop.run(config(), Tiny(), tmp_path / "cut", resume=True).status == "finished"
    loop.run(config(), Tiny(), tmp_path / "whole")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize("gone", ["config.json", "metrics.jsonl"])
def test_an_ended_run_of_which_a_file_is_gone_is_not_taken_for_another(gone: str, tmp_path: Path) -> None:
    loop.run(config(), Tiny(), tmp_path / "run")
    (tmp_path / "run" / gone).unlink()
    for made in (config(), config(seed=1)):
        with pytest.raises(RunError, match=rf"without {gone}.* make the run again with ngplus compare --fresh"):
            loop.run(made, Tiny(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / gone).exists()
