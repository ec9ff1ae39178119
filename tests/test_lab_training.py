"""The training loop: kills, checkpoints, divergence, Ctrl-C, the optimizers by name and the schedules."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
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

from regression import Regression

from ngplus.lab import loop as training
from ngplus.lab import optimizers, presets, runs, schedules, workloads
from ngplus.lab.runs import Config, RunError

pytestmark = pytest.mark.usefixtures("one_thread")


class Tiny(Regression):
    widths, samples = (8, 4), 8


def config(optimizer: str = "ngadam", **changes: Any) -> Config:
    base = Config(
        workload="tiny",
        preset="small",
        optimizer=optimizer,
        hyper={},
        seed=0,
        steps=30,
        batch_size=8,
        evaluate_every=5,
        target=0.2,
        measure="loss",
        higher_is_better=False,
        warmup=3,
    )
    return replace(base, **changes)


def curve(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the clock."""
    rows = runs.read_metrics(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def parameters(folder: Path) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(folder / "checkpoint.pt", weights_only=True)
    return held


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Bit for bit, through dicts and lists; the clock aside."""
    if isinstance(a, Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key != "seconds":
                assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{k}]")
    else:
        assert a == b, where


class Killed(BaseException):
    """Stands for a kill at that point of the program."""


ALL = [name for name in optimizers.names() if name not in ("kfac", "seng")]


@pytest.mark.parametrize("optimizer", [*ALL, "kfac", "seng"])
def test_every_optimizer_goes_on_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    if optimizer in ("lars", "shampoo", "soap"):
        pytest.importorskip("pytorch_optimizer")
    if optimizer in ("kfac", "seng"):
        pytest.importorskip("ngplus.baselines")
    made = config(optimizer)
    training.run(made, Tiny(), tmp_path / "whole")

    def kill(step: int, loss: float, seconds: float) -> None:
        if step == 18:
            raise Killed

    with pytest.raises(Killed):
        training.run(made, Tiny(), tmp_path / "cut", on_step=kill, checkpoint_every=7)
    assert parameters(tmp_path / "cut")["step"] == 14
    training.run(made, Tiny(), tmp_path / "cut", resume=True, checkpoint_every=7)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert_same(parameters(tmp_path / "cut"), parameters(tmp_path / "whole"))
    first, last = (curve(tmp_path / "whole")[k]["loss"] for k in (0, -1))
    assert last != first  # it trains


def killed_process(folder: str) -> None:
    torch.set_num_threads(1)
    training.run(config(steps=300, evaluate_every=4), Tiny(), Path(folder), resume=True, checkpoint_every=3)


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="needs a POSIX system")
def test_sigkill_at_random_moments_gives_the_same_curve(tmp_path: Path) -> None:
    """Real processes, real kills; the last one is left to end."""
    training.run(config(steps=300, evaluate_every=4), Tiny(), tmp_path / "whole")
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
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert_same(parameters(tmp_path / "cut"), parameters(tmp_path / "whole"))


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
    training.run(config(), Tiny(), tmp_path / "whole")

    def kill(step: int, loss: float, seconds: float) -> None:
        if step == 17:
            raise Killed

    with pytest.raises(Killed):
        training.run(config(), Tiny(), tmp_path / "cut", on_step=kill)
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "sec')
    training.run(config(), Tiny(), tmp_path / "cut", resume=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "other", "foreign", "pickle"])
def test_a_damaged_checkpoint_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    made = config()

    def kill(step: int, loss: float, seconds: float) -> None:
        if step == 12:
            raise Killed

    with pytest.raises(Killed):
        training.run(made, Tiny(), tmp_path, on_step=kill)
    path = tmp_path / "checkpoint.pt"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "other":
        torch.save({"format": 99}, path)
    elif damage == "foreign":
        held = parameters(tmp_path)
        held["config"]["seed"] = 5
        torch.save(held, path)
    else:  # a pickle that would run code

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return (os.mkdir, (str(tmp_path / "ran"),))

        torch.save(Evil(), path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"(?s)checkpoint\.pt.* train --resume or compare begins the run anew"):
        training.run(made, Tiny(), tmp_path, resume=True)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_divergence_is_recorded_and_the_run_has_ended(tmp_path: Path) -> None:
    class Explodes(Tiny):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            return super().loss(model, batch) + model[0].weight.exp().sum()  # type: ignore[union-attr, operator]

    made = config("sgd", hyper={"lr": 1e6})
    result = training.run(made, Explodes(), tmp_path)
    assert result.status == "diverged"
    assert "loss" in result.reason
    assert result.step < made.steps
    content = json.loads((tmp_path / "result.json").read_text())  # strict JSON, without NaN
    assert content["status"] == "diverged"
    assert training.run(made, Explodes(), tmp_path, resume=True) == result


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_ngplus_leaves_out_is_a_divergence() -> None:
    """Its parameters stay finite, where a rival's would not: the comparison counts both alike."""

    class Huge(Tiny):
        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            large = 1e25 if model.training and self.steps == 5 else 1.0
            self.steps += 1
            return super().loss(model, batch) * large

        steps = 0

    result = training.run(config("ngplus"), Huge())
    assert (result.status, result.step < 30) == ("diverged", True)
    assert "not finite" in result.reason


def test_a_factorisation_that_fails_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(torch.optim.SGD, "step", broken)
    result = training.run(config("sgd"), Tiny())
    assert (result.status, result.step) == ("diverged", 0)
    assert "positive definite" in result.reason


def test_ctrl_c_ends_after_the_step_with_what_was_measured(tmp_path: Path) -> None:
    def interrupt(step: int, loss: float, seconds: float) -> None:
        if step == 13:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = training.run(config(), Tiny(), tmp_path / "cut", on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert (result.status, result.step) == ("interrupted", 13)
    assert curve(tmp_path / "cut")[-1]["step"] == 13
    assert training.run(config(), Tiny(), tmp_path / "cut", resume=True).status == "finished"
    training.run(config(), Tiny(), tmp_path / "whole")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


class WithOption(Tiny):
    def model(self) -> nn.Module:
        return nn.Linear(6, 1, widht=3)  # type: ignore[call-arg]


def test_an_option_that_the_model_does_not_have_is_named() -> None:
    with pytest.raises(RunError, match=r"tiny with these settings: .*widht"):
        training.run(config(), WithOption())


class Scored(Tiny):
    def final(self, model: nn.Module) -> dict[str, float]:
        return {"length": float(sum(p.detach().square().sum() for p in model.parameters()).sqrt())}


def test_what_is_measured_at_the_end_is_kept(tmp_path: Path) -> None:
    result = training.run(config("adam"), Scored(), tmp_path / "run")
    held = parameters(tmp_path / "run")["model"]
    want = math.sqrt(sum(float(x.square().sum()) for x in held.values()))
    assert result.scores["length"] == pytest.approx(want, rel=1e-5)
    assert runs.load(tmp_path / "run").result == result
    assert training.run(config("adam"), Scored(), final=False).scores == {}
    assert training.run(config("sgd", hyper={"lr": 1e30}), Scored()).scores == {}  # it did not get to its end


def test_a_run_can_be_stopped_at_a_look() -> None:
    looks: list[int] = []

    def on_evaluation(step: int, value: float | None) -> str:
        looks.append(step)
        assert value is not None
        return "enough" if step == 15 else ""

    result = training.run(config("adam"), Tiny(), on_evaluation=on_evaluation)
    assert (result.status, result.reason, result.step, looks) == ("stopped", "enough", 15, [5, 10, 15])
    assert not result.ended


def test_an_ended_run_is_not_made_again(tmp_path: Path) -> None:
    first = training.run(config(), Tiny(), tmp_path)
    written = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != ".lock"}

    class Broken(Tiny):
        def model(self) -> nn.Module:
            raise AssertionError

    assert training.run(config(), Broken(), tmp_path) == first
    assert written == {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.name != ".lock"}


def test_another_run_in_the_folder_is_an_error(tmp_path: Path) -> None:
    training.run(config(), Tiny(), tmp_path)
    with pytest.raises(RunError, match="seed 0 there and 1 now"):
        training.run(config(seed=1), Tiny(), tmp_path, resume=True)


@pytest.mark.parametrize("gone", ["config.json", "metrics.jsonl"])
def test_an_ended_run_of_which_a_file_is_gone_is_not_taken_for_another(gone: str, tmp_path: Path) -> None:
    training.run(config(), Tiny(), tmp_path / "run")
    (tmp_path / "run" / gone).unlink()
    for made in (config(), config(seed=1)):
        with pytest.raises(RunError, match=rf"without its {gone}.* Remove the run's folder, or let compare --fresh"):
            training.run(made, Tiny(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / gone).exists()


def test_settings_that_are_refused_do_not_take_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="learning rate"):
        training.run(config("adam", hyper={"lr": -1.0}), Tiny(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    runs.write_json(
        tmp_path / "config.json", config(seed=5).as_dict()
    )  # as of a run that was killed before its first look
    assert training.run(config("adam"), Tiny(), tmp_path).status == "finished"
    assert runs.load(tmp_path).config == config("adam")


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    with runs.locked(tmp_path), pytest.raises(runs.Busy):
        training.run(config(), Tiny(), tmp_path)


def test_the_folder_has_what_it_promises(tmp_path: Path) -> None:
    result = training.run(config(target=1e9), Tiny(), tmp_path)
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
    result = training.run(config(evaluate_every=2), Slow())
    assert time.perf_counter() - start > 16 * 0.05
    assert result.seconds < 0.5 * (time.perf_counter() - start)


def test_time_leaves_out_the_look_at_the_methods_health(monkeypatch: pytest.MonkeyPatch) -> None:
    real = training._check_health

    def slow(optimizer: optimizers.Trainer) -> None:
        time.sleep(0.05)
        real(optimizer)

    monkeypatch.setattr(training, "_check_health", slow)
    start = time.perf_counter()
    result = training.run(config(steps=10), Tiny())
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

    whole, parts = training.run(config(), NoDropout()), training.run(config(), PartsNoDropout())
    assert whole.final == pytest.approx(parts.final, rel=1e-4)


# ------------------------------------------------------------------------------------------------ many processes

TORCHRUN = """
import sys
sys.path.insert(0, {tests!r})
from test_lab_training import Tiny, config
from ngplus.lab import loop as training
from pathlib import Path
made = config("adamw", processes=2, steps=12)
result = training.run(made, Tiny(), Path({folder!r}), resume=True)
assert result.status == "finished"
"""


def test_under_torchrun_the_first_process_writes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "run")))
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


