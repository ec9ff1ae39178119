"""Models in which rows are easily taken for those of other samples: only what is certain is called per-sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.certain import Loss, assert_certain
from helpers.steps import Model, N, data, loss_fn
from ngplus.capture import reasons

pytestmark = pytest.mark.usefixtures("double")

WIDTH, LENGTH = 4, 5


def linear(**sizes: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(WIDTH, size) for name, size in sizes.items()}


def on_samples(x: Tensor, y: Tensor) -> Loss:
    return lambda m, of: loss_fn(m(x[of]), y[of]) * len(of) / N


# ------------------------------------------------------------------------------------------------ rows in another order


def copied(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).copy_(rows[order])


def written(rows: Tensor, order: Tensor) -> Tensor:
    buffer = torch.empty_like(rows)
    buffer[:] = rows[order]
    return buffer


def written_in_part(rows: Tensor, order: Tensor) -> Tensor:
    buffer = torch.zeros_like(rows)
    buffer[:, 1:].copy_(rows[order][:, 1:])
    return buffer


def beside(rows: Tensor, order: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[order][:, 1:]], dim=1)


BUFFERS = [lambda rows, order: torch.zeros_like(rows) + rows[order], copied, written, written_in_part, beside]


@pytest.mark.parametrize("buffer", BUFFERS, ids=["added", "copied", "written", "written in part", "beside"])
def test_rows_in_another_order_in_a_buffer_of_their_shape(buffer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """``zeros_like(x)`` has the samples of x by its shape alone."""

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = m.a(x).flatten(0, 1)
        order = rows[:, 0].argsort()
        h = m.b(buffer(rows, order)).tanh()
        return m.c(h[order.argsort()].unflatten(0, (len(x), -1)).mean(1))

    loss = on_samples(*data(LENGTH, WIDTH))
    assert_certain(Model(forward, **linear(a=WIDTH, b=WIDTH, c=3)), loss, a="sample", b="batch", c="batch")


def test_a_state_of_zeros_has_the_samples_of_what_is_added_to_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for each in x.unbind(1):
            h = (m.a(each) + m.b(h)).tanh()
        return m.c(h)

    sources = dict.fromkeys("abc", "sample")
    assert_certain(Model(forward, **linear(a=WIDTH, b=WIDTH, c=3)), on_samples(*data(LENGTH, WIDTH)), **sources)


def test_indices_of_a_mask_that_are_as_many_as_the_samples() -> None:
    """Of the rows [length, samples] that a mask chooses, the numbers of the samples."""
    x, y = data(LENGTH, WIDTH)
    mask = torch.zeros(N, LENGTH, dtype=torch.bool)
    mask[torch.arange(N), torch.tensor([3, 1, 0, 2, 4, 1])] = True

    def forward(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        time, sample = torch.where(mask.T)
        rows = m.a(m.table(sample) + x.transpose(0, 1)[time, sample])
        return x.new_zeros(len(x), 3).index_put((sample,), rows)

    model = Model(forward, table=nn.Embedding(N, WIDTH), **linear(a=3))
    nn.init.zeros_(model.table.weight)
    optimizer = assert_certain(model, lambda m, of: loss_fn(m(x[of], mask[of]), y[of]) * len(of) / N, a="batch")
    assert optimizer.plan()["table.weight"].source == "batch"


def test_a_norm_of_channels_with_the_samples_last() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(m.norm(m.a(x).permute(1, 2, 0)).permute(2, 0, 1).mean(1))

    model = Model(forward, norm=nn.BatchNorm1d(WIDTH).eval(), **linear(a=WIDTH, b=3))
    assert_certain(model, on_samples(*data(LENGTH, WIDTH)), a="sample", norm="batch")


@pytest.mark.parametrize("time_first", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_two_calls_in_a_reentrant_checkpoint_whose_outputs_have_one_shape(time_first: bool) -> None:
    """Time-major and batch-major with as many positions as samples, or rows in their order and in another one."""

    def routed(m: Any, rows: Tensor) -> Tensor:
        order = rows[:, 0].argsort()
        return m.b(rows + m.b(rows[order])[order.argsort()])

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if time_first:
            h = checkpoint(m.b, h.transpose(0, 1), use_reentrant=True).transpose(0, 1)
            h = checkpoint(m.b, h, use_reentrant=True)
        else:
            h = checkpoint(lambda rows: routed(m, rows), h.flatten(0, 1), use_reentrant=True).view_as(h)
        return m.c(h.tanh().mean(1))

    model = Model(forward, **linear(a=WIDTH, b=WIDTH, c=3))
    assert_certain(model, on_samples(*data(N if time_first else LENGTH, WIDTH)), a="sample", b="batch", c="sample")


# ------------------------------------------------------------------------------------------------ another dimension


class Attends(nn.Module):
    """Attention among the rows [rows, features] of each of several texts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.transpose(0, 1)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1)


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class Convolves(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(1, 2, 0)).permute(2, 0, 1)


