"""Layers of torch_geometric: its Linear has the rule of nn.Linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref

geometric = pytest.importorskip("torch_geometric.nn")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = geometric.GCNConv(4, 6), geometric.Linear(6, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x, edges).tanh())
        return out


def graphs() -> tuple[Tensor, Tensor, Tensor]:
    """Three rings, of 4, 3 and 5 nodes."""
    sizes = torch.tensor([4, 3, 5])
    starts = sizes.cumsum(0) - sizes
    rings = [torch.stack([torch.arange(k), (torch.arange(k) + 1) % k]) + s for k, s in zip(sizes, starts, strict=True)]
    return torch.randn(12, 4), torch.cat(rings, dim=1), torch.arange(3).repeat_interleave(sizes)


def test_linear_has_the_cheap_forms(double: None) -> None:
    model, x = (
        nn.Sequential(geometric.Linear(30, 40), nn.Tanh(), geometric.Linear(40, 2, bias=False)),
        torch.randn(6, 30),
    )
    optimizer = ngplus.NGPlus(model, lr=0.0, solver="dense")
    model(x).square().mean().backward()
    optimizer.step()
    for row in optimizer.plan():
        assert (row.source, row.form) == ("sample", "rank-one")
        own = [dict(model.named_parameters())[name] for name in row.parameters]
        grads = [torch.autograd.grad(model(one[None]).square().mean(), own) for one in x]
        wanted = ref.gfim(torch.stack([ref.rows(*each) for each in grads]), row.side)
        assert ref.relative_error(optimizer.curvature(row.name).matrix, wanted[0]) < 1e-12


def test_graphs_as_samples(double: None) -> None:
    model, (x, edges, graph) = Net(), graphs()
    optimizer = ngplus.NGPlus(model, lr=0.0, loss_reduction="sum", sample_index=lambda x, edges: graph)
    model(x, edges).square().sum().backward()
    optimizer.step()
    for name in ("conv.lin.weight", "head.weight"):
        row = optimizer.plan()[name]
        assert row.source == "sample"
        own = [dict(model.named_parameters())[each] for each in row.parameters]
        grads = []
        for i in range(3):
            nodes, between = graph == i, graph[edges[0]] == i
            alone = model(x[nodes], edges[:, between] - int(nodes.nonzero()[0]))
            grads.append(torch.autograd.grad(alone.square().sum(), own))
        wanted = ref.gfim(torch.stack([ref.rows(*each) for each in grads]), row.side)
        assert ref.relative_error(optimizer.curvature(name).matrix, wanted[0]) < 1e-12


class ReadDirectly(nn.Module):
    """Some layers of torch_geometric read the weight of their Linear, and do not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = geometric.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin(x) + x.flip(1) @ self.lin.weight.t()
        return out


def test_a_weight_that_is_read_directly_has_mini_batch_curvature() -> None:
    model = ReadDirectly()
    optimizer = ngplus.NGPlus(model)
    model(torch.randn(5, 4)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"lin\.weight"):
        optimizer.step()
    assert optimizer.plan()["lin.weight"].source == "batch"


@pytest.mark.parametrize("make", [ngplus.NGPlus, ngplus.NGAdam])
@pytest.mark.parametrize("lazy", [lambda: geometric.Linear(-1, 4), lambda: nn.LazyLinear(4)])
def test_lazy_layers_are_called_first(make: Any, lazy: Any) -> None:
    model = nn.Sequential(lazy(), nn.Tanh())
    with pytest.raises(ValueError, match="call the model with a batch before you create the optimizer"):
        make(model)
    model(torch.randn(5, 3))
    optimizer = make(model)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    assert optimizer.plan()["0.weight"].shape[0] == 4


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("outputs", [4, 3])  # as many as inputs, and fewer
def test_a_weight_for_each_type_of_row_has_mini_batch_curvature(is_sorted: bool, outputs: int) -> None:
    """HeteroLinear takes the rows of each type apart by their values, which vmap does not support."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.typed, self.head = geometric.HeteroLinear(4, outputs, 3, is_sorted=is_sorted), nn.Linear(outputs, 2)

        def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
            out: Tensor = self.head(self.typed(x, kinds).tanh())
            return out

    model, kinds = Typed(), torch.tensor([0, 0, 1, 1, 2, 2, 2])
    optimizer = ngplus.NGPlus(model)
    model(torch.randn(7, 4), kinds).square().mean().backward()
    with pytest.warns(UserWarning, match=r"typed\.weight"):
        optimizer.step()
    for row in optimizer.plan():
        if row.name.startswith("typed"):
            assert row.source == "batch"
            assert row.note.startswith("vmap does not apply to its module")
