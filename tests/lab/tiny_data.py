"""Made-up data of every workload in the form that it comes in, and tiny models for it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ngplus.lab import workloads
from ngplus.lab.workloads.base import Preset

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
    "sst2": {"pretrained": "tiny-bert", "longest": 8, "max_grad_norm": 1.0},
}


NAMES = list(OPTIONS)


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


def make_sst2(root: Path) -> None:
    """With a tiny BERT in the place of the pretrained model."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    root.mkdir()
    rows = [f"{sentence}\t{k % 2}" for k, sentence in enumerate(ENGLISH * 4)]
    for part, count in (("train", 16), ("dev", 5), ("test", 7)):
        (root / f"{part}.tsv.gz").write_bytes(gzip.compress(("\n".join(rows[:count]) + "\n").encode()))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for line in ENGLISH for word in line.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=16, **sizes)
    BertModel(config).save_pretrained(root / "tiny-bert")
    tokenizer.save(str(root / "tiny-bert" / "tokenizer.json"))


MAKE: dict[str, Callable[[Path], None]] = {
    "cifar10": make_cifar10,
    "imagenet": make_imagenet,
    "qm9": make_qm9,
    "materials": make_materials,
    "multi30k": make_multi30k,
    "iwslt14": make_iwslt14,
    "criteo": make_criteo,
    "shakespeare": make_shakespeare,
    "sst2": make_sst2,
}


def tiny_preset(name: str, **options: Any) -> Preset:
    size = 60 if name in ("multi30k", "iwslt14") else 8
    return Preset(steps=5, batch_size=size, evaluate_every=5, target=0.0, options={**OPTIONS[name], **options})


def open_tiny(name: str, data: Path, **options: Any) -> Any:
    return workloads.get(name).open(tiny_preset(name, **options), data)
