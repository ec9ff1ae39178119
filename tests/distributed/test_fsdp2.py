"""FSDP2 and HSDP: sharded parameters end where one process ends, and each rank keeps its share of the curvature."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.training import parameters


@dataclass(frozen=True)
class Case:
    """The options, the shape of the mesh (None: all ranks shard), and how the samples are shared out."""

    options: str
    mesh: tuple[int, int] | None = None
    unequal: bool = False
    accumulate: bool = False
    offload: bool = False

    def __str__(self) -> str:
        marks = [name for name in ("unequal", "accumulate", "offload") if getattr(self, name)]
        return "-".join([self.options, *(["hsdp"] if self.mesh else []), *marks])


def train(rank: int, world: int, case: Case) -> list[Any]:
    dtype = cases.precision(case.options)
    plain = cases.convolutions(dtype)
    net: Any = cases.sharded(plain, case.mesh) if not case.offload else plain
    if case.offload:
        fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = cases.optimizer_of(net, case.options)
    for step in range(cases.STEPS):
        x, y = cases.batch(step, dtype)
        mine = cases.share(len(x), rank, world, case.unequal)
        middle = (mine.start + mine.stop) // 2
        parts = [slice(mine.start, middle), slice(middle, mine.stop)] if case.accumulate else [mine]
        optimizer.zero_grad()
        for part in parts:
            net.set_requires_gradient_sync(part is parts[-1])
            (cases.squared(net(x[part]), y[part]).sum() * world / len(x)).backward()
        optimizer.step()
    buffers = [s["momentum_buffer"] for s in optimizer.state.values() if "momentum_buffer" in s]
    assert all(b.placements == p.placements for b, p in zip(buffers, net.parameters(), strict=False))
    return [parameters(net), cases.numbers_kept(optimizer)]


def assert_like_one_process(found: list[list[Any]], options: str) -> None:
    cases.assert_same_everywhere([params for params, _ in found])
    cases.assert_close(found[0][0], cases.alone(options))


CASES = [Case(name) for name in cases.OPTIONS]
CASES += [Case("sample", unequal=True), Case("sample", accumulate=True)]
CASES += [Case("sample", offload=True), Case("ngadam", offload=True)]
CASES += [Case("ngadam blocks"), Case("ngadam", unequal=True), Case("ngadam", accumulate=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process(ranks: Callable[[int], Pool], case: Case) -> None:
    assert_like_one_process(ranks(2).run(train, case), case.options)


@pytest.mark.parametrize("case", [Case("sample"), Case("sample", unequal=True), Case("ngadam")], ids=str)
def test_four_ranks_equal_one_process(ranks: Callable[[int], Pool], case: Case) -> None:
    assert_like_one_process(ranks(4).run(train, case), case.options)


@pytest.mark.parametrize("case", [Case(name, (2, 2)) for name in ("sample", "momentum", "ngadam")], ids=str)
def test_hybrid_sharding_equals_one_process(ranks: Callable[[int], Pool], case: Case) -> None:
    assert_like_one_process(ranks(4).run(train, case), case.options)


@pytest.mark.parametrize("name", ["momentum", "ngadam blocks"])
def test_each_rank_keeps_its_share_of_the_state(ranks: Callable[[int], Pool], name: str) -> None:
    """Together the ranks hold what one process holds, and each matrix is on one rank alone."""
    net = cases.convolutions(cases.precision(name))
    optimizer = cases.optimizer_of(net, name)
    x, y = cases.batch(0, cases.precision(name))
    cases.squared(net(x), y).mean().backward()
    optimizer.step()
    whole = cases.numbers_kept(optimizer)
    shares = [kept for _, kept in ranks(2).run(train, Case(name))]
    assert sum(shares) == whole
    assert 0 < max(shares) < 0.75 * whole


class Experts(nn.Module):
    """Two layers, and samples that go to one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = x[:, 0] < 0
        out = x.new_empty(len(x), 3)
        out[left], out[~left] = torch.tanh(self.first(x[left])), torch.tanh(self.second(x[~left]))
        return out


def with_experts(rank: int, world: int, wrapped: bool) -> list[Tensor]:
    """All samples of a rank go to one expert."""
    net = Experts()
    if wrapped:
        fully_shard(net)
    optimizer = ngplus.NGPlus(net, lr=cases.LR, update_every=2)
    for step in range(6):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0] * 4 + [1.0] * 4)
        mine = slice(4 * rank, 4 * rank + 4) if wrapped else slice(None)
        optimizer.zero_grad()
        net(x[mine]).square().sum(1).mean().backward()
        optimizer.step()
    return parameters(net)


def test_a_rank_whose_module_got_no_samples(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(with_experts, True)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], with_experts(0, 1, False))


