"""Adaptive scaling of long sides: which fall into blocks, how, and each block's basis against plain formulas."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import reference as ref
import torch
from linear_cases import batches, matrix_of, per_sample, train
from plain_adaptive import PlainDefault
from torch import Tensor, nn

import ngplus
from ngplus.capture import matrices

pytestmark = pytest.mark.usefixtures("double")

BASES = ("basis", "basis_tail", "basis_tail2", "basis_tail3")


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


@pytest.mark.parametrize("options", [{}, {"curvature": "batch"}, {"second_moment": "full"}], ids=str)
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
