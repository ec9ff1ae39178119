"""DLRM: embeddings of categories and an MLP of numbers, their dot products, and an MLP of those.

M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(sizes: Sequence[int], last_relu: bool) -> nn.Sequential:
    """Linear layers with ReLU between them; weights from N(0, 2 / (in + out)), biases from N(0, 1 / out)."""
    layers: list[nn.Module] = []
    for k, (n, m) in enumerate(pairwise(sizes)):
        linear = nn.Linear(n, m)
        nn.init.normal_(linear.weight, std=(2 / (m + n)) ** 0.5)
        nn.init.normal_(linear.bias, std=(1 / m) ** 0.5)
        layers.append(linear)
        if last_relu or k < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """``rows`` are the sizes of the tables. ``bottom`` and ``top`` are the widths of the MLPs' hidden layers; the
    bottom one ends with the embeddings' width ``dim``, the top one with the logit of a click."""

    def __init__(
        self, rows: Sequence[int], dense: int, dim: int, bottom: Sequence[int], top: Sequence[int], sparse: bool = False
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=sparse) for n in rows)
        for table, n in zip(self.tables, rows, strict=True):
            assert isinstance(table, nn.EmbeddingBag)
            nn.init.uniform_(table.weight, -(n**-0.5), n**-0.5)
        self.bottom = mlp([dense, *bottom, dim], last_relu=True)
        vectors = len(rows) + 1
        self.top = mlp([dim + vectors * (vectors - 1) // 2, *top, 1], last_relu=False)
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Numbers [batch, dense] and categories [batch, tables] to logits [batch]."""
        x = self.bottom(dense)
        looked_up = [table(categories[:, k : k + 1]) for k, table in enumerate(self.tables)]
        vectors = torch.stack([x, *looked_up], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], dim=1)).squeeze(1)
