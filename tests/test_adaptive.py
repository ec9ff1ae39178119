"""Adaptive scaling: Adam's moments in the eigenbases of one side, of both or of none, against plain formulas."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import reference as ref
import torch
from linear_cases import LAMBDA, SHAPES, batches, compare, matrix_of, per_sample, train
from torch import Tensor, nn

import ngplus
from ngplus import matrices

pytestmark = pytest.mark.usefixtures("double")

BASES = ("basis", "basis_tail", "basis_tail2", "basis_tail3")
BARE = {"scaling": "adaptive", "curvature": "sample", "side": "smaller", "nesterov": False, "early_refreshes": False}


def second_moment(v: Tensor, kind: str) -> Tensor:
    """As it is, or as the product of its means over rows and columns. These are linear in v, and a change of basis
    keeps its sums, so that it does not matter when they are taken. Of one or two rows or columns it is as it is."""
    rows, cols = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
    return v if kind == "full" or min(v.shape[-2:]) < 3 else rows * cols / rows.mean(-2, keepdim=True)


def adam_step(m: Tensor, v: Tensor, t: int, beta1: float, beta2: float, kind: str) -> Tensor:
    """m / sqrt(v), both without their bias; of a factored matrix no longer than 1 a number in the root mean square."""
    second = second_moment(v, kind) / (1 - beta2**t)
    step = (m / (1 - beta1**t)) / (second.sqrt() + 1e-8)
    factored = kind == "factored" and min(v.shape[-2:]) > 2
    return step / step.square().mean().sqrt().clamp_min(1.0) if factored else step


class PlainAdaptive:
    """Adam's moments in the eigenbasis of L or R, as DESIGN.md has it, with nothing but torch.linalg.eigh."""

    def __init__(self, beta1: float, beta2: float, every: int, kind: str = "full") -> None:
        self.beta1, self.beta2, self.every, self.kind = beta1, beta2, every, kind

    def curvature(self, k: int, grads: Tensor, side: str) -> Tensor:
        return ref.gfim(grads, side)

    def __call__(self, k: int, grads: Tensor, _: Tensor) -> Tensor:
        side, mean = ref.side_of(grads), grads.mean(0)
        gradient = mean if side == "left" else mean.mT
        curvature = self.curvature(k, grads, side)
        if k % self.every == 0:
            new = torch.linalg.eigh(curvature).eigenvectors
            if k == 0:
                self.m, self.v = torch.zeros_like(gradient), torch.zeros_like(gradient)
            else:
                change = new.mT @ self.q
                self.m, self.v = change @ self.m, (change * change) @ self.v
            self.q = new
        turned = self.q.mT @ gradient
        self.m = self.beta1 * self.m + (1 - self.beta1) * turned
        self.v = self.beta2 * self.v + (1 - self.beta2) * turned**2
        direction = self.q @ adam_step(self.m, self.v, k + 1, self.beta1, self.beta2, self.kind)
        return direction if side == "left" else direction.mT


