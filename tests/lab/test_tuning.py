"""Tuning: what it tries and gives up, what processes share, and what it writes."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("optuna")
pytest.importorskip("sklearn")
pytest.importorskip("tensorboard")
pytest.importorskip("typer")
pytest.importorskip("pytorch_optimizer")

from commands import SHORT, ngplus, trials_of
from regression import Regression

from ngplus.lab import loop, runs, settings

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

CONFIG = runs.Config("digits", "small", "sgd", {}, 100, 100, 16, 10, 0.9, "accuracy", True)


def test_tune_writes_a_preset_that_train_takes() -> None:
    arguments = ["tune", "digits", "--optimizer", "sgd,ngplus", "--trials", "3", *SHORT]
    ngplus(*arguments)
    held = json.loads(Path("presets/digits.json").read_text())["presets"]["small"]
    assert set(held["ngplus"]["hyper"]) == {"lr", "relative_damping"}
    assert len(held["sgd"]["tuning"]["trials"]) == 3
    rates = [trial["hyper"]["lr"] for trial in held["sgd"]["tuning"]["trials"]]
    step = held["sgd"]["tuning"]["scales"]["step"]
    assert rates == pytest.approx([step * 0.03 * 1000**part for part in (1 / 2, 3 / 4, 1 / 4)], rel=1e-3)
    assert Path("tuning.db").exists()
    before = Path("presets/digits.json").read_bytes()
    ngplus(*arguments)  # the study has its trials
    assert Path("presets/digits.json").read_bytes() == before
    ngplus("train", "digits", "--optimizer", "sgd", *SHORT)
    run = runs.load(Path("runs/digits-small/sgd-seed0"))
    assert run.config.hyper["lr"] == held["sgd"]["hyper"]["lr"]
    assert run.config.tuning is not None
    assert run.config.tuning["study"] == "digits-small-sgd-target"


def test_a_storage_is_a_local_file_or_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ["tune", "digits", "-o", "adam", "--trials", "1", "--finalists", "1", *SHORT]
    said = ngplus(*made, "--storage", "mine.db")
    assert "the best of 1 trial with" in said
    assert Path("mine.db").read_bytes().startswith(b"SQLite")
    ngplus(*made, "--storage", "sqlite:///mine.db")
    Path("file").touch()
    monkeypatch.setattr(loop, "run", None)  # nothing is run
    assert "Settings cannot be written to file" in ngplus(*made, "--presets", "file", "--storage", "new.db", code=2)


def test_tune_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in ngplus("tune", "digits", "-o", "sgd", *SHORT, code=2)
    assert not Path("tuning.db").exists()


ALONE = ("--finalists", "1")


def test_a_trial_ends_when_nothing_more_is_to_be_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[str, str, int]] = []
    real = loop.run

    def watched(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        ends.append((result.status, result.reason, result.step))
        return result

    monkeypatch.setattr(loop, "run", watched)
    common = ["--evaluate-every", "1", "--batch-size", "16", "--set", "width=4", "--steps", "8"]
    # any accuracy is enough, even the untrained model's
    ngplus("tune", "digits", "-o", "adam", "--trials", "2", "--target", "0.0", *common, *ALONE)
    assert ends == [("finished", "", 8)] * 2
    assert [trial["score"] for trial in trials_of("adam")] == [0.0] * 2
    ends.clear()
    # out of time at the first look
    ngplus("tune", "digits", "-o", "sgd", "--trials", "1", "--target", "2.0", "--limit", "0", *common, *ALONE)
    assert ends == [("stopped", "out of time", 1)]
    assert trials_of("sgd")[0]["score"] > 1
    ends.clear()
    # out of reach: all runs go to half of their steps at least, and those behind the median no further
    ngplus("tune", "digits", "-o", "adagrad", "--trials", "5", "--target", "2.0", *common, *ALONE)
    assert len(ends) == 5
    assert all(
        (status, step) == ("finished", 8) or (status == "stopped" and reason == "behind" and 4 < step < 8)
        for status, reason, step in ends
    )


def test_a_trial_that_cannot_win_ends() -> None:
    from ngplus.lab import optimizers, tune
    from ngplus.lab.search import Scales

    study = tune.open_study("sqlite:///one.db", "one", CONFIG)
    made = tune.Plan(optimizers.get("sgd"), CONFIG, study, 3, 1, 1, "target", None, Scales())
    study.tell(study.ask(), 0.3)  # the target after 30 of 100 steps
    look = tune.stopper(made, study.ask(), CONFIG)
    assert [look(step, 0.5) for step in (10, 20, 30)] == ["", "", "cannot win"]
    look = tune.stopper(made, study.ask(), CONFIG)
    assert [look(step, 0.95) for step in (20, 30, 90)] == ["", "", ""]  # it goes on: it may collapse


def test_ranges_follow_the_task() -> None:
    """A loss times c has c times the gradients: the rate that a coordinate stands for is 1/c of it, c^2 the damping."""
    from ngplus.lab import optimizers, search

    class Scaled(Regression):
        factor = 1.0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return self.factor * super().loss(model, batch)

    one, other = Scaled(), Scaled()
    other.factor = 1000.0
    mine, theirs = search.measure(one, 100), search.measure(other, 100)
    assert theirs.step == pytest.approx(mine.step / 1e3)
    assert theirs.eigenvalue == pytest.approx(mine.eigenvalue * 1e6)
    ranges = optimizers.get("kfac").ranges
    point = {search.coordinate(name, entry): 2.0 for name, entry in ranges.items()}
    found = search.hyper(ranges, point, theirs)
    assert found["damping"] == pytest.approx(2 * theirs.eigenvalue, rel=1e-3)
    assert found["lr"] == pytest.approx(2 * theirs.step * found["damping"], rel=1e-3)


def test_the_scales_are_those_of_single_samples() -> None:
    from ngplus.lab import search

    class Plain(Regression):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))

    task = Plain()
    torch.manual_seed(100)
    model, batch = task.model(), task.batch(100, 0)
    squares = dict.fromkeys(("0", "2", "4"), 0.0)
    for i in range(len(batch)):
        model.zero_grad()
        task.loss(model, batch[i : i + 1]).backward()
        for name in squares:
            grads = [p.grad for p in model.get_submodule(name).parameters()]
            squares[name] += sum(float(g.square().sum()) for g in grads if g is not None) / len(batch)
    found = search.measure(task, 100)
    assert found.step == pytest.approx(task.loss(model, batch).item() / sum(squares.values()), rel=1e-4)
    wanted = statistics.geometric_mean([squares["0"] / (5 * 7), squares["2"] / (4 * 6)])  # the last one is a vector
    assert found.eigenvalue == pytest.approx(wanted, rel=1e-4)


def test_a_run_that_loses_its_target_again_has_failed() -> None:
    from ngplus.lab.study import score

    def ended(*values: float, status: str = "finished") -> runs.Result:
        looks = [{"step": 10 * k, "seconds": 1.0, "accuracy": value} for k, value in enumerate(values)]
        return runs.summarise(CONFIG, looks, 100, 1.0, 0, status)

    kept, lost = ended(0.1, 0.95, 0.88), ended(0.1, 0.95, 0.6)  # a tenth of the way from 0.1 to 0.9 is 0.08
    assert (kept.collapsed, lost.collapsed) == (False, True)
    assert score(CONFIG, kept, "target") == pytest.approx(0.1)
    assert score(CONFIG, lost, "target") > 1
    assert ended(0.1, 0.95, status="diverged").collapsed
    assert not ended(0.1, 0.5, 0.2).collapsed  # what was never reached is not lost


@pytest.mark.parametrize("objective", ["target", "final"])
def test_what_diverged_is_behind_what_learned_nothing(objective: str) -> None:
    """However far from the target a run ends, and however large its loss is."""
    from ngplus.lab.study import score

    chosen, size = settings.open_preset("digits", "small", {}, [], None)
    config = settings.configure(chosen, "small", size, "sgd", seed=0)
    config = replace(config, target=1e-3, higher_is_better=False)
    lost = replace(runs.summarise(config, [], 0, 0.0, 0, "finished"), final=1e6)
    assert score(config, lost, objective) < score(config, replace(lost, status="diverged"), objective)


def test_two_processes_do_not_make_a_trial_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna

    from ngplus.lab import tune

    ngplus("tune", "digits", "-o", "adam", "--trials", "1", *SHORT)
    study = optuna.load_study(study_name="digits-small-adam-target", storage="sqlite:///tuning.db")
    other = study.ask()  # somebody else is at it
    other.suggest_float("lr", 3e-4, 1e-1, log=True)
    told: list[int] = []
    real = tune.make_trial

    def counted(plan: Any, patient: bool, *rest: Any) -> None:
        told.append(patient)
        real(plan, patient, *rest)
        if len(told) == 1:
            study.tell(other, 0.9)

    monkeypatch.setattr(tune, "make_trial", counted)
    ngplus("tune", "digits", "-o", "adam", "--trials", "3", *SHORT)
    assert told == [True]
    assert len(trials_of("adam")) == 3
    assert "steps 6 there and 7 now" in ngplus("tune", "digits", "-o", "adam", *SHORT, "--steps", "7", code=2)


def test_the_same_seed_tunes_alike() -> None:
    found = []
    for name in ("a", "b"):
        ngplus(
            "tune",
            "digits",
            "-o",
            "adam",
            "--trials",
            "3",
            "--storage",
            f"sqlite:///{name}.db",
            "--presets",
            name,
            *SHORT,
        )
        trials = json.loads(Path(f"{name}/digits.json").read_text())["presets"]["small"]["adam"]["tuning"]["trials"]
        found.append(trials)
    assert found[0] == found[1]


def test_a_trial_of_several_seeds_has_their_mean() -> None:
    ngplus("tune", "digits", "-o", "adam", "--trials", "2", "--seeds", "2", "--objective", "final", *SHORT)
    held = json.loads(Path("presets/digits.json").read_text())["presets"]["small"]["adam"]["tuning"]
    assert held["seeds of the runs"] == [100, 101]
    assert held["seeds of the finals"] == [100, 101, 102, 103]
    assert len(held["trials"]) == 2
    assert all(-1 <= trial["score"] <= 0 for trial in held["trials"])


class Told:
    """Runs that end as a test says: for each learning rate and seed the steps that it takes, of 100."""

    def __init__(self, steps: dict[tuple[float, int], int]) -> None:
        self.steps = steps
        self.made: list[tuple[float, int, int]] = []

    def __call__(self, config: runs.Config, *_: Any, on_evaluation: Any, **options: Any) -> runs.Result:
        rate = round(config.hyper["lr"], 4)
        wanted = self.steps[rate, config.seed]
        for step in range(10, 101, 10):
            reason = on_evaluation(step, 1.0 if step >= wanted else 0.5)
            if reason or step == 100:
                break
        self.made.append((rate, config.seed, step))
        looks = [{"step": min(step, wanted), "seconds": 1.0, "accuracy": 1.0 if step >= wanted else 0.5}]
        return runs.summarise(config, looks, step, 1.0, 0, "stopped" if reason else "finished", reason)


def test_the_best_trials_are_run_on_more_seeds_and_the_best_mean_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told({
        (0.0055, 100): 40, (0.0055, 101): 50, (0.0055, 102): 60,
        (0.0234, 100): 30, (0.0234, 101): 100, (0.0234, 102): 60,  # the best of the seed that all trials have
        (0.0013, 100): 80, (0.0013, 101): 100, (0.0013, 102): 90,
    })  # fmt: skip
    monkeypatch.setattr(loop, "run", told)
    arguments = ["tune", "digits", "-o", "adam", "--trials", "3", "--steps", "100", "--target", "0.9"]
    said = ngplus(*arguments, "--warmup", "1")
    assert "lr 0.005477, the best of 3 trials with a score of 0.5;" in said
    trials = told.made[:3]
    assert trials == [(0.0055, 100, 100), (0.0234, 100, 100), (0.0013, 100, 100)]
    finals = told.made[3:]
    assert finals == [
        (0.0234, 101, 100), (0.0234, 102, 100),  # 190 steps in all, with the 30 of its trial
        (0.0055, 101, 100), (0.0055, 102, 100),  # 150
        (0.0013, 101, 70),  # and here it has as many with the 80 of its trial
    ]  # fmt: skip
    held = {round(trial["hyper"]["lr"], 4): trial["scores of the finals"] for trial in trials_of("adam")}
    assert held[0.0234] == pytest.approx([0.3, 1.0, 0.6])
    assert held[0.0055] == pytest.approx([0.4, 0.5, 0.6])
    assert held[0.0013] == pytest.approx([0.8])
    ngplus(*arguments, "--warmup", "1")  # all of it is in the storage
    assert told.made[8:] == []
    # two finalists: the last trial ends where it is not among them any more, and is not one
    said = ngplus(*arguments, "--warmup", "1", "--finalists", "2", "--storage", "sqlite:///two.db")
    assert "lr 0.005477, the best of 3 trials with a score of 0.5;" in said
    assert told.made[8:11] == [(0.0055, 100, 100), (0.0234, 100, 100), (0.0013, 100, 40)]
    assert len(told.made) == 8 + 3 + 4
    assert [len(trial.get("scores of the finals", [])) for trial in trials_of("adam")] == [3, 3, 0]
    said = ngplus(*arguments, "--warmup", "1", "--trials", "1", "--storage", "sqlite:///two.db")
    assert "lr 0.005477, the best of 1 trial with" in said


def test_a_finalist_that_diverges_makes_room_for_the_next_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told({(0.0055, 100): 40, (0.0234, 100): 30, (0.0013, 100): 80}
                | {(0.0055, 101): 50, (0.0055, 102): 60, (0.0013, 101): 90, (0.0013, 102): 90})  # fmt: skip

    def run(config: runs.Config, *rest: Any, **options: Any) -> runs.Result:
        if (config.seed, round(config.hyper["lr"], 4)) in ((101, 0.0234), (101, 0.0055)):
            told.made.append((round(config.hyper["lr"], 4), 101, 10))
            return runs.summarise(config, [], 10, 1.0, 0, "diverged", "the loss became nan")
        return told(config, *rest, **options)

    monkeypatch.setattr(loop, "run", run)
    arguments = ["tune", "digits", "-o", "adam", "--trials", "3", "--steps", "100", "--target", "0.9"]
    said = ngplus(*arguments, "--finalists", "1", "--storage", "sqlite:///one.db")
    assert "lr 0.0234, the best of 3 trials with" in said  # without finals, the best trial wins
    made = len(told.made)
    said = ngplus(*arguments, "--finalists", "2")
    finals = [(rate, seed) for rate, seed, _ in told.made[made + 3 :]]
    # the best trial ends at its second seed, and so does the next one; the third was cut short, and begins anew
    assert finals == [(0.0234, 101), (0.0055, 101), (0.0013, 100), (0.0013, 101), (0.0013, 102)]
    assert "lr 0.001282, the best of 3 trials with" in said
    assert trials_of("adam")[1]["scores of the finals"] == pytest.approx([0.3, 10.0])


def test_a_finalist_that_was_left_off_goes_on_when_its_better_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third trial beats the others, and then only two trials are asked for."""
    told = Told({(0.0055, seed): 60 for seed in (100, 101, 102)} | {(0.0234, seed): 70 for seed in (100, 101, 102)}
                | {(0.0013, seed): 20 for seed in (100, 101, 102)})  # fmt: skip
    monkeypatch.setattr(loop, "run", told)
    arguments = ["tune", "digits", "-o", "adam", "--steps", "100", "--target", "0.9"]
    assert "lr 0.001282" in ngplus(*arguments, "--trials", "3")
    assert len(trials_of("adam")[0]["scores of the finals"]) < 3
    assert "lr 0.005477, the best of 2 trials with a score of 0.6;" in ngplus(*arguments, "--trials", "2")
    assert trials_of("adam")[0]["scores of the finals"] == pytest.approx([0.6] * 3)


