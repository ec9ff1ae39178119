"""ngplus sweep: which runs it makes and in which order, and that it goes on after a kill at any moment."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")
pytest.importorskip("typer")

from commands import ngplus
from made_up_sweeps import line, rows, save
from tiny_runs import Killed

from ngplus.lab import optimizers, settings
from ngplus.lab.runs import RunError
from ngplus.lab.search import Scales
from ngplus.lab.sweep import plan, running, timing
from ngplus.lab.sweep.plan import Chain, Made
from ngplus.lab.sweep.rows import append, read

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

SHORT = ["--preset", "small", "--steps", "6", "--evaluate-every", "3", "--set", "width=4", "--out", "s.jsonl"]


class InThisProcess:
    """Stands for a pool of processes: makes a run when it is asked for."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "ProcessPoolExecutor", InThisProcess)


def without_clock(path: Path) -> dict[Any, Any]:
    """The runs of a file, by what makes them other ones."""
    return {row.key: (row.curve, row.final, row.state_bytes, row.config) for row in read(path)[0]}


# ------------------------------------------------------------------------------------------------ which runs


def test_trials_are_the_same_places_of_each_range() -> None:
    entry = optimizers.get("adamw")
    r = entry.ranges["lr"]
    found = [point["lr"] for point in plan.trials_of(entry, 7, Scales())]
    places = [math.log(rate / r.low) / math.log(r.high / r.low) for rate in found]
    assert places == pytest.approx([1 / 2, 3 / 4, 1 / 4, 3 / 8, 7 / 8, 5 / 8, 1 / 8], abs=1e-4)
    assert plan.trials_of(entry, 3, Scales()) == plan.trials_of(entry, 7, Scales())[:3]  # more trials go on with them
    assert plan.trials_of(optimizers.get("soap"), 7, Scales()) == plan.trials_of(
        entry, 7, Scales()
    )  # it has the same range
    # two dimensions, relative to what is measured: in the middle of both ranges first
    first, *rest = plan.trials_of(optimizers.get("kfac"), 4, Scales(step=2.0, eigenvalue=3.0))
    assert first["damping"] == pytest.approx(3.0 * math.sqrt(1e4), rel=1e-3)
    assert first["lr"] == pytest.approx(math.sqrt(0.15 * 500) * 2.0 * first["damping"], rel=1e-3)
    assert len({point["lr"] for point in rest} | {point["damping"] for point in rest}) == 6


def chain(optimizer: str, rates: bool = False, seeds: int = 2) -> Chain:
    workload, size = settings.open_preset("digits", "small", {}, [], None)
    points = [{"lr": 0.01}, {"lr": 0.02}]
    return Chain("digits", workload, "small", size, optimizer, points, seeds, rates)


def row_of(job: plan.Job, final: float | None) -> dict[str, Any]:
    config = job.config
    made = line(config.optimizer, config.seed, (0.1, final), kind=job.kind, hyper=dict(job.hyper))
    return {**made, "workload": "digits", "preset": "small", "config": config.as_dict()}


def made_by(chains: list[Chain], finals: dict[float, float | None]) -> list[tuple[Any, ...]]:
    """Makes all runs one by one, with a measure for each learning rate; what was made, in its order."""
    made, order = Made([]), []
    while (job := plan.following(chains, made, [])) is not None:
        made.add(rows([row_of(job, finals.get(job.hyper["lr"], 0.0))])[0])
        order.append((job.config.optimizer, job.kind, job.hyper["lr"], job.config.seed))
    assert sum(chain.left(made) for chain in chains) == 0
    assert sum(chain.count(made) for chain in chains) == len(order)
    return order


def test_the_order_of_the_runs() -> None:
    assert plan.order(["sgd", "soap", "ngadam", "kfac", "adamw"]) == ["adamw", "ngadam", "soap", "sgd", "kfac"]
    order = made_by([chain("adamw", rates=True), chain("muon")], {0.01: 0.5, 0.02: 0.9})
    assert order[:4] == [
        ("adamw", "trial", 0.01, 100),
        ("adamw", "trial", 0.02, 100),
        ("adamw", "result", 0.02, 0),
        ("adamw", "result", 0.02, 1),
    ]
    assert {one[0] for one in order[4:8]} == {"muon"}  # other rates come last
    assert order[8:] == [("adamw", "rate", rate, 100) for rate in (0.005, 0.01, 0.04, 0.08)]


