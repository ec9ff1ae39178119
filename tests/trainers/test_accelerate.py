"""Accelerate: NG+ in the loop that its documentation shows, with accumulation, clipping and its own checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from classification import OPTIONS, SAVED, STEPS, loader, plain_loop, small_net
from torch import Tensor
from torch.nn import functional as F

import ngplus
from helpers import reference
from helpers.training import flat


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate's settings are those of the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Run:
    """A training with Accelerate that can be saved and resumed."""

    def __init__(self, accumulate: int = 1, **arguments: Any) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **arguments)
        model = small_net()
        optimizer = ngplus.NGPlus(model, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.plain = optimizer
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader(8 // accumulate), scheduler
        )

    def train(self, first: int, last: int) -> None:
        """Micro-batches ``first`` to ``last``."""
        for k, (x, y) in enumerate(self.loader):
            if not first <= k < last:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(F.cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()

    @property
    def parameters(self) -> Tensor:
        return flat(self.accelerator.unwrap_model(self.model))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_loop_makes_the_steps_of_a_plain_one(accumulate: int) -> None:
    run = Run(accumulate)
    run.train(0, STEPS * accumulate)
    assert run.plain.param_groups[0]["step"] == STEPS
    assert {row.source for row in run.plain.plan()} == {"sample"}
    assert reference.relative_error(run.parameters, plain_loop()) < 1e-5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_resumed_training_equals_uninterrupted_training(compiled: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    arguments = {"dynamo_backend": "aot_eager"} if compiled else {}
    whole = Run(**arguments)
    whole.train(0, STEPS)
    first = Run(**arguments)
    first.train(0, SAVED)
    first.accelerator.save_state(str(tmp_path))
    resumed = Run(**arguments)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(SAVED, STEPS)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.plain.param_groups[0]["step"] == STEPS
    if not compiled:
        assert reference.relative_error(whole.parameters, plain_loop()) < 1e-6


def test_bfloat16_autocast() -> None:
    run = Run(mixed_precision="bf16")
    run.train(0, STEPS)
    assert {row.source for row in run.plain.plan()} == {"sample"}
    start = flat(small_net())
    assert reference.relative_error(run.parameters - start, plain_loop() - start) < 0.3
