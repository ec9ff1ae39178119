"""Every workload on tiny made-up data: what a task promises, its model under NGPlus, AdamW and SGD."""

from __future__ import annotations

import dataclasses
import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ngplus
from ngplus.lab import workloads
from ngplus.lab.workloads.base import DataError, Preset, Task

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")
pytest.importorskip("torch_geometric")
pytest.importorskip("matscipy")
pytest.importorskip("sacrebleu")

TINY_RESNET = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
TINY_SCHNET = {"hidden_channels": 8, "num_filters": 8, "num_interactions": 1, "num_gaussians": 8, "cutoff": 4.0}
TINY_MARIAN = {"layers": 1, "width": 16, "inner": 16, "heads": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "cifar10": {"model": {**TINY_RESNET, "stem_stride": 2}, "augment": True},
    "imagenet": {"model": TINY_RESNET, "pixels": 32, "threads": 2, "micro_batch": 3},
    "qm9": {"model": TINY_SCHNET, "train": 30, "validation": 10},
    "materials": {"model": TINY_SCHNET, "train": 10, "validation": 4},
    "multi30k": {"model": TINY_MARIAN, "vocabulary": 60, "longest": 40, "bleu_sentences": 4, "beams": 2},
    "iwslt14": {"model": TINY_MARIAN, "vocabulary": 60, "longest": 40, "bleu_sentences": 4, "beams": 2},
    "criteo": {"model": {"dim": 4, "bottom": [8], "top": [8]}, "cap": 5},
    "shakespeare": {
        "model": {"context": 8, "width": 16, "heads": 2, "depth": 1},
        "max_grad_norm": 1.0,
        "validation": 5,
    },
}
NAMES = list(OPTIONS)


# ------------------------------------------------------------------------------------------------ made-up data


def make_cifar10(root: Path) -> None:
    root.mkdir()
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 60)
    pixels = (
        random.integers(0, 120, (60, 32, 32, 3)).astype(np.uint8) + (labels * 12).astype(np.uint8)[:, None, None, None]
    )
    Image.fromarray(pixels[:40].reshape(40, 1024, 3)).save(root / "data_batch_1.png")
    Image.fromarray(pixels[40:].reshape(20, 1024, 3)).save(root / "test_batch.png")
    (root / "train_lables.json").write_text(json.dumps(labels[:40].tolist()))
    (root / "test_lables.json").write_text(json.dumps(labels[40:].tolist()))


def make_imagenet(root: Path) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for k, name in enumerate(("n01", "n02")):
            (root / part / name).mkdir(parents=True)
            for n in range(count):
                pixels = random.integers(0, 100, (40 + n, 50, 3)).astype(np.uint8) + np.uint8(100 * k)
                Image.fromarray(pixels).save(root / part / name / f"{name}_{n}.JPEG")


def make_qm9(root: Path) -> None:
    root.mkdir()
    random = np.random.default_rng(0)
    count = random.integers(2, 6, 40)
    numbers = random.choice([1, 6, 7, 8, 9], count.sum())
    atoms = {1: -0.500273, 6: -37.846772, 7: -54.583861, 8: -75.064579, 9: -99.718730}
    own = np.array([atoms[int(z)] for z in numbers])
    energy = np.add.reduceat(own - 0.1, np.cumsum(count) - count)
    np.savez(
        root / "qm9.npz",
        N=count.astype(np.uint8),
        Z=numbers.astype(np.uint8),
        R=random.normal(0, 1.5, (count.sum(), 3)).astype(np.float32),
        Y=np.stack([np.zeros(40), energy], 1),
        Y_names=np.array(["HOMO_au", "InternalEnergy_0K_au"]),
    )


def structure(elements: list[str], size: float) -> dict[str, Any]:
    sites = [
        {"abc": [k / len(elements)] * 3, "species": [{"occu": 1, "element": name}]} for k, name in enumerate(elements)
    ]
    return {"lattice": {"matrix": [[size, 0.0, 0.0], [0.0, size, 0.0], [0.5, 0.0, size]]}, "sites": sites}


