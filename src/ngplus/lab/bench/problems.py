"""The models of the benchmark, each with one fixed batch of random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Problem:
    """``model`` makes the model anew, with the same weights each time. ``loss`` is that of its batch,
    ``small_loss`` that of a batch that takes next to no memory."""

    title: str
    model: Callable[[], nn.Module]
    loss: Loss
    small_loss: Loss


def resnet(quick: bool = False, batch: int = 32, pixels: int = 224) -> Problem:
    """ResNet-50 v1.5 with 1,000 classes, images of 224 pixels; the quick one is 14 layers thin."""
    from ngplus.lab.workloads.resnet import resnet as make

    config: dict[str, Any] = {}
    if quick:
        batch, pixels = 4, 32
        config = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 128], "embedding_size": 16}
    classes = 10 if quick else 1000

    def loss(count: int, size: int) -> Loss:
        images, labels = torch.randn(count, 3, size, size), torch.randint(classes, (count,))
        return lambda model: F.cross_entropy(model(pixel_values=images).logits, labels)

    torch.manual_seed(1)
    title = "a thin ResNet" if quick else f"ResNet-50, {pixels} px, batch {batch}"
    return Problem(title, _seeded(lambda: make(classes, **config)), loss(batch, pixels), loss(2, 64))


class LanguageModel(nn.Module):
    """torch's TransformerEncoder between an embedding and a projection to the vocabulary."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, max(width // 64, 1), 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return out


def transformer(quick: bool = False, batch: int = 32) -> Problem:
    """6 layers, d 512, feed-forward 2,048, 64 tokens, a vocabulary of 8,192, no dropout; loss over all tokens."""
    vocabulary, width, layers, length = (50, 32, 2, 8) if quick else (8192, 512, 6, 64)
    batch = 4 if quick else batch

    def loss(count: int) -> Loss:
        tokens, labels = torch.randint(vocabulary, (2, count, length))
        return lambda model: F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    torch.manual_seed(1)
    title = f"{layers}-layer Transformer, d {width}, {length} tokens, batch {batch}"
    make = _seeded(lambda: LanguageModel(vocabulary, width, layers))
    return Problem(title, make, loss(batch), loss(1))


def mlp(quick: bool = False, batch: int = 256) -> Problem:
    """Four ReLU layers 2,048 wide and ten classes."""
    width, batch = (32, 16) if quick else (2048, batch)

    def make() -> nn.Module:
        hidden = chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(4))
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    def loss(count: int) -> Loss:
        x, labels = torch.randn(count, width), torch.randint(10, (count,))
        return lambda model: F.cross_entropy(model(x), labels)

    torch.manual_seed(1)
    return Problem(f"MLP {width:,} wide, batch {batch}", _seeded(make), loss(batch), loss(1))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return seeded


PROBLEMS: dict[str, Callable[[bool], Problem]] = {"resnet": resnet, "transformer": transformer, "mlp": mlp}