class PlainAdaptiveBatch(PlainAdaptive):
    """The same in the eigenbasis of the moving average of mini-batch products."""

    def curvature(self, k: int, grads: Tensor, side: str) -> Tensor:
        product = ref.gfim(grads.mean(0)[None], side)
        old = LAMBDA * torch.eye(product.shape[-1])[None] if k == 0 else self.average
        self.average = 0.8 * old + 0.2 * product
        return self.average


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["full", "factored"])
def test_adaptive_scaling(shape: tuple[int, int], every: int, kind: str) -> None:
    compare(
        PlainAdaptive(0.8, 0.95, every, kind),
        shape=shape,
        **{**BARE, "update_every": every, "momentum": 0.8, "beta2": 0.95, "second_moment": kind},
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_adaptive_scaling_with_batch_curvature(shape: tuple[int, int]) -> None:
    # Where the average is still lambda I its eigenvectors are not unique, but no gradient has reached there either.
    compare(
        PlainAdaptiveBatch(0.8, 0.95, 1),
        shape=shape,
        steps=4,
        second_moment="full",
        **{**BARE, "update_every": 1, "momentum": 0.8, "beta2": 0.95, "curvature": "batch", "beta": 0.8},
    )


class PlainTwoSided:
    """Adam's moments of Q_L^T G Q_R, with nothing but torch.linalg.eigh.

    The larger side has a null space, whose basis is made definite by the tilt: a rising diagonal of sqrt(eps) of the
    mean eigenvalue.
    """

    def __init__(self, beta1: float, beta2: float, every: int, kind: str) -> None:
        self.beta1, self.beta2, self.every, self.kind = beta1, beta2, every, kind

    def refreshes(self, k: int) -> bool:
        return k % self.every == 0

    def curvature(self, grads: Tensor, side: str) -> Tensor:
        return ref.gfim(grads, side)

    def basis(self, matrix: Tensor) -> Tensor:
        d = matrix.shape[-1]
        tilt = torch.diag(torch.linspace(0, 1, d)) * torch.finfo(matrix.dtype).eps ** 0.5
        return torch.linalg.eigh(matrix * d / matrix[0].trace() + tilt).eigenvectors

    def __call__(self, k: int, grads: Tensor, _: Tensor) -> Tensor:
        gradient = grads.mean(0)
        if self.refreshes(k):
            left, right = (self.basis(self.curvature(grads, side)) for side in ("left", "right"))
            if k == 0:
                self.m, self.v = torch.zeros_like(gradient), torch.zeros_like(gradient)
            else:
                p, q = left.mT @ self.left, right.mT @ self.right
                self.m, self.v = p @ self.m @ q.mT, (p * p) @ self.v @ (q * q).mT
            self.left, self.right = left, right
        turned = self.left.mT @ gradient @ self.right
        self.m = self.beta1 * self.m + (1 - self.beta1) * turned
        self.v = self.beta2 * self.v + (1 - self.beta2) * turned**2
        step = adam_step(self.ahead(turned), self.v, k + 1, self.beta1, self.beta2, self.kind)
        return self.left @ step @ self.right.mT

    def ahead(self, turned: Tensor) -> Tensor:
        return self.m


class PlainDefault(PlainTwoSided):
    """What a newcomer gets: moving averages of L and R, refreshes after 1 and 5 steps and then every T, Nesterov,
    second moments by rows and columns."""

    def __init__(self) -> None:
        super().__init__(0.9, 0.95, 20, "factored")
        self.averages: dict[str, Tensor] = {}

    def refreshes(self, k: int) -> bool:
        return k in (0, 1, 5, 25)

    def curvature(self, grads: Tensor, side: str) -> Tensor:
        new = ref.gfim(grads, side)
        self.averages[side] = 0.5 * self.averages[side] + 0.5 * new if side in self.averages else new
        return self.averages[side]

    def ahead(self, turned: Tensor) -> Tensor:
        return self.beta1 * self.m + (1 - self.beta1) * turned


@pytest.mark.parametrize(
    ("every", "early"),
    [(1, [0]), (2, [0]), (3, [0, 1]), (10, [0, 1]), (11, [0, 1, 5]), (20, [0, 1, 5]), (51, [0, 1, 5, 25])],
)
def test_when_the_early_refreshes_come(every: int, early: list[int]) -> None:
    """At the start and after 1, 5, 25, ... steps, below T/2; then every T from the last of these."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, update_every=every)
    refreshed = []
    for k, (x, y) in enumerate(batches(early[-1] + every + 2)):
        before = optimizer.state[model.weight].get("basis")
        train(model, optimizer, x, y)
        if optimizer.state[model.weight]["basis"] is not before:
            refreshed.append(k)
    assert refreshed[: len(early) + 1] == [*early, early[-1] + every]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_default(shape: tuple[int, int]) -> None:
    model = nn.Linear(*shape)
    plain, optimizer = PlainDefault(), ngplus.NGPlus(model)
    for k, (x, y) in enumerate(batches(30, features=shape[0], outputs=shape[1])):
        before = matrix_of(model)
        wanted = plain(k, per_sample(model, x, y), before)
        train(model, optimizer, x, y)
        assert ref.relative_error(before - matrix_of(model), 0.01 * wanted) < 1e-6, k


def test_what_the_default_settles_on() -> None:
    """Blocks and a sketch have one side; the paper's scaling has none of what is new."""

    def settled(**options: Any) -> list[Any]:
        group = ngplus.NGPlus(nn.Linear(4, 3), **options).param_groups[0]
        return [group[name] for name in ("side", "curvature", "beta", "nesterov", "early_refreshes")]

    assert settled() == ["auto", "momentum", 0.5, True, True]
    assert settled(scaling="inverse") == ["auto", "sample", 0.9, False, False]
    for one in ({"scaling": "inverse"}, {"block_size": 2}, {"sketch": 2}):
        assert ngplus.NGPlus(nn.Linear(4, 3), **one).plan()[0].side == "left"
    assert settled(curvature="batch")[2] == 0.95
    assert settled(momentum=0.0)[3] is False
    assert settled(side="left", curvature="sample", beta=0.7, nesterov=False, early_refreshes=False) == [
        *("left", "sample", 0.7, False, False)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["full", "factored"])
def test_adaptive_scaling_of_both_sides(shape: tuple[int, int], every: int, kind: str) -> None:
    compare(
        PlainTwoSided(0.8, 0.95, every, kind),
        shape=shape,
        **{**BARE, "side": "both", "update_every": every, "momentum": 0.8, "beta2": 0.95, "second_moment": kind},
    )


class PlainBlocks(PlainDefault):
    """The default for long sides: a basis for each block of a side, of as few equal ones as can be, by default."""

    def __init__(self, whole: int, block: int, sizes: dict[int, int] | None = None) -> None:
        super().__init__()
        self.whole, self.block, self.sizes = whole, block, sizes or {}

    def basis(self, matrix: Tensor) -> Tensor:
        d = matrix.shape[-1]
        if d <= self.whole:
            return super().basis(matrix)
        count = math.ceil(d / self.block)
        size = self.sizes.get(d, math.ceil(d / count))
        blocks = [matrix[:, at : at + size, at : at + size] for at in range(0, d, size)]
        return torch.block_diag(*(super(PlainBlocks, self).basis(block)[0] for block in blocks))[None]


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((5, 7), 2 + 3), ((6, 6), 2 + 3), ((8, 5), 2 + 3), ((12, 4), 1 + 5), ((3, 15), 1 + 5), ((5, 4), 1 + 2)],
)
def test_long_sides_have_a_basis_for_each_block(
    shape: tuple[int, int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WHOLE", 4), ("BLOCK", 3)):
        monkeypatch.setattr(matrices, name, value)
    model = nn.Linear(*shape)
    plain, optimizer = PlainBlocks(4, 3), ngplus.NGPlus(model)
    for k, (x, y) in enumerate(batches(30, features=shape[0], outputs=shape[1])):
        before = matrix_of(model)
        wanted = plain(k, per_sample(model, x, y), before)
        train(model, optimizer, x, y)
        assert ref.relative_error(before - matrix_of(model), 0.01 * wanted) < 1e-6, k
    entry = optimizer.plan()["weight"]
    assert (entry.side, entry.blocks) == ("both", blocks)
    planned = ngplus.NGPlus(nn.Linear(*shape)).plan(batch_size=6)["weight"]
    assert (planned.blocks, planned.side) == (entry.blocks, "both")
    floor = 8  # and the spectrum's roundings, one number
    assert abs(entry.state_bytes - planned.state_bytes) <= floor


@pytest.mark.parametrize("bias", [True, False])
def test_the_bases_of_channels_with_their_kernel(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WHOLE", 5), ("BLOCK", 3), ("PATCH", 8)):
        monkeypatch.setattr(matrices, name, value)
    model = nn.Conv2d(3, 6, 2, bias=bias)  # of three channels with four places two fit into a block
    plain, optimizer = PlainBlocks(5, 3, {12 + bias: 8}), ngplus.NGPlus(model)

    def matrix(tensors: Iterable[Tensor | None]) -> Tensor:
        return torch.cat([t.reshape(6, -1) for t in tensors if t is not None], 1)[None]

    for k in range(30):
        x = torch.randn(5, 3, 4, 4)
        grads = []
        for sample in x:
            model.zero_grad()
            model(sample[None]).tanh().square().mean().backward()
            grads.append(matrix(p.grad for p in model.parameters()))
        before = matrix(p.detach() for p in model.parameters())
        wanted = plain(k, torch.stack(grads), before)
        optimizer.zero_grad()
        model(x).tanh().square().mean().backward()
        optimizer.step()
        after = matrix(p.detach() for p in model.parameters())
        assert ref.relative_error(before - after, 0.01 * wanted) < 1e-6, k
    assert optimizer.plan()["weight"].blocks == 2 + 2


@pytest.mark.parametrize(
    ("shape", "side", "blocks"),
    [
        ((160, 160), "both", 2),
        ((161, 160), "both", 1 + 4),  # in blocks of 4 roots of the rows at most
        ((256, 257), "both", 4 + 4),
        ((640, 300), "both", 5 + 7),
        ((641, 640), "both", 7 + 7),
        ((2000, 600), "both", 7 + 16),  # and of 128
        ((2999, 600), "both", 7 + 24),
        ((3000, 600), "left", 7),
        ((4096, 1024), "both", 8 + 32),
        ((4097, 1024), "both", 8 + 33),  # with the bias as a column
        ((5120, 1024), "left", 8),
        ((100, 5000), "right", 1),
        ((128, 640), "both", 1 + 7),
        ((128, 641), "right", 1),
    ],
)
def test_which_sides_the_default_curves(shape: tuple[int, int], side: str, blocks: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(*shape, bias=False)
    (entry,) = ngplus.NGPlus(model).plan(batch_size=8)
    assert (entry.side, entry.blocks) == (side, blocks)
    (entry,) = ngplus.NGPlus(model, side="both").plan(batch_size=8)
    assert (entry.side, entry.blocks) == (
        ("both", 2) if max(shape) <= 640 else ("left" if shape[0] >= shape[1] else "right", 1)
    )


@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        (nn.Conv2d(16, 32, 3, bias=False), [32, 144]),
        (nn.Conv2d(19, 32, 3, bias=False), [32, 9 * 10, 9 * 9]),
        (nn.Conv2d(32, 32, 3), [32, 144, 144, 1]),  # the bias by itself
        (nn.Conv2d(64, 64, 3, bias=False), [64, 144, 144, 144, 144]),
        (nn.Conv2d(40, 20, 3), [20, 9 * 14, 9 * 14, 9 * 12 + 1]),
        (nn.Conv2d(8, 48, 5, bias=False), [48, 100, 100]),
        (nn.Conv1d(100, 180, 3, bias=False), [*[45] * 4, *[3 * 34] * 2, 3 * 32]),
        (nn.Conv2d(96, 64, 3, groups=2, bias=False), [*[32] * 2, *[144] * 6]),
        (nn.ConvTranspose2d(32, 24, 3, bias=False), [24, 144, 144]),
        (nn.Conv2d(256, 200, 1, bias=False), [*[50] * 4, *[64] * 4]),
        (nn.Conv2d(128, 128, 3, bias=False), [128, *[144] * 8]),  # nine times as long, but as many channels
        (nn.Conv2d(359, 72, 3, bias=False), [72, *[144] * 22, 63]),
        (nn.Conv2d(360, 72, 3, bias=False), [72]),  # five times as many
        (nn.Conv2d(90, 67, 3, bias=False), [67]),  # a block would have more than twice the rows of the smaller side
        (nn.Conv1d(100, 100, 65, groups=4, padding=32, bias=False), [25] * 4),
        (nn.Conv2d(32, 161, 3, bias=False), [*[41] * 3, 38, 144, 144]),
        (nn.Conv2d(3, 192, 16, stride=16, bias=False), [*[48] * 4, *[110] * 6, 108]),  # no channel fits into a block
    ],
    ids=str,
)
def test_the_blocks_of_a_convolution_hold_whole_channels(layer: nn.Module, sizes: list[int]) -> None:
    layer = copy.deepcopy(layer).double()
    optimizer = ngplus.NGPlus(layer)
    inputs = (2, 100, 5) if isinstance(layer, nn.Conv1d) else (2, layer.in_channels, 16, 16)
    layer(torch.randn(inputs)).square().mean().backward()
    optimizer.step()
    held = optimizer.state[layer.weight]
    found = [size for name in BASES if name in held for size in [held[name].shape[-1]] * len(held[name])]
    assert sorted(found) == sorted(sizes)
    assert optimizer.plan()["weight"].blocks == len(sizes)


@pytest.mark.parametrize("options", [{}, {"curvature": "batch"}, {"second_moment": "full"}, {"drift": 0.1}], ids=str)
def test_blocks_of_both_sides_of_every_kind_of_layer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups, patches, sequences and a checkpoint on the way: with blocks as long as the sides it is the default."""

    def trained(**constants: int) -> list[Tensor]:
        for name, value in constants.items():
            monkeypatch.setattr(matrices, name, value)
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv1d(6, 7, 2), nn.Tanh(), nn.Linear(3, 9), nn.Tanh(),
            nn.Flatten(), nn.Linear(63, 5),
        )  # fmt: skip
        optimizer = ngplus.NGPlus(model, lr=0.01, update_every=3, **options)
        for k in range(8):
            if k == 5:
                held = copy.deepcopy(optimizer.state_dict())
                optimizer = ngplus.NGPlus(model, lr=0.01, update_every=3, **options)
                optimizer.load_state_dict(held)
            train(model, optimizer, torch.randn(6, 4, 6), torch.randn(6, 5))
        found = [p.detach().clone() for p in model.parameters()]
        assert all(p.isfinite().all() for p in found)
        return found

    whole = trained()
    blocks = trained(WHOLE=0, BLOCK=100, ROOTS=100, PATCH=0)  # one block a side
    for one, other in zip(whole, blocks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    cut = trained(WHOLE=3, BLOCK=2)
    assert not any(torch.allclose(one, other) for one, other in zip(whole, cut, strict=True))


@pytest.mark.parametrize("shape", [(1, 3, 224, 224), (16, 3, 64, 64), (64, 256, 64)])
def test_a_lone_parameter_of_many_dimensions_is_no_kernel(shape: tuple[int, ...]) -> None:
    """An image that is optimised, or experts in one tensor, have no channels: the long side has no basis."""
    model = nn.Module()
    model.lone = nn.Parameter(torch.empty(shape, device="meta"))
    (entry,) = ngplus.NGPlus(model).plan(batch_size=8)
    assert (entry.side, entry.blocks) == ("left", 1)


def test_curvature_that_was_made_for_other_blocks() -> None:
    model = nn.Linear(6, 8)
    optimizer = ngplus.NGPlus(model, scaling="inverse")
    train(model, optimizer, torch.randn(5, 6), torch.randn(5, 8))
    optimizer.param_groups[0]["block_size"] = 3
    with pytest.raises(RuntimeError, match="made for other blocks"):
        optimizer.curvature("weight")
    train(model, optimizer, torch.randn(5, 6), torch.randn(5, 8))
    assert optimizer.curvature("weight").matrix.shape == (7, 7)


def test_a_table_without_a_basis_has_means_over_its_rows_and_columns() -> None:
    """Adam with a second moment of m + n numbers, in plain formulas; a vector keeps all of its own."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "norm": nn.LayerNorm(4, bias=False)})
    optimizer = ngplus.NGPlus(model, lr=0.01, nesterov=False)
    m, v = torch.zeros(5, 4), torch.zeros(5, 4)
    for k in range(1, 5):
        optimizer.zero_grad()
        model["norm"](model["table"](torch.randint(5, (6,)))).square().sum().backward()
        before, gradient = model["table"].weight.detach().clone(), model["table"].weight.grad
        optimizer.step()
        assert gradient is not None
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        wanted = before - 0.01 * adam_step(m, v, k, 0.9, 0.95, "factored")
        torch.testing.assert_close(model["table"].weight.detach(), wanted)
    assert "exp_avg_sq" in optimizer.state[model["norm"].weight]


def test_what_a_factored_second_moment_keeps() -> None:
    """m + n numbers in place of m n; a change of the kind begins the moments anew."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model)
    state = optimizer.state[model.weight]
    train(model, optimizer, *batches(1)[0])
    assert "exp_avg_sq" not in state
    assert [tuple(state[key].shape) for key in ("exp_avg_sq_row", "exp_avg_sq_col")] == [(1, 3, 1), (1, 1, 6)]
    optimizer.param_groups[0]["second_moment"] = "full"
    train(model, optimizer, *batches(1)[0])
    assert tuple(state["exp_avg_sq"].shape) == (1, 3, 6)
    assert "exp_avg_sq_row" not in state
    assert state["adam_step"] == 1


@pytest.mark.parametrize("options", [{}, {"side": "smaller"}, {"side": "smaller", "block_size": 4}])
def test_a_factored_step_is_no_longer_than_adams_first(options: dict[str, Any]) -> None:
    """Of few gradients the means know too little, and steps along the small ones would be tens of times too long: no
    block, and no group of a convolution, moves by more than lr in the root mean square."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, groups=2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(32, 8))
    optimizer = ngplus.NGPlus(model, lr=0.01, **options)
    longest = []
    for _ in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        x = torch.randn(16, 4, 6) * torch.logspace(0, -3, 16)[:, None, None]
        train(model, optimizer, x, torch.randn(16, 8))
        conv, weight, bias = (old - new.detach() for old, new in zip(before, model.parameters(), strict=True))
        joined = torch.cat([weight, bias[:, None]], dim=1)
        blocks = [*conv.flatten(1).split(4), *joined.split(options.get("block_size", 8))]
        longest.append(max(float(block.square().mean().sqrt()) for block in blocks))
    assert max(longest) < 0.01 * (1 + 1e-6)
    assert longest[0] > 0.01 * (1 - 1e-6)


def test_both_sides_of_grouped_convolutions_tables_and_vectors() -> None:
    """Groups have two bases each; the rows of a table and the entries of a vector are left as they are."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"conv": nn.Conv1d(4, 6, 3, groups=2, bias=False), "table": nn.Embedding(9, 4), "norm": nn.LayerNorm(6)}
    )
    optimizer = ngplus.NGPlus(model, lr=0.01, side="both", curvature="batch")
    for _ in range(3):
        optimizer.zero_grad()
        hidden = model["conv"](model["table"](torch.tensor([[1, 2, 5, 1]])).mT)
        model["norm"](hidden.mT).square().sum().backward()
        optimizer.step()
    shapes = {
        name: [
            tuple(optimizer.state[param][key].shape) for key in ("basis", "basis_tail") if key in optimizer.state[param]
        ]
        for name, param in model.named_parameters()
        if "basis" in optimizer.state[param]
    }
    assert shapes == {"conv.weight": [(2, 3, 3), (2, 6, 6)], "table.weight": [(1, 4, 4)], "norm.weight": [(1, 2, 2)]}
    assert [row.side for row in optimizer.plan()] == ["both", "right", "right"]


def test_a_change_from_one_side_to_both_is_a_refresh() -> None:
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=100, side="smaller", early_refreshes=False)
    (x, y), *rest = batches(3)
    train(model, optimizer, x, y)
    optimizer.param_groups[0]["side"] = "both"
    train(model, optimizer, *rest[0])
    assert "basis_tail" in optimizer.state[model.weight]
    assert optimizer.plan()[0].source == "sample"
    optimizer.param_groups[0].update(scaling="inverse", side="smaller", curvature="sample", nesterov=False)
    train(model, optimizer, *rest[1])
    kept = set(optimizer.state[model.weight])
    assert kept == {"inverse", "damping", "refreshed", "momentum_buffer"}  # and nothing of what adaptive scaling keeps


@pytest.mark.parametrize("bad", [{"scaling": "inverse"}, {"block_size": 2}, {"sketch": 2}])
def test_both_sides_refuse_what_has_one(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="side='both' goes with"):
        ngplus.NGPlus(nn.Linear(4, 3), side="both", **bad)


def test_adaptive_scaling_of_a_vector_is_adam() -> None:
    """A lone vector is a matrix of one column: R is a number, its basis 1, and Adam is what is left."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + self.v)

    ours, theirs = Shift(), Shift()
    first = ngplus.NGPlus(ours, lr=0.1, scaling="adaptive", momentum=0.9, beta2=0.99, nesterov=False)
    second = torch.optim.Adam(theirs.parameters(), lr=0.1, betas=(0.9, 0.99))
    for _ in range(5):
        x = torch.randn(6, 4)
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.v, theirs.v)


def test_vectors_and_tables_have_no_basis_by_default_and_are_adam() -> None:
    """What is only looked up; one that is the output layer as well has a basis, and one with sparse gradients. With
    second moments in full it is Adam to the last digit."""

    class Words(nn.Module):
        def __init__(self, tied: bool, sparse: bool = False) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(9, 4, sparse=sparse), nn.LayerNorm(4)
            self.head = nn.Linear(4, 9, bias=False)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.table(x)))

    def sides(model: nn.Module, **options: Any) -> dict[str, str]:
        return {row.name: row.side for row in ngplus.NGPlus(model, **options).plan()}

    assert sides(Words(tied=False)) == {"table.weight": "none", "norm.weight": "none", "head.weight": "both"}
    assert sides(Words(tied=True)) == {"table.weight": "right", "norm.weight": "none"}
    assert sides(Words(tied=False, sparse=True))["table.weight"] == "right"
    assert sides(Words(tied=False), side="both") == {
        "table.weight": "right", "norm.weight": "right", "head.weight": "both"
    }  # fmt: skip

    ours = Words(tied=False)
    theirs = Words(tied=False)
    theirs.load_state_dict(ours.state_dict())
    first = ngplus.NGPlus(ours, lr=0.01, nesterov=False, beta2=0.99, second_moment="full")
    second = torch.optim.Adam([*theirs.table.parameters(), *theirs.norm.parameters()], lr=0.01, betas=(0.9, 0.99))
    for _ in range(5):
        x, y = torch.randint(9, (6,)), torch.randint(9, (6,))
        theirs.head.load_state_dict(ours.head.state_dict())
        for model, optimizer in ((ours, first), (theirs, second)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name in ("table.weight", "norm.weight", "norm.bias"):
            torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name))
    assert "basis" not in first.state[ours.table.weight]
    with pytest.raises(RuntimeError, match=r"'table.weight' has no curvature of its own: side='auto' leaves"):
        first.curvature("table.weight")


def test_a_basis_that_is_given_up_takes_its_moments_along() -> None:
    model = nn.LayerNorm(5)
    optimizer = ngplus.NGPlus(model, side="both", early_refreshes=False)
    for side in ("both", "auto", "both"):
        optimizer.param_groups[0]["side"] = side
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the capture was not armed for this step
            train(model, optimizer, torch.randn(6, 5), torch.randn(6, 5))
        state = optimizer.state[model.weight]
        assert ("basis" in state) == (side == "both")
        assert state["adam_step"] == 1
