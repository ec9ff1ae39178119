"""plan() and curvature(): what a person looks at, and what a program can use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.steps import PAPER, conv_net, data, one_step
from ngplus.baselines import KFAC, SENG
from ngplus.diagnostics.tables import abbreviated


def state_bytes(optimizer: ngplus.NGPlus | ngplus.NGAdam) -> int:
    """Bytes of the state's tensors: all but lambda and the momentum buffers of the step."""
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key not in ("momentum_buffer", "damping")
    )


OPTIONS: list[dict[str, Any]] = [
    {"solver": "dense"},
    {"solver": "woodbury"},
    {"solver": "dense", "block_size": 3},
    {"curvature": "momentum"},
    {"curvature": "batch"},
    {"curvature": "momentum", "block_size": 2},
    {"solver": "dense", "graft": "adam"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_bytes_are_those_that_the_state_has(options: dict[str, Any]) -> None:
    model = conv_net()
    optimizer = ngplus.NGPlus(model, **{**PAPER, "damping": 0.3, **options})
    before = optimizer.plan(batch_size=6, positions=4)
    one_step(model, optimizer, *data(2, 4, 4))
    after = optimizer.plan()
    assert abs(after.state_bytes - state_bytes(optimizer)) <= 8 * len(after)  # but for lambda, a number each
    if options.get("solver") != "woodbury":  # whose rank depends on each layer's positions
        assert abs(before.state_bytes - state_bytes(optimizer)) <= 8 * len(after)


def test_state_bytes_of_ngadam_are_those_that_the_state_has() -> None:
    model = conv_net()
    optimizer = ngplus.NGAdam(model)
    before = optimizer.plan().state_bytes
    one_step(model, optimizer, *data(2, 4, 4))
    assert before == optimizer.plan().state_bytes == state_bytes(optimizer) > 0


def test_every_parameter_has_one_row() -> None:
    model = conv_net()
    plan = ngplus.NGPlus(model, side="smaller").plan()
    assert [row.parameters for row in plan] == [
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias"),
        ("4.weight", "4.bias"),
    ]
    assert [row.shape for row in plan] == [(4, 19), (4, 2), (3, 17)]
    assert [(row.side, row.solver) for row in plan] == [
        ("left", "dense"),
        ("right", "dense"),
        ("left", "dense"),
    ]
    assert [row.side for row in ngplus.NGPlus(model, side="right").plan()] == ["right", "right", "right"]
    assert plan["1.bias"] is plan[1]
    assert plan.as_dicts()[0]["name"] == "0.weight"
    with pytest.raises(KeyError):
        plan["nothing"]


def test_the_table_names_every_parameter_and_what_it_gets() -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Parameter(torch.zeros(1, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + self.token)

    text = str(ngplus.NGPlus(Token(), block_size=2).plan(batch_size=8, verbose=True))
    for part in ("token", "head.weight + bias", "batch", "rank-one", "dense", "no layer rule covers it"):
        assert part in text, part
    lines = text.splitlines()
    (total,) = [i for i, line in enumerate(lines) if line.startswith("total")]
    explained = " ".join(lines[total + 1 :])
    for head in lines[0].replace("m x n", "").split()[1:]:  # but for the parameter and its shape
        assert f"{head}: " in explained, head


def test_flops_of_a_step_are_counted() -> None:
    """The dense direction of one layer against torch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(30, 12)
    optimizer = ngplus.NGPlus(model, solver="dense", momentum=0.0, damping=0.3, **PAPER)
    x, y = torch.randn(6, 30), torch.randn(6, 12)
    one_step(model, optimizer, x, y)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == optimizer.plan().step_flops == 2 * 12 * 12 * 31


def test_flops_of_a_sketched_step_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(30, 12)
    optimizer = ngplus.NGPlus(model, solver="sketched", sketch=10, momentum=0.0, damping=0.3, update_every=100, **PAPER)
    x, y = torch.randn(6, 30), torch.randn(6, 12)
    for _ in range(2):  # the first refreshes
        one_step(model, optimizer, x, y)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == optimizer.plan().step_flops


@pytest.mark.parametrize("kind", [ngplus.NGPlus, KFAC, SENG])
def test_what_is_frozen_costs_nothing(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    whole = kind(model).plan(batch_size=8)
    model[0].requires_grad_(False)
    optimizer = kind(model)
    plan = optimizer.plan(batch_size=8)
    frozen, trained = plan
    assert (frozen.source, frozen.side, frozen.solver, frozen.note) == ("none", "none", "none", "frozen")
    assert frozen.frozen
    assert not trained.frozen
    assert trained == whole[1]
    for name in ("state_bytes", "step_flops", "refresh_flops", "wire_bytes"):
        assert getattr(frozen, name) == 0
        assert getattr(plan, name) == getattr(whole[1], name)
    assert "frozen" in str(plan)
    load, both = plan.on_ranks(2, "memory"), whole.on_ranks(2, "memory")
    assert load.parameter_bytes == both.parameter_bytes
    assert load.state_bytes == trained.state_bytes
    assert load.step_bytes == trained.parameter_bytes
    assert load.step_flops == trained.step_flops
    one_step(model, optimizer, torch.randn(8, 6), torch.randn(8, 3))
    assert not optimizer.state.get(model[0].weight)  # as the plan has said
    assert optimizer.plan().state_bytes == optimizer.plan()[1].state_bytes > 0


def test_frozen_after_steps_keeps_the_state_it_has() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = ngplus.NGPlus(model)
    one_step(model, optimizer, torch.randn(8, 6), torch.randn(8, 3))
    before = optimizer.plan()
    model[0].requires_grad_(False)
    assert not optimizer.plan()[0].frozen  # the gradient that is there still makes a step
    optimizer.zero_grad()
    after = optimizer.plan()
    assert after[0].frozen
    assert after.state_bytes == before.state_bytes == after.on_ranks(1).state_bytes
    assert after.step_flops == before[1].step_flops < before.step_flops
    model[0].weight.requires_grad_(True)
    assert not optimizer.plan()[0].frozen
    one_step(model, optimizer, torch.randn(8, 6), torch.randn(8, 3))
    assert optimizer.plan()[0].shape == (5, 6)  # a matrix without its column of biases


def test_a_gradient_by_hand_is_stepped_and_so_not_frozen() -> None:
    model = nn.Linear(4, 3).requires_grad_(False)
    optimizer = ngplus.NGPlus(model, curvature="batch")
    assert optimizer.plan()[0].frozen
    model.weight.grad = torch.randn(3, 4)
    assert not optimizer.plan()[0].frozen
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_small_fraction_is_one_sample_at_least() -> None:
    flops = [
        ngplus.NGPlus(nn.Linear(4, 3), samples=samples).plan(batch_size=4).refresh_flops for samples in (0.01, 1, 4)
    ]
    assert flops[0] == flops[1] < flops[2]


def test_a_plan_for_what_is_not_there_is_refused() -> None:
    optimizer = ngplus.NGPlus(nn.Linear(4, 3))
    assert optimizer.plan(batch_size=4, positions={"weight": 9})["weight"].refresh_flops > 0
    with pytest.raises(KeyError, match=r"wieght.*did you mean 'weight'"):
        optimizer.plan(batch_size=4, positions={"wieght": 9})
    for ranks in (0, -1, 1.5):
        with pytest.raises(ValueError, match="Invalid ranks"):
            optimizer.plan().on_ranks(ranks)


def test_curvature_is_recovered_from_the_inverse() -> None:
    """Exact until the next step; later from the inverse."""
    torch.manual_seed(0)
    model = conv_net().double()
    optimizer = ngplus.NGPlus(model, solver="dense")
    x, y = (t.double() for t in data(2, 4, 4))
    one_step(model, optimizer, x, y)
    exact = {name: optimizer.curvature(name).matrix.clone() for name, _ in model.named_parameters()}
    one_step(model, optimizer, x, y)
    for name, matrix in exact.items():
        assert ref.relative_error(optimizer.curvature(name).matrix, matrix) < 1e-8


def test_a_refresh_that_captured_nothing_is_told() -> None:
    """The model was left in eval(): the curvature in use is the mini-batch's, until a refresh has samples again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    optimizer = ngplus.NGPlus(model, update_every=1)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    with pytest.warns(UserWarning, match=r"in eval\(\) mode"):
        one_step(model, optimizer, x, y)
    assert [row.source for row in optimizer.plan()] == ["batch", "batch"]
    assert all("eval()" in row.note for row in optimizer.plan())
    assert all(row.form == "mini-batch" for row in optimizer.plan())
    optimizer.zero_grad()
    one_step(model.train(), optimizer, x, y)
    assert [(row.source, row.note) for row in optimizer.plan()] == [("sample", ""), ("sample", "")]


def test_the_plan_says_what_the_last_refresh_saw() -> None:
    """The samples of all micro-batches, and the positions of each; nothing before a refresh or without samples."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 3)
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.table(x) + self.shift).mean(1))

    model = Tokens()
    optimizer = ngplus.NGPlus(model, update_every=2)
    assert [row.seen for row in optimizer.plan(batch_size=4)] == [None] * 4
    for length in (5, 7, 3):
        model(torch.randint(9, (6, length))).square().mean().backward()
    with pytest.warns(UserWarning, match="shift: no layer rule covers it"):
        optimizer.step()
    seen = {row.name: row.seen for row in optimizer.plan()}
    assert seen == {"shift": None, "table.weight": (18, 7), "norm.weight": (18, 1), "head.weight": (18, 1)}
    text = str(optimizer.plan(verbose=True))
    assert "18 x 7" in text
    assert "seen: samples x positions of the last refresh" in text.replace("\n", " ")
    assert "18 x 7" not in str(optimizer.plan())
    optimizer.zero_grad()
    model(torch.randint(9, (6, 5))).square().mean().backward()
    optimizer.step()  # without a refresh
    assert optimizer.plan()["table.weight"].seen == (18, 7)
    model.eval()
    optimizer.zero_grad()
    model(torch.randint(9, (6, 5))).square().mean().backward()
    optimizer.step()
    assert [row.seen for row in optimizer.plan()] == [None] * 4


@pytest.mark.parametrize("kind", [KFAC, SENG])
def test_the_plans_of_the_baselines_say_what_was_seen(kind: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = kind(model)
    one_step(model, optimizer, torch.randn(6, 2, 4), torch.randn(6, 2, 3))
    assert optimizer.plan()[0].seen == (6, 2)


def test_columns_that_say_nothing_are_left_out() -> None:
    model = nn.Linear(4, 3)
    head = str(ngplus.NGAdam(model).plan(verbose=True)).splitlines()[0].split()
    assert head == ["parameter", "m", "x", "n", "curvature", "side", "solver", "blocks", "state", "step", "refresh"]
    head = str(ngplus.NGPlus(model, block_size=2).plan(batch_size=3, verbose=True)).splitlines()[0].split()
    assert head[4:] == ["curvature", "side", "solver", "blocks", "form", "state", "step", "refresh"]
    head = str(ngplus.NGPlus(model, block_size=2).plan(batch_size=3)).splitlines()[0].split()
    assert head[4:] == ["curvature", "side", "state", "step", "refresh"]


class Deep(nn.Module):
    """Names as long as those of large models."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in self.encoder.layers:
            layer.feed_forward_network = nn.Module()
            layer.feed_forward_network.intermediate_projection = nn.Linear(4096, 1024)
            layer.experts = nn.Conv2d(64, 128, 3, groups=8)
        self.a_parameter_with_a_name_that_is_long_by_itself_and_goes_on_and_on = nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize("kind", [ngplus.NGPlus, ngplus.NGAdam, ngplus.Preconditioner, KFAC, SENG])
def test_a_plan_has_80_columns_and_more_only_if_asked_for(kind: Any) -> None:
    optimizer = kind(Deep())
    brief, verbose = str(optimizer.plan(32)), str(optimizer.plan(32, verbose=True))
    assert max(map(len, brief.splitlines())) <= 80 < max(map(len, verbose.splitlines()))
    for row in optimizer.plan():
        assert row.name in verbose
        assert any(row.name.rpartition(".")[2][-12:] in line for line in brief.splitlines())
    shown = [line.split("  ")[0] for line in brief.splitlines()[2:]]
    assert len(set(shown[: len(optimizer.plan())])) == len(optimizer.plan())  # names tell layers apart


def test_a_plan_on_ranks_has_80_columns() -> None:
    plan = ngplus.NGAdam(Deep()).plan()
    rows = tuple(replace(row, owner=12, wire_bytes=10**9, step_bytes=10**9) for row in plan)
    brief = str(ngplus.Plan(rows))
    assert max(map(len, brief.splitlines())) <= 80
    assert brief.splitlines()[0].endswith("owner")
    assert "wire" in str(ngplus.Plan(rows, verbose=True)).splitlines()[0]


def test_names_are_abbreviated_from_the_left_and_keep_their_numbers() -> None:
    name = "model.layers.10.self_attn.q_proj.weight + bias"
    for width, wanted in (
        (46, name),
        (41, "model.layers.10.self_attn.q_proj.weight +"),
        (33, "m.l.10.self_attn.q_proj.weight +"),
        (20, "m.l.10.s.q.weight +"),
        (12, "....weight +"),
    ):
        assert len(wanted) <= width
        assert abbreviated(name, width) == wanted
    assert abbreviated("weight", 4) == "...t"


def test_an_empty_plan_can_be_printed() -> None:
    assert str(ngplus.Plan(())).splitlines()[0].startswith("parameter")


@pytest.mark.parametrize("shape", [(5,), (5, 1, 1), (1, 1, 5), (1, 5), ()])
def test_a_bare_parameter_with_one_dimension_is_a_vector(shape: tuple[int, ...]) -> None:
    """As of LayerScale or a class token: of NGAdam plain Adam's step, whatever ones its shape has."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.shift = nn.Linear(3, 5), nn.Parameter(torch.zeros(shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + (self.shift.flatten() if shape else self.shift)

    torch.manual_seed(0)
    model = Shifted()
    optimizer = ngplus.NGAdam(model, lr=0.1, betas=(0.0, 0.95), weight_decay=0.0)
    one_step(model, optimizer, torch.randn(6, 3), torch.randn(6, 5))
    row = optimizer.plan()["shift"]
    assert (row.side, row.source, row.solver) == ("none", "none", "none")
    assert model.shift.shape == torch.Size(shape)
    torch.testing.assert_close(model.shift.detach().abs(), torch.full(shape, 0.1), rtol=1e-4, atol=0)  # Adam's first