class OverTime(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, -1)).transpose(0, -1)


ACROSS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0),
    "attention": Attends,
    "recurrent": lambda: Recurrent(WIDTH, WIDTH),
    "convolution": lambda: Convolves(WIDTH, WIDTH, 3, padding=1),
    "linear": lambda: OverTime(LENGTH, LENGTH),
}


@pytest.mark.parametrize("name", ACROSS)
def test_a_layer_over_the_first_dimension_tells_that_it_has_no_samples(name: str) -> None:
    """Inputs [time, batch, features], without ``batch_dim``: all of the model has mini-batch curvature."""
    x, y = torch.randn(LENGTH, N, WIDTH), torch.randn(LENGTH, N, 3)

    def loss(m: nn.Module, of: list[int]) -> Tensor:
        return (m(x[:, of]) - y[:, of]).square().sum() / N

    model = Model(lambda m, x: m.b(m.mixer(m.a(x))), mixer=ACROSS[name](), **linear(a=WIDTH, b=3))
    optimizer = assert_certain(model, loss, a="batch", b="batch")
    assert optimizer.plan()["a.weight"].note.startswith(reasons.ACROSS)
    assert_certain(model, loss, options={"batch_dim": 1}, a="sample", b="sample")


@pytest.mark.parametrize("pool", [lambda h: h.mean(0), lambda h: h.max(0).values])
def test_a_layer_after_a_mean_over_the_first_dimension(pool: Callable[[Tensor], Tensor]) -> None:
    """A graph in a call: its nodes are no samples. The loss is the output."""
    graphs = [torch.randn(n, WIDTH) for n in (5, 3, 4, 5, 2, 3)]
    model = Model(lambda m, x: m.b(pool(m.a(x).tanh())).square().sum() / N, **linear(a=WIDTH, b=3))
    assert_certain(model, lambda m, of: sum(m(graphs[i]) for i in of), a="batch", b="batch")  # type: ignore[arg-type]


def test_a_list_of_sequences() -> None:
    x, y = data(LENGTH, WIDTH)

    def forward(m: Any, sequences: list[Tensor]) -> Tensor:
        return m.b(torch.stack([m.a(each).tanh() for each in sequences]).mean(1))

    model = Model(forward, **linear(a=WIDTH, b=3))
    assert_certain(model, lambda m, of: loss_fn(m([x[i] for i in of]), y[of]) * len(of) / N, a="batch", b="batch")


# ------------------------------------------------------------------------------------------------ number of samples


def test_states_of_several_layers_with_the_loss_as_output() -> None:
    """Two inputs [layers, samples, features], and one [samples, length, features]."""
    x, _ = data(LENGTH, WIDTH)
    states = torch.randn(2, N, WIDTH), torch.randn(2, N, WIDTH)

    def forward(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return m.b(m.rnn(x, (m.a(h), c))[0]).square().sum() / N

    model = Model(forward, rnn=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), **linear(a=WIDTH, b=3))
    assert_certain(model, lambda m, of: m(x[of], *(s[:, of] for s in states)), a="batch", b="batch")


