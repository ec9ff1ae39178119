"""Samples with unlike numbers of rows, graphs and packed sequences: ``sample_index`` against brute force."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import SAMPLES, SIZES, GraphNet, graphs
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from ngplus.capture.layers import linear
from ngplus.capture.layers.attention import _batch
from ngplus.capture.sample_index import Ragged, parse_sample_index
from ngplus.fisher.factors import Segments
from ngplus.layers import Batch, LinearRule, NotPerSample

pytestmark = pytest.mark.usefixtures("double")


class Scaled(nn.Module):
    """A layer without a rule, for vmap."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Rows(nn.Module):
    """Any layer on the rows of the nodes, and a sum over those of each graph."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        y = torch.tanh(self.layer(x)).flatten(1).sum(1)
        return y.new_zeros(graphs).index_add(0, graph, y)

    @staticmethod
    def index(x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        return graph


def per_graph(model: nn.Module, inputs: tuple[Any, ...], target: Tensor) -> list[dict[str, Tensor]]:
    """The gradient of each graph's own part of the loss."""
    found = []
    for i in range(len(target)):
        loss = (model(*inputs)[i] - target[i]).square()
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        names = (name for name, _ in model.named_parameters())
        found.append({n: g for n, g in zip(names, grads, strict=True) if g is not None})
    return found


def check(
    model: nn.Module, inputs: tuple[Any, ...], target: Tensor, lay: Callable[..., Tensor], **options: Any
) -> None:
    """L or R of every matrix against the loop over graphs."""
    wanted = per_graph(copy.deepcopy(model), inputs, target)
    found = ngplus.gfim(model, nn.functional.mse_loss, inputs, target, sample_index=type(model).index, **options)
    for name in {name.rpartition(".")[0] for name, _ in model.named_parameters()}:
        names = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] == name]
        stack = torch.stack([lay(*(grads[n] for n in names)) for grads in wanted])
        matrix = found[names[0]].matrix
        assert ref.relative_error(matrix.reshape(-1), ref.gfim(stack, found[names[0]].side).reshape(-1)) < 1e-10, name


@pytest.mark.parametrize("many", [2**13, 0], ids=["padded", "segments"])
@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "shuffled"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_graphs_are_the_samples(side: str, shuffled: bool, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_UNPADDED_ENTRIES", many)
    torch.manual_seed(1)
    model, inputs = GraphNet(), graphs(shuffled)
    check(model, inputs, torch.randn(SAMPLES), ref.rows, side=side)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[..., Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,), ref.rows),
    "linear, several positions a row": (lambda: nn.Linear(3, 2), (4, 3), ref.rows),
    "convolution": (lambda: nn.Conv1d(3, 2, 3), (3, 5), ref.rows),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 2, 3), (3, 5), ref.transposed(1)),
    "rms norm": (lambda: nn.RMSNorm(3), (3,), ref.columns),
    "group norm": (lambda: nn.GroupNorm(3, 3), (3, 4), ref.columns),
    "instance norm": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4), ref.columns),
    "batch norm in eval": (lambda: nn.BatchNorm1d(3).eval(), (3,), ref.columns),
    "any other": (lambda: Scaled(3), (3,), ref.columns),
}
LINEAR = [
    name for name in LAYERS if name.startswith("linear")
]  # which are multiplied sample by sample if these are large


