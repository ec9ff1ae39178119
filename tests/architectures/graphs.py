"""Graph networks of torch_geometric, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as gnn
from torch import Tensor, nn

from architectures.cases import Case, N, architecture, prepared

LIBRARY = "torch_geometric"
NODES, EDGES, FEATURES = [3, 6, 4, 7, 3], [8, 15, 11, 20, 9], 4
NODES_MIX = "its nodes exchange messages"


def graphs() -> list[dict[str, Tensor]]:
    """One graph for each sample, as x, edge_index and batch."""
    generator, made = torch.Generator().manual_seed(1), []
    for nodes, edges in zip(NODES, EDGES, strict=True):
        x = torch.randn(nodes, FEATURES, generator=generator, dtype=torch.float64)
        source = torch.randint(nodes, (edges,), generator=generator)
        edge_index = torch.stack(
            [source, (source + 1 + torch.randint(nodes - 1, (edges,), generator=generator)) % nodes]
        )
        made.append({"x": x, "edge_index": edge_index, "batch": torch.zeros(nodes, dtype=torch.long)})
    return made


def joined(made: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    starts = torch.tensor([0, *NODES]).cumsum(0)
    edges = torch.cat([one["edge_index"] + start for one, start in zip(made, starts, strict=False)], 1)
    batch = torch.repeat_interleave(torch.arange(N), torch.tensor(NODES))
    return {"x": torch.cat([one["x"] for one in made]), "edge_index": edges, "batch": batch}


def by_graph(x: Tensor, edge_index: Tensor, batch: Tensor) -> list[Tensor]:
    """A ``sample_index``: the graph of each node, and of each edge."""
    return [batch, batch[edge_index[0]]]


class Pooled(nn.Module):
    """Two layers of messages, the mean over a graph's nodes, and a linear layer."""

    def __init__(self, make: Callable[[int, int], nn.Module], width: int = 8) -> None:
        super().__init__()
        self.first, self.second = make(FEATURES, width), make(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        x = self.second(x, edge_index).tanh()
        return self.head(gnn.global_mean_pool(x, batch))


class Nodes(Pooled):
    """The same with an output for each node."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh()
        return self.head(self.second(x, edge_index).tanh())


def _case(model: nn.Module, **options: Any) -> Case:
    made = graphs()
    return Case(prepared(model), joined(made), made, lambda out: [out], options)


def _gin(inputs: int, outputs: int) -> nn.Module:
    return gnn.GINConv(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs)))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": gnn.GCNConv,
    "GAT": lambda a, b: gnn.GATConv(a, b // 2, heads=2),
    "GIN": _gin,
    "GraphSAGE": gnn.SAGEConv,
    "Graph transformer": lambda a, b: gnn.TransformerConv(a, b // 2, heads=2),
}
for _name, _make in LAYERS.items():
    architecture(f"{_name}, sample_index", LIBRARY)(lambda make=_make: _case(Pooled(make), sample_index=by_graph))
    architecture(_name, LIBRARY)(lambda make=_make: _case(Pooled(make)))
architecture("GCN, an output for each node", LIBRARY, mixes=NODES_MIX)(lambda: _case(Nodes(gnn.GCNConv)))


class _SchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.schnet = gnn.SchNet(hidden_channels=8, num_filters=8, num_interactions=2, num_gaussians=6, cutoff=5.0)
        self.schnet.interaction_graph = _AllPairs()

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        return self.schnet(z, pos, batch)


class _AllPairs(nn.Module):
    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return _all_pairs(pos, batch)


def _all_pairs(pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """In place of the neighbour list, which needs a library of its own."""
    edge_index = ((batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)).nonzero().T
    return edge_index, (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=1)


def _molecules(**options: Any) -> Case:
    generator, made = torch.Generator().manual_seed(1), []
    for atoms in NODES:
        z = torch.randint(1, 9, (atoms,), generator=generator)
        pos = torch.randn(atoms, 3, generator=generator, dtype=torch.float64)
        made.append({"z": z, "pos": pos, "batch": torch.zeros(atoms, dtype=torch.long)})
    whole = {name: torch.cat([one[name] for one in made]) for name in ("z", "pos")}
    whole["batch"] = torch.repeat_interleave(torch.arange(N), torch.tensor(NODES))
    return Case(prepared(_SchNet()), whole, made, lambda out: [out], options)


def by_molecule(z: Tensor, pos: Tensor, batch: Tensor) -> list[Tensor]:
    return [batch, batch[_all_pairs(pos, batch)[0][0]]]


architecture("SchNet, sample_index", LIBRARY)(lambda: _molecules(sample_index=by_molecule))
architecture("SchNet", LIBRARY)(_molecules)
