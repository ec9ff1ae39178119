"""Gradient accumulation: micro-batches give the curvature of the whole batch, and steps are optimizer steps.

With ``no_sync`` under DDP it is in the tests of many ranks."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference
from helpers.steps import BOTH, EXACT, Make, N, assert_equal, check, data, loss_fn, mlp, one_step

pytestmark = pytest.mark.usefixtures("double")


@BOTH
@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 1, 6), (0, 1, 2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_accumulation_equals_the_whole_batch(model: Make, cuts: tuple[int, ...], curvature: str) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for a, b in pairwise(cuts):
            (loss_fn(model(x[a:b]), y[a:b]) * (b - a) / N).backward()
        optimizer.step()

    optimizer = check(model(), *data(4), train, curvature=curvature)
    assert optimizer.param_groups[0]["step"] == 1


@BOTH
def test_all_forward_passes_before_the_backward_passes(model: Make) -> None:
    def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        losses = [loss_fn(model(x[i : i + 2]), y[i : i + 2]) / 3 for i in range(0, N, 2)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    check(model(), *data(4), train)


@pytest.mark.parametrize(
    ("make", "options"),
    [*((ngplus.NGPlus, {**EXACT, "curvature": kind}) for kind in ("sample", "momentum", "batch")), (ngplus.NGAdam, {})],
    ids=["sample", "momentum", "batch", "NGAdam"],
)
@pytest.mark.parametrize("micro", [256, 1024])
def test_a_large_batch_in_micro_batches(micro: int, make: Any, options: dict[str, Any]) -> None:
    """The paper's 2,048 and 4,096 are trained so: four steps with refreshes equal those on whole batches."""
    size = 2048
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator)) for _ in range(4)]
    whole, parts = mlp(), mlp()
    parts.load_state_dict(whole.state_dict())
    before = copy.deepcopy(whole)
    optimizers = [make(model, **{**options, "lr": 0.05, "update_every": 2}) for model in (whole, parts)]
    for x, y in batches:
        one_step(whole, optimizers[0], x, y)
        optimizers[1].zero_grad()
        for i in range(0, size, micro):
            (loss_fn(parts(x[i : i + micro]), y[i : i + micro]) * micro / size).backward()
        optimizers[1].step()
    assert_equal(parts, before, dict(whole.named_parameters()))
    for row in (row for row in optimizers[0].plan() if row.side != "none"):
        have, want = (o.curvature(row.name).matrix for o in reversed(optimizers))
        assert reference.relative_error(have, want) < 1e-6
    assert [o.param_groups[0]["step"] for o in optimizers] == [4, 4]
