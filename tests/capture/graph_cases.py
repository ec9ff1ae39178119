"""Graphs of unlike sizes, a network on their nodes and edges, and its training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ngplus

SIZES = (3, 1, 5, 2)  # nodes of each graph
SAMPLES = len(SIZES)


class GraphNet(nn.Module):
    """A table of kinds, a filter for each edge, layers on nodes, and one on graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, 4)
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.filter = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
        self.last = nn.Linear(6, 2)
        self.out = nn.Linear(2, 1)
        self.again = False

    def forward(self, kinds: Tensor, edges: Tensor, features: Tensor, graph: Tensor, graphs: int) -> Tensor:
        h = self.norm(torch.tanh(self.first(self.kinds(kinds))))
        filters = checkpoint(self.filter, features, use_reentrant=False) if self.again else self.filter(features)
        h = h.index_add(0, edges[1], filters * h[edges[0]])
        return self.out(h.new_zeros(graphs, 2).index_add(0, graph, torch.tanh(self.last(h))))[:, 0]

    @staticmethod
    def index(kinds: Tensor, edges: Tensor, features: Tensor, graph: Tensor, graphs: int) -> Any:
        return graph, graph[edges[1]]


def graphs(shuffled: bool) -> tuple[Any, ...]:
    """All pairs of the nodes of each graph, but for the one that has a single node, which has no edge."""
    graph = torch.repeat_interleave(torch.arange(SAMPLES), torch.tensor(SIZES))
    if shuffled:
        graph = graph[torch.randperm(len(graph))]
    pairs = ((graph[:, None] == graph) & ~torch.eye(len(graph), dtype=torch.bool)).nonzero().T
    if shuffled:
        pairs = pairs[:, torch.randperm(pairs.shape[1])]
    return torch.randint(5, graph.shape), pairs, torch.randn(pairs.shape[1], 3), graph, SAMPLES


def train(model: nn.Module, batches: list[tuple[Any, ...]], steps: int, **options: Any) -> ngplus.NGPlus:
    """``steps`` steps, each of the mean over all graphs of these batches."""
    optimizer = ngplus.NGPlus(model, sample_index=GraphNet.index, update_every=2, **options)
    graphs = sum(inputs[-1] for inputs in batches)
    for _ in range(steps):
        optimizer.zero_grad()
        for inputs in batches:
            (model(*inputs).square().sum() / graphs).backward()
        optimizer.step()
    return optimizer


def together(*batches: tuple[Any, ...]) -> tuple[Any, ...]:
    """Several batches of graphs as one."""
    kinds, edges, features, graph, count = zip(*batches, strict=True)
    nodes = torch.tensor([0, *(len(k) for k in kinds)]).cumsum(0)
    before = torch.tensor([0, *count]).cumsum(0)
    shifted = [e + n for e, n in zip(edges, nodes[:-1], strict=True)]
    own = [g + b for g, b in zip(graph, before[:-1], strict=True)]
    return torch.cat(kinds), torch.cat(shifted, 1), torch.cat(features), torch.cat(own), int(before[-1])
