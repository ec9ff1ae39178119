"""On several ranks, too, a matrix whose captured gradients do not sum to its gradient has mini-batch curvature."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ngplus
from helpers.ranks import Pool
from helpers.steps import Model


class Scaled(nn.Embedding):
    """As Gemma's: the rows are scaled after they are looked up."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3.0 * super().forward(tokens)


def tied(m: Any, tokens: Tensor) -> Tensor:
    return F.linear(m.hidden(m.table(tokens).mean(1)), m.table.weight)


def sources(rank: int, world: int, wrapper: str, added_at: int) -> list[str]:
    """Trains with a refresh in every step; from one step on, the first rank's loss has a penalty on a weight."""
    torch.manual_seed(0)
    model: nn.Module = Model(tied, table=nn.Embedding(30, 40), hidden=nn.Linear(40, 40)).double()
    if added_at == 0:
        model.table = Scaled(30, 40).double()
    net = DistributedDataParallel(model) if wrapper == "ddp" else fully_shard(model)
    optimizer = ngplus.NGPlus(net, lr=1e-3, update_every=1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        optimizer.zero_grad()
        loss = net(torch.randint(30, (6, 3), generator=generator)).square().mean()
        if 0 < added_at <= step and rank == 0:
            loss = loss + model.hidden.weight.sum()
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if added_at else "default")
            optimizer.step()
    return [row.source for row in optimizer.plan()]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_scaled_tied_table(ranks: Callable[[int], Pool], wrapper: str) -> None:
    assert ranks(2).run(sources, wrapper, 0) == [["batch", "sample"]] * 2


def test_a_penalty_on_one_rank_at_a_later_refresh(ranks: Callable[[int], Pool]) -> None:
    found = ranks(2).run(sources, "ddp", 2)
    assert all(each[1] == "batch" for each in found)