def test_a_trial_that_diverged_is_never_the_best() -> None:
    assert ("adamw", "result", 0.01, 0) in made_by([chain("adamw")], {0.01: 0.2, 0.02: None})
    assert made_by([chain("adamw", rates=True)], {0.01: None, 0.02: None}) == [
        ("adamw", "trial", 0.01, 100),
        ("adamw", "trial", 0.02, 100),
    ]


def test_runs_under_way_are_not_begun_twice() -> None:
    chains, made, running = [chain("adamw"), chain("muon")], Made([]), []
    for _ in range(4):
        job = plan.following(chains, made, running)
        assert job is not None
        running.append(job)
    assert [job.config.optimizer for job in running] == ["adamw", "adamw", "muon", "muon"]
    assert plan.following(chains, made, running) is None  # the seeds wait for the trials


def test_runs_of_other_settings_or_by_other_rules_are_refused(in_this_process: None) -> None:
    asked = ["sweep", "digits", "--optimizers", "adamw", "--trials", "1", "--seeds", "1"]
    ngplus(*asked, *SHORT)
    said = ngplus(*asked, *SHORT, "--batch-size", "8", code=2)
    assert "digits with adamw with other settings: batch_size 64 there and 8 now. Choose another file" in said
    earlier = {"workload": "digits", "preset": "small", "optimizer": "adamw", "lr": 0.1, "seed": 0, "final": 0.5}
    save(Path("s.jsonl"), [{**earlier, "milliseconds": 1.0, "curve": [[3, None], [6, 0.5]], "bleu": 3.0}])
    assert "runs of an earlier version" in ngplus(*asked, *SHORT, code=2)
    row = read(Path("s.jsonl"))[0][0]
    assert (row.kind, row.hyper, row.scores, row.state_bytes) == ("result", {"lr": 0.1}, {"bleu": 3.0}, None)
    assert math.isnan(row.curve[0][1])


def test_a_decay_that_is_tuned_is_not_that_of_the_preset() -> None:
    workload, size = settings.open_preset("shakespeare", "standard", {}, [], None)
    for point, decay in (({"lr": 0.01}, 1e-2), ({"lr": 0.01, "weight_decay": 0.3}, 0.3)):
        config = settings.configure(workload, "standard", size, "adamw", seed=0, hyper=point)
        assert config.hyper["weight_decay"] == pytest.approx(decay)


