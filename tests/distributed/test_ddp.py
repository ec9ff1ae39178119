"""DistributedDataParallel: the parameters of one process on the same global batch, on 2 and 4 ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.training import parameters
from ngplus.optimizers.gradient_matrices import agree


@dataclass(frozen=True)
class Case:
    """A way to train: the options, who keeps the curvature, and how the samples are shared out."""

    options: str
    distribution: str = "communication"
    unequal: bool = False
    accumulate: bool = False
    wrapped_later: bool = False  # the optimizer was made first, of the plain model

    def __str__(self) -> str:
        marks = [name for name in ("unequal", "accumulate", "wrapped_later") if getattr(self, name)]
        return "-".join([self.options, self.distribution, *marks])


CASES = [Case(name, distribution) for name in cases.OPTIONS for distribution in ("communication", "memory")]
CASES += [Case("sample", wrapped_later=True), Case("sample", "memory", wrapped_later=True)]
CASES += [Case("ngadam blocks"), Case("ngadam blocks", "memory")]
CASES += [
    Case(name, distribution, unequal=True, accumulate=True)
    for name in ("sample", "momentum", "ngadam")
    for distribution in ("communication", "memory")
]


def train(rank: int, world: int, case: Case) -> list[Tensor]:
    dtype = cases.precision(case.options)
    plain = cases.convolutions(dtype)
    net = None if case.wrapped_later else DistributedDataParallel(plain)
    optimizer = cases.optimizer_of(net or plain, case.options, distribution=case.distribution)
    net = net or DistributedDataParallel(plain)
    for step in range(cases.STEPS):
        x, y = cases.batch(step, dtype)
        mine = cases.share(len(x), rank, world, case.unequal)
        middle = (mine.start + mine.stop) // 2
        parts = [mine]
        if case.accumulate and middle > mine.start:
            parts = [slice(mine.start, middle), slice(middle, mine.stop)]
        optimizer.zero_grad()
        for part in parts:
            with contextlib.nullcontext() if part is parts[-1] else net.no_sync():
                # DDP averages over ranks: this weight makes the average that over all samples.
                (cases.squared(net(x[part]), y[part]).sum() * world / len(x)).backward()
        optimizer.step()
    return parameters(plain)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process(ranks: Callable[[int], Pool], case: Case) -> None:
    found = ranks(2).run(train, case)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], cases.alone(case.options))


@pytest.mark.parametrize("distribution", ["communication", "memory"])
@pytest.mark.parametrize(
    ("name", "unequal"), [("sample", False), ("sample", True), ("momentum", True), ("ngadam", True)]
)
def test_four_ranks_equal_one_process(
    ranks: Callable[[int], Pool], name: str, unequal: bool, distribution: str
) -> None:
    found = ranks(4).run(train, Case(name, distribution, unequal))
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], cases.alone(name))


def kept_after_a_step(rank: int, world: int, name: str) -> int:
    dtype = cases.precision(name)
    net: nn.Module = cases.convolutions(dtype)
    net = DistributedDataParallel(net) if world > 1 else net
    optimizer = cases.optimizer_of(net, name, distribution="memory")
    x, y = cases.batch(0, dtype)
    cases.squared(net(x), y).mean().backward()
    optimizer.step()
    return cases.numbers_kept(optimizer)


@pytest.mark.parametrize("name", ["momentum", "ngadam blocks"])
def test_owners_keep_the_state_of_their_matrices(ranks: Callable[[int], Pool], name: str) -> None:
    shares = ranks(2).run(kept_after_a_step, name)
    assert sum(shares) == kept_after_a_step(0, 1, name)
    assert all(shares)


class Sometimes(nn.Module):
    """A part that only some ranks' samples go through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.some = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, take: bool) -> Tensor:
        y = torch.tanh(self.always(x))
        return y + self.some(y) if take else y


def some_ranks(rank: int, world: int, distribution: str, averaged: bool) -> list[Tensor]:
    """For three steps no rank's samples go through the part, then those of the last rank alone. Without DDP's average
    the other rank has no gradient for it."""
    plain = Sometimes()
    net = DistributedDataParallel(plain, find_unused_parameters=True)
    model = net if averaged else plain
    optimizer = ngplus.NGPlus(net, lr=cases.LR, update_every=2, distribution=distribution)
    for step in range(6):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(x, take=step > 2 and rank == world - 1).square().sum(1).mean().backward()
        if not averaged:
            for p in plain.always.parameters():
                torch.distributed.all_reduce(p.grad)
        optimizer.step()
    return parameters(plain)


