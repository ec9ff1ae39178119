"""Activation checkpointing, both kinds: the same step, and the memory saving stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ngplus
from helpers import reference
from helpers.steps import EXACT, Block, Model, N, assert_equal, brute_force, check, data, loss_fn, one_step

pytestmark = pytest.mark.usefixtures("double")


KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None, blocks: list[nn.Module], nested: bool = False) -> None:
        super().__init__()
        self.reentrant, self.nested = reentrant, nested
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(blocks), nn.Linear(4, 3)

    def _call(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def _all(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._call(block, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self._call(self._all, h) if self.nested else self._all(h)
        return self.head(h.flatten(1, -2).mean(1) if h.dim() > 2 else h)


@KINDS
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing(reentrant: bool, nested: bool, shared: bool) -> None:
    first = Block()
    check(Checkpointed(reentrant, [first, first if shared else Block()], nested), *data(4))


@KINDS
def test_module_used_inside_and_outside_of_a_checkpoint(reentrant: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        h = checkpoint(lambda h: torch.tanh(m.a(torch.tanh(m.a(h)))), h, use_reentrant=reentrant)
        return m.b(torch.tanh(m.a(h)))

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(4))


@KINDS
def test_checkpointing_beside_calls_of_other_sizes(reentrant: bool) -> None:
    """Whose losses are still to come: what is made again belongs to the latest call."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x.flatten(0, 1)))
        return checkpoint(m.b, h, use_reentrant=reentrant).view(len(x), -1, 3).mean(1)

    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        waiting = [model(torch.randn(size, 12 // size, 4)) for size in (1, 2, 3, 4, 12) * 4]
        one_step(model, optimizer, x, y)
        assert all(output.requires_grad for output in waiting)

    check(Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), *data(2, 4), train)


@KINDS
def test_checkpointing_with_accumulation(reentrant: bool) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for i in range(0, N, 2):
            (loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3).backward()
        optimizer.step()

    check(Checkpointed(reentrant, [Block(), Block()]), *data(4), train)


def parameters_after(model: nn.Module, x: Tensor, y: Tensor, steps: int = 2) -> Tensor:
    optimizer = ngplus.NGPlus(model, **EXACT)
    torch.manual_seed(3)
    for _ in range(steps):
        one_step(model, optimizer, x, y)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@KINDS
@pytest.mark.parametrize("layer", ["block", "transformer"])
def test_checkpointing_with_dropout_changes_nothing(reentrant: bool, layer: str) -> None:
    def block() -> nn.Module:
        if layer == "block":
            return Block(dropout=0.3)
        return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)

    x, y = data(5, 4)
    runs = []
    for kind in (None, reentrant):
        torch.manual_seed(0)
        runs.append(parameters_after(Checkpointed(kind, [block(), block()]), x, y))
    assert reference.relative_error(runs[1], runs[0]) < 1e-9


def inner_activations(model: Checkpointed) -> list[StorageWeakRef]:
    """Collects, as the model runs, the memory of what its blocks compute on the way."""
    held: list[StorageWeakRef] = []
    for block in model.blocks:
        block.down.register_forward_pre_hook(lambda _, args: held.append(StorageWeakRef(args[0].untyped_storage())))
    return held


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_checkpointing_keeps_its_memory_saving_on_a_refresh(reentrant: bool | None) -> None:
    model = Checkpointed(reentrant, [Block(), Block()])
    optimizer = ngplus.NGPlus(model, **EXACT)
    held = inner_activations(model)
    x, y = data(4)
    loss = loss_fn(model(x), y)
    assert len(held) == 2
    # Without checkpoints the activations are there, so the measure can tell; with them they are not.
    assert [ref.expired() for ref in held] == [reentrant is not None] * 2
    loss.backward()
    del loss
    assert all(ref.expired() for ref in held)
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


def living_bytes(reentrant: bool | None, optimized: bool) -> tuple[int, int]:
    """Bytes of layer outputs and of tensors saved for backward that are alive between the passes of a refresh step,
    and their number at the start."""
    torch.manual_seed(0)
    model = Checkpointed(reentrant, [Block() for _ in range(4)])
    optimizer = ngplus.NGPlus(model, **EXACT) if optimized else None
    made: dict[int, tuple[StorageWeakRef, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return tensor

    for module in model.modules():
        module.register_forward_hook(lambda _, args, output: note(output) if isinstance(output, Tensor) else None)
    x, y = torch.randn(512, 4), torch.randn(512, 3)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_fn(model(x), y)
    alive = [size for key, (ref, size) in made.items() if not ref.expired() and key not in parameters]
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        assert {row.source for row in optimizer.plan()} == {"sample"}
    return sum(alive), len(made)


@KINDS
def test_bytes_kept_between_the_passes_of_a_refresh(reentrant: bool) -> None:
    """What a checkpoint saves without NG+ it saves with NG+, to the byte."""
    plain, _ = living_bytes(None, optimized=False)
    saving, count = living_bytes(reentrant, optimized=False)
    assert count > 8
    assert saving < plain / 2
    assert living_bytes(reentrant, optimized=True)[0] == saving


class Watchful(nn.Module):
    """Looks at its numbers, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if x.abs().max().item() < 1e6 else x


class Positions(nn.Module):
    """Vectors of positions, which are normalized before they are added."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, None] + self.norm(self.places(torch.arange(4)[None]))).mean(1)


class Halved(nn.Module):
    """Gives one tensor at first and two when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, parts: int = 1) -> Any:
        y = x * self.scale
        return y if parts == 1 else y.split(2, dim=1)


def lost_in_backward(m: Any, x: Tensor) -> Tensor:
    return m.lost(torch.tanh(m.a(x)))


def lost_in_the_second_region(m: Any, x: Tensor) -> Tensor:
    return torch.cat(m.lost(m.a(m.lost(x)), 2), dim=1)


def used_by_a_function(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.lost(x)) + nn.functional.linear(x, m.lost.weight)


LOST: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "vmap fails in backward": (Watchful, lost_in_backward),
    "vectors are used otherwise": (Positions, lost_in_backward),
    "refused in forward": (Halved, lost_in_the_second_region),
    "found out by its gradient": (lambda: nn.Linear(4, 4), used_by_a_function),
}


def gradients_of_two_calls(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of two graphs that wait at the same time, in one step."""
    losses = [loss_fn(model(part), target) for part, target in ((x[:3], y[:3]), (x[3:], y[3:]))]
    for loss in losses:
        (loss / 2).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@KINDS
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("how", LOST)
def test_curvature_that_is_given_up_within_a_pass(reentrant: bool, how: str) -> None:
    """The recomputed forward saves what the first one saved, though nothing is made of it any more."""
    make, call = LOST[how]

    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda h: torch.tanh(call(m, h)), x, use_reentrant=reentrant)
        return m.head(x)

    model = Model(forward, a=nn.Linear(4, 4), lost=make(), head=nn.Linear(4, 3))
    x, y = data(4)
    x.requires_grad_()
    before = copy.deepcopy(model)
    expected = brute_force(before, x, y, skip="lost")
    optimizer = ngplus.NGPlus(model, **EXACT)
    torch.testing.assert_close(gradients_of_two_calls(model, x, y), gradients_of_two_calls(before, x, y))
    optimizer.step()
    assert_equal(model, before, expected)
    lost = {row.name.split(".")[0] for row in optimizer.plan() if row.source == "batch"}
    assert lost == {"lost"}
