"""Every workload on tiny made-up data: what a task promises, its model under NGPlus, AdamW and SGD."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data import MAKE, NAMES, make_materials, open_tiny, tiny_preset

import ngplus
from ngplus.lab import workloads
from ngplus.lab.workloads.base import DataError, Task

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")
pytest.importorskip("torch_geometric")
pytest.importorskip("matscipy")
pytest.importorskip("sacrebleu")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, make in MAKE.items():
        make(root / name)
    return root


# ------------------------------------------------------------------------------------------------ every workload


@pytest.mark.parametrize("name", NAMES)
def test_described(name: str) -> None:
    workload = workloads.get(name)
    assert workload.name == name
    assert {"small", "paper"} <= set(workload.presets)
    for preset in workload.presets.values():
        assert 0 < preset.evaluate_every <= preset.steps
        assert preset.warmup < preset.steps


def flat(batch: Any) -> list[torch.Tensor]:
    return [x for x in batch if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_batches_depend_on_seed_and_step_alone(name: str, data: Path) -> None:
    task, other = open_tiny(name, data), open_tiny(name, data)
    first = [task.batch(3, step) for step in range(4)]
    torch.manual_seed(99)
    again = {step: other.batch(3, step) for step in (2, 0, 3, 1)}
    for step, batch in enumerate(first):
        assert all(torch.equal(a, b) for a, b in zip(flat(batch), flat(again[step]), strict=True))
    if name not in ("multi30k", "iwslt14"):  # of their few batches the same one may come
        pairs = zip(flat(first[0]), flat(task.batch(4, 0)), strict=True)
        assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_evaluate_leaves_mode_and_weights(name: str, data: Path) -> None:
    task = open_tiny(name, data)
    model = task.model().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    metrics = task.evaluate(model)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert {"loss", workloads.get(name).measure} <= set(metrics)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics == task.evaluate(model)


OPTIMIZERS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "ngadam": lambda model: ngplus.NGAdam(model, lr=0.01, update_every=2),
    "ngplus": lambda model: ngplus.NGPlus(model, lr=0.02, damping=0.3, update_every=2),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_few_steps_reduce_the_loss(name: str, optimizer: str, data: Path) -> None:
    task: Task = open_tiny(name, data)
    torch.manual_seed(0)
    model = task.model().train()
    opt = OPTIMIZERS[optimizer](model)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "No per-sample curvature")  # of graphs without sample_index, of positions
        for _ in range(12):
            opt.zero_grad()
            loss = task.loss(model, task.batch(0, 0))
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_sample_curvature(name: str, data: Path) -> None:
    task: Task = open_tiny(name, data)
    model = task.model().train()
    opt = ngplus.NGPlus(model, update_every=1, sample_index=getattr(model, "sample_index", None))
    task.loss(model, task.batch(0, 0)).backward()
    opt.step()
    # looked up once for all samples
    once = {"shakespeare": "positions.weight", "sst2": "encoder.embeddings.token_type_embeddings.weight"}
    shared = {once[name]} if name in once else set()
    assert {row.name for row in opt.plan() if not row.frozen and row.source != "sample"} == shared
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert [row.name for row in opt.plan() if row.frozen] == frozen


# ------------------------------------------------------------------------------------------------ data errors


@pytest.mark.parametrize("name", NAMES)
def test_no_folder_named(name: str) -> None:
    with pytest.raises(DataError, match="NGPLUS_DATA"):
        workloads.get(name).open(tiny_preset(name), None)


@pytest.mark.parametrize("name", NAMES)
def test_missing_data_says_what_where_and_how(name: str, tmp_path: Path) -> None:
    for empty in (False, True):
        if empty:
            (tmp_path / name).mkdir()
        with pytest.raises(DataError) as error:
            open_tiny(name, tmp_path)
        message = str(error.value)
        assert str(tmp_path) in message
        assert "https://" in message
        assert f"DATA/{name}" in message


DAMAGE = {
    "cifar10": "data_batch_1.png",
    "imagenet": "train/n01/n01_0.JPEG",
    "qm9": "qm9.npz",
    "materials": "flla_2015.csv.gz",
    "multi30k": "train.en.gz",
    "iwslt14": "IWSLT14.TED.tst2010.de-en.en.xml",
    "criteo": "a.csv",
    "shakespeare": "input.txt.gz",
    "sst2": "train.tsv.gz",
}


def read_all(name: str, data: Path) -> None:
    task = open_tiny(name, data)
    for step in range(2):  # images are read when asked for
        task.batch(0, step)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["cut", "garbage"])
def test_a_damaged_file_is_named(name: str, how: str, tmp_path: Path) -> None:
    MAKE[name](tmp_path / name)
    path = tmp_path / name / DAMAGE[name]
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if how == "cut" else b"\x93 \xff\x00 what is this?\n" * 20)
    with pytest.raises(DataError, match=path.name):
        read_all(name, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_links_do_not_lead_out(name: str, tmp_path: Path) -> None:
    MAKE[name](tmp_path / name)
    path = tmp_path / name / DAMAGE[name]
    outside = tmp_path / f"outside{path.suffix}"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(DataError, match="leads out"):
        open_tiny(name, tmp_path)


def test_the_cache_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngplus.lab.workloads import files

    make_materials(tmp_path / "materials")
    monkeypatch.setattr(files, "_memory", {})
    plain = open_tiny("materials", tmp_path)
    before = sorted(path.name for path in (tmp_path / "materials").iterdir())
    monkeypatch.setenv("NGPLUS_CACHE", str(tmp_path / "cache"))
    files._memory.clear()
    written = open_tiny("materials", tmp_path)
    (held,) = (tmp_path / "cache").iterdir()
    files._memory.clear()
    monkeypatch.setattr("ngplus.lab.workloads.materials.parse_structure", None)  # not needed again
    kept = open_tiny("materials", tmp_path)
    for task in (written, kept):
        assert all(torch.equal(a, b) for a, b in zip(plain.batch(0, 0), task.batch(0, 0), strict=True))
    monkeypatch.undo()
    held.write_bytes(b"damaged")
    monkeypatch.setenv("NGPLUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_memory", {})
    assert torch.equal(open_tiny("materials", tmp_path).batch(0, 0).edges, plain.batch(0, 0).edges)
    assert sorted(path.name for path in (tmp_path / "materials").iterdir()) == before
    monkeypatch.setenv("NGPLUS_CACHE", str(tmp_path / "materials" / "cache"))
    files._memory.clear()
    with pytest.raises(DataError, match="NGPLUS_CACHE"):
        open_tiny("materials", tmp_path)


def test_unknown_names_have_a_hint() -> None:
    with pytest.raises(ValueError, match="did you mean 'multi30k'"):
        workloads.get("multi30")


def test_presets_are_plain_values() -> None:
    """A run's configuration is written as JSON."""
    for name in NAMES:
        for preset in workloads.get(name).presets.values():
            json.dumps(dataclasses.asdict(preset))
