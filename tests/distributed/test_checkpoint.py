"""torch.distributed.checkpoint: saved on 2 ranks, loaded on 1, 2 and 4, and on to the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.training import parameters

SAVED_AT = 10  # in between two refreshes: T is 3
KINDS = ["ddp", "ddp memory", "fsdp2"]


def make(kind: str, name: str, world: int) -> tuple[nn.Module, ngplus.NGPlus | ngplus.NGAdam]:
    net: nn.Module = cases.convolutions(cases.precision(name))
    if world > 1:
        net = cases.sharded(net) if kind == "fsdp2" else DistributedDataParallel(net)  # type: ignore[arg-type]
    distribution = "memory" if kind == "ddp memory" else "communication"
    return net, cases.optimizer_of(net, name, distribution=distribution)


def train(net: nn.Module, optimizer: ngplus.NGPlus | ngplus.NGAdam, steps: range, rank: int, world: int) -> None:
    for step in steps:
        x, y = cases.batch(step, next(net.parameters()).dtype)
        mine = cases.share(len(x), rank, world, unequal=False)
        optimizer.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        optimizer.step()


def save(rank: int, world: int, kind: str, name: str, folder: str) -> list[Tensor]:
    """Saves in the middle, and goes on to the end."""
    net, optimizer = make(kind, name, world)
    train(net, optimizer, range(SAVED_AT), rank, world)
    cases.save(net, optimizer, folder)
    train(net, optimizer, range(SAVED_AT, cases.STEPS), rank, world)
    return parameters(net)


def load(rank: int, world: int, kind: str, name: str, folder: str) -> list[Tensor]:
    net, optimizer = make(kind, name, world)
    cases.load(net, optimizer, folder)
    assert all(group["step"] == SAVED_AT for group in optimizer.param_groups)
    train(net, optimizer, range(SAVED_AT, cases.STEPS), rank, world)
    return parameters(net)


@pytest.mark.parametrize("name", ["sample", "momentum", "ngadam", "ngadam blocks"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_on_any_number_of_ranks(ranks: Callable[[int], Pool], tmp_path: Path, kind: str, name: str) -> None:
    whole = ranks(2).run(save, kind, name, str(tmp_path))
    cases.assert_close(whole[0], cases.alone(name))
    for world in (2, 4):
        found = ranks(world).run(load, kind, name, str(tmp_path))
        cases.assert_same_everywhere(found)
        if world == 2:
            cases.assert_same_everywhere([whole[0], found[0]])
        cases.assert_close(found[0], whole[0])
    cases.assert_close(load(0, 1, kind, name, str(tmp_path)), whole[0])


def misload(rank: int, world: int) -> str:
    """The state of rank 0 on all ranks, where each keeps a part of the curvature."""
    net, optimizer = make("ddp memory", "sample", world)
    train(net, optimizer, range(2), rank, world)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box)
    other = make("ddp memory", "sample", world)[1]
    try:
        other.load_state_dict(box[0])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_part_of_the_state_is_refused(ranks: Callable[[int], Pool]) -> None:
    first, second = ranks(2).run(misload)
    assert first == ""
    assert "The loaded state does not have the curvature" in second
