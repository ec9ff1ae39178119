"""ResNets of the transformers library, and the task of classifying images with them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer

from ngplus.lab.workloads.base import Task
from ngplus.lab.workloads.sampling import device_of, evaluating


def resnet(classes: int, *, stem_stride: int | None = None, **config: Any) -> nn.Module:
    """A ResNet with new weights. With a ``stem_stride`` its stem is 3 x 3 without pooling, as 32-pixel images need.

    Bottleneck layers have their stride in the 3 x 3 convolution, which is what v1.5 means.
    """
    settings = ResNetConfig(**{"num_labels": classes, "downsample_in_bottleneck": False, **config})
    make: Any = ResNetForImageClassification  # its constructor has no types
    model = make(settings)
    if stem_stride is not None:
        embedder = model.resnet.embedder
        embedder.embedder = ResNetConvLayer(3, settings.embedding_size, kernel_size=3, stride=stem_stride)
        nn.init.kaiming_normal_(embedder.embedder.convolution.weight, mode="fan_out", nonlinearity="relu")
        embedder.pooler = nn.Identity()
    return model


# what ResNets and ImageTask read beside what the presets have
OPTIONAL: dict[str, Any] = {
    "model": {
        "stem_stride": None,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    },
    "label_smoothing": 0.0,
    "micro_batch": None,
}


class Images(NamedTuple):
    """Images as bytes, [batch, 3, height, width], and their classes."""

    pixels: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        return len(self.labels)


class ImageTask(Task):
    """Classification by cross-entropy; the measure is top-1 accuracy."""

    def __init__(self, classes: int, options: dict[str, Any], mean: Tensor, std: Tensor) -> None:
        self.classes = classes
        self.config = options["model"]
        self.smoothing = float(options.get("label_smoothing", 0.0))
        self.micro_batch: int | None = options.get("micro_batch")
        self._mean, self._std = mean[:, None, None], std[:, None, None]

    def model(self) -> nn.Module:
        return resnet(self.classes, **self.config)

    def logits(self, model: nn.Module, pixels: Tensor) -> Tensor:
        device = device_of(model)
        x = (pixels.to(device).float() / 255 - self._mean.to(device)) / self._std.to(device)
        return model(pixel_values=x).logits

    def loss(self, model: nn.Module, batch: Images) -> Tensor:
        logits = self.logits(model, batch.pixels)
        return F.cross_entropy(logits, batch.labels.to(logits.device), label_smoothing=self.smoothing)

    def split(self, batch: Images) -> Iterator[tuple[float, Images]]:
        """Micro-batches, where the option ``micro_batch`` asks for them."""
        size = self.micro_batch or batch.size
        for start in range(0, batch.size, size):
            part = Images(batch.pixels[start : start + size], batch.labels[start : start + size])
            yield part.size / batch.size, part

    @abstractmethod
    def validation(self) -> Iterator[Images]:
        """The validation images, in batches."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        loss = right = 0.0
        count = 0
        with evaluating(model):
            for batch in self.validation():
                logits = self.logits(model, batch.pixels)
                labels = batch.labels.to(logits.device)
                loss += float(F.cross_entropy(logits, labels, reduction="sum"))
                right += float((logits.argmax(1) == labels).sum())
                count += batch.size
        return {"loss": loss / count, "accuracy": right / count}


IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406])
IMAGENET_STD = torch.tensor([0.229, 0.224, 0.225])
