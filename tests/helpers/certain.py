"""Compares what plan() calls per-sample with the gradients of one sample at a time."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, N

Loss = Callable[[Any, list[int]], Tensor]  # of the model and the numbers of some samples: their part of the mean


def assert_certain(
    model: nn.Module, loss: Loss, call: nn.Module | None = None, options: Any = None, **sources: str
) -> ngplus.NGPlus:
    """Refreshes on all samples, and compares each matrix that is called per-sample with N times the gradients of the
    parts. ``sources`` are those of some modules, "sample", "vmap" or "batch"."""
    gradients = []
    for i in range(N):
        one = copy.deepcopy(model)
        loss(one, [i]).mul(N).backward()
        gradients.append({k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in one.named_parameters()})
    given = {**EXACT, "lr": 0.0, "solver": "dense", **(options or {})}
    optimizer = ngplus.NGPlus(model if call is None else call, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model if call is None else call, list(range(N))).backward()
        optimizer.step()
    compare(optimizer, gradients, sources)
    return optimizer


def compare(optimizer: ngplus.NGPlus, gradients: Sequence[dict[str, Tensor]], sources: dict[str, str]) -> None:
    plan = optimizer.plan()
    for row in plan:
        if row.source not in ("sample", "vmap"):
            continue
        matrix = optimizer._find_matrix(row.name)
        stack = torch.stack([matrix.layout.join([one[name.removeprefix("_orig_mod.")] for name in matrix.names])
                             for one in gradients])  # fmt: skip
        wanted = torch.einsum("sgij,sgkj->gik" if row.side == "left" else "sgji,sgjk->gik", stack, stack) / N
        torch.testing.assert_close(optimizer.curvature(row.name).matrix, wanted.squeeze(0), msg=row.name)
    found = {row.name.removeprefix("_orig_mod.").partition(".")[0]: row.source for row in plan}
    assert {name: found[name] for name in sources} == sources