def test_a_run_that_fails_does_not_end_the_others(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = running.make

    def make(job: plan.Job, *rest: Any) -> Any:
        if job.config.optimizer == "adamw" and job.hyper["lr"] > 0.02:
            raise IndexError("no such block")
        return kept(job, *rest)

    asked = ["sweep", "digits", "--optimizers", "adamw,sgd", "--trials", "2", "--seeds", "1", *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr(running, "make", make)
        said = ngplus(*asked, code=1)
    assert "Failed: digits, adamw, trial, lr 0.0234, seed 100: IndexError: no such block" in said
    assert "1 run failed: the same command tries again" in said
    assert [row.optimizer for row in read(Path("s.jsonl"))[0]] == ["adamw", "sgd", "sgd", "sgd"]
    assert "All runs are in" in ngplus(*asked)
    assert "NGPLUS_DATA" in ngplus("sweep", "qm9", "--optimizers", "adamw", "--out", "q.jsonl", code=2)


# ------------------------------------------------------------------------------------------------ what is written


def test_a_sweep_from_its_first_run_to_its_page(in_this_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["sweep", "digits", "--optimizers", "ngadam,adamw", "--trials", "2", "--seeds", "2", "--rates", *SHORT]
    said = ngplus(*asked)
    assert "16 of 16 runs, about 0 s left: digits, ngadam, rate" in said
    found = read(Path("s.jsonl"))[0]
    assert [row.optimizer for row in found[:4]] == ["adamw"] * 4
    assert {row.kind for row in found} == {"trial", "result", "rate"}
    for row in found:
        assert [step for step, _ in row.curve] == [0, 3, 6]
        assert row.state_bytes and row.cpu_milliseconds and row.milliseconds and row.elapsed  # noqa: PT018
        assert {"code", "processor", "threads", "torch", "device"} <= set(row.environment)
        assert "command" not in row.environment  # it has paths of the machine
    assert not Path("s.runs").exists()
    before = Path("s.jsonl").read_bytes()
    assert "All runs are in s.jsonl" in ngplus(*asked)  # nothing is left to do
    assert Path("s.jsonl").read_bytes() == before

    monkeypatch.setattr(timing, "STEPS", 2)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(timing, "busy_cores", lambda: 1.5)
    assert "Other programs use 1.5 cores" in ngplus(*asked, "--timed", code=2)
    ngplus(*asked, "--timed", "--load", "2")
    ngplus(*asked, "--timed")  # the times are there: no look at the load
    timings = read(Path("s.jsonl"))[1]
    assert [(one.optimizer, len(one.milliseconds), one.load) for one in timings] == [
        ("adamw", 2, 1.5),
        ("ngadam", 2, 1.5),
    ]
    ngplus("sweep", "--preset", "small", "--out", "s.jsonl", "--summary", "page.md")
    assert "## Time" in Path("page.md").read_text()
    assert "| adamw | " in ngplus("sweep", "--preset", "small", "--out", "s.jsonl", "--show")


def test_the_end_of_a_line_that_was_cut_short_is_made_again() -> None:
    path = Path("s.jsonl")
    append(path, line(curve=(1.0,)))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert len(read(path)[0]) == 1
    append(path, line(seed=1, curve=(1.0,)))
    assert [row.seed for row in read(path)[0]] == [0, 1]
    path.write_text("{}\n")
    with pytest.raises(RunError, match="is not a file of ngplus sweep: line 1"):
        read(path)


# ------------------------------------------------------------------------------------------------ kills


def test_a_run_that_was_cut_off_goes_on_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, size = settings.open_preset("digits", "small", {"steps": 30, "evaluate_every": 5}, ["width=4"], None)
    job = Chain("digits", workload, "small", size, "ngadam", [{"lr": 0.01}], 1, False).trials[0]
    whole = running.make(job, Path("whole"), None)
    kept = running.Clocked.on_step

    def killed(self: running.Clocked, step: int, loss: float, seconds: float) -> None:
        kept(self, step, loss, seconds)
        if step == 17:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(running.Clocked, "on_step", killed)
        with pytest.raises(Killed):
            running.make(job, Path("cut"), None)
    cut = running.make(job, Path("cut"), None)
    assert whole is not None
    assert cut is not None
    assert cut["elapsed"] is None  # it says nothing about how long a run takes
    curves = [[look[:2] for look in made["curve"]] for made in (whole, cut)]
    assert curves[0] == curves[1]
    assert whole["config"] == cut["config"]
    # half of a run by other code is made again
    (job.folder(Path("cut")) / "environment.json").write_text('{"code": "other"}')
    again = running.make(job, Path("cut"), None)
    assert again is not None
    assert again["elapsed"] is not None


LONG = ["--optimizers", "adamw", "--trials", "2", "--seeds", "1", "--preset", "small", "--steps", "150"]
LONG = ["sweep", "digits", *LONG, "--evaluate-every", "5", "--set", "width=4", "--workers", "2"]


def begun(out: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own, once one of its runs has a checkpoint."""
    made = subprocess.Popen([sys.executable, "-m", "ngplus", *LONG, "--out", out], stdout=subprocess.PIPE)
    while made.poll() is None and not list(Path().glob("*.runs/*/checkpoint.pt")):
        time.sleep(0.02)
    return made


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX system")
def test_kills_and_ctrl_c_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: Ctrl-C, then kill -9, then to the end. The same runs as without."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        with begun("cut.jsonl") as process:
            process.send_signal(number)
            assert process.wait(timeout=120) == code
    monkeypatch.setattr(running, "ProcessPoolExecutor", InThisProcess)
    ngplus(*LONG, "--out", "cut.jsonl")  # were a worker of the killed command alive, the run's folder would be locked
    ngplus(*LONG, "--out", "whole.jsonl")
    assert without_clock(Path("cut.jsonl")) == without_clock(Path("whole.jsonl"))
    assert len(json.loads(Path("cut.jsonl").read_text().splitlines()[0])["curve"]) == 31
    assert not Path("cut.runs").exists()
