"""When ``sample_index`` is asked, what it may return, and what users are told of it; micro-batches and checkpoints."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from graph_cases import SAMPLES, GraphNet, graphs, together, train
from torch import Tensor, nn

import ngplus
from ngplus.capture import reasons
from ngplus.capture.sample_index import parse_sample_index

pytestmark = pytest.mark.usefixtures("double")


def test_graphs_without_edges_are_samples_of_the_edges_layers() -> None:
    """A micro-batch in which no graph has an edge counts like one in which some have."""
    first = graphs(False)
    lone = torch.tensor([1, 3]), torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 3), torch.tensor([0, 1]), 2
    one, other = GraphNet(), GraphNet()
    other.load_state_dict(one.state_dict())
    options: dict[str, Any] = {"curvature": "sample"}
    optimizers = train(one, [first, lone], 1, **options), train(other, [together(first, lone)], 1, **options)
    for name in ("filter.0.weight", "first.weight"):
        a, b = (optimizer.curvature(name).matrix for optimizer in optimizers)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_micro_batches_count_together() -> None:
    first, second = graphs(False), graphs(True)
    one, other = GraphNet(), GraphNet()
    other.load_state_dict(one.state_dict())
    optimizers = train(one, [first, second], 4), train(other, [together(first, second)], 4)
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9, msg=name)
    a, b = (optimizer.curvature("filter.0.weight").matrix for optimizer in optimizers)
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)


def test_checkpointed_layers_see_the_same_samples() -> None:
    inputs = graphs(True)
    one, other = GraphNet(), GraphNet()
    other.load_state_dict(one.state_dict())
    other.again = True
    optimizers = train(one, [inputs], 3), train(other, [inputs], 3)
    a, b = (optimizer.curvature("filter.2.weight").matrix for optimizer in optimizers)
    torch.testing.assert_close(a, b)


def test_it_is_asked_on_refresh_steps_alone() -> None:
    calls = []

    def index(*inputs: Any) -> Any:
        calls.append(len(inputs))
        return GraphNet.index(*inputs)

    model, inputs = GraphNet(), graphs(False)
    optimizer = ngplus.NGPlus(model, sample_index=index, update_every=3)
    for _ in range(7):
        optimizer.zero_grad()
        model(*inputs).square().mean().backward()
        optimizer.step()
    assert len(calls) == 3
    optimizer = ngplus.NGPlus(model, sample_index=index)  # whose first step is due for a refresh
    with torch.no_grad():
        model(*inputs)
    assert len(calls) == 3


def test_it_is_not_asked_in_eval_mode() -> None:
    def index(*inputs: Any) -> Any:
        raise AssertionError

    model = GraphNet().eval()
    optimizer = ngplus.NGPlus(model, sample_index=index)
    model(*graphs(False)).sum().backward()
    with pytest.raises(AssertionError):
        model.train()(*graphs(False))
    del optimizer  # without which nothing is watched


def test_an_error_in_it_is_all_that_is_said(recwarn: pytest.WarningsRecorder) -> None:
    model = GraphNet()
    optimizer = ngplus.NGPlus(model, sample_index=lambda: None)
    with pytest.raises(TypeError, match="positional"):
        model(*graphs(False))
    assert not list(recwarn)
    del optimizer


def test_it_is_told_of_once_and_only_where_no_layer_ever_had_such_rows(recwarn: pytest.WarningsRecorder) -> None:
    """A refresh of layers with other rows alone says nothing, after one that had them; gradients may be set to zero
    between the passes."""
    model, inputs = GraphNet(), graphs(False)
    out = list(model.out.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in out)]
    groups = [{"params": rest, "update_every": 6}, {"params": out, "update_every": 2}]
    optimizer = ngplus.NGPlus(groups, model=model, sample_index=GraphNet.index)
    for _ in range(5):
        loss = model(*inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not list(recwarn)


def test_rows_that_no_layer_has_are_told(recwarn: pytest.WarningsRecorder) -> None:
    model, sequence = nn.Linear(3, 2), torch.tensor([0, 0, 1, 1])
    optimizer = ngplus.NGPlus(model, sample_index=lambda x: sequence, update_every=1)
    for _ in range(2):
        loss = model(torch.randn(1, 5, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert [str(w.message)[:40] for w in recwarn] == ["No per-sample curvature for weight: samp"]


def test_a_part_of_the_model_that_is_called_by_itself_is_told() -> None:
    model, inputs = GraphNet(), graphs(False)
    optimizer = ngplus.NGPlus(model, sample_index=GraphNet.index)
    model.first(model.kinds(inputs[0])).square().mean().backward()
    with pytest.warns(UserWarning, match="A part of GraphNet was called by itself"):
        optimizer.step()


def test_a_copy_has_it_too() -> None:
    model, inputs = GraphNet(), graphs(False)
    optimizer = train(model, [inputs], 1)
    assert copy.deepcopy(optimizer)._sample_index is GraphNet.index


def test_none_is_as_if_it_were_not_given() -> None:
    model, inputs = GraphNet(), graphs(False)
    target = torch.randn(SAMPLES)
    plain = ngplus.gfim(model, nn.functional.mse_loss, inputs, target)
    given = ngplus.gfim(model, nn.functional.mse_loss, inputs, target, sample_index=lambda *inputs: None)
    torch.testing.assert_close(given["first.weight"].matrix, plain["first.weight"].matrix)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3), "float32"),
        (torch.zeros(3, 2, dtype=torch.long), r"\[3, 2\]"),
        (torch.zeros(3, dtype=torch.bool), "bool"),
        ([[0, 1]], r"\[0, 1\]"),
        (torch.tensor([0, -1]), "sample -1 .*from 0"),
        (torch.tensor([1_000_000_000_000]), "sample 1000000000000 for 1 rows .*from 0"),
        (np.zeros(3, dtype=int), "0"),
    ],
)
def test_what_is_no_index_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid sample_index: .*{message}"):
        parse_sample_index(given)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid sample_index: tensor"):
        ngplus.NGPlus(nn.Linear(3, 2), sample_index=torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not take sample_index"):
        ngplus.NGPlus([{"params": [nn.Parameter(torch.zeros(2))], "sample_index": None}], curvature="batch")


class SelfLoops(nn.Module):
    """A layer on edges with self-loops, of which the index knows nothing, beside layers on nodes, edges and graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges, self.loops = nn.Linear(3, SAMPLES), nn.Linear(3, 2), nn.Linear(SAMPLES, 2)
        self.out = nn.Linear(2, 1)

    def forward(self, nodes: Tensor, edges: Tensor, features: Tensor, graph: Tensor, graphs: int) -> Tensor:
        h = self.nodes(nodes)
        both = torch.cat([h[edges[0]], h])  # [edges + nodes, SAMPLES]: its features are as many as there are samples
        messages = torch.cat([self.edges(features), features.new_zeros(len(h), 2)]) + self.loops(torch.tanh(both))
        place = torch.cat([edges[1], torch.arange(len(h))])
        h = nodes.new_zeros(len(h), 2).index_add(0, place, torch.tanh(messages))
        return self.out(h.new_zeros(graphs, 2).index_add(0, graph, h))[:, 0]


