"""The samples of a batch, followed through torch functions: what is called per-sample is exact."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, Model, check, data, loss_fn
from ngplus.capture.sample_axis import SampleAxis, UnknownAxis
from ngplus.capture.sample_tracker import SampleTracker

pytestmark = pytest.mark.usefixtures("double")

SAMPLES = 3
FOLLOWED: dict[str, tuple[Callable[[Tensor], Tensor], SampleAxis]] = {
    "tanh": (torch.tanh, SampleAxis(0)),
    "broadcast": (lambda x: x + torch.ones(7, 1, 1, 5), SampleAxis(1)),
    "transpose": (lambda x: x.transpose(0, 1), SampleAxis(1)),
    "mT": (lambda x: x.permute(1, 2, 0).mT, SampleAxis(1)),
    "flatten": (lambda x: x.flatten(0, 1), SampleAxis(0, inner=4)),
    "time first, flattened": (lambda x: x.transpose(0, 1).flatten(0, 1), SampleAxis(0, outer=4)),
    "unflatten": (lambda x: x.flatten(0, 1).unflatten(0, (3, 4)), SampleAxis(0)),
    "repeat": (lambda x: x.repeat(2, 1, 1), SampleAxis(0, outer=2)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, dim=0), SampleAxis(0, inner=2)),
    "cat of views": (lambda x: torch.cat([x, -x]), SampleAxis(0, outer=2)),
    "cat of positions": (lambda x: torch.cat([torch.zeros(3, 1, 5), x], dim=1), SampleAxis(0)),
    "stack": (lambda x: torch.stack([x, x]), SampleAxis(1)),
    "chunk": (lambda x: x.chunk(2, dim=1)[0], SampleAxis(0)),
    "select": (lambda x: x.transpose(0, 1)[-1], SampleAxis(0)),
    "slice": (lambda x: x[:, 1:, None], SampleAxis(0)),
    "one position of each": (lambda x: x[torch.arange(3), torch.tensor([0, 2, 1])], SampleAxis(0)),
    "mean over positions": (lambda x: x.transpose(0, 1).mean(0), SampleAxis(0)),
    "linear": (lambda x: F.linear(x, torch.ones(2, 5)), SampleAxis(0)),
    "matmul": (lambda x: x @ x.mT, SampleAxis(0)),
    "einsum": (lambda x: torch.einsum("bij,kj->kbi", x, torch.ones(2, 5)), SampleAxis(1)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), SampleAxis(0)),
    "a flip of positions": (lambda x: x.flip(1, 2), SampleAxis(0)),
    "a roll of positions": (lambda x: x.roll(1, 1), SampleAxis(0)),
    "padded positions": (lambda x: F.pad(x, (0, 0, 1, 1)), SampleAxis(0)),
    "gather": (lambda x: x.gather(1, torch.zeros(3, 2, 5, dtype=torch.long)), SampleAxis(0)),
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda x: x[x[:, 0, 0] > -100],
    "an order by values": lambda x: x[x[:, 0, 0].argsort()],
    "a sort": lambda x: x.sort(dim=0).values,
    "a part of the batch": lambda x: x[1:],
    "a flip of several dimensions": lambda x: x.flip(0, 1),
    "a descending sort": lambda x: x.sort(0, True).values,
    "a roll of all entries": lambda x: x.roll(1),
    "the largest of a transposed batch": lambda x: x[..., 0].mT.topk(3).values,
    "a transform of all dimensions": lambda x: torch.fft.fftn(x).real,
    "samples shifted by padding": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "the mean of the batch": lambda x: x.mean(0),
    "products of samples": lambda x: x.flatten(1) @ x.flatten(1).mT,
    "a function without a rule": lambda x: torch.linalg.pinv(x),
    "positions cut across samples": lambda x: x.flatten(0, 1)[:6],
}


def located(function: Callable[[Tensor], Tensor]) -> object:
    x = torch.randn(SAMPLES, 4, 5)
    with SampleTracker(SAMPLES, (x,), 0) as tracker:
        out = function(x)
    return tracker.of(out)


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    function, wanted = FOLLOWED[name]
    assert located(function) == wanted


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_known(name: str) -> None:
    assert isinstance(located(UNKNOWN[name]), UnknownAxis)


def test_what_does_not_depend_on_the_samples_has_none() -> None:
    assert located(lambda x: x.new_zeros(3, 4) + torch.arange(4)) is None
    assert located(lambda x: torch.ones(3, 4, dtype=torch.float32).type_as(x)) is None


def test_a_buffer_takes_the_samples_of_what_is_written_to_it() -> None:
    def shifted(x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        out[:, 1:] = x[:, :-1]
        return out

    assert located(shifted) == SampleAxis(0)


# ------------------------------------------------------------------------------------------------ through the optimizer


@pytest.mark.parametrize("length", [5, 6])
def test_time_first_inside_of_a_model_that_is_batch_first(length: int) -> None:
    """With 6 samples of 6 positions, no shape tells the two apart."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x.transpose(0, 1)))).mean(0)

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(length, 4))