def with_preconditioner(rank: int, world: int, wrapped: bool) -> list[Tensor]:
    net = cases.convolutions()
    if wrapped:
        cases.sharded(net)
    preconditioner = ngplus.Preconditioner(net, damping=0.5, update_every=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=cases.LR, momentum=0.9)
    for step in range(cases.STEPS):
        x, y = cases.batch(step)
        mine = cases.share(len(x), rank, world, unequal=False)
        optimizer.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        preconditioner.step()
        optimizer.step()
    return parameters(net)


def test_the_preconditioner_gives_sharded_directions(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(with_preconditioner, True)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], with_preconditioner(0, 1, False))


def ask_all(rank: int, world: int) -> list[Any]:
    """For each matrix the owner, and L or what is said in its place."""
    net = cases.sharded(cases.convolutions())
    optimizer = ngplus.NGPlus(net)
    x, y = cases.batch(0)
    cases.squared(net(x), y).mean().backward()
    optimizer.step()
    answers: list[Any] = []
    for row in optimizer.plan():
        try:
            answers.append([row.owner, optimizer.curvature(row.name).matrix])
        except RuntimeError as error:
            answers.append([row.owner, str(error)])
    return answers


def test_the_owner_has_the_curvature(ranks: Callable[[int], Pool]) -> None:
    plain = cases.convolutions()
    optimizer = ngplus.NGPlus(plain)
    x, y = cases.batch(0)
    cases.squared(plain(x), y).mean().backward()
    optimizer.step()
    found = ranks(2).run(ask_all)
    for k, row in enumerate(optimizer.plan()):
        owner = found[0][k][0]
        torch.testing.assert_close(found[owner][k][1], optimizer.curvature(row.name).matrix, rtol=1e-4, atol=1e-6)
        assert f"call curvature() on its owner, rank {owner} of the process group" in found[1 - owner][k][1]


def with_a_bad_part(rank: int, world: int) -> list[bool]:
    """In the second step one rank's part of one gradient is not finite. Does each step change the parameters?"""
    net = cases.sharded(cases.convolutions())
    optimizer = ngplus.NGPlus(net, lr=cases.LR, update_every=2)
    changed = []
    for step in range(4):
        x, y = cases.batch(step)
        optimizer.zero_grad()
        cases.squared(net(x), y).mean().backward()
        if step == 1 and rank == world - 1:
            net[5].weight.grad.to_local().fill_(float("nan"))
        before = parameters(net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        after = parameters(net)
        assert all(p.isfinite().all() for p in after)
        changed.append(not all(map(torch.equal, before, after)))
    return changed


def test_all_ranks_leave_out_a_step_that_one_cannot_make(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(with_a_bad_part) == [[True, False, True, True]] * 2


def with_a_later_group(rank: int, world: int, wrapped: bool) -> list[Tensor]:
    """The first layers, the largest of all, join the training between two refreshes."""
    net = cases.convolutions()
    if wrapped:
        cases.sharded(net)
    late = [*net[5].parameters(), *net[0].parameters()]
    early = [p for p in net.parameters() if not any(p is q for q in late)]
    optimizer = ngplus.NGPlus(early, lr=cases.LR, model=net, **cases.OPTIONS["momentum"])
    for step in range(10):
        if step == 4:
            optimizer.add_param_group({"params": late})
        x, y = cases.batch(step)
        mine = cases.share(len(x), rank, world, unequal=False)
        net.zero_grad()
        cases.squared(net(x[mine]), y[mine]).mean().backward()
        optimizer.step()
    return parameters(net)


def test_a_group_that_is_added_later(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(with_a_later_group, True)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], with_a_later_group(0, 1, False))


def with_fsdp1(rank: int, world: int, kind: str, whole: bool) -> list[str]:
    """What is said where FSDP1's wrapper is given: the model, or its flat parameters alone."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    flat = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
    try:
        options = {"curvature": "batch"} if kind == "NGPlus" else {}  # which needs no module
        getattr(ngplus, kind)(flat if whole else flat.parameters(), **options)
    except ValueError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", ["NGPlus", "NGAdam"])
def test_fsdp1_is_refused(ranks: Callable[[int], Pool], kind: str, whole: bool) -> None:
    """Its flat vectors are no matrices: they would be trained as vectors are, and nothing would say so."""
    for said in ranks(2).run(with_fsdp1, kind, whole):
        assert len(said) == 1
        assert "fully_shard" in said[0]


def with_graphs(rank: int, world: int) -> list[Tensor]:
    net = fully_shard(cases.Graphs())
    cases.train_on_graphs(net, rank, world)
    return parameters(net)


def test_graphs_of_unlike_sizes(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(with_graphs)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], cases.graphs_alone())
