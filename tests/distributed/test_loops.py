"""Training loops that do unusual things, on ranks as in one process: passes that are not for a step, gradients thrown
away, shares without samples, losses that are sums, a first state from elsewhere."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.steps import PAPER
from helpers.training import parameters

STEPS, BATCH = 9, 8
OPTIMIZERS: dict[str, Any] = {"NGPlus": functools.partial(ngplus.NGPlus, damping=0.5, **PAPER), "NGAdam": ngplus.NGAdam}


class Net(nn.Module):
    """Its output is not that of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7, dtype=torch.float64), nn.Linear(7, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) + 0.1


def made(kind: str, world: int, name: str = "NGPlus", **options: Any) -> tuple[nn.Module, Any]:
    net: Any = Net()
    if kind == "fsdp2":
        net = fully_shard(net)
    elif kind == "fsdp2 by layers":  # whose whole parameters are gone between forward and backward
        for part in (net.first, net.last, net):
            fully_shard(part)
    elif world > 1:
        net = DistributedDataParallel(net)
    distribution = "memory" if kind == "ddp memory" else "communication"
    return net, OPTIMIZERS[name](net, lr=cases.LR, update_every=3, distribution=distribution, **options)


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return x[mine], y[mine]


def error(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    squares: Tensor = (net(x) - y).square().sum(1)
    return squares


def with_inputs_attacked(net: nn.Module, optimizer: ngplus.NGPlus, step: int, rank: int, world: int) -> None:
    """A pass for the gradient of the inputs alone comes first."""
    x, y = batch(step, rank, world)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(error(net, x, y).mean(), x)
    optimizer.zero_grad()
    error(net, (x + 0.1 * slope.sign()).detach(), y).mean().backward()
    optimizer.step()


def with_a_pass_thrown_away(net: nn.Module, optimizer: ngplus.NGPlus, step: int, rank: int, world: int) -> None:
    x, y = batch(step, rank, world)
    net.zero_grad()
    (error(net, x, y).mean() * 1e3).backward()
    net.zero_grad()
    error(net, x, y).mean().backward()
    optimizer.step()


def with_an_empty_share(net: nn.Module, optimizer: ngplus.NGPlus, step: int, rank: int, world: int) -> None:
    """All samples on the first rank, in a step with a refresh and in others."""
    x, y = batch(step, 0, 1) if step % 2 else batch(step, rank, world)
    if step % 2 and rank > 0:
        x, y = x[:0], y[:0]
    optimizer.zero_grad()
    (error(net, x, y).sum() * world / BATCH).backward()
    optimizer.step()


def with_a_sum(net: nn.Module, optimizer: ngplus.NGPlus, step: int, rank: int, world: int) -> None:
    x, y = batch(step, rank, world)
    optimizer.zero_grad()
    (error(net, x, y).sum() * world).backward()
    optimizer.step()


EACH = (with_inputs_attacked, with_a_pass_thrown_away, with_an_empty_share, with_a_sum)
LOOPS = {loop.__name__: loop for loop in EACH}


def trained(rank: int, world: int, kind: str, loop: str) -> list[Tensor]:
    net, optimizer = made(kind, world, loss_reduction="sum" if loop == "with_a_sum" else "mean")
    for step in range(STEPS):
        LOOPS[loop](net, optimizer, step, rank, world)
    return parameters(net)


@pytest.mark.parametrize("kind", ["ddp", "ddp memory", "fsdp2", "fsdp2 by layers"])
@pytest.mark.parametrize("loop", LOOPS)
def test_two_ranks_equal_one_process(ranks: Callable[[int], Pool], loop: str, kind: str) -> None:
    found = ranks(2).run(trained, kind, loop)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], trained(0, 1, "plain", loop))


def plain_steps(net: nn.Module, optimizer: Any, steps: range, rank: int, world: int) -> None:
    for step in steps:
        x, y = batch(step, rank, world)
        optimizer.zero_grad()
        error(net, x, y).mean().backward()
        optimizer.step()


