"""Readers and models of the workloads one by one, against plain versions."""

from __future__ import annotations

import gzip
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_workloads_tiny import (
    ENGLISH,
    GERMAN,
    TINY_SCHNET,
    criteo_rows,
    make_cifar10,
    make_criteo,
    make_imagenet,
    make_iwslt14,
    make_materials,
    make_multi30k,
    make_qm9,
    open_tiny,
    structure,
)
from torch import Tensor, nn

import ngplus
from ngplus.lab import optimizers
from ngplus.lab.workloads import cifar10, criteo, imagenet, materials, schnet, translation
from ngplus.lab.workloads.base import DataError
from ngplus.lab.workloads.dlrm import DLRM
from ngplus.lab.workloads.resnet import Images, resnet
from ngplus.lab.workloads.sampling import batch_index, generator

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------------------------------------ batches


def test_an_epoch_has_every_example_once() -> None:
    epochs = [torch.cat([batch_index(10, 3, 0, step) for step in steps]) for steps in (range(3), range(3, 6))]
    for order in epochs:
        assert len(set(order.tolist())) == 9
    assert not torch.equal(*epochs)
    assert sorted(batch_index(4, 100, 0, 7).tolist()) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------ images


def test_cifar10_pickles_are_read_like_pngs(tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    wanted = open_tiny("cifar10", tmp_path)
    public = tmp_path / "other" / "cifar-10-batches-py"
    public.mkdir(parents=True)
    for name, part in (("data_batch_1", wanted.train), ("test_batch", wanted.test)):
        content = {
            b"data": part.pixels.reshape(-1, 3072).numpy(),
            b"labels": part.labels.tolist(),
            b"batch_label": b"x",
        }
        (public / name).write_bytes(pickle.dumps(content, protocol=2))
    found = open_tiny("cifar10", tmp_path / "other")
    assert torch.equal(found.train.pixels, wanted.train.pixels)
    assert torch.equal(found.test.labels, wanted.test.labels)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize("content", [Evil(), {b"data": Evil(), b"labels": [1]}, {b"labels": [1]}, [1, 2]])
def test_cifar10_pickles_run_nothing(content: Any, tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "data_batch_2").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="data_batch_2"):
        open_tiny("cifar10", tmp_path)


def test_cifar10_labels_fit_the_images(tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "test_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(DataError, match=r"test_lables\.json.*20 images and 3 labels"):
        open_tiny("cifar10", tmp_path)


def test_augmentation_moves_and_mirrors() -> None:
    image = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32).expand(40, -1, -1, -1)
    out = cifar10.augment(image, generator(0))
    padded = nn.functional.pad(image[0], (4, 4, 4, 4))
    windows = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    windows += [window.flip(2) for window in windows]
    assert all(any(torch.equal(one, window) for window in windows) for one in out)
    assert len({tuple(one.flatten().tolist()) for one in out}) > 20


def test_resnet50_is_v1_5() -> None:
    with torch.device("meta"):
        model = resnet(1000, **imagenet.RESNET50)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032  # torchvision's
    strided = [c for c in model.modules() if isinstance(c, nn.Conv2d) and c.stride == (2, 2)]
    # the stem, and in three stages the 3 x 3 convolution and the shortcut
    assert sorted(c.kernel_size[0] for c in strided) == [1, 1, 1, 3, 3, 3, 7]
    assert all(c.in_channels != c.out_channels for c in strided if c.kernel_size == (1, 1))


