"""Tensor parallelism, alone and under FSDP2: DTensor parameters whose layers see features in parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.training import parameters

BATCH, LENGTH, VOCABULARY, WIDTH = 8, 4, 11, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tokens(nn.Module):
    """An embedding, a norm, a block with a column-wise and a row-wise layer, a head that is not parallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.block = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.block(self.norm(x))
        return self.head(x).mean(1)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = 4 if step == cases.STEPS - 1 else BATCH
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return tokens, torch.randn(size, 3, generator=generator).to(dtype)


def parallel(net: Tokens, mesh: DeviceMesh, sequence: bool) -> None:
    """With ``sequence``, the norm's positions are shared out as well."""
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
    }
    if sequence:
        plan["block"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan["norm"] = SequenceParallel(use_local_output=True)
        net.norm.register_forward_pre_hook(lambda _, args: (part(args[0], mesh),), prepend=True)
    parallelize_module(net, mesh, plan)


def part(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share of the positions."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(1)])


def train(rank: int, world: int, name: str, data: int, sequence: bool = False) -> list[Tensor]:
    """``data`` ranks shard the parameters and the samples by FSDP2, the rest of the mesh is tensor parallel."""
    dtype = cases.precision(name)
    net = Tokens().to(dtype)
    place, share = 0, 1
    if world > 1 and data == 1:
        parallel(net, init_device_mesh("cpu", (world,)), sequence)
    elif world > 1:
        mesh = init_device_mesh("cpu", (data, world // data), mesh_dim_names=("data", "model"))
        parallel(net, mesh["model"], sequence)
        fully_shard(net.block, mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        place, share = mesh.get_local_rank("data"), data
    optimizer = cases.optimizer_of(net, name)
    for step in range(cases.STEPS):
        x, y = batch(step, dtype)
        mine = slice(place * len(x) // share, (place + 1) * len(x) // share)
        optimizer.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        optimizer.step()
    return parameters(net)


@functools.cache
def alone(name: str) -> list[Tensor]:
    return train(0, 1, name, 1)


@pytest.mark.parametrize("name", [*cases.OPTIONS, *cases.NGADAM])
def test_two_ranks_equal_one_process(ranks: Callable[[int], Pool], name: str) -> None:
    found = ranks(2).run(train, name, 1)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], alone(name))


def test_sequence_parallel_norms(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(train, "sample", 1, True)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], alone("sample"))


@pytest.mark.parametrize("data", [1, 2], ids=["alone", "under fsdp2"])
@pytest.mark.parametrize("name", ["sample", "momentum", "ngadam"])
def test_four_ranks_equal_one_process(ranks: Callable[[int], Pool], name: str, data: int) -> None:
    found = ranks(4).run(train, name, data)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], alone(name))


def averaged_by_hand(rank: int, world: int) -> list[Tensor]:
    """Two tensor parallel copies on different samples, whose gradients the user averages."""
    net = Tokens()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "model"))
    parallel(net, mesh["model"], sequence=False)
    place, group = mesh.get_local_rank("data"), mesh.get_group("data")
    optimizer = ngplus.NGPlus(net, lr=cases.LR, process_group=group, **cases.OPTIONS["sample"])
    for step in range(cases.STEPS):
        x, y = batch(step, torch.float32)
        mine = slice(place * len(x) // 2, (place + 1) * len(x) // 2)
        optimizer.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        for p in net.parameters():
            part = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            torch.distributed.all_reduce(part, group=group)
            part /= 2
        optimizer.step()
    return parameters(net)


def test_copies_whose_gradients_the_user_averages(ranks: Callable[[int], Pool]) -> None:
    found = ranks(4).run(averaged_by_hand)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], alone("sample"))
