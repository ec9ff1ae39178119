"""scikit-learn's digits with a small convolutional network. The data is in scikit-learn: nothing to download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ngplus.lab.workloads.base import Preset, Task, Workload
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating

VALIDATION = 500


class Images(NamedTuple):
    pixels: Tensor  # [count, 1, 8, 8], in [0, 1]
    labels: Tensor

    def on(self, device: torch.device) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device))


def load_images() -> tuple[Images, Images]:
    """1,297 images to train on and 500 to evaluate on, always the same ones."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[VALIDATION:], order[:VALIDATION]
    return Images(pixels[train], labels[train]), Images(pixels[validation], labels[validation])


class DigitsTask(Task):
    def __init__(self, preset: Preset) -> None:
        self.train, self.validation = load_images()
        self.batch_size = preset.batch_size
        self.width = int(preset.options.get("width", 16))

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def batch(self, seed: int, step: int) -> Images:
        index = batch_index(len(self.train.labels), self.batch_size, seed, step)
        return Images(self.train.pixels[index], self.train.labels[index])

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        pixels, labels = batch.on(device_of(model))
        return F.cross_entropy(model(pixels), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        pixels, labels = self.validation.on(device_of(model))
        with evaluating(model):
            logits = model(pixels)
        right = (logits.argmax(1) == labels).double().mean()
        return {"loss": F.cross_entropy(logits, labels).item(), "accuracy": right.item()}


class Digits(Workload):
    name = "digits"
    title = "Digits, small CNN"
    measure = "accuracy"
    higher_is_better = True
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(steps=200, batch_size=64, evaluate_every=5, target=0.97, warmup=5, options={"width": 16}),
        # The paper has no digits; this is the same network, wider and trained for longer.
        "paper": Preset(steps=2000, batch_size=64, evaluate_every=20, target=0.985, warmup=50, options={"width": 64}),
    }

    def open(self, preset: Preset, data: Path | None) -> DigitsTask:
        return DigitsTask(preset)