def test_finals_that_were_broken_off_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told({(rate, seed): 50 for rate in (0.0055, 0.0234, 0.0013) for seed in (100, 101, 102)})

    def broken_off(config: runs.Config, *rest: Any, **options: Any) -> runs.Result:
        if len(told.made) == 5:
            raise KeyboardInterrupt
        return told(config, *rest, **options)

    arguments = ["tune", "digits", "-o", "adam", "--trials", "3", "--steps", "100", "--target", "0.9"]
    monkeypatch.setattr(loop, "run", broken_off)
    ngplus(*arguments, code=130)
    assert not Path("presets/digits.json").exists()
    monkeypatch.setattr(loop, "run", told)
    ngplus(*arguments)
    assert len(told.made) == 9
    assert len(trials_of("adam")[0]["scores of the finals"]) == 3


def test_later_trials_are_near_the_best() -> None:
    from ngplus.lab import optimizers, search, tune
    from ngplus.lab.study import GLOBAL_TRIALS

    study = tune.open_study("sqlite:///near.db", "near", CONFIG)
    entry = optimizers.get("kfac")
    made = tune.Plan(entry, CONFIG, study, GLOBAL_TRIALS + 4, 1, 1, "target", None, search.Scales())
    ranges = {search.coordinate(name, r): r for name, r in entry.ranges.items()}
    points = []
    for place in range(made.trials):
        study.sampler = tune.sampler(point := made.point(place))
        trial = study.ask()
        found = {key: trial.suggest_float(key, r.low, r.high, log=r.log) for key, r in ranges.items()}
        assert found == pytest.approx(point)
        points.append(point)
        study.tell(trial, 0.2 if place == 1 else 0.5)
    assert points[:GLOBAL_TRIALS] == search.points(entry.ranges, GLOBAL_TRIALS)
    parts = [{key: search.part_of(r, point[key]) for key, r in ranges.items()} for point in points]
    for key in ranges:
        assert min(part[key] for part in parts[:GLOBAL_TRIALS]) < 0.2  # all over the ranges
        assert max(part[key] for part in parts[:GLOBAL_TRIALS]) > 0.8
        near = [part[key] - parts[1][key] for part in parts[GLOBAL_TRIALS:]]
        assert max(map(abs, near)) <= search.LOCAL / 2 + 1e-9
        assert min(near) < 0 <= max(near)
    assert len({tuple(point.values()) for point in points}) == made.trials


def test_settings_that_are_tried_as_well() -> None:
    start = ["--start", "lr=0.02", "--storage", "sqlite:///start.db"]
    ngplus("tune", "digits", "-o", "adam", "--trials", "3", *start, *SHORT)
    ngplus("tune", "digits", "-o", "adam", "--trials", "4", *start, *SHORT)  # it is not tried twice
    assert [trial["hyper"]["lr"] for trial in trials_of("adam")] == [0.02, 0.005477, 0.0234, 0.001282]
    assert "outside of the range 0.0003 to 0.1" in ngplus("tune", "digits", "-o", "adam", "--start", "lr=1", code=2)
    assert "--start takes lr, not beta" in ngplus("tune", "digits", "-o", "adam", "--start", "beta=1", code=2)


def test_a_point_is_what_its_hyper_parameters_stand_for() -> None:
    from ngplus.lab import optimizers, search

    ranges, scales = optimizers.get("kfac").ranges, search.Scales(2.0, 3.0)
    for point in search.points(ranges, 4):
        values = search.hyper(ranges, point, scales)
        assert search.point_of(ranges, values, scales) == pytest.approx(point, rel=1e-3)