# ------------------------------------------------------------------------------------------------ names, schedules


def test_unknown_names_come_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'shampoo'"):
        optimizers.get("shampo")
    with pytest.raises(ValueError, match="did you mean 'momentum'"):
        optimizers.get("sgd").make(nn.Linear(2, 2), {"momentun": 0.5})
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        schedules.parse("cosin")


def test_what_is_not_installed_comes_with_a_remedy() -> None:
    old = replace(optimizers.get("muon"), where="torch.optim:NotThereYet")
    with pytest.raises(ValueError, match=r"torch>=2\.9.*leave muon out of --optimizers"):
        old.load()
    with pytest.raises(ModuleNotFoundError):  # the commands say what to install
        replace(old, where="no_such_library:Muon").load()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "muon", "ngadam", "ngplus"])
def test_sparse_tables_stay_sparse(optimizer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), nn.Linear(4, 3), nn.Linear(3, 1))
    made = optimizers.get(optimizer).make(model, {})
    before = model[0].weight.detach().clone()  # type: ignore[union-attr]
    for _ in range(3):
        made.zero_grad()
        model(torch.tensor([[1, 2], [3, 4]])).square().mean().backward()
        made.step()
    changed = (model[0].weight != before).any(1).nonzero().flatten().tolist()  # type: ignore[union-attr]
    assert changed == [1, 2, 3, 4]


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 2))
    made = optimizers.get("muon").make(model, {"lr": 0.1})
    kinds = [[tuple(p.shape) for p in group["params"]] for group in made.param_groups]
    assert kinds == [[(4, 9), (5, 16)], [(4,), (5,), (2, 5), (2,)]]
    before = model[0].weight.detach().clone()
    model(torch.randn(3, 1, 6, 6)[..., :4, :4]).square().mean().backward()
    made.step()
    assert not torch.equal(model[0].weight, before)  # the view and the parameter share their memory


