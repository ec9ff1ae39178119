"""Numbers that are not fit for a step, on one rank of two: all ranks decide alike, and go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed import cases
from helpers.ranks import Pool
from helpers.training import parameters

BAD_STEP, ALL_STEPS = 3, 8  # of a refresh every third step: the bad one is a refresh


def train(rank: int, world: int, kind: str, name: str, bad: float | None) -> tuple[list[Tensor], int, list[int]]:
    """``bad`` is what rank 1 sees in one sample of one step; None leaves that step out on all ranks."""
    dtype = cases.precision(name)
    plain = cases.convolutions(dtype)
    net: nn.Module = DistributedDataParallel(plain) if kind != "fsdp2" else fully_shard(plain)
    distribution = "memory" if kind == "ddp memory" else "communication"
    optimizer = cases.optimizer_of(net, name, distribution=distribution)
    for step in range(ALL_STEPS):
        x, y = cases.batch(step, dtype)
        mine = cases.share(len(x), rank, world, False)
        x, y = x[mine].clone(), y[mine]
        if step == BAD_STEP and bad is None:
            continue
        if step == BAD_STEP and rank == 1:
            x[0, 0] = bad
        optimizer.zero_grad()
        cases.squared(net(x), y).mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ngplus.HealthWarning)
            optimizer.step()
    steps = [int(group["step"]) for group in optimizer.param_groups]
    return parameters(net), optimizer.health().skipped, steps


@pytest.mark.parametrize("name", ["sample", "momentum", "batch", "ngadam"])
@pytest.mark.parametrize("kind", ["ddp", "ddp memory", "fsdp2"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_bad_sample_on_one_rank_is_a_step_that_all_ranks_skip(
    ranks: Callable[[int], Pool], kind: str, name: str, bad: float
) -> None:
    found = ranks(2).run(train, kind, name, bad)
    without = ranks(2).run(train, kind, name, None)
    cases.assert_same_everywhere([params for params, *_ in found])
    assert [skipped for _, skipped, *_ in found] == [1, 1]
    assert [steps for _, _, steps in found] == [[ALL_STEPS - 1]] * 2
    for p, q in zip(found[0][0], without[0][0], strict=True):  # as if that step had not been
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["sample", "ngadam"])
@pytest.mark.parametrize("kind", ["ddp", "ddp memory", "fsdp2"])
def test_a_sample_of_1e25_on_one_rank_leaves_all_ranks_finite_and_alike(
    ranks: Callable[[int], Pool], kind: str, name: str
) -> None:
    found = ranks(2).run(train, kind, name, 1e25)
    cases.assert_same_everywhere([params for params, *_ in found])
    assert all(bool(p.isfinite().all()) for p in found[0][0])


class TwoHeads(nn.Module):
    """``steady`` sees what ``wild`` sees, cut off at 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wild, self.steady = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.wild(x), self.steady(x.clamp(-1, 1))


def overflow(rank: int, world: int, kind: str, name: str, bad_step: int) -> tuple[list[Tensor], list[int]]:
    """In one step rank 1 has two samples of opposite sign, whose gradients cancel and whose squares are infinite."""
    plain = TwoHeads()
    net: nn.Module = plain
    if kind != "alone":
        net = DistributedDataParallel(plain) if kind != "fsdp2" else fully_shard(plain)
    distribution = "memory" if kind == "ddp memory" else "communication"
    optimizer = cases.optimizer_of(net, name, distribution=distribution)
    for step in range(ALL_STEPS):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        if step == bad_step:  # the others are zero: beside 2^83 they would be rounded away, in an order of their own
            x = torch.zeros(8, 4)
            x[4], x[5] = 2.0**83, -(2.0**83)
        optimizer.zero_grad()
        wild, steady = net(x[cases.share(len(x), rank, world, False)])
        (wild.sum(1) + steady.square().sum(1)).mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in plain.parameters() if p.grad is not None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ngplus.HealthWarning)
            optimizer.step()
    health = optimizer.health()
    return parameters(net), [
        health.skipped,
        health["wild.weight"].dropped,
        health["steady.weight"].dropped,
    ]


@pytest.mark.parametrize("name", ["sample", "momentum"])
@pytest.mark.parametrize("kind", ["ddp", "ddp memory", "fsdp2"])
@pytest.mark.parametrize("later", [False, True])
def test_curvature_that_overflows_on_one_rank_is_dropped_by_all(
    ranks: Callable[[int], Pool], kind: str, name: str, later: bool
) -> None:
    bad_step = BAD_STEP if later else 0
    found = ranks(2).run(overflow, kind, name, bad_step)
    cases.assert_same_everywhere([params for params, _ in found])
    skipped, dropped, beside = torch.tensor([counts for _, counts in found]).amax(0).tolist()
    assert (skipped, dropped, beside) == (0, 1, 0)  # counted where the sums of all ranks are kept
    wanted, counts = overflow(0, 1, "alone", name, bad_step)
    assert counts == [0, 1, 0]
    cases.assert_close(found[0][0], wanted)