@pytest.mark.parametrize("distribution", ["communication", "memory"])
def test_a_rank_whose_module_got_no_samples(ranks: Callable[[int], Pool], distribution: str) -> None:
    found = ranks(2).run(some_ranks, distribution, True)
    cases.assert_same_everywhere(found)
    for before, after in zip(Sometimes().parameters(), found[0], strict=True):
        assert after.isfinite().all()
        assert not torch.equal(before, after)


@pytest.mark.parametrize("distribution", ["communication", "memory"])
def test_nothing_hangs_where_one_rank_has_no_gradient(ranks: Callable[[int], Pool], distribution: str) -> None:
    first, second = ranks(2).run(some_ranks, distribution, False)
    start = [p.detach() for p in Sometimes().parameters()]
    cases.assert_same_everywhere([first[:2], second[:2]])
    assert all(torch.equal(a, b) for a, b in zip(first[2:], start[2:], strict=True))  # as in torch.optim: no gradient
    assert not any(torch.equal(a, b) for a, b in zip(second, start, strict=True))


class Words(nn.Module):
    """A table with sparse gradients, and a layer whose direction its owner sends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index).sum(1))


def with_a_sparse_table(rank: int, world: int) -> list[Tensor]:
    plain = Words()
    net: nn.Module = DistributedDataParallel(plain) if world > 1 else plain
    optimizer = ngplus.NGPlus(net, lr=cases.LR, distribution="memory", **cases.OPTIONS["sample"])
    for step in range(4):
        index = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(index[cases.share(len(index), rank, world, False)]).square().sum(1).mean().backward()
        optimizer.step()
    return parameters(plain)


def test_a_table_with_sparse_gradients_beside_layers_with_owners(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(with_a_sparse_table)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], with_a_sparse_table(0, 1))


def agreed_norm(rank: int, world: int) -> list[float]:
    """Of a gradient whose norm is above what float16 holds."""
    net = nn.Linear(4, 4, bias=False).half()
    optimizer = ngplus.NGPlus(net, process_group=torch.distributed.group.WORLD, distribution="memory")
    net.weight.grad = torch.full_like(net.weight, 3e4)
    return agree(optimizer._distributors[0])[2].tolist()


def test_norms_that_float16_does_not_hold(ranks: Callable[[int], Pool]) -> None:
    (norm,), _ = ranks(2).run(agreed_norm)
    assert norm == pytest.approx(2 * 4 * 3e4, rel=1e-2)  # of both ranks


def switched(rank: int, world: int) -> list[Tensor]:
    """The side changes between two refreshes; of each layer its owner alone keeps the curvature."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    net: nn.Module = DistributedDataParallel(plain) if world > 1 else plain
    optimizer = ngplus.NGPlus(net, lr=cases.LR, distribution="memory", update_every=4)
    for step in range(9):
        optimizer.param_groups[0]["side"] = ("right", "left", "smaller")[step // 3]
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x[cases.share(len(x), rank, world, False)]).square().sum(1).mean().backward()
        optimizer.step()
    return parameters(plain)


def test_all_ranks_know_that_the_side_is_another(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(switched)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], switched(0, 1))


def with_graphs(rank: int, world: int, distribution: str) -> list[Tensor]:
    net = DistributedDataParallel(cases.Graphs())
    cases.train_on_graphs(net, rank, world, distribution=distribution)
    return parameters(net)


@pytest.mark.parametrize("distribution", ["communication", "memory"])
def test_graphs_of_unlike_sizes(ranks: Callable[[int], Pool], distribution: str) -> None:
    found = ranks(2).run(with_graphs, distribution)
    cases.assert_same_everywhere(found)
    cases.assert_close(found[0], cases.graphs_alone())


def seen_by_a_step(rank: int, world: int, distribution: str) -> list[tuple[int, int] | None]:
    """Two micro-batches on each rank, of other sizes on each."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 3, batch_first=True))
    net = DistributedDataParallel(plain)
    optimizer = ngplus.NGPlus(net, distribution=distribution)
    for rows in (3, 4 + rank):
        with contextlib.nullcontext() if rows > 3 else net.no_sync():
            net(torch.randn(rows, 5, 4))[0].square().mean().backward()
    optimizer.step()
    return [row.seen for row in optimizer.plan()]


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("distribution", ["communication", "memory"])
def test_the_plan_has_the_samples_of_all_ranks(ranks: Callable[[int], Pool], distribution: str) -> None:
    for seen in ranks(2).run(seen_by_a_step, distribution):
        assert seen == [(2 * 3 + 4 + 5, 5), None, None]