@pytest.mark.parametrize(("name", "many"), [*((name, 2**13) for name in LAYERS), *((name, 0) for name in LINEAR)])
def test_every_layer_takes_rows_of_samples(name: str, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_UNPADDED_ENTRIES", many)
    make, shape, lay = LAYERS[name]
    model = Rows(make())
    graph = torch.tensor([2, 0, 0, 1, 3, 2, 2, 3, 2, 2, 0])
    check(model, (torch.randn(len(graph), *shape), graph, SAMPLES), torch.randn(SAMPLES), lay)


class Offsets(nn.EmbeddingBag):
    """Bags of two entries each, told by where they begin."""

    def forward(self, input: Tensor, *rest: Any) -> Tensor:
        return super().forward(input.flatten(), torch.arange(0, input.numel(), 2))


@pytest.mark.parametrize("kind", [nn.EmbeddingBag, Offsets])
def test_bags_of_tables(kind: type[nn.EmbeddingBag]) -> None:
    model = Rows(kind(6, 3, mode="mean"))
    graph = torch.tensor([2, 0, 0, 1, 3, 2, 2])
    check(model, (torch.randint(6, (7, 2)), graph, SAMPLES), torch.randn(SAMPLES), ref.rows)


class Packed(nn.Module):
    """Sequences one behind the other, [1, tokens, features], or without the first dimension."""

    def __init__(self, batch_first: bool = True, flat: bool = False) -> None:
        super().__init__()
        self.first_dim, self.flat = batch_first, flat
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: Tensor, sequence: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        h = h[0] if self.flat else h if self.first_dim else h.transpose(0, 1)
        h, _ = self.attention(h, h, h, attn_mask=sequence[:, None] != sequence, need_weights=False)
        y = self.b(torch.tanh(h.reshape(x.shape[0], x.shape[1], 4)))[0, :, 0]
        return y.new_zeros(SAMPLES).index_add(0, sequence, y)

    @staticmethod
    def index(x: Tensor, sequence: Tensor) -> Tensor:
        return sequence


@pytest.mark.parametrize("many", [2**13, 0], ids=["padded", "segments"])
@pytest.mark.parametrize(
    "model", [Packed, lambda: Packed(False), lambda: Packed(flat=True)], ids=["", "second", "flat"]
)
def test_packed_sequences(model: Callable[[], Packed], many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MIN_UNPADDED_ENTRIES", many)
    sequence = torch.repeat_interleave(torch.arange(SAMPLES), torch.tensor(SIZES))
    inputs = torch.randn(1, len(sequence), 3), sequence
    check(model(), inputs, torch.randn(SAMPLES), ref.rows, batch_dim=1)


class PackedWords(nn.Module):
    """Tokens one behind the other, [1, tokens], with a table for words and one for places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(6, 3), nn.Embedding(5, 3)

    def forward(self, words: Tensor, places: Tensor, sequence: Tensor) -> Tensor:
        y = torch.tanh(self.words(words) + self.places(places))[0].sum(1)
        return y.new_zeros(SAMPLES).index_add(0, sequence, y)

    @staticmethod
    def index(words: Tensor, places: Tensor, sequence: Tensor) -> Tensor:
        return sequence


@pytest.mark.parametrize("side", ["left", "right"])
def test_tables_of_packed_sequences(side: str) -> None:
    sequence = torch.repeat_interleave(torch.arange(SAMPLES), torch.tensor(SIZES))
    places = torch.cat([torch.arange(size) for size in SIZES])[None]
    inputs = torch.randint(6, (1, len(sequence))), places, sequence
    check(PackedWords(), inputs, torch.randn(SAMPLES), ref.rows, batch_dim=1, side=side)


def test_attention_over_as_many_positions_as_there_are_rows() -> None:
    """Its batch dimension is not told of, however long its sequences are."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    batch = Batch(0, 2, parse_sample_index(torch.tensor([0, 0, 1, 1, 1])))
    with pytest.raises(NotPerSample, match="no entries for the rows of its output: a batch dimension of 3"):
        _batch(attention, torch.zeros(3, 5, 4), batch).count(3)
    assert _batch(attention, torch.zeros(3, 5, 4), batch).dim == 0
    assert _batch(attention, torch.zeros(1, 5, 4), batch).dim == 1


class Boxes(nn.Module):
    """Layers with a row for each image, and with one for each of their boxes, of which an image may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.box = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        y = torch.tanh(self.box(torch.tanh(self.image(x))[of])).sum(1)
        return y.new_zeros(len(x)).index_add(0, of, y)

    @staticmethod
    def index(x: Tensor, of: Tensor) -> Any:
        return of, torch.arange(len(x))


@pytest.mark.parametrize("of", [[0, 0, 1, 3, 3, 5, 7], [0, 0, 1, 3, 3], [2]])
def test_samples_without_rows_count(of: list[int]) -> None:
    check(Boxes(), (torch.randn(8, 3), torch.tensor(of)), torch.randn(8), ref.rows)


def test_one_row_for_each_sample_comes_first() -> None:
    """As many boxes as images: those of the images are right, and of the boxes each is a sample in this refresh."""
    model, of = Boxes(), torch.tensor([0, 0, 1, 3, 3, 3, 6, 7])
    x, target = torch.randn(8, 3), torch.randn(8)
    found = ngplus.gfim(model, nn.functional.mse_loss, (x, of), target, sample_index=Boxes.index)
    stack = torch.stack([ref.rows(g["image.weight"], g["image.bias"]) for g in per_graph(model, (x, of), target)])
    wanted = ref.gfim(stack, found["image.weight"].side)[0]
    torch.testing.assert_close(found["image.weight"].matrix, wanted)


def test_rows_that_it_does_not_tell_of() -> None:
    """Not folded into samples, though their number can be divided by that of the samples."""
    batch = Batch(0, 4, parse_sample_index(torch.tensor([0, 0, 1, 2, 3, 3, 3])))
    assert batch.count(7) == 4
    assert batch.count(4) == 4
    with pytest.raises(NotPerSample, match="no entries for the rows of its output: a batch dimension of 8"):
        batch.count(8)
    assert Batch(0, 4).count(8) == 4


def test_positions_that_all_rows_share() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(7, 4), nn.Embedding(5, 4)

        def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
            y = torch.tanh(self.words(x) + self.places(torch.arange(5)[None])).sum((1, 2))
            return y.new_zeros(graphs).index_add(0, graph, y)

        index = Rows.index

    graph = torch.tensor([2, 0, 0, 1, 2, 0, 2])
    check(Placed(), (torch.randint(7, (7, 5)), graph, 3), torch.randn(3), ref.rows)


@pytest.mark.parametrize("index", [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 2]])
def test_a_layer_without_a_batch_has_no_rows(index: list[int]) -> None:
    """A vector goes through the first layer, whose outputs are as many as there are rows; attention has a sequence for
    all samples, as long as they are many."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector, self.rows = nn.Linear(3, 6), nn.Linear(3, 6)
            self.attention = nn.MultiheadAttention(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            all_samples = self.vector(x.mean(0))
            h = self.rows(x) + all_samples
            memory = all_samples.expand(index[-1] + 1, -1)
            return h + self.attention(memory, memory, memory, need_weights=False)[0].sum(0)

    model, x, target = Whole(), torch.randn(6, 3), torch.randn(6, 6)
    given = dict.fromkeys(("vector", "attention"))
    found = ngplus.gfim(
        model, nn.functional.mse_loss, x, target, batch_dim=given, sample_index=lambda x: torch.tensor(index)
    )
    grads = torch.autograd.grad(nn.functional.mse_loss(model(x), target), list(model.parameters()))
    named = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
    for names in (("vector.weight", "vector.bias"), ("attention.in_proj_weight", "attention.in_proj_bias")):
        whole = ref.rows(*(named[name] for name in names))  # of all samples as one
        wanted = ref.gfim(whole[None], found[names[0]].side)[0]
        torch.testing.assert_close(found[names[0]].matrix, wanted)


def test_two_that_have_as_many_rows() -> None:
    """The same twice is one; of two that differ, it cannot be told which a layer has: neither is taken."""
    one, other = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    assert parse_sample_index([one, one.clone()])[3].sizes == [2, 1]
    assert sorted(parse_sample_index([one, other])) == [2]  # one row for each sample
    rest = parse_sample_index([one, other, torch.tensor([0, 1, 2, 2])])
    assert sorted(rest) == [3, 4]
    assert rest[3].index.tolist() == [0, 1, 2]
    assert rest[4].sizes == [1, 1, 2]


def test_no_rows_are_rows_of_no_sample() -> None:
    """A batch of graphs without any edge."""
    none = torch.zeros(0, dtype=torch.long)
    rows = parse_sample_index([torch.tensor([0, 1]), none])
    assert sorted(rows) == [0, 2]
    assert rows[0].sizes == [0, 0]
    assert parse_sample_index([none]) == {}


@pytest.mark.parametrize("index", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 2], [2, 0, 2, 2]])
def test_rows_in_their_places(index: list[int]) -> None:
    ragged = Ragged(torch.tensor(index), 3)
    x = torch.arange(1.0, 9.0).view(4, 2)
    padded, ordered = ragged.pad(x), ragged.sort(x)
    at = 0
    for i in range(3):
        own = x[torch.tensor(index) == i]
        assert torch.equal(padded[i, : len(own)], own)
        assert not padded[i, len(own) :].any()
        assert torch.equal(ordered[at : at + len(own)], own)
        at += len(own)


def test_samples_of_one_size_are_not_copied() -> None:
    ragged = Ragged(torch.tensor([0, 0, 1, 1]), 2)
    x = torch.randn(4, 3)
    assert ragged.pad(x).data_ptr() == x.data_ptr()


def test_large_samples_are_not_filled_up() -> None:
    """One large graph among many small ones: no tensor has rows of zeros."""
    index = torch.cat([torch.zeros(4000, dtype=torch.long), torch.arange(1, 400)])
    batch = Batch(0, 400, parse_sample_index(index))
    layer = nn.Linear(8, 8)
    factors = LinearRule().factors(layer, (torch.randn(4399, 8),), torch.randn(4399, 8), (True, True), batch)
    assert isinstance(factors, Segments)
    assert factors.left.shape == (4399, 8)
    assert factors.samples == 400
