"""The options of torch.distributed.checkpoint.state_dict: training goes on to the same bits, on the same ranks, or in
one process."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from distributed import cases
from distributed.test_checkpoint import KINDS, SAVED_AT, make, train
from helpers.ranks import Pool
from helpers.training import parameters
from ngplus.distributed import full_state

NAMES = ["sample", "momentum", "ngadam"]
SHARDED = {"offload": {"cpu_offload": True}, "flat": {"flatten_optimizer_state_dict": True}}


def states(net: Any, optimizer: Any, **options: bool) -> dict[str, Any]:
    asked = StateDictOptions(**options)
    return {"m": get_model_state_dict(net, options=asked), "o": get_optimizer_state_dict(net, optimizer, options=asked)}


def take(net: Any, optimizer: Any, found: dict[str, Any], **options: bool) -> None:
    asked = StateDictOptions(**options)
    set_model_state_dict(net, found["m"], options=asked)
    set_optimizer_state_dict(net, optimizer, found["o"], options=asked)


def rest_of(net: Any, optimizer: Any, rank: int, world: int) -> list[Tensor]:
    train(net, optimizer, range(SAVED_AT, cases.STEPS), rank, world)
    return parameters(net)


def sharded(rank: int, world: int, kind: str, name: str, option: str, folder: str) -> list[list[Tensor]]:
    """The parameters of a training, and of one that goes on from its distributed checkpoint."""
    net, optimizer = make(kind, name, world)
    train(net, optimizer, range(SAVED_AT), rank, world)
    dcp.save(states(net, optimizer, **SHARDED[option]), checkpoint_id=folder)
    again, other = make(kind, name, world)
    found = states(again, other, **SHARDED[option])
    dcp.load(found, checkpoint_id=folder)
    take(again, other, found, **SHARDED[option])
    return [rest_of(net, optimizer, rank, world), rest_of(again, other, rank, world)]


@pytest.mark.parametrize("option", SHARDED)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_states(ranks: Callable[[int], Pool], tmp_path: Path, kind: str, name: str, option: str) -> None:
    for went_on, resumed in ranks(2).run(sharded, kind, name, option, str(tmp_path / "saved")):
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


def full(rank: int, world: int, kind: str, name: str, broadcast: bool, file: str) -> list[list[Tensor]]:
    """The same by one file, which rank 0 alone reads, or every rank."""
    net, optimizer = make(kind, name, world)
    train(net, optimizer, range(SAVED_AT), rank, world)
    kept = cases.numbers_kept(optimizer)
    found = copy.deepcopy(states(net, optimizer, full_state_dict=True, cpu_offload=broadcast))
    assert cases.numbers_kept(optimizer) == kept
    if rank == 0:
        torch.save(found, file)
    torch.distributed.barrier()
    again, other = make(kind, name, world)
    read: dict[str, Any] = {"m": {}, "o": {}}
    if rank == 0 or not broadcast:
        read = torch.load(file, weights_only=True)
    take(again, other, read, full_state_dict=True, cpu_offload=broadcast, broadcast_from_rank0=broadcast)
    assert cases.numbers_kept(other) == kept  # its own part, and no more
    return [rest_of(net, optimizer, rank, world), rest_of(again, other, rank, world)]


@pytest.mark.parametrize("broadcast", [True, False], ids=["rank 0 reads", "all read"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_file(ranks: Callable[[int], Pool], tmp_path: Path, kind: str, name: str, broadcast: bool) -> None:
    """It has the state of all owners, so that one process goes on from it, too."""
    file = str(tmp_path / "full.pt")
    found = ranks(2).run(full, kind, name, broadcast, file)
    for went_on, resumed in found:
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)
    net, optimizer = make("plain", name, 1)
    take(net, optimizer, torch.load(file, weights_only=True), full_state_dict=True)
    cases.assert_close(rest_of(net, optimizer, 0, 1), found[0][0])


def hybrid(rank: int, world: int, name: str) -> list[list[str]]:
    """The keys of each parameter in the full state, where each of two replicas has its owners."""
    dtype = cases.precision(name)
    net = cases.sharded(cases.convolutions(dtype), (2, 2))
    optimizer = cases.optimizer_of(net, name)
    x, y = cases.batch(0, dtype)
    cases.squared(net(x), y).mean().backward()
    optimizer.step()
    return [sorted(state) for state in states(net, optimizer, full_state_dict=True)["o"]["state"].values()]


@pytest.mark.parametrize("name", ["momentum", "ngadam"])
def test_hybrid_sharding(ranks: Callable[[int], Pool], name: str) -> None:
    net = cases.convolutions(cases.precision(name))
    optimizer = cases.optimizer_of(net, name)
    x, y = cases.batch(0, cases.precision(name))
    cases.squared(net(x), y).mean().backward()
    optimizer.step()
    alone = [sorted(optimizer.state[param]) for param in net.parameters()]
    assert ranks(4).run(hybrid, name) == [alone] * 4


def frozen(rank: int, world: int, kind: str, name: str) -> tuple[str, list[list[Tensor]]]:
    """The error of torch's functions where a weight is frozen, not its bias; and a training by load_state_dict."""

    def made() -> tuple[Any, Any]:
        net = cases.convolutions(cases.precision(name))
        net[0].weight.requires_grad_(False)
        wrapped: Any = cases.sharded(net) if kind == "fsdp2" else DistributedDataParallel(net)
        distribution = "memory" if kind == "ddp memory" else "communication"
        return wrapped, cases.optimizer_of(wrapped, name, distribution=distribution)

    net, optimizer = made()
    train(net, optimizer, range(SAVED_AT), rank, world)
    again, other = made()
    set_model_state_dict(again, get_model_state_dict(net))
    error = ""
    try:
        full = StateDictOptions(full_state_dict=True)
        found = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=full))
        set_optimizer_state_dict(again, other, found, options=full)
    except ValueError as refused:
        error = str(refused)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # what it recommends
    return error, [rest_of(net, optimizer, rank, world), rest_of(again, other, rank, world)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_weight_with_a_trained_bias(ranks: Callable[[int], Pool], kind: str, name: str) -> None:
    """torch loads no state of frozen parameters. NGAdam has none there; NGPlus has the curvature of the layer."""
    for error, (went_on, resumed) in ranks(2).run(frozen, kind, name):
        assert ("curvature of 0.weight, 0.bias" in error) is (name != "ngadam")
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)


def test_torch_still_has_the_functions_whose_options_are_read() -> None:
    module = importlib.import_module(full_state.MODULE)
    for function in (full_state.SAVES, full_state.LOADS):
        assert "info" in inspect.unwrap(getattr(module, function)).__code__.co_varnames
    assert not full_state.is_wanted()
