"""Modules for the cases of layers: tied, shared and unknown ones, and layouts of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EvalNorm(nn.Module):
    """A norm layer that uses running statistics in a model that trains, as in fine-tuning."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Attention(nn.Module):
    """Attention whose own inputs are batch first; inside, the batch lies where ``batch_first`` says."""

    def __init__(self, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None) -> Tensor:
        def turn(x: Tensor) -> Tensor:
            return x if self.a.batch_first else x.transpose(0, 1)

        q = turn(query)
        k = q if key is None else turn(key)
        v = k if value is None else turn(value)
        return turn(self.a(q, k, v)[0])


class Turned(nn.Module):
    """[batch, length, features] outside, [length, batch, features] inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *x: Tensor) -> Tensor:
        return self.inner(*(t.transpose(0, 1) for t in x)).transpose(0, 1)


class Tied(nn.Module):
    """An embedding and an output layer that share their weight."""

    def __init__(self, bias: bool, vocabulary: int = 9) -> None:
        super().__init__()
        self.e, self.l = nn.Embedding(vocabulary, 4), nn.Linear(4, 4)
        self.h = nn.Linear(4, vocabulary, bias=bias)
        self.h.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.l(self.e(x))))


class Twice(nn.Module):
    """Modules that are called two times for the same samples, with an in-place activation in between."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.n(torch.tanh(self.l(self.n(torch.relu_(self.l(x) + 1.0)))))


class SharedConv(nn.Module):
    """One convolution at two places of the network, on images of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.c(x)))


class Flattened(nn.Module):
    """A layer that sees k rows for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.n = nn.Linear(4, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.l(x.flatten(0, 1))).unflatten(0, x.shape[:2])


class Fields(nn.Module):
    """Several bags of one table for each sample, side by side."""

    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode=mode, **options)

    def forward(self, index: Tensor) -> Tensor:
        return self.bag(index.flatten(0, 1)).view(len(index), -1)


class Positions(nn.Module):
    """A position embedding that is looked up once, with an index of shape [1, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.t, self.l = nn.Embedding(6, 3), nn.Embedding(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(torch.tanh(self.t(x) + self.p(torch.arange(x.shape[1])[None])))


class Unknown(nn.Module):
    """A module that no rule knows: a scale, and a weight with its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.weight, self.bias = nn.Parameter(torch.rand(3, 4)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        return F.linear(torch.tanh(x * self.scale) ** power, self.weight, self.bias)


class Scalar(nn.Module):
    """A parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.s)


def residual_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5)
    )


class Unrolled(nn.Module):
    """A recurrent cell, called step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0])]
        for t in range(x.shape[1]):
            states.append(self.cell(x[:, t], states[-1]))
        return torch.stack(states[1:], dim=1)
