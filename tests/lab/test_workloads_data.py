"""The workloads on the real data that NGPLUS_DATA names: counts, known values, and a few steps of the small presets."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ngplus
from ngplus.lab import workloads

DATA = os.environ.get("NGPLUS_DATA")
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA, reason="NGPLUS_DATA names no folder"),
    pytest.mark.usefixtures("one_thread"),
]
NAMES = ("cifar10", "qm9", "materials", "multi30k", "criteo", "shakespeare")


@cache
def opened(name: str) -> Any:
    workload = workloads.get(name)
    if not (Path(DATA or "") / name).is_dir():
        pytest.skip(f"NGPLUS_DATA has no {name}")
    return workload.open(workload.presets["small"], Path(DATA or ""))


def test_cifar10() -> None:
    task = opened("cifar10")
    assert task.train.size % 10_000 == 0
    assert task.train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # of the data set's first batch
    means = task.train.pixels.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=0.01, rtol=0.0)
    # an image has smooth rows; were they cut wrongly, neighbouring pixels would have little in common
    pixels = task.train.pixels[:500].float()
    assert (pixels[..., 1:] - pixels[..., :-1]).abs().mean() < 0.2 * pixels.std() * 2
    assert (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean() < 0.2 * pixels.std() * 2


def test_shakespeare() -> None:
    task = opened("shakespeare")
    assert (len(task.train), task.vocabulary) == (1_003_854, 65)  # as nanoGPT's prepare.py prints
    assert len(task.validation.inputs) == 111_540 // task.context
    inputs, targets = task.batch(0, 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_sst2() -> None:
    task = opened("sst2")
    assert [len(part.labels) for part in (task.train, task.test)] == [6_920, 1_821]
    assert task.train.labels.sum() == 3_610  # positive ones, by the data set's statistics
    assert sum(p.numel() for p in task.model().parameters()) == 22_565_376 + 2 * 385
    # "a stirring , funny ..." as BERT's vocabulary has it
    assert task.train.tokens[0][:5].tolist() == [101, 1037, 18385, 1010, 6057]


def test_qm9() -> None:
    task = opened("qm9")
    molecules = task.structures
    assert len(molecules) == 130_831
    methane = molecules.batch(torch.tensor([0]))  # the first molecule
    assert sorted(methane.numbers.tolist()) == [1, 1, 1, 1, 6]
    assert float(methane.target) == pytest.approx(-17.17, abs=0.02)  # its atomisation energy, eV
    assert float(methane.distances.min()) == pytest.approx(1.09, abs=0.01)


def test_materials() -> None:
    task = opened("materials")
    crystals = task.structures
    assert len(crystals) == 3_938
    assert int(crystals.count.sum()) == 46_488
    arsenic = crystals.batch(torch.tensor([0]))
    assert arsenic.numbers.tolist() == [33, 33]
    assert float(arsenic.target) == pytest.approx(0.10740506)
    assert (crystals.pairs > 0).float().mean() > 0.99  # some solid gases are thinner than that
    assert bool((crystals.distances < 5.0).all())


def test_multi30k() -> None:
    task = opened("multi30k")
    assert len(task.corpus.train[0]) == 29_000
    assert len(task.corpus.val[0]) == 200  # of 1,014: the small preset looks at a part
    assert len(task.corpus.test[0]) == 1_000
    sides = task.corpus.train
    said = [task.corpus.tokenizer.decode(side[0].tolist()) for side in sides]
    assert said[0] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."
    assert said[1].startswith("Two young, White males are outside")
    assert np.mean([len(ids) for ids in sides[1]]) < 25


def test_criteo() -> None:
    task = opened("criteo")
    assert len(task.train.labels) + len(task.val.labels) == 20_000
    assert int(task.train.labels.sum() + task.val.labels.sum()) == 4_855
    assert max(task.sizes) <= 1_001


# Without sample_index, which structure an atom or a pair belongs to is not known; positions are those of all samples.
NOT_KNOWN = {
    "qm9": "embedding.weight",
    "materials": "embedding.weight",
    "shakespeare": "positions.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_small_presets_learn(name: str) -> None:
    """Both get less loss in the steps 8 to 12 than in the first four."""
    task = opened(name)
    for kind in ("adamw", "ngplus"):
        torch.manual_seed(0)
        model = task.model().train()
        if kind == "adamw":
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
        else:
            optimizer = ngplus.NGPlus(model, lr=1e-4 if name == "qm9" else 3e-3)  # SGD diverges at 3e-4
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            if kind == "ngplus" and name in NOT_KNOWN:
                warnings.filterwarnings("ignore", message=f"No per-sample curvature for {NOT_KNOWN[name]}")
            for step in range(12):
                optimizer.zero_grad()
                loss = task.loss(model, task.batch(0, step))
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        assert np.mean(losses[8:]) < np.mean(losses[:4]), kind
        if kind == "ngplus":
            sources = {row.name: row.source for row in optimizer.plan() if row.side != "none"}
            if name in NOT_KNOWN:
                assert sources[NOT_KNOWN[name]] == "batch"
            else:
                assert set(sources.values()) == {"sample"}