def test_flattened_with_time_first() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.b(torch.tanh(m.a(x.transpose(0, 1).flatten(0, 1)))).unflatten(0, (-1, len(x))).mean(0)

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(5, 4))


def routed(m: Any, x: Tensor) -> Tensor:
    """An expert gets the first half of the rows by their values, as many as divide into samples."""
    rows = x.flatten(0, 1)
    chosen = rows[:, 0].argsort()[: len(rows) // 2]
    out = m.b(rows)
    return out.index_add(0, chosen, m.a(rows[chosen])).unflatten(0, (len(x), -1)).mean(1)


def shared(m: Any, x: Tensor) -> Tensor:
    """A layer on the same vectors for all samples, as on relative positions, and then on those of the batch."""
    return m.b(x + m.a(torch.ones(1, x.shape[1], 4)) + m.a(x)).mean(1)


@pytest.mark.parametrize("forward", [routed, shared])
def test_a_layer_whose_samples_are_not_known(forward: Callable[..., Tensor]) -> None:
    model = Model(forward, a=nn.Linear(4, 3 if forward is routed else 4), b=nn.Linear(4, 3))
    x, y = data(4, 4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss_fn(model(x), y).backward()
    with pytest.warns(UserWarning, match=r"a\.weight"):
        optimizer.step()
    assert {row.name: row.source for row in optimizer.plan()} == {"a.weight": "batch", "b.weight": "sample"}


@dataclass
class Record:
    x: Tensor


class Fields:
    """As torch_geometric's Data."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def keys(self) -> list[str]:
        return ["x"]

    def to_dict(self) -> dict[str, Tensor]:
        return {"x": self.x}


@pytest.mark.parametrize("pack", [Record, Fields, lambda x: UserDict(x=x)], ids=["dataclass", "Data", "BatchEncoding"])
def test_inputs_in_containers(pack: Callable[[Tensor], Any]) -> None:
    class Unpacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, given: Any) -> Tensor:
            x = given["x"] if isinstance(given, UserDict) else given.x
            return self.a(x.transpose(0, 1)).mean(0)

    model = Unpacks()
    x, y = data(6, 4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    loss_fn(model(pack(x)), y).backward()
    optimizer.step()
    assert optimizer.plan()["a.weight"].source == "sample"
    assert optimizer._find_matrix("a.weight").seen == (6, 6)


def test_a_call_for_each_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = data(4)
    optimizer = ngplus.NGPlus(model, **EXACT)
    torch.stack([loss_fn(model(one[None]), target[None]) for one, target in zip(x, y, strict=True)]).mean().backward()
    with pytest.warns(UserWarning, match="several calls of its module"):
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}


def test_sample_index_that_does_not_cover_a_layer() -> None:
    """As where self-loops are added to the edges."""

    def forward(m: Any, x: Tensor, graph: Tensor) -> Tensor:
        more = torch.cat([x, x[:1]])
        return (m.a(x).sum() + m.b(more).sum())[None]

    model = Model(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    optimizer = ngplus.NGPlus(model, sample_index=lambda x, graph: graph, **EXACT)
    model(torch.randn(5, 4), torch.tensor([0, 0, 1, 1, 1])).square().mean().backward()
    with pytest.warns(UserWarning, match=r"b\.weight.*sample_index has no entries"):
        optimizer.step()
    assert {row.name: row.source for row in optimizer.plan()} == {"a.weight": "sample", "b.weight": "batch"}


class Graphs(nn.Module):
    """Nodes, their graphs, and what is returned: of each graph, or a loss, or also of each node."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns, self.a, self.b = returns, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, graph: Tensor) -> Any:
        h = x + torch.tanh(self.a(x))
        chosen = graph[graph >= 0]
        out = self.b(h.new_zeros(2, 4).index_add(0, chosen, h))
        return {"graphs": out, "loss": out.square().mean(), "both": (out, h)}[self.returns]


@pytest.mark.parametrize("returns", ["graphs", "loss", "both"])
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_nodes_that_are_summed_up_are_no_samples(returns: str) -> None:
    model = Graphs(returns)
    optimizer = ngplus.NGPlus(model, **EXACT)
    out = model(torch.randn(7, 4), torch.tensor([0, 0, 0, 1, 1, 1, 1]))
    (out[0] if returns == "both" else out).square().mean().backward()
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}
