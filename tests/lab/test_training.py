"""The training loop: what a run keeps, when it ends, and what its clock counts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tensorboard")
pytest.importorskip("typer")

from tiny_runs import Tiny, checkpoint, config

from ngplus.lab import loop, optimizers, runs, workloads
from ngplus.lab.runs import RunError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_divergence_is_recorded_and_the_run_has_ended(tmp_path: Path) -> None:
    class Explodes(Tiny):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return super().loss(model, batch) + model[0].weight.exp().sum()  # type: ignore[union-attr, operator]

    made = config("sgd", hyper={"lr": 1e6})
    result = loop.run(made, Explodes(), tmp_path)
    assert result.status == "diverged"
    assert "loss" in result.reason
    assert result.step < made.steps
    content = json.loads((tmp_path / "result.json").read_text())  # strict JSON, without NaN
    assert content["status"] == "diverged"
    assert loop.run(made, Explodes(), tmp_path, resume=True) == result


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_ngplus_leaves_out_is_a_divergence() -> None:
    """Its parameters stay finite, where a rival's would not: the comparison counts both alike."""

    class Huge(Tiny):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            large = 1e25 if model.training and self.steps == 5 else 1.0
            self.steps += 1
            return super().loss(model, batch) * large

        steps = 0

    result = loop.run(config("ngplus"), Huge())
    assert (result.status, result.step < 30) == ("diverged", True)
    assert "not finite" in result.reason


def test_a_factorisation_that_fails_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(torch.optim.SGD, "step", broken)
    result = loop.run(config("sgd"), Tiny())
    assert (result.status, result.step) == ("diverged", 0)
    assert "positive definite" in result.reason


class WithOption(Tiny):
    def model(self) -> nn.Module:
        return nn.Linear(6, 1, widht=3)  # type: ignore[call-arg]


def test_an_option_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(RunError, match=r"tiny does not work with these settings: .*widht"):
        loop.run(config(), WithOption())


class Scored(Tiny):
    def final(self, model: nn.Module) -> dict[str, float]:
        return {"length": float(sum(p.detach().square().sum() for p in model.parameters()).sqrt())}


def test_what_is_measured_at_the_end_is_kept(tmp_path: Path) -> None:
    result = loop.run(config("adam"), Scored(), tmp_path / "run")
    held = checkpoint(tmp_path / "run")["model"]
    want = math.sqrt(sum(float(x.square().sum()) for x in held.values()))
    assert result.scores["length"] == pytest.approx(want, rel=1e-5)
    assert runs.load(tmp_path / "run").result == result
    assert loop.run(config("adam"), Scored(), final=False).scores == {}
    assert loop.run(config("sgd", hyper={"lr": 1e30}), Scored()).scores == {}  # it did not get to its end


def test_a_run_can_be_stopped_at_a_look() -> None:
    looks: list[int] = []

    def on_evaluation(step: int, value: float | None) -> str:
        looks.append(step)
        assert value is not None
        return "enough" if step == 15 else ""

    result = loop.run(config("adam"), Tiny(), on_evaluation=on_evaluation)
    assert (result.status, result.reason, result.step, looks) == ("stopped", "enough", 15, [5, 10, 15])
    assert not result.ended


def test_an_ended_run_is_not_made_again(tmp_path: Path) -> None:
    first = loop.run(config(), Tiny(), tmp_path)
    written = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != ".lock"}

    class Broken(Tiny):
        def model(self) -> nn.Module:
            raise AssertionError

    assert loop.run(config(), Broken(), tmp_path) == first
    assert written == {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != ".lock"}


def test_another_run_in_the_folder_is_an_error(tmp_path: Path) -> None:
    loop.run(config(), Tiny(), tmp_path)
    with pytest.raises(RunError, match="seed 0 there and 1 now"):
        loop.run(config(seed=1), Tiny(), tmp_path, resume=True)