def passed_on(rank: int, world: int, kind: str, name: str, folder: str) -> list[Tensor]:
    """Goes on from the state of one process, saves, and goes on from that."""
    saved = torch.load(Path(folder) / "one.pt")
    net, optimizer = made(kind, world, name)
    set_model_state_dict(net, saved["model"], options=StateDictOptions(full_state_dict=True))
    optimizer.load_state_dict(saved["optimizer"])
    plain_steps(net, optimizer, range(3, 6), rank, world)
    cases.save(net, optimizer, f"{folder}/many")
    net, optimizer = made(kind, world, name)
    cases.load(net, optimizer, f"{folder}/many")
    plain_steps(net, optimizer, range(6, STEPS), rank, world)
    return parameters(net)


PASSED_ON = [("ddp", "NGPlus"), ("ddp", "NGAdam"), ("ddp memory", "NGPlus"), ("ddp memory", "NGAdam")]


@pytest.mark.parametrize(("kind", "name"), [*PASSED_ON, ("fsdp2", "NGAdam")])
def test_a_state_is_passed_on_from_one_process_to_ranks_and_on(
    ranks: Callable[[int], Pool], tmp_path: Path, kind: str, name: str
) -> None:
    """A rank that does not own a matrix drops what it was given of it: else the next checkpoint has it twice."""
    net, optimizer = made("plain", 1, name)
    plain_steps(net, optimizer, range(3), 0, 1)
    torch.save(copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()}), tmp_path / "one.pt")
    plain_steps(net, optimizer, range(3, STEPS), 0, 1)
    found = ranks(2).run(passed_on, kind, name, str(tmp_path))
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], parameters(net))


def trained_plainly(rank: int, world: int, kind: str, name: str) -> list[Tensor]:
    net, optimizer = made(kind, world, name)
    plain_steps(net, optimizer, range(STEPS), rank, world)
    return parameters(net)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fsdp2_on_one_rank(ranks: Callable[[int], Pool], name: str) -> None:
    """As in a first try before many ranks are taken."""
    (found,) = ranks(1).run(trained_plainly, "fsdp2", name)
    cases.assert_close(found, trained_plainly(0, 1, "plain", name))


def with_a_whole_buffer(rank: int, world: int) -> list[str]:
    plain, optimizer = made("plain", 1)
    plain_steps(plain, optimizer, range(2), 0, 1)
    _, sharded = made("fsdp2", world)
    try:
        sharded.load_state_dict(optimizer.state_dict())
    except ValueError as refused:
        return [str(refused)]
    return []


def test_a_momentum_buffer_that_is_not_sharded_is_refused(ranks: Callable[[int], Pool]) -> None:
    for said in ranks(2).run(with_a_whole_buffer):
        assert len(said) == 1
        assert "set_optimizer_state_dict" in said[0]


def saved_and_loaded(rank: int, world: int, kind: str, solver: str, folder: str) -> list[list[Tensor]]:
    """The parameters of a run that goes on, and of one that goes on from its checkpoint."""
    net, optimizer = made(kind, world, solver=solver)
    plain_steps(net, optimizer, range(4), rank, world)
    cases.save(net, optimizer, folder)
    plain_steps(net, optimizer, range(4, STEPS), rank, world)
    again, other = made(kind, world, solver=solver)
    cases.load(again, other, folder)
    plain_steps(again, other, range(4, STEPS), rank, world)
    return [parameters(net), parameters(again)]


@pytest.mark.parametrize("solver", ["auto", "dense", "woodbury", "sketched"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_every_solver_s_checkpoint_is_loaded_again(
    ranks: Callable[[int], Pool], tmp_path: Path, kind: str, solver: str
) -> None:
    for went_on, resumed in ranks(2).run(saved_and_loaded, kind, solver, str(tmp_path / "saved")):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)
