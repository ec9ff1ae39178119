"""The optimizers of the lab by name, their presets and their schedules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("tensorboard")
pytest.importorskip("typer")


from regression import Regression

from ngplus.lab import averaging, loop, optimizers, presets, schedules, search, settings, workloads

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_muon_leaves_adamw_a_rate_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    for given, want in (({}, 0.1), ({"adamw_lr": 0.004}, 0.004)):
        made = optimizers.get("muon").make(model, {"lr": 0.1, "weight_decay": 0.02, **given})
        own, rest = made.param_groups
        assert (own["lr"], rest["lr"]) == (0.1, want)
        assert rest["lr"] * rest["weight_decay"] == pytest.approx(own["lr"] * own["weight_decay"])


NEW = ["soap-1", "kl-soap", "kl-shampoo", "psgd", "splus", "schedule-free", "ademamix", "muon"]


@pytest.mark.parametrize("optimizer", NEW)
def test_they_learn_the_digits(optimizer: str) -> None:
    """A tenth of the images is right by chance."""
    pytest.importorskip(optimizers.get(optimizer).where.partition(":")[0])
    workload, size = settings.open_preset("digits", "small", {"steps": 60, "evaluate_every": 60}, [], optimizer)
    rate = {"psgd": 0.003, "muon": 0.01}.get(optimizer)
    made = settings.configure(workload, "small", size, optimizer, seed=100, lr=rate)
    result = loop.run(made, workload.open(size, None))
    assert result.final is not None
    assert result.final > 0.75


def test_schedule_free_has_the_constant_schedule() -> None:
    def schedule(changes: dict[str, object], optimizer: str) -> str:
        workload, size = settings.open_preset("digits", "small", changes, [], optimizer)
        return settings.configure(workload, "small", size, optimizer, seed=0).schedule

    assert schedule({}, "schedule-free") == "constant"
    assert schedule({"schedule": "linear"}, "schedule-free") == "linear"  # the user's own comes first
    assert schedule({}, "adamw") == "cosine"


def test_schedule_free_is_evaluated_at_the_mean_of_its_iterates() -> None:
    """With a constant rate x is the plain mean of all z; gradients are taken at y = (1 - beta1) z + beta1 x."""
    torch.manual_seed(0)
    task, beta1 = Regression(), 0.8
    model = task.model()
    made = optimizers.get("schedule-free").make(model, {"lr": 0.01, "beta1": beta1, "weight_decay": 0.0})
    seen: list[torch.Tensor] = []
    for step in range(5):
        made.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        made.step()
        seen.append(made.optimizer.state[model[0].weight]["z"].clone())  # type: ignore[attr-defined, index]
    trained = [p.detach().clone() for p in model.parameters()]
    found: list[torch.Tensor] = []

    def measure(at: nn.Module) -> dict[str, float]:
        found.append(at[0].weight.detach().clone())  # type: ignore[index]
        return {}

    averaging.measured(measure, task, model, made, 0)
    mean = torch.stack(seen).mean(0)
    torch.testing.assert_close(found[0], mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(trained[0], (1 - beta1) * seen[-1] + beta1 * mean, atol=1e-6, rtol=1e-5)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), trained, strict=True))


class Normed(Regression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("optimizer", ["splus", "schedule-free"])
def test_batchnorm_has_the_statistics_of_the_averaged_weights(optimizer: str) -> None:
    torch.manual_seed(0)
    task = Normed()
    model = task.model().train()
    made = optimizers.get(optimizer).make(model, {"lr": 0.1})
    for step in range(5):
        made.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        made.step()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def measure(at: nn.Module) -> dict[str, float]:
        rows = torch.cat([at[0](task.batch(0, step)) for step in range(averaging.BATCHES)])  # type: ignore[index]
        seen.append((at[1].running_mean.clone(), rows.mean(0)))  # type: ignore[index, union-attr, operator]
        return {}

    averaging.measured(measure, task, model, made, 0)
    torch.testing.assert_close(*seen[0])
    assert not torch.allclose(seen[0][0], before["1.running_mean"])
    assert model[1].momentum == 0.1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_splus_sees_convolutions_as_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    made = optimizers.get("splus").make(model, {})
    model(torch.randn(3, 2, 4, 4)).square().mean().backward()
    before = model[0].weight.detach().clone()
    made.step()
    shapes = [tuple(p.shape) for group in made.param_groups for p in group["params"]]
    assert shapes == [(4, 18), (4,), (5, 16), (5,)]
    assert not torch.equal(model[0].weight, before)


def test_nothing_pickled_is_kept_of_heavyball_or_read() -> None:
    pytest.importorskip("heavyball")
    model = nn.Linear(3, 2)
    made = optimizers.get("psgd").make(model, {})
    model(torch.ones(1, 3)).sum().backward()
    made.step()
    state = made.state_dict()
    assert list(state["heavyball"]) == ["inner_group"]
    state["heavyball"] |= {"precond_schedule": b"not a pickle", "step": 3}
    made.load_state_dict(state)
    made.step()


def test_fine_tuning_takes_smaller_rates() -> None:
    workload, size = settings.open_preset("digits", "small", {}, [], "adamw")
    small = replace(size, rate=0.01)
    made = settings.configure(workload, "small", small, "adamw", seed=0, hyper={})
    assert made.hyper["lr"] == pytest.approx(0.01 * optimizers.get("adamw").defaults["lr"])
    assert settings.configure(workload, "small", small, "adamw", seed=0, lr=0.5).hyper["lr"] == 0.5
    ranges = optimizers.get("muon").ranges
    found = search.hyper(ranges, {"lr": 0.3, "adamw_lr": 0.2}, search.Scales(rate=0.01))
    assert found == pytest.approx({"lr": 0.003, "adamw_lr": 0.002})
    assert search.hyper(optimizers.get("ademamix").ranges, {"lr": 1.0, "alpha": 4.0}, search.Scales(rate=0.01)) == {
        "lr": 0.01,
        "alpha": 4.0,
    }


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
                assert len(tuned.tuning["trials"]) >= 5
