"""A deep tanh autoencoder on scikit-learn's digits: a classic test of second-order methods, without a download."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ngplus.lab.workloads.base import Preset, Task, Workload
from ngplus.lab.workloads.digits import load_images
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating, generator, random_crops


class AutoencoderTask(Task):
    """The loss is the cross-entropy of an image's pixels, summed over them, less the entropy of the image itself.

    Grey pixels have an entropy that no reconstruction gets below; without it, 0 is a perfect one.
    """

    def __init__(self, preset: Preset) -> None:
        train, validation = load_images()
        self.train, self.validation = train.pixels.flatten(1), validation.pixels.flatten(1)
        self.batch_size = preset.batch_size
        self.shift = int(preset.options.get("shift", 0))
        self.widths = [int(width) for width in preset.options["widths"]]

    def model(self) -> nn.Module:
        widths = [self.train.shape[1], *self.widths]
        sizes = [*widths, *widths[-2::-1]]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layer = nn.Linear(before, after)
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def batch(self, seed: int, step: int) -> Tensor:
        """With the option ``shift``, each image is moved by up to so many pixels."""
        images = self.train[batch_index(len(self.train), self.batch_size, seed, step)]
        if self.shift == 0:
            return images
        return random_crops(images.view(-1, 1, 8, 8), self.shift, generator(seed, step, 1)).flatten(1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        images = batch.to(device_of(model))
        return self._divergence(model(images), images)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with evaluating(model):
            return {"loss": self.loss(model, self.validation).item()}

    def _divergence(self, logits: Tensor, images: Tensor) -> Tensor:
        cross = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
        entropy = -(torch.xlogy(images, images) + torch.xlogy(1 - images, 1 - images)).sum()
        return (cross - entropy) / len(images)


class Autoencoder(Workload):
    name = "autoencoder"
    title = "Digits, deep tanh autoencoder"
    measure = "loss"
    higher_is_better = False
    optional: ClassVar[Mapping[str, Any]] = {"shift": 0}
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(
            steps=400,
            batch_size=128,
            evaluate_every=10,
            target=4.0,
            warmup=10,
            options={"widths": [256, 128, 64, 32, 16]},
        ),
        # The MNIST autoencoder of the literature, on digits. Without the shifts it learns the images by heart.
        "standard": Preset(
            steps=1_000,
            batch_size=128,
            evaluate_every=25,
            target=1.244,
            warmup=50,
            decay=1e-4,
            options={"widths": [1000, 500, 250, 30], "shift": 1},
        ),
        # The paper has no autoencoder; this is the size that the MNIST one has in the literature.
        "paper": Preset(
            steps=4000,
            batch_size=256,
            evaluate_every=40,
            target=2.5,
            warmup=50,
            options={"widths": [1000, 500, 250, 30]},
        ),
    }

    def open(self, preset: Preset, data: Path | None) -> AutoencoderTask:
        return AutoencoderTask(preset)
