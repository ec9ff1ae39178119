"""Tiny Shakespeare, character by character, with a small GPT: nanoGPT's recipe for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ngplus.lab.workloads.base import Preset, Task, Workload
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.gpt import GPT
from ngplus.lab.workloads.sampling import device_of, evaluating, generator

HELP = """Get input.txt (1.1 MB) from https://github.com/karpathy/char-rnn (data/tinyshakespeare) and put it at
  DATA/shakespeare/input.txt      (or input.txt.gz)"""

TRAINING_SHARE = 0.9  # the first part of the text


class Characters(NamedTuple):
    """Sequences of characters, and the same sequences one character later: [batch, context] each."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Characters:
        return Characters(self.inputs.to(device), self.targets.to(device))


def read(source: Folder) -> Arrays:
    """The text as numbers of its characters in alphabetical order, and the number of different characters."""
    path = source.require("input.txt", "input.txt.gz")

    def make() -> Arrays:
        text = source.text(path)
        known = sorted(set(text))
        number = {character: k for k, character in enumerate(known)}
        return {"text": np.array([number[c] for c in text], np.int64), "vocabulary": np.array(len(known))}

    return cached([path], "shakespeare", None, make)


class ShakespeareTask(Task):
    """``evaluate`` gives the mean negative log-likelihood of a character, in nats, on evenly spread sequences of the
    validation text; ``final`` that of the whole validation text."""

    def __init__(self, text: Tensor, vocabulary: int, preset: Preset) -> None:
        self.options, self.vocabulary = preset.options, vocabulary
        self.batch_size, self.context = preset.batch_size, int(preset.options["model"]["context"])
        cut = int(TRAINING_SHARE * len(text))
        self.train = text[:cut]
        starts = torch.arange(0, len(text) - cut - self.context, self.context)
        self.validation = self._sequences(text[cut:], starts)
        self.max_grad_norm = float(preset.options["max_grad_norm"])

    def _sequences(self, text: Tensor, starts: Tensor) -> Characters:
        index = starts[:, None] + torch.arange(self.context)
        return Characters(text[index], text[index + 1])

    def model(self) -> nn.Module:
        return GPT(self.vocabulary, **self.options["model"])

    def batch(self, seed: int, step: int) -> Characters:
        """Sequences that begin anywhere in the training text."""
        last = len(self.train) - self.context
        return self._sequences(self.train, torch.randint(last, (self.batch_size,), generator=generator(seed, step)))

    def loss(self, model: nn.Module, batch: Characters) -> Tensor:
        return self._loss(model, batch, "mean")

    def _loss(self, model: nn.Module, batch: Characters, reduction: str) -> Tensor:
        inputs, targets = batch.to(device_of(model))
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)

    def _mean_loss(self, model: nn.Module, sequences: Characters) -> float:
        total = 0.0
        with evaluating(model):
            for inputs, targets in zip(sequences.inputs.split(64), sequences.targets.split(64), strict=True):
                total += float(self._loss(model, Characters(inputs, targets), "sum"))
        return total / sequences.targets.numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        count = min(int(self.options["validation"]), len(self.validation.inputs))
        index = torch.arange(count) * len(self.validation.inputs) // count
        part = Characters(self.validation.inputs[index], self.validation.targets[index])
        return {"loss": self._mean_loss(model, part)}

    def final(self, model: nn.Module) -> dict[str, float]:
        return {"whole_loss": self._mean_loss(model, self.validation)}


class Shakespeare(Workload):
    name = "shakespeare"
    title = "Tiny Shakespeare, GPT"
    measure = "loss"  # nats for each validation character
    higher_is_better = False
    optional: ClassVar[Mapping[str, Any]] = {"model": {"dropout": 0.0, "bias": True}}
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(
            steps=200,
            batch_size=12,
            evaluate_every=20,
            target=2.2,
            warmup=20,
            options={
                "model": {"context": 32, "width": 64, "heads": 4, "depth": 2, "bias": False},
                "max_grad_norm": 1.0,
                "validation": 64,
            },
        ),
        # nanoGPT's settings for a CPU, with half of its iterations
        "standard": Preset(
            steps=1_000,
            batch_size=12,
            evaluate_every=25,
            target=1.955,
            warmup=100,
            decay=1e-4,
            options={
                "model": {"context": 64, "width": 128, "heads": 4, "depth": 4, "bias": False},
                "max_grad_norm": 1.0,
                "validation": 300,
            },
        ),
        # nanoGPT's settings for one GPU; the paper has no such task
        "paper": Preset(
            steps=5_000,
            batch_size=64,
            evaluate_every=250,
            target=1.48,
            warmup=100,
            options={
                "model": {"context": 256, "width": 384, "heads": 6, "depth": 6, "dropout": 0.2, "bias": False},
                "max_grad_norm": 1.0,
                "validation": 400,
            },
        ),
    }

    def open(self, preset: Preset, data: Path | None) -> ShakespeareTask:
        arrays = read(folder(self.name, data, HELP))
        text = torch.from_numpy(arrays["text"])
        context = int(preset.options["model"]["context"])
        if len(text) * (1 - TRAINING_SHARE) < 2 * context:
            source = folder(self.name, data, HELP)
            raise source.damaged(source.root, f"{len(text)} characters are too few for a context of {context}")
        return ShakespeareTask(text, int(arrays["vocabulary"]), preset)
