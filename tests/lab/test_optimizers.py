"""The optimizers of the lab by name, their presets and their schedules."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("tensorboard")
pytest.importorskip("typer")


from ngplus.lab import optimizers, presets, schedules, workloads

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
