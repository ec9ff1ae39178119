"""multi30k and iwslt14: sub-words, batches of tokens and translation, against plain versions."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_data import (
    ENGLISH,
    GERMAN,
    make_iwslt14,
    make_multi30k,
    open_tiny,
)

from ngplus.lab.workloads import translation
from ngplus.lab.workloads.base import DataError

pytestmark = pytest.mark.usefixtures("one_thread")


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
