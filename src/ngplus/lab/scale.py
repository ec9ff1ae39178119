"""Models too large for one machine, for ``ngplus plan --ranks``: made on the meta device, so that nothing is allocated.

Each function gives a model and the inputs of one rank's batch; a forward pass on the meta device tells how many
positions each layer sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Inputs = tuple[Tensor, ...]


def resnet50() -> tuple[nn.Module, Inputs]:
    """ResNet-50 for ImageNet, 32 images of 224 pixels a rank."""
    from ngplus.lab.workloads.resnet import resnet

    return resnet(1000), (torch.empty(32, 3, 224, 224),)


class _Block(nn.Module):
    """A decoder's block: attention and a feed-forward part, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_feed_forward(x))))


class _Decoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def transformer_1b3() -> tuple[nn.Module, Inputs]:
    """A Transformer of the size of GPT-3 XL, 1.3 billion parameters; 4 sequences of 2,048 tokens a rank."""
    return _Decoder(50257, 2048, 2048, 16, 24), (torch.zeros(4, 2048, dtype=torch.long),)


def dlrm_10m() -> tuple[nn.Module, Inputs]:
    """DLRM with one table of 10 million rows and 25 of 100,000, sparse gradients; 2,048 clicks a rank."""
    from ngplus.lab.workloads.dlrm import DLRM

    model = DLRM([10_000_000] + [100_000] * 25, 13, 64, [512, 256], [512, 256], sparse=True)
    return model, (torch.empty(2048, 13), torch.zeros(2048, 26, dtype=torch.long))


def positions(model: nn.Module, inputs: Inputs) -> dict[str, int]:
    """Positions a sample by the name of each layer's weight, a shared one's first name, from one forward pass."""
    names = {weight: name for name, weight in model.named_parameters()}
    found: dict[str, int] = {}
    handles = []
    batch = len(inputs[0])
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            continue

        def note(module: nn.Module, args: Any, output: Tensor, key: str = names[weight]) -> None:
            features = output.shape[1] if isinstance(module, nn.modules.conv._ConvNd) else output.shape[-1]
            found[key] = max(1, output.numel() // (batch * features))

        handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return found
