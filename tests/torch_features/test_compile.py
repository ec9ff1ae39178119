"""torch.compile of the model and of the step: the same parameters, one graph for steps that watch nothing, no
recompilation for a schedule."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ngplus
from helpers.steps import EXACT, Model, assert_equal, data, loss_fn, one_step
from ngplus.preconditioners import inverse_root

pytestmark = pytest.mark.usefixtures("double", "fresh_compiler")

T, STEPS = 3, 7  # refreshes at steps 0, 3 and 6
OPTIONS = {**EXACT, "update_every": T}


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def written_by_the_user() -> nn.Module:
    return Model(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(4, 5), b=nn.Linear(5, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 2, -1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


MODELS = pytest.mark.parametrize("make", [sequential, written_by_the_user, Attention])
FULLGRAPH = pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "graph breaks"])


def compiled(model: nn.Module, fullgraph: bool) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=fullgraph)  # type: ignore[return-value]


def give_compiled(model: nn.Module, fullgraph: bool) -> tuple[nn.Module, ngplus.NGPlus]:
    called = compiled(model, fullgraph)
    return called, ngplus.NGPlus(called, **OPTIONS)


def compile_later(model: nn.Module, fullgraph: bool) -> tuple[nn.Module, ngplus.NGPlus]:
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    return compiled(model, fullgraph), optimizer


def wrap_and_compile_later(model: nn.Module, fullgraph: bool) -> tuple[nn.Module, ngplus.NGPlus]:
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    return compiled(Model(lambda m, x: m.inner(x), inner=model), fullgraph), optimizer


def compile_in_place(model: nn.Module, fullgraph: bool) -> tuple[nn.Module, ngplus.NGPlus]:
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    return model, ngplus.NGPlus(model, **OPTIONS)


def compile_in_place_later(model: nn.Module, fullgraph: bool) -> tuple[nn.Module, ngplus.NGPlus]:
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    model.compile(backend="aot_eager", fullgraph=fullgraph)
    return model, optimizer


Way = Callable[[nn.Module, bool], tuple[nn.Module, ngplus.NGPlus]]
WAYS = [give_compiled, compile_later, wrap_and_compile_later, compile_in_place, compile_in_place_later]


def train(model: nn.Module, optimizer: Any, steps: int = STEPS) -> None:
    x, y = data(4)
    for _ in range(steps):
        one_step(model, optimizer, x, y)


def assert_trained_alike(model: nn.Module, before: nn.Module) -> None:
    """As a model that was never compiled."""
    plain = copy.deepcopy(before)
    train(plain, ngplus.NGPlus(plain, **OPTIONS))
    assert_equal(model, before, dict(plain.named_parameters()), 1e-9)


@MODELS
@FULLGRAPH
@pytest.mark.parametrize("way", WAYS)
def test_compiled_model(way: Way, fullgraph: bool, make: Callable[[], nn.Module]) -> None:
    """Refresh steps run eagerly; all others are one graph, compiled once."""
    model = make()
    before = copy.deepcopy(model)
    called, optimizer = way(model, fullgraph)
    train(called, optimizer)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert {row.source for row in optimizer.plan()} == {"sample"}
    assert_trained_alike(model, before)


@FULLGRAPH
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_blocks(in_place: bool, fullgraph: bool) -> None:
    """Regional compilation, after the optimizer was made."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(4, 3))
    before = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    for i in range(2):
        if in_place:
            model[i].compile(backend="aot_eager", fullgraph=fullgraph)
        else:
            model[i] = compiled(model[i], fullgraph)
    train(model, optimizer)
    assert not counters["graph_break"]
    for i in range(2):
        model[i] = blocks[i]
    assert_trained_alike(model, before)


def test_compiled_function_breaks_its_graph() -> None:
    """No wrapper to switch, so the graph breaks at the hooks of a refresh; the numbers are the same."""
    model = written_by_the_user()
    before = copy.deepcopy(model)
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    x, y = data(4)
    loss = torch.compile(lambda x, y: loss_fn(model(x), y), backend="aot_eager")
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(x, y).backward()
        optimizer.step()
    assert_trained_alike(model, before)