@pytest.mark.parametrize("returns", ["loss", "positions, too"])
def test_positions_as_an_input(returns: str) -> None:
    x, _ = data(LENGTH, WIDTH)
    positions, mask = torch.arange(LENGTH), torch.zeros(LENGTH, LENGTH)

    def forward(m: Any, positions: Tensor, mask: Tensor, x: Tensor) -> Any:
        h = m.a(x) + m.table(positions)
        out = m.b((h @ h.mT + mask).softmax(-1) @ h)
        return out.square().sum() / N if returns == "loss" else (out, positions)

    def loss(m: nn.Module, of: list[int]) -> Tensor:
        out = m(positions, mask, x[of])
        return out if returns == "loss" else out[0].square().sum() / N

    model = Model(forward, table=nn.Embedding(LENGTH, WIDTH), **linear(a=WIDTH, b=3))
    assert_certain(model, loss, a="batch", b="batch", table="batch")
    assert_certain(model, loss, options={"batch_dim": {"a": 0, "b": 0}}, a="sample", b="sample", table="batch")


def test_as_many_positions_as_samples() -> None:
    """The sizes do not tell which of the two inputs has the samples; how they are added does."""
    x, y = data(N, WIDTH)
    positions = torch.arange(N)

    def forward(m: Any, x: Tensor, positions: Tensor) -> Tensor:
        return m.b((m.a(x) + m.table(positions)).tanh().mean(1))

    model = Model(forward, table=nn.Embedding(N, WIDTH), **linear(a=WIDTH, b=3))
    loss: Loss = lambda m, of: loss_fn(m(x[of], positions), y[of]) * len(of) / N  # noqa: E731
    assert_certain(model, loss, a="batch", b="batch", table="batch")


def test_an_input_of_size_one_is_the_same_for_all() -> None:
    x, y = data(LENGTH, WIDTH)
    model = Model(lambda m, scale, x: m.b(m.a(x * scale).tanh().mean(1)), **linear(a=WIDTH, b=3))
    loss: Loss = lambda m, of: loss_fn(m(torch.full((1,), 2.0), x[of]), y[of]) * len(of) / N  # noqa: E731
    assert_certain(model, loss, a="sample", b="sample")


# ------------------------------------------------------------------------------------------------ sample_index

