"""criteo: its reader, its ranks and the DLRM, against plain versions."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data import (
    criteo_rows,
    make_criteo,
    open_tiny,
)
from torch import Tensor, nn

import ngplus
from ngplus.lab.workloads import criteo
from ngplus.lab.workloads.base import DataError
from ngplus.lab.workloads.dlrm import DLRM

pytestmark = pytest.mark.usefixtures("one_thread")


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
