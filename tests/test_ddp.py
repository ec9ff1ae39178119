"""Many ranks by DistributedDataParallel on gloo: the parameters of one process on the same global batch."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ngplus
from ngplus.blocks import Cut
from ngplus.sync import assign, wire_elements

STEPS, BATCH = 20, 12


def precision(options: dict[str, Any]) -> torch.dtype:
    return torch.float64 if options["scaling"] == "adaptive" else torch.float32


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 9),
        nn.Linear(9, 3),
    )
    return net.to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = 8 if step == STEPS - 1 else BATCH  # a last, short batch
    x, y = torch.randn(size, 1, 6, 6, generator=generator), torch.randn(size, 3, generator=generator)
    return x.to(dtype), y.to(dtype)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1)


def shares(count: int, world: int, unequal: bool) -> list[slice]:
    if not unequal:
        sizes = [count // world] * world
    else:  # the first rank has the most
        sizes = [1] * (world - 1)
        sizes.insert(0, count - sum(sizes))
    ends = [sum(sizes[: i + 1]) for i in range(world)]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


OPTIONS: dict[str, dict[str, Any]] = {
    "sample": {"scaling": "inverse", "damping": 0.5, "update_every": 3},
    "momentum": {"scaling": "inverse", "damping": 0.5, "update_every": 3, "curvature": "momentum"},
    "batch": {"scaling": "inverse", "damping": 0.5, "update_every": 3, "curvature": "batch"},
    "blocks": {"scaling": "inverse", "damping": 0.5, "update_every": 3, "block_size": 3},
    # In float64: where two eigenvalues are close their eigenvectors follow the rounding, and Adam's step with them.
    "adaptive": {"scaling": "adaptive", "update_every": 3, "curvature": "momentum", "eps": 1e-4},
}


def alone(options: dict[str, Any]) -> list[Tensor]:
    net = model(precision(options))
    optimizer = ngplus.NGPlus(net, lr=0.02, **options)
    for step in range(STEPS):
        x, y = batch(step, precision(options))
        optimizer.zero_grad()
        squared(net(x), y).mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def one_rank(rank: int, world: int, folder: str, options: dict[str, Any], unequal: bool, accumulate: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    net = DistributedDataParallel(model(precision(options)))
    optimizer = ngplus.NGPlus(net, lr=0.02, **options)
    for step in range(STEPS):
        x, y = batch(step, precision(options))
        mine = shares(len(x), world, unequal)[rank]
        optimizer.zero_grad()
        parts = [mine]
        if accumulate and mine.stop - mine.start > 1:
            middle = (mine.start + mine.stop) // 2
            parts = [slice(mine.start, middle), slice(middle, mine.stop)]
        for i, part in enumerate(parts):
            # DDP averages over ranks: this weight makes the average that over all samples.
            loss = squared(net(x[part]), y[part]).sum() * world / len(x)
            if i + 1 < len(parts):
                with net.no_sync():
                    squared(net(x[part]), y[part]).sum().mul(world / len(x)).backward()
            else:
                loss.backward()
        optimizer.step()
    torch.save([p.detach() for p in net.module.parameters()], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(tmp_path: Path, world: int, options: dict[str, Any], unequal: bool = False, accumulate: bool = False) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(one_rank, (world, str(tmp_path), options, unequal, accumulate), nprocs=world)
    expected = alone(options)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    for got, want in zip(found[0], expected, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_equal_one_process(tmp_path: Path, name: str) -> None:
    run(tmp_path, 2, OPTIONS[name])


@pytest.mark.parametrize("name", ["sample", "momentum"])
def test_unequal_shares_and_accumulation(tmp_path: Path, name: str) -> None:
    run(tmp_path, 2, OPTIONS[name], unequal=True, accumulate=True)


@pytest.mark.slow
def test_four_ranks_with_unequal_shares(tmp_path: Path) -> None:
    run(tmp_path, 4, OPTIONS["sample"], unequal=True)


class Sometimes(nn.Module):
    """A part that only some ranks' samples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.some = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, take: bool) -> Tensor:
        y = torch.tanh(self.always(x))
        return y + self.some(y) if take else y


def some_ranks(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    torch.manual_seed(0)
    net = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    optimizer = ngplus.NGPlus(net, lr=0.02, scaling="inverse", update_every=2)
    for step in range(6):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        net(x, take=step > 2 and rank == 1).square().sum(1).mean().backward()
        optimizer.step()
    torch.save([p.detach() for p in net.module.parameters()], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_a_rank_whose_module_got_no_samples(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(some_ranks, (2, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    start = copy.deepcopy(Sometimes())
    assert all(p.isfinite().all() for p in first)
    assert len(first) == len(list(start.parameters()))


@pytest.mark.parametrize("block", [None, 2])
def test_bytes_on_the_wire(block: int | None) -> None:
    """The lower triangle of the smaller side, d (d + 1) / 2 numbers a block."""
    cut = Cut.of(2, 5, block)
    assert wire_elements(cut) == 2 * (15 if block is None else 3 + 3 + 1)


def test_assignment_is_balanced_and_the_same_everywhere() -> None:
    costs = [float((7 * i) % 13 + 1) for i in range(40)]
    owners = assign(costs, 4)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(4)]
    assert owners == assign(costs, 4)
    assert max(loads) <= 4 / 3 * sum(costs) / 4 + max(costs)
    assert max(loads) - min(loads) <= max(costs)
    assert assign([], 3) == []
    assert assign([5.0, 1.0], 1) == [0, 0]
