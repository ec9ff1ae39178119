"""Many ranks by DistributedDataParallel on gloo: the parameters of one process on the same global batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
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
from ngplus.sync import assign

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


@dataclass(frozen=True)
class Case:
    """A way to train: the options, and how the samples are shared out."""

    options: str
    unequal: bool = False
    accumulate: bool = False
    wrapped_later: bool = False  # the optimizer was made first, of the plain model


CASES = [Case(name) for name in OPTIONS]
CASES += [Case("sample", wrapped_later=True)]
CASES += [Case(name, unequal=True, accumulate=True) for name in ("sample", "momentum")]


def train_on_ranks(rank: int, world: int, case: Case) -> list[Tensor]:
    options = OPTIONS[case.options]
    dtype = precision(options)
    plain = model(dtype)
    if case.wrapped_later:
        optimizer = ngplus.NGPlus(plain, lr=0.02, **options)
        net = DistributedDataParallel(plain)
    else:
        net = DistributedDataParallel(plain)
        optimizer = ngplus.NGPlus(net, lr=0.02, **options)
    for step in range(STEPS):
        x, y = batch(step, dtype)
        mine = shares(len(x), world, case.unequal)[rank]
        middle = (mine.start + mine.stop) // 2
        parts = [mine]
        if case.accumulate and middle > mine.start:
            parts = [slice(mine.start, middle), slice(middle, mine.stop)]
        optimizer.zero_grad()
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else net.no_sync():
                # DDP averages over ranks: this weight makes the average that over all samples.
                (squared(net(x[part]), y[part]).sum() * world / len(x)).backward()
        optimizer.step()
    return [p.detach() for p in net.module.parameters()]


def one_rank(rank: int, world: int, folder: str, cases: list[Case]) -> None:
    """A process: all cases one after the other, since starting it takes longer than they do."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    results = [train_on_ranks(rank, world, case) for case in cases]
    torch.save([results, bytes_of_a_refresh()], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def bytes_of_a_refresh() -> tuple[int, int]:
    """What plan() says that a refresh sends, and what goes through all_reduce beside DDP's own gradients."""
    sent = []
    plain = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    net = DistributedDataParallel(model(torch.float32))
    optimizer = ngplus.NGPlus(net, **OPTIONS["sample"])
    x, y = batch(0, torch.float32)
    squared(net(x), y).mean().backward()
    dist.all_reduce = counted
    try:
        optimizer.step()
    finally:
        dist.all_reduce = plain
    counts, *buckets = sent  # the sample counts come first, three numbers a matrix
    assert counts == 3 * 8 * len(optimizer.plan())
    return optimizer.plan().wire_bytes, sum(buckets)


def start(function: Callable[..., None], world: int, folder: Path, *args: Any) -> list[Any]:
    """What the ranks of a group have saved."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(function, (world, str(folder), *args), nprocs=world)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def assert_equal_to_one_process(found: list[list[Tensor]], case: Case) -> None:
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    for got, want in zip(found[0], alone(OPTIONS[case.options]), strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-5


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return start(one_rank, 2, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_two_ranks_equal_one_process(two_ranks: list[Any], index: int) -> None:
    assert_equal_to_one_process([results[index] for results, _ in two_ranks], CASES[index])


def test_plan_tells_the_bytes_on_the_wire(two_ranks: list[Any]) -> None:
    for _, (planned, counted) in two_ranks:
        assert planned == counted > 0


def test_four_ranks_with_unequal_shares(tmp_path: Path) -> None:
    case = Case("sample", unequal=True)
    found = start(one_rank, 4, tmp_path, [case])
    assert_equal_to_one_process([results[0] for results, _ in found], case)


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
    first, second = start(some_ranks, 2, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.manual_seed(0)
    for before, after in zip(Sometimes().parameters(), first, strict=True):
        assert after.isfinite().all()
        assert not torch.equal(before, after)


@pytest.mark.parametrize("block", [None, 2])
def test_bytes_on_the_wire(block: int | None) -> None:
    """The lower triangle of the smaller side, d (d + 1) / 2 numbers a block."""
    assert Cut.of(2, 5, block).triangle == 2 * (15 if block is None else 3 + 3 + 1)


def test_assignment_is_balanced_and_the_same_everywhere() -> None:
    costs = [float((7 * i) % 13 + 1) for i in range(40)]
    owners = assign(costs, 4)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(4)]
    assert owners == assign(costs, 4)
    assert max(loads) <= 4 / 3 * sum(costs) / 4 + max(costs)
    assert max(loads) - min(loads) <= max(costs)
    assert assign([], 3) == []
    assert assign([5.0, 1.0], 1) == [0, 0]