def test_compiled_function_with_fullgraph_says_what_to_do() -> None:
    model = written_by_the_user()
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    function = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"NGPlus\(torch\.compile\(model\)\)"):
        function(data(4)[0])
    assert optimizer.param_groups[0]["step"] == 0


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_of_a_compiled_model_while_a_refresh_is_due(way: Way) -> None:
    """It needs no eager run, and leaves no trace."""
    model = written_by_the_user()
    before = copy.deepcopy(model)
    called, optimizer = way(model, True)
    x, _ = data(4)
    with torch.no_grad():
        called(x)
    assert counters["stats"]["unique_graphs"] == 1
    called.eval()
    called(x)
    called.train()
    train(called, optimizer)
    assert not counters["graph_break"]
    assert_trained_alike(model, before)


def test_frozen_and_thawed_in_a_compiled_model() -> None:
    model, plain = sequential(), sequential()
    plain.load_state_dict(model.state_dict())
    before = copy.deepcopy(model)
    called, optimizer = compile_later(model, True)
    other = ngplus.NGPlus(plain, **OPTIONS)
    for frozen in (False, True, True, False, False):
        for one in (model, plain):
            one[0].weight.requires_grad_(not frozen)
        train(called, optimizer, 1)
        train(plain, other, 1)
    assert_equal(model, before, dict(plain.named_parameters()), 1e-9)


def test_a_compiled_model_is_free_once_the_optimizer_is_gone() -> None:
    model = written_by_the_user()
    called, optimizer = compile_in_place_later(model, True)
    train(called, optimizer, 1)
    wrapped = model._compiled_call_impl
    del optimizer
    gc.collect()
    assert model._compiled_call_impl is not wrapped
    x, y = data(4)
    loss_fn(called(x), y).backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Dynamo")  # of what it cannot trace
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (ngplus.NGPlus, {**EXACT, "momentum": 0.9}),
        (ngplus.NGPlus, {**EXACT, "curvature": "batch"}),
        (ngplus.NGAdam, {}),
    ],
    ids=["sample", "batch", "NGAdam"],
)
def test_compiled_step_follows_schedules_without_recompilation(make: Any, options: dict[str, Any]) -> None:
    """The step equals the eager one; once both kinds of step have been compiled, nothing is compiled again though
    learning rate and damping change in every step."""
    model = nn.Sequential(nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model)
    optimizer, eager = (make(m, **{**options, "lr": 0.1, "update_every": 2}) for m in (model, plain))
    schedules: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, eager)]
    if make is ngplus.NGPlus:  # NGAdam has no option for its damping
        schedules += [ngplus.schedules.ExponentialDamping(o, 0.5) for o in (optimizer, eager)]
    step = torch.compile(optimizer.step, backend="aot_eager")
    x, y = data(4)
    graphs = []
    for _ in range(16):
        for one, make_step in ((model, step), (plain, eager.step)):
            one.zero_grad()
            loss_fn(one(x), y).backward()
            make_step()
        for schedule in schedules:
            schedule.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[12:] == [graphs[12]] * 4  # NGAdam refreshes in all of its first seven steps
    assert_equal(model, before, dict(plain.named_parameters()), 1e-9)


@pytest.mark.slow
def test_compiled_step_of_ngadam_with_blocks_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE", 2), ("BLOCK", 2)):
        monkeypatch.setattr(inverse_root, name, value)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    plain, before = copy.deepcopy(model), copy.deepcopy(model)
    optimizer, eager = (ngplus.NGAdam(m, lr=0.1, update_every=3) for m in (model, plain))
    step = torch.compile(optimizer.step, backend="aot_eager")
    x, y = data(4)
    for _ in range(5):
        for one, make_step in ((model, step), (plain, eager.step)):
            one.zero_grad()
            loss_fn(one(x), y).backward()
            make_step()
    assert [row.blocks for row in optimizer.plan()] == [2 + 2, 0] * 3  # a weight, and a bias
    assert_equal(model, before, dict(plain.named_parameters()), 1e-9)


def test_a_schedule_recompiles_no_model() -> None:
    """Learning rate and damping are the optimizer's, and no graph of the model knows them."""
    model = sequential()
    called, optimizer = compile_later(model, True)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ngplus.schedules.ExponentialDamping(optimizer, rate=0.5),
    ]
    for _ in range(STEPS):
        train(called, optimizer, 1)
        for schedule in schedules:
            schedule.step()
    assert counters["stats"]["unique_graphs"] == 1