def make_materials(root: Path) -> None:
    root.mkdir()
    lines = ["# a comment", "material_id,structure,formation_energy_per_atom"]
    for k in range(14):
        crystal = structure(["Na", "Cl", "As", "Hf"][: 1 + k % 4], 3.0 + 0.2 * k)
        lines.append(f'mp-{k},"{crystal}",{-0.1 * k}')
    (root / "flla_2015.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


GERMAN = ["ein Mann geht .", "eine Frau läuft schnell .", "zwei Hunde spielen im Schnee .", "ein Kind lacht !"]
ENGLISH = ["a man walks .", "a woman runs fast .", "two dogs play in the snow .", "a child laughs !"]


def make_multi30k(root: Path) -> None:
    root.mkdir()
    for part in ("train", "val", "test_2016_flickr"):
        for language, text in (("de", GERMAN), ("en", ENGLISH)):
            (root / f"{part}.{language}.gz").write_bytes(gzip.compress(("\n".join(text * 4) + "\n").encode()))


def make_iwslt14(root: Path) -> None:
    """The form that the data set comes in."""
    root.mkdir()
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        tags = ["<url>http://a.b</url>", "<title>Titel</title>"]
        (root / f"train.tags.de-en.{language}").write_text("\n".join([*tags, *(text * 8)]) + "\n", encoding="utf-8")
        segments = "\n".join(f'<seg id="{k}"> {line} </seg>' for k, line in enumerate(text))
        for name in ("TED.tst2010", "TED.tst2011"):
            xml = f'<?xml version="1.0"?><mteval><doc>{segments}</doc></mteval>'
            (root / f"IWSLT14.{name}.de-en.{language}.xml").write_text(xml, encoding="utf-8")


def criteo_rows(count: int) -> list[list[str]]:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        numbers = ["" if random.random() < 0.2 else str(float(x)) for x in random.integers(-1, 30, 13)]
        categories = ["" if random.random() < 0.1 else str(float(x)) for x in random.zipf(1.5, 26) - 1]
        rows.append([str(int(random.random() < 0.4)), *numbers, *categories])
    return rows


def make_criteo(root: Path) -> None:
    root.mkdir()
    header = ",".join(["Id", "Label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))])
    rows = [f"{k}," + ",".join(x or '""' for x in row) for k, row in enumerate(criteo_rows(70))]
    (root / "b.csv").write_text("\n".join([header, *rows[:30]]) + "\n")
    (root / "a.csv").write_text("\n".join([header, *rows[30:]]) + "\n")  # later in time, earlier in name


def make_shakespeare(root: Path) -> None:
    root.mkdir()
    (root / "input.txt.gz").write_bytes(gzip.compress(("\n".join(ENGLISH) * 10).encode()))


MAKE: dict[str, Callable[[Path], None]] = {
    "cifar10": make_cifar10,
    "imagenet": make_imagenet,
    "qm9": make_qm9,
    "materials": make_materials,
    "multi30k": make_multi30k,
    "iwslt14": make_iwslt14,
    "criteo": make_criteo,
    "shakespeare": make_shakespeare,
}


def tiny_preset(name: str, **options: Any) -> Preset:
    size = 60 if name in ("multi30k", "iwslt14") else 8
    return Preset(steps=5, batch_size=size, evaluate_every=5, target=0.0, options={**OPTIONS[name], **options})


def open_tiny(name: str, data: Path, **options: Any) -> Any:
    return workloads.get(name).open(tiny_preset(name, **options), data)


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
        warnings.simplefilter("error", UserWarning)  # nothing falls back to mini-batch curvature
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
    opt = ngplus.NGPlus(model, update_every=1)
    task.loss(model, task.batch(0, 0)).backward()
    opt.step()
    assert {row.source for row in opt.plan() if not row.frozen} == {"sample"}
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