def test_imagenet_micro_batches_add_up(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    model = task.model().eval()  # without batch statistics, which see a micro-batch alone
    batch = task.batch(0, 0)
    parts = list(task.split(batch))
    assert [part.size for _, part in parts] == [3, 3, 2]
    total = sum(share * task.loss(model, part) for share, part in parts)
    torch.testing.assert_close(total, task.loss(model, batch))


def test_imagenet_accumulates_with_ngplus(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = 0.0
        for share, part in task.split(task.batch(0, 0)):
            scaled = share * task.loss(model, part)
            scaled.backward()
            loss += float(scaled.detach())
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < losses[0]


def test_imagenet_classes(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    assert task.classes == 2
    labels = torch.cat([batch.labels for batch in task.validation()])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "imagenet" / "val" / "n99").mkdir()
    with pytest.raises(DataError, match="train/n99"):
        open_tiny("imagenet", tmp_path)


def test_imagenet_looks_at_as_many_images_as_asked_for(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    for asked, want in ((1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1]), (100, [0, 0, 0, 1, 1, 1])):
        task = open_tiny("imagenet", tmp_path, validation=asked)
        assert torch.cat([batch.labels for batch in task.validation()]).tolist() == want
    with pytest.raises(DataError, match="1 or more"):
        open_tiny("imagenet", tmp_path, validation=0)


def test_imagenet_reads_the_next_batch_of_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    monkeypatch.setattr(imagenet.processes, "world", lambda: 2)
    task.batch(0, 1)
    assert task._next is not None
    assert task._next[0] == (0, 3)


@pytest.mark.parametrize("size", [(300, 200), (20, 400), (400, 20), (1, 1)])
def test_crops_have_the_size(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (10, 200, 30))
    assert imagenet.middle_crop(image, 64).size == (64, 64)
    for seed in range(5):
        assert imagenet.random_crop(image, 64, np.random.default_rng(seed)).size == (64, 64)


def test_images_of_other_modes(tmp_path: Path) -> None:
    """Grey, palette and CMYK images are in ImageNet."""
    make_imagenet(tmp_path / "imagenet")
    for k, mode in enumerate(("L", "CMYK")):
        Image.new(mode, (30, 40)).save(tmp_path / "imagenet" / "val" / "n01" / f"n01_{k}.JPEG")
    pixels = torch.cat([batch.pixels for batch in open_tiny("imagenet", tmp_path).validation()])
    assert pixels.shape == (6, 3, 32, 32)


# ------------------------------------------------------------------------------------------------ energies


def test_schnet_is_torch_geometrics(tmp_path: Path) -> None:
    from torch_geometric.nn.models import SchNet

    make_qm9(tmp_path / "qm9")
    batch = open_tiny("qm9", tmp_path).batch(0, 0)
    torch.manual_seed(0)
    ours = schnet.EnergySchNet(**TINY_SCHNET)
    torch.manual_seed(0)
    theirs = SchNet(**TINY_SCHNET, interaction_graph=lambda pos, which: (batch.edges, batch.distances))
    positions = torch.zeros(len(batch.numbers), 3)
    wanted = theirs(batch.numbers, positions, batch.structure).squeeze(1)
    found = ours(batch.numbers, batch.edges, batch.distances, batch.structure, len(batch.target))
    torch.testing.assert_close(found, wanted)


def test_molecules_are_the_samples(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")
    task = open_tiny("qm9", tmp_path)
    model, batch = task.model(), task.batch(0, 0)
    optimizer = optimizers.get("ngplus").make(model, {"lr": 0.01})
    task.loss(model, batch).backward()
    optimizer.step()
    assert {matrix.seen[0] for matrix in optimizer._matrices if matrix.seen} == {len(batch.target)}


def test_neighbours_of_molecules(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")
    molecules = open_tiny("qm9", tmp_path).structures
    index = torch.tensor([5, 0, 17])
    batch = molecules.batch(index)
    places = torch.cat([torch.arange(molecules.first[k], molecules.first[k] + molecules.count[k]) for k in index])
    assert torch.equal(batch.numbers, molecules.numbers[places])
    wanted = {}
    for i in range(len(places)):
        for j in range(len(places)):
            distance = float((molecules.positions[places[i]] - molecules.positions[places[j]]).norm())
            if i != j and batch.structure[i] == batch.structure[j] and distance < 4.0:
                wanted[i, j] = distance
    found = {(int(i), int(j)): float(d) for i, j, d in zip(*batch.edges, batch.distances, strict=True)}
    assert found == pytest.approx(wanted, rel=1e-5)


def test_qm9_energies_are_without_atoms(tmp_path: Path) -> None:
    make_qm9(tmp_path / "qm9")  # 0.1 Hartree of binding for each atom
    task = open_tiny("qm9", tmp_path)
    torch.testing.assert_close(task.structures.target, -2.7211386245988 * task.structures.count.double())
    assert task.mean == pytest.approx(-2.7211386245988)
    assert set(task.train.tolist()).isdisjoint(task.val.tolist())


def test_neighbours_of_crystals() -> None:
    crystal = materials.parse_structure(str(structure(["Na", "Cl"], 3.0)))
    edges, distances = materials.periodic_pairs(crystal, 4.0)
    cell, _, positions = crystal
    images = np.array([[a, b, c] for a in range(-3, 4) for b in range(-3, 4) for c in range(-3, 4)]) @ cell
    wanted = []
    for i in range(2):
        for j in range(2):
            for length in np.linalg.norm(positions[j] + images - positions[i], axis=1):
                if 1e-9 < length < 4.0:
                    wanted.append((j, i, round(float(length), 4)))
    found = [(int(j), int(i), round(float(d), 4)) for j, i, d in zip(*edges, distances, strict=True)]
    assert sorted(found) == sorted(wanted)
    assert any(i == j for i, j, _ in found)  # an atom and its own image


def test_batches_of_crystals_keep_to_themselves(tmp_path: Path) -> None:
    make_materials(tmp_path / "materials")
    crystals = open_tiny("materials", tmp_path).structures
    both = crystals.batch(torch.tensor([7, 2]))
    alone = [crystals.batch(torch.tensor([k])) for k in (7, 2)]
    torch.testing.assert_close(both.distances, torch.cat([one.distances for one in alone]))
    shifted = torch.cat([alone[0].edges, alone[1].edges + len(alone[0].numbers)], dim=1)
    assert torch.equal(both.edges, shifted)
    assert torch.equal(both.structure[both.edges[0]], both.structure[both.edges[1]])


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getcwd()",
        "{'lattice': 1}",
        str(structure(["Na"], 0.0)),
        str(structure(["Xx"], 3.0)),
        str(structure(["Na"], 3.0)).replace("'abc': [0.0, 0.0, 0.0]", "'abc': [0.0]"),
        "(" * 500,
    ],
)
def test_a_bad_crystal_is_named_by_its_row(text: str, tmp_path: Path) -> None:
    (tmp_path / "materials").mkdir()
    good = f'"{structure(["Na"], 3.0)}",1.0'
    rows = ["structure,formation_energy_per_atom", good, f'"{text}",1.0']
    (tmp_path / "materials" / "flla_2015.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"flla_2015\.csv.*row 2"):
        open_tiny("materials", tmp_path)


# ------------------------------------------------------------------------------------------------ translation


def test_subwords_give_the_text_back() -> None:
    first = translation.learn_subwords([*GERMAN, *ENGLISH], 80)
    second = translation.learn_subwords([*GERMAN, *ENGLISH], 80)
    assert first.to_str() == second.to_str()
    for text in (*GERMAN, *ENGLISH):
        ids = first.encode(text).ids
        assert first.decode([*ids, translation.EOS, translation.PAD]) == text
        assert not {translation.PAD, translation.EOS} & set(ids)


def test_sentences_are_padded_and_shifted(tmp_path: Path) -> None:
    make_multi30k(tmp_path / "multi30k")
    task = open_tiny("multi30k", tmp_path)
    batch = task.batch(0, 0)
    assert (batch.decoder_input[:, 0] == translation.PAD).all()
    ends = batch.labels == translation.EOS
    assert (ends.sum(1) == 1).all()
    kept = (batch.labels != translation.PAD) & ~ends
    assert torch.equal(batch.labels[:, :-1][kept[:, :-1]], batch.decoder_input[:, 1:][kept[:, :-1]])


def test_batches_of_tokens() -> None:
    random = np.random.default_rng(0)
    pairs = ([np.zeros(n) for n in random.integers(1, 30, 200)], [np.zeros(n) for n in random.integers(1, 30, 200)])
    batches = translation.token_batches(pairs, 200, 25)
    kept = [k for k in range(200) if max(len(pairs[0][k]), len(pairs[1][k])) + 1 <= 25]
    assert sorted(k for batch in batches for k in batch) == kept
    for batch in batches:
        assert len(batch) * (max(max(len(pairs[0][k]), len(pairs[1][k])) for k in batch) + 1) <= 200


def test_learned_by_heart_it_translates(tmp_path: Path) -> None:
    make_multi30k(tmp_path / "multi30k")
    size = {"layers": 1, "width": 32, "inner": 32, "heads": 2}
    task = open_tiny("multi30k", tmp_path, vocabulary=120, model=size)
    torch.manual_seed(0)
    model = task.model().train()
    untrained = task.final(model)["bleu"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(60):
        optimizer.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        optimizer.step()
    assert task.translate(model, GERMAN) == ENGLISH
    assert task.final(model)["bleu"] == pytest.approx(100.0)
    assert untrained < 50
    assert model.training


def test_iwslt14_prepared_form(tmp_path: Path) -> None:
    make_iwslt14(tmp_path / "iwslt14")
    raw = open_tiny("iwslt14", tmp_path)
    assert len(raw.corpus.test[0]) == 8
    assert len(raw.corpus.val[0]) == 2  # every 23rd of 32
    prepared = tmp_path / "other" / "iwslt14"
    prepared.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (prepared / f"{part}.de").write_text("\n".join(GERMAN), encoding="utf-8")
        (prepared / f"{part}.en.gz").write_bytes(gzip.compress("\n".join(ENGLISH).encode()))
    assert open_tiny("iwslt14", tmp_path / "other").corpus.test == (GERMAN, ENGLISH)


def test_sides_of_different_length(tmp_path: Path) -> None:
    make_multi30k(tmp_path / "multi30k")
    (tmp_path / "multi30k" / "val.en.gz").write_bytes(gzip.compress(b"one line\n"))
    with pytest.raises(DataError, match=r"val\.en\.gz.*1 lines, where val\.de\.gz has 16"):
        open_tiny("multi30k", tmp_path)


# ------------------------------------------------------------------------------------------------ clicks


def test_dlrm_by_hand() -> None:
    torch.manual_seed(0)
    model = DLRM([4, 5], dense=3, dim=2, bottom=[6], top=[7]).double()
    numbers, categories = torch.randn(3, 3).double(), torch.tensor([[0, 1], [3, 4], [2, 2]])
    x = model.bottom(numbers)
    a, b = (table.weight[categories[:, k]] for k, table in enumerate(model.tables))  # type: ignore[union-attr,index]
    dots = torch.stack([(a * x).sum(1), (b * x).sum(1), (b * a).sum(1)], 1)
    torch.testing.assert_close(model(numbers, categories), model.top(torch.cat([x, dots], 1)).squeeze(1))
    assert model.bottom[-1].__class__ is nn.ReLU
    assert isinstance(model.top[-1], nn.Linear)


def test_criteo_keeps_to_time(tmp_path: Path) -> None:
    make_criteo(tmp_path / "criteo")
    arrays = criteo.read(_folder(tmp_path))
    assert arrays["id"].tolist() == list(range(70))
    assert arrays["label"].astype(int).tolist() == [int(row[0]) for row in criteo_rows(70)]
    task = open_tiny("criteo", tmp_path)
    assert len(task.train.labels) == 60
    assert torch.equal(task.val.labels, torch.from_numpy(arrays["label"][60:]))
    assert float(task.train.numbers.min()) >= 0.0


def _folder(data: Path) -> Any:
    from ngplus.lab.workloads.files import folder

    return folder("criteo", data, criteo.HELP)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_criteo_public_form(ending: str, tmp_path: Path) -> None:
    make_criteo(tmp_path / "criteo")
    wanted = open_tiny("criteo", tmp_path)
    other = tmp_path / "other" / "criteo"
    other.mkdir(parents=True)
    lines = []
    for row in criteo_rows(70):
        words = ["" if not c else f"{int(float(c)):08x}" for c in row[14:]]
        lines.append("\t".join([row[0], *row[1:14], *words]) + "\n")
    text = "".join(lines).encode()
    (other / f"train.txt{ending}").write_bytes(gzip.compress(text) if ending else text)
    found = open_tiny("criteo", tmp_path / "other")
    for a, b in zip(found.train, wanted.train, strict=True):
        assert torch.equal(a, b)
    assert len(open_tiny("criteo", tmp_path / "other", rows=14).train.labels) == 12


def test_ranks_are_of_the_training_rows() -> None:
    column = np.array([7, 7, 7, 3, 3, 9, -1, 5, 3, 7, -1, 42])
    # of the first 8: 7 three times, 3 twice, 5 and 9 once; 42 is new
    assert criteo.ranked(column, 8, 10).tolist() == [1, 1, 1, 2, 2, 4, 0, 3, 2, 1, 0, 5]
    assert criteo.ranked(column, 8, 2).tolist() == [1, 1, 1, 2, 2, 2, 0, 2, 2, 1, 0, 2]


def test_sparse_tables_train_like_dense_ones(tmp_path: Path) -> None:
    make_criteo(tmp_path / "criteo")
    ends: list[list[Tensor]] = []
    for sparse in (False, True):
        task = open_tiny("criteo", tmp_path, model={"dim": 4, "bottom": [8], "top": [8], "sparse": sparse})
        torch.manual_seed(0)
        model = task.model().train()
        optimizer = ngplus.NGPlus(model, lr=0.05, momentum=0.0, damping=0.3, update_every=2)
        for step in range(4):
            optimizer.zero_grad()
            task.loss(model, task.batch(0, step)).backward()
            if sparse:
                assert model.tables[0].weight.grad.is_sparse
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
    for dense, sparse_one in zip(*ends, strict=True):
        torch.testing.assert_close(dense, sparse_one, rtol=1e-4, atol=1e-5)


def test_criteo_of_one_kind_has_no_auc(tmp_path: Path) -> None:
    make_criteo(tmp_path / "criteo")
    task = open_tiny("criteo", tmp_path)
    task.val = task.val._replace(labels=torch.zeros_like(task.val.labels))
    metrics = task.evaluate(task.model())
    assert math.isnan(metrics["auc"])
    assert math.isfinite(metrics["loss"])


@pytest.mark.parametrize("bad", ["2", "x", ""])
def test_a_bad_click_is_named_by_its_row(bad: str, tmp_path: Path) -> None:
    (tmp_path / "criteo").mkdir()
    rows = criteo_rows(5)
    lines = ["\t".join([*row[:14], *(c and "0a" for c in row[14:])]) for row in rows]
    lines[3] = bad + lines[3][1:]
    (tmp_path / "criteo" / "train.txt").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"train\.txt.*row 4"):
        open_tiny("criteo", tmp_path)


def test_images_is_plain() -> None:
    assert Images(torch.zeros(3, 3, 2, 2, dtype=torch.uint8), torch.zeros(3)).size == 3