def test_settings_that_are_refused_do_not_take_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="learning rate"):
        loop.run(config("adam", hyper={"lr": -1.0}), Tiny(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    runs.write_json(
        tmp_path / "config.json", config(seed=5).as_dict()
    )  # as of a run that was killed before its first look
    assert loop.run(config("adam"), Tiny(), tmp_path).status == "finished"
    assert runs.load(tmp_path).config == config("adam")


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    with runs.locked(tmp_path), pytest.raises(runs.Busy):
        loop.run(config(), Tiny(), tmp_path)


def test_the_folder_has_what_it_promises(tmp_path: Path) -> None:
    result = loop.run(config(target=1e9), Tiny(), tmp_path)
    run = runs.load(tmp_path)
    assert run.result == result
    assert run.config == config(target=1e9)
    assert run.environment["torch"] == torch.__version__
    assert {row["step"] for row in run.metrics} == set(range(31))
    assert result.steps_to_target == 0
    assert result.state_bytes > 0
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_time_leaves_out_the_evaluation() -> None:
    class Slow(Tiny):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            time.sleep(0.05)
            return super().evaluate(model)

    start = time.perf_counter()
    result = loop.run(config(evaluate_every=2), Slow())
    assert time.perf_counter() - start > 16 * 0.05
    assert result.seconds < 0.5 * (time.perf_counter() - start)


def test_time_leaves_out_the_look_at_the_methods_health(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loop._check_health

    def slow(optimizer: optimizers.Trainer) -> None:
        time.sleep(0.05)
        real(optimizer)

    monkeypatch.setattr(loop, "_check_health", slow)
    start = time.perf_counter()
    result = loop.run(config(steps=10), Tiny())
    assert result.seconds < time.perf_counter() - start - 10 * 0.05


def test_parts_of_a_batch_give_the_whole_batchs_step() -> None:
    class Parts(Tiny):
        def split(self, batch: Tensor) -> Iterator[tuple[float, Tensor]]:
            yield 0.25, batch[:2]
            yield 0.75, batch[2:]

    class NoDropout(Tiny):
        def model(self) -> nn.Module:
            return nn.Linear(6, 1)

    class PartsNoDropout(Parts, NoDropout):
        pass

    whole, parts = loop.run(config(), NoDropout()), loop.run(config(), PartsNoDropout())
    assert whole.final == pytest.approx(parts.final, rel=1e-4)


# ------------------------------------------------------------------------------------------------ many processes

TORCHRUN = """
import sys
sys.path[:0] = {tests!r}
from tiny_runs import Tiny, config
from ngplus.lab import loop
from pathlib import Path
made = config("adamw", processes=2, steps=12)
result = loop.run(made, Tiny(), Path({folder!r}), resume=True)
assert result.status == "finished"
"""


def test_under_torchrun_the_first_process_writes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        TORCHRUN.format(
            tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])], folder=str(tmp_path / "run")
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    run = runs.load(tmp_path / "run")
    assert run.result is not None
    assert run.result.status == "finished"
    assert [row["step"] for row in run.metrics] == list(range(13))
    assert run.config.processes == 2


@pytest.mark.parametrize("name", ["digits", "autoencoder"])
def test_the_embedded_workloads(name: str) -> None:
    pytest.importorskip("sklearn")
    workload = workloads.get(name)
    task = workload.open(workload.presets["small"], None)
    model = task.model()
    found = task.evaluate(model)
    assert workload.measure in found
    assert "loss" in found
    assert math.isfinite(task.loss(model, task.batch(0, 3)).item())
    one, two = task.batch(0, 3), task.batch(0, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    goal = {"target": workload.presets["small"].target, "higher_is_better": workload.higher_is_better}
    assert not config(**goal).reached(found[workload.measure])


def test_the_digits_of_the_autoencoder_are_moved_by_a_pixel() -> None:
    pytest.importorskip("sklearn")
    workload = workloads.get("autoencoder")
    preset = workload.presets["standard"]
    still = replace(preset, options={**preset.options, "shift": 0})
    moved, plain = (workload.open(size, None).batch(0, 3).view(-1, 8, 8) for size in (preset, still))
    padded = torch.nn.functional.pad(plain, (1, 1, 1, 1))
    places = [(top, left) for top in range(3) for left in range(3)]
    found = [
        {place for place in places if torch.equal(padded[k, place[0] :, place[1] :][:8, :8], moved[k])}
        for k in range(len(plain))
    ]
    assert all(found)
    assert set.union(*found) == set(places)
