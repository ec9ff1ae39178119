"""What a matrix accumulates over micro-batches."""

from __future__ import annotations

import torch
from torch import nn

from helpers import reference as ref
from ngplus.capture.accumulator import Accumulator
from ngplus.capture.matrices import lone_matrix
from ngplus.fisher.factors import Outer
from ngplus.utils.memory import HeldStorages, storages

SIZE, OTHER, SAMPLES = 20, 30, 3
GROUP = {"side": "smaller", "block_size": None, "samples": None, "sketch": None, "solver": "auto",
         "curvature": "sample", "damping": 0.1, "relative_damping": 0.0}  # fmt: skip


def test_low_rank_roots_of_many_micro_batches_are_multiplied_out(double: None) -> None:
    """U of all of them would have more columns than L."""
    matrix, accumulator = lone_matrix("weight", nn.Parameter(torch.zeros(SIZE, OTHER))), Accumulator()
    gradients = []
    for micro_batch in range(6):
        left, right = torch.randn(1, SAMPLES, 1, SIZE), torch.randn(1, SAMPLES, 1, OTHER)
        accumulator.take_in(matrix, Outer(left, right), GROUP, seed=0)
        gradients.append(left.mT @ right)
        columns = sum(part[0].shape[-1] for part in accumulator.low_rank)
        assert columns == (SAMPLES * (micro_batch + 1) if micro_batch < 3 else 0)
    found = accumulator.products()
    assert found is not None
    stack = torch.cat(gradients, dim=1).transpose(0, 1)
    assert ref.relative_error(found[0], ref.gfim(stack, "left") * len(stack)) < 1e-12


def test_storages_that_several_owners_hold_count_once() -> None:
    held, x, y = HeldStorages(), torch.zeros(10), torch.zeros(5)
    held.add("a", storages([x, x[2:4], y]))
    held.add("b", storages([x.view(2, 5)]))
    assert (held.of("a"), held.of("b"), held.total) == (60, 40, 60)
    held.release("a")
    assert (held.of("a"), held.total) == (0, 40)
    held.release("b")
    assert held.total == 0
