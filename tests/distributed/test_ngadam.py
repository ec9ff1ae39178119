"""NGAdam on several ranks: the parameters of one process on the same global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed import cases
from distributed.test_fsdp2 import sharded
from helpers.ranks import Pool

KINDS = ["communication", "memory", "fsdp2"]


def make(kind: str, world: int) -> tuple[nn.Module, ngplus.NGAdam]:
    net: nn.Module = cases.convolutions(torch.float64)
    if world > 1:
        net = sharded(net) if kind == "fsdp2" else DistributedDataParallel(net)  # type: ignore[arg-type]
    distribution = "memory" if kind == "memory" else "communication"
    return net, ngplus.NGAdam(net, lr=cases.LR, distribution=distribution)


def train(net: nn.Module, optimizer: ngplus.NGAdam, steps: range, rank: int, world: int) -> None:
    for step in steps:
        x, y = cases.batch(step, torch.float64)
        mine = cases.share(len(x), rank, world, unequal=False)
        optimizer.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        optimizer.step()


def parameters(net: nn.Module) -> list[Tensor]:
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in net.parameters()]


@functools.cache
def alone() -> list[Tensor]:
    net, optimizer = make("communication", 1)
    train(net, optimizer, range(cases.STEPS), 0, 1)
    return parameters(net)


def trained(rank: int, world: int, kind: str) -> tuple[list[Tensor], int]:
    net, optimizer = make(kind, world)
    train(net, optimizer, range(cases.STEPS), rank, world)
    kept = sum(x.numel() for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
    return parameters(net), kept


@pytest.mark.parametrize("kind", KINDS)
def test_as_in_one_process(ranks: Callable[[int], Pool], kind: str) -> None:
    found = ranks(2).run(trained, kind)
    cases.assert_same_everywhere([params for params, _ in found])
    cases.assert_close(found[0][0], alone(), within=1e-9)
    if kind != "communication":  # each rank keeps the state of the matrices that it owns
        net, optimizer = make(kind, 1)
        train(net, optimizer, range(2), 0, 1)
        whole = sum(x.numel() for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor))
        assert sum(kept for _, kept in found) == whole
        assert all(kept for _, kept in found)


def saved(rank: int, world: int, kind: str, folder: str) -> list[Tensor]:
    net, optimizer = make(kind, world)
    train(net, optimizer, range(8), rank, world)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True)), checkpoint_id=folder)
    return []


def resumed(rank: int, world: int, kind: str, folder: str) -> list[Tensor]:
    net, optimizer = make(kind, world)
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(net, optimizer, range(8, cases.STEPS), rank, world)
    return parameters(net)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_on_two_ranks_and_loaded_on_one_and_two(ranks: Callable[[int], Pool], tmp_path: Path, kind: str) -> None:
    ranks(2).run(saved, kind, str(tmp_path))
    cases.assert_close(ranks(2).run(resumed, kind, str(tmp_path))[0], alone(), within=1e-9)
    cases.assert_close(resumed(0, 1, kind, str(tmp_path)), alone(), within=1e-9)