SIZES = [3, 5, 1, 2, 4, 2]  # of N samples
ROWS = torch.randn(sum(SIZES), WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OWNER = torch.repeat_interleave(torch.arange(N), torch.tensor(SIZES))
Messages = Callable[[Any, Tensor, Tensor, int], Tensor]


def sorted_by(moved: Callable[[Tensor, Tensor], Tensor]) -> Messages:
    def forward(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
        order = x[:, 0].argsort(descending=True)
        h = m.b(moved(m.a(x), order)).tanh()
        return m.c(h.new_zeros(samples, WIDTH).index_add(0, owner[order], h))

    return forward


def flipped(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    h = m.b(m.a(x).flip(0)).tanh()
    return m.c(h.new_zeros(samples, WIDTH).index_add(0, owner.flip(0), h))


def shared(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Vectors of the model, as many as there are rows."""
    table = m.b(torch.linspace(-1, 1, len(ROWS) * WIDTH).view(-1, WIDTH)).mean(0)
    return m.c(x.new_zeros(samples, WIDTH).index_add(0, owner, m.a(x).tanh()) * table)


def queries(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    """Vectors of the model, as many as there are samples."""
    table = m.b(torch.linspace(-1, 1, N * WIDTH).view(-1, WIDTH)).mean(0)
    return m.c(x.new_zeros(samples, WIDTH).index_add(0, owner, m.a(x).tanh()) * table)


def on_edges(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    """As many edges as nodes, in another order."""
    source, target = edges(owner)
    messages = m.b(m.a(x)[source]).tanh()
    h = torch.zeros_like(x).index_add(0, target, messages)
    return m.c(h.new_zeros(samples, WIDTH).index_add(0, owner, h))


def edges(owner: Tensor) -> tuple[Tensor, Tensor]:
    """Each node sends to the first one of its graph; the last ones come first."""
    target = torch.tensor([int((owner == each).nonzero()[0]) for each in owner])
    return torch.arange(len(owner)).flip(0), target.flip(0)


MOVED: dict[str, Messages] = {
    "index": sorted_by(lambda h, order: h[order]),
    "index_select": sorted_by(lambda h, order: h.index_select(0, order)),
    "gather": sorted_by(lambda h, order: h.gather(0, order[:, None].expand(-1, WIDTH))),
    "permutation": sorted_by(lambda h, order: F.one_hot(order, len(h)).to(h) @ h),
    "flip": flipped,
    "shared": shared,
    "queries": queries,
    "edges": on_edges,
}


def on_rows(m: Any, of: list[int]) -> Tensor:
    chosen = torch.isin(OWNER, torch.tensor(of))
    owner = torch.searchsorted(torch.tensor(of), OWNER[chosen])
    return m(ROWS[chosen], owner, len(of)).square().sum() / N


@pytest.mark.parametrize("name", MOVED)
def test_rows_of_sample_index_that_are_as_many_but_not_those(name: str) -> None:
    model = Model(MOVED[name], **linear(a=WIDTH, b=WIDTH, c=3))
    index = {"sample_index": lambda x, owner, samples: [owner, torch.arange(samples)]}
    assert_certain(model, on_rows, options=index, a="sample", b="batch", c="sample")


def filled_up(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    """The rows of each sample, [samples, longest, features]."""
    place = torch.cat([torch.arange(int((owner == i).sum())) for i in range(samples)])
    dense, mask = x.new_zeros(samples, max(SIZES), WIDTH), x.new_zeros(samples, max(SIZES))
    dense[owner, place], mask[owner, place] = m.a(x).tanh(), 1.0
    return m.c((m.b(dense).tanh() * mask[..., None]).sum(1))


def attention_by_hand(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    h = m.a(x)
    scores = (h @ h.mT).masked_fill(owner[:, None] != owner, -torch.inf)
    h = m.b(scores.softmax(-1) @ h).tanh()
    return m.c(h.new_zeros(samples, WIDTH).index_add(0, owner, h))


def behind_one(m: Any, x: Tensor, owner: Tensor, samples: int) -> Tensor:
    h = m.b(m.a(x[None]).tanh())[0].tanh()
    return m.c(h.new_zeros(samples, WIDTH).index_add(0, owner, h))


@pytest.mark.parametrize("forward", [filled_up, attention_by_hand, behind_one])
def test_rows_of_sample_index_in_their_order(forward: Messages) -> None:
    model = Model(forward, **linear(a=WIDTH, b=WIDTH, c=3))
    index = {"sample_index": lambda x, owner, samples: [owner, torch.arange(samples)]}
    assert_certain(model, on_rows, options=index, a="sample", b="sample", c="sample")


# ------------------------------------------------------------------------------------------------ another order


ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
ORDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda rows, order: rows[order],
    "index_select": lambda rows, order: rows.index_select(0, order),
    "stack": lambda rows, order: torch.stack([rows[i] for i in order.tolist()]),
    "scatter": lambda rows, order: rows.scatter(0, order.argsort()[:, None].expand_as(rows), rows),
    "matrix": lambda rows, order: F.one_hot(order, len(rows)).to(rows) @ rows,
}


@pytest.mark.parametrize("by", ORDERS)
@pytest.mark.parametrize("known", [True, False], ids=["an order", "the order of the rows"])
def test_rows_in_another_order_beside_rows_in_their_own(by: str, known: bool) -> None:
    """A mask that is made of the inputs does not tell the order of the rows that it is multiplied by."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).tanh()
        order = x[:, 0].argsort() if not known else ORDER if len(x) > 1 else torch.tensor([0])
        rows = m.a(ORDERS[by](h, order) * (x.abs() >= 0)).tanh()
        return m.c(h + rows[order.argsort()])

    model = Model(forward, **linear(a=WIDTH, c=3))
    assert_certain(model, on_samples(*data(WIDTH)), a="batch")


def test_an_output_beside_one_whose_samples_are_known() -> None:
    """As the features of images beside the logits."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.a(x).tanh()
        return m.c(h.mean(1)), torch.cat(list(h.unbind(0)))

    x, y = data(LENGTH, WIDTH)
    model = Model(forward, **linear(a=WIDTH, c=3))
    assert_certain(model, lambda m, of: loss_fn(m(x[of])[0], y[of]) * len(of) / N, a="sample", c="sample")