def test_muon_keeps_the_last_matrix_where_the_output_is_a_table() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(7, 3), "hidden": nn.Linear(3, 3), "head": nn.Linear(3, 7, bias=False)})
    model["head"].weight = model["table"].weight
    made = optimizers.get("muon").make(model, {"lr": 0.1})
    kinds = [[tuple(p.shape) for p in group["params"]] for group in made.param_groups]
    assert kinds == [[(3, 3)], [(7, 3), (3,)]]


def test_schedules() -> None:
    assert [schedules.factor("constant", k, 10, warmup=4) for k in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedules.factor("cosine", 5, 10) == pytest.approx(0.5)
    assert schedules.factor("polynomial:5", 5, 10) == pytest.approx(0.5**5)
    assert schedules.factor("linear", 9, 10) == pytest.approx(0.1)
    assert schedules.factor("inverse-sqrt", 400, 1000, warmup=100) == pytest.approx(0.5)
    assert schedules.factor("inverse-sqrt:10:100", 140, 1000) == pytest.approx(0.5)  # max(epoch - 10, 1)^-1/2
    assert schedules.factor("inverse-sqrt:10:100", 90, 1000) == 1.0
    for bad in ("cosine:1", "polynomial:x", "polynomial:-1", "polynomial:nan", "inverse-sqrt:1:2:3"):
        with pytest.raises(ValueError, match="schedule"):
            schedules.parse(bad)


def test_the_presets_that_ship_fit_their_optimizers() -> None:
    pytest.importorskip("pytorch_optimizer")
    for path in presets.SHIPPED.glob("*.json"):
        held = json.loads(path.read_text())["presets"]
        for size, entries in held.items():
            assert size in workloads.get(path.stem).presets
            for name in entries:
                tuned = presets.lookup(path.stem, size, name, folder=presets.SHIPPED)
                assert tuned is not None
                assert set(tuned.hyper) <= set(optimizers.get(name).options())
                assert tuned.tuning is not None
                assert len(tuned.tuning["trials"]) >= 6


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
