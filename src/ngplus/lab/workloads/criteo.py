"""Criteo's display advertising challenge (Kaggle) with DLRM: will the advertisement be clicked?"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from ngplus.lab.workloads.base import DataError, Preset, Task, Workload
from ngplus.lab.workloads.dlrm import DLRM
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.recipe import Recipe
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating

HELP = """Get the Kaggle Display Advertising set from https://ailab.criteo.com/ressources/ and unpack it, so that
  DATA/criteo/train.txt                 (or train.txt.gz)
is there: label, 13 numbers and 26 categories a line, between tabs. Or files in CSV with the header Id, Label, I1-I13,
C1-C26, the categories as ranks of their frequency, which are joined in the order of Id:
  DATA/criteo/*.csv"""

NUMBERS, CATEGORIES = 13, 26
_HEADER = ["Id", "Label", *(f"I{k}" for k in range(1, 14)), *(f"C{k}" for k in range(1, 27))]


def read(source: Folder, rows: int | None = None) -> Arrays:
    """Labels, numbers (missing: 0) and categories (missing: -1; ranks or hashed words) in the order of time."""
    parts = sorted(path.name for path in source.root.glob("*.csv"))
    raw = source.find("train.txt", "train.txt.gz")
    if raw is not None:
        return cached([raw], "criteo", rows, lambda: _pack(_from_text(source, raw, rows)))
    if not parts:
        raise source.missing("train.txt or *.csv")
    joined = [
        cached([path], "criteo-part", None, lambda path=path: _pack(_from_csv(source, path)))  # type: ignore[misc]
        for path in map(source.path, parts)
    ]
    arrays = {key: np.concatenate([part[key] for part in joined]) for key in joined[0]}
    order = np.argsort(arrays["id"], kind="stable")[:rows]
    return {key: value[order] for key, value in arrays.items()}


Row = tuple[int, int, list[float], list[int]]


def _pack(rows: Iterator[Row]) -> Arrays:
    """Rows to arrays, in pieces: Python's numbers take many times the memory."""
    pieces: list[Arrays] = []
    held: list[Row] = []

    def pack() -> None:
        ids, labels, numbers, categories = zip(*held, strict=True)
        pieces.append(
            {
                "id": np.array(ids, np.int64),
                "label": np.array(labels, np.float32),
                "numbers": np.array(numbers, np.float32),
                "categories": np.array(categories, np.int64),
            }
        )
        held.clear()

    for row in rows:
        held.append(row)
        if len(held) == 50_000:
            pack()
    if held:
        pack()
    return {key: np.concatenate([piece[key] for piece in pieces]) for key in pieces[0]}


def _row(place: int, label: str, numbers: list[str], categories: list[str], base: int) -> Row:
    if label not in ("0", "1") or len(numbers) != NUMBERS or len(categories) != CATEGORIES:
        raise ValueError("a label 0 or 1, 13 numbers and 26 categories are expected")
    ids = [-1 if not c else int(c, 16) if base == 16 else int(float(c)) for c in categories]
    if min(ids) < -1:
        raise ValueError("a category is negative")
    return place, int(label), [float(x) if x else 0.0 for x in numbers], ids


def _from_csv(source: Folder, path: Path) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(source.text(path), newline=""))
    if next(reader, None) != _HEADER:
        raise source.damaged(path, "the first line is not Id,Label,I1,...,I13,C1,...,C26")
    yield from _checked(source, path, (line for line in reader if line), named=True)


def _from_text(source: Folder, path: Path, rows: int | None) -> Iterator[Row]:
    with source.reading(path), (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        lines = (line.rstrip("\n").split("\t") for _, line in zip(range(rows or 10**12), file, strict=False))
        yield from _checked(source, path, lines, named=False)


def _checked(source: Folder, path: Path, lines: Iterator[list[str]], named: bool) -> Iterator[Row]:
    line = -1
    for line, fields in enumerate(lines):
        try:
            if named:
                yield _row(int(fields[0]), fields[1], fields[2:15], fields[15:], 10)
            else:
                yield _row(line, fields[0], fields[1:14], fields[14:], 16)
        except (ValueError, IndexError, OverflowError) as error:
            raise source.damaged(path, f"row {line + 1}: {error}") from error
    if line < 0:
        raise source.damaged(path, "it has no rows")


def ranked(column: np.ndarray[Any, Any], train: int, cap: int) -> np.ndarray[Any, Any]:
    """Ids by frequency in the first ``train`` rows: 0 is missing, 1 the most frequent category, and the last id, at
    most ``cap``, stands for all that are rarer or new. A column is ranked anew, whatever its ids mean."""
    values, counts = np.unique(column[:train], return_counts=True)
    values, counts = values[values >= 0], counts[values >= 0]
    rank = np.empty(len(values), np.int64)
    rank[np.argsort(-counts, kind="stable")] = np.arange(1, len(values) + 1)
    place = np.searchsorted(values, column)
    known = np.zeros(len(column), bool)
    inside = place < len(values)
    known[inside] = values[place[inside]] == column[inside]
    last = min(cap, len(values) + 1)
    ids = np.full(len(column), last, np.int64)
    ids[known] = np.minimum(rank[place[known]], last)
    ids[column < 0] = 0
    return ids


class Clicks(NamedTuple):
    numbers: Tensor
    categories: Tensor
    labels: Tensor

    def rows(self, index: Any) -> Clicks:
        return Clicks(*(tensor[index] for tensor in self))


class CriteoTask(Task):
    """Binary cross-entropy; the last seventh of the rows, the last of seven days, is for validation."""

    def __init__(self, arrays: Arrays, preset: Preset) -> None:
        count = len(arrays["label"])
        train, cap = count * 6 // 7, int(preset.options["cap"])
        if train == 0:
            raise DataError("criteo: there must be two rows or more, to split off the last seventh")
        columns = [ranked(column, train, cap) for column in arrays["categories"].T]
        self.sizes = [int(column.max()) + 1 for column in columns]
        data = Clicks(
            torch.from_numpy(np.log1p(np.maximum(arrays["numbers"], 0.0))),
            torch.from_numpy(np.stack(columns, axis=1)),
            torch.from_numpy(arrays["label"]),
        )
        self.train, self.val = data.rows(slice(0, train)), data.rows(slice(train, None))
        self.batch_size, self.options = preset.batch_size, preset.options

    def model(self) -> nn.Module:
        return DLRM(self.sizes, NUMBERS, **self.options["model"])

    def batch(self, seed: int, step: int) -> Clicks:
        return self.train.rows(batch_index(len(self.train.labels), self.batch_size, seed, step))

    def loss(self, model: nn.Module, batch: Clicks) -> Tensor:
        numbers, categories, labels = (tensor.to(device_of(model)) for tensor in batch)
        return F.binary_cross_entropy_with_logits(model(numbers, categories), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """``loss`` and ``log_loss`` are the same number under both names."""
        device = device_of(model)
        with evaluating(model):
            parts = (self.val.rows(slice(k, k + 4096)) for k in range(0, len(self.val.labels), 4096))
            logits = torch.cat([model(part.numbers.to(device), part.categories.to(device)).cpu() for part in parts])
        labels, chance = self.val.labels.numpy(), logits.double().sigmoid().numpy()
        if not np.isfinite(chance).all():
            return {"loss": float("nan"), "log_loss": float("nan"), "accuracy": float("nan"), "auc": float("nan")}
        loss = float(log_loss(labels, chance, labels=[0, 1]))
        auc = float(roc_auc_score(labels, chance)) if 0 < labels.mean() < 1 else float("nan")
        return {
            "loss": loss,
            "log_loss": loss,
            "accuracy": float(((chance > 0.5) == (labels > 0.5)).mean()),
            "auc": auc,
        }


class Criteo(Workload):
    name = "criteo"
    title = "Criteo Kaggle clicks, DLRM"
    measure = "auc"
    higher_is_better = True
    optional: ClassVar[Mapping[str, Any]] = {"rows": None}
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(
            steps=267,  # one epoch, as in the paper; the second would be learned by heart
            batch_size=64,
            evaluate_every=10,
            target=0.768,
            warmup=10,
            options={"model": {"dim": 16, "bottom": [128, 64], "top": [128, 64]}, "cap": 1_000},
        ),
        # The model of the repository's script for Kaggle; one epoch of 20,000 rows.
        "standard": Preset(
            steps=534,
            batch_size=32,
            evaluate_every=20,
            target=0.771,
            warmup=25,
            decay=1e-5,
            options={"model": {"dim": 16, "bottom": [512, 256, 64], "top": [512, 256]}, "cap": 10_000},
        ),
        # The repository's script for Kaggle: one epoch of six days, 39.3 million rows.
        "paper": Preset(
            steps=306_969,
            batch_size=128,
            evaluate_every=10_240,
            target=0.80,
            schedule="constant",
            options={
                "model": {"dim": 16, "bottom": [512, 256, 64], "top": [512, 256], "sparse": True},
                "cap": 10_200_000,
            },
        ),
    }
    recipes: ClassVar[Mapping[str, Mapping[str, Recipe]]] = {
        "paper": {
            "ngplus-paper": Recipe({"lr": 0.015, "damping": 1.0, "update_every": 1000}),
            "adagrad": Recipe({"lr": 0.01}),
            "sgd": Recipe({"lr": 0.1, "momentum": 0.0}),
        }
    }

    def open(self, preset: Preset, data: Path | None) -> CriteoTask:
        return CriteoTask(read(folder(self.name, data, HELP), preset.options.get("rows")), preset)