def test_rows_without_an_entry_are_not_taken_for_samples() -> None:
    """The layer on self-loops has mini-batch curvature, told once; the others equal those of one graph at a time."""
    _, edges, features, graph, count = graphs(False)
    nodes = torch.randn(len(graph), 3)
    model, given = SelfLoops(), (nodes, edges, features, graph, count)
    optimizer = ngplus.NGPlus(model, lr=0.0, update_every=1, sample_index=GraphNet.index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.zero_grad()
            model(*given).square().mean().backward()
            optimizer.step()
    (told,) = [str(w.message) for w in caught]
    assert f"for loops.weight: {reasons.NO_SAMPLE_INDEX}: a batch dimension of {len(graph) + edges.shape[1]}" in told
    seen = {row.name: (row.source, row.seen and row.seen[0]) for row in optimizer.plan()}
    sample = ("sample", SAMPLES)
    assert seen.pop("loops.weight") == ("batch", None)
    assert seen == dict.fromkeys(["nodes.weight", "edges.weight", "out.weight"], sample)
    params = dict(model.named_parameters())
    each = []
    for i in range(SAMPLES):
        own, between = (graph == i).nonzero().flatten(), (graph[edges[0]] == i).nonzero().flatten()
        alone = (nodes[own], edges[:, between] - own[0], features[between], torch.zeros(len(own), dtype=torch.long), 1)
        each.append(torch.autograd.grad(model(*alone).square().mean(), list(params.values()), allow_unused=True))
    for name in ("nodes", "edges", "out"):
        parts = []
        for gradients in each:
            of = dict(zip(params, gradients, strict=True))
            weight, bias = of[f"{name}.weight"], of[f"{name}.bias"]
            parts.append(torch.cat([weight, bias[:, None]], 1))
        side, found = optimizer.curvature(f"{name}.weight")
        wanted = sum(g @ g.mT if side == "left" else g.mT @ g for g in parts) / SAMPLES
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_packed_rows_behind_a_dimension_of_one_are_found() -> None:
    """The rows of all samples as [1, rows, features]."""
    model = nn.Linear(3, 2)
    optimizer = ngplus.NGPlus(model, sample_index=lambda x: torch.tensor([0, 0, 1, 1, 1]))
    model(torch.randn(1, 5, 3)).square().mean().backward()
    optimizer.step()
    row = optimizer.plan()[0]
    assert (row.source, row.seen) == ("sample", (2, 3))


@pytest.mark.parametrize("loops", [False, True])
def test_a_graph_attention_layer_with_self_loops(loops: bool, recwarn: pytest.WarningsRecorder) -> None:
    """torch_geometric adds the loops inside of the layer, to the features of the edges as well."""
    geometric = pytest.importorskip("torch_geometric.nn")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = geometric.GATConv(3, 4, edge_dim=3, add_self_loops=loops)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor, edges: Tensor, features: Tensor, graph: Tensor, graphs: int) -> Tensor:
            h = torch.tanh(self.conv(x, edges, features))
            return self.out(h.new_zeros(graphs, 4).index_add(0, graph, h))

    _, edges, features, graph, count = graphs(False)
    model = Net()
    optimizer = ngplus.NGPlus(model, sample_index=GraphNet.index)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(len(graph), 3), edges, features, graph, count).square().mean().backward()
        optimizer.step()
    assert len([w for w in recwarn if "No per-sample" in str(w.message)]) == 1
    row = optimizer.plan()["conv.lin_edge.weight"]
    assert (row.source == "batch") == loops
    assert (reasons.NO_SAMPLE_INDEX in row.note) == loops
    assert optimizer.plan()["out.weight"].seen == (SAMPLES, 1)
