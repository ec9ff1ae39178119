"""Evaluation at the weights that an optimizer evaluates at: schedule-free methods and SPlus average theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ngplus.lab.optimizer_wrappers import Averaged, Trainer
from ngplus.lab.workloads import Task

BATCHES = 50  # whose statistics BatchNorm takes at the averaged weights, as the authors of schedule-free advise


def measured(
    measure: Callable[[nn.Module], dict[str, float]], task: Task, model: nn.Module, optimizer: Trainer, seed: int
) -> dict[str, float]:
    """What ``measure`` gives of the model with averaged weights, where the optimizer has them. Nothing is changed."""
    with ExitStack() as stack:
        # before the first step there is no state, and nothing to average
        own = getattr(optimizer, "parts", (optimizer,))
        parts = [part for part in own if isinstance(part, Averaged) and part.optimizer.state]
        for part in parts:
            stack.enter_context(part.averages())
        if parts:
            stack.enter_context(_statistics(task, model, seed))
        return measure(model)


@contextmanager
def _statistics(task: Task, model: nn.Module, seed: int) -> Iterator[None]:
    """BatchNorm's running statistics at these weights, from training batches; put back afterwards."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    if not norms:
        yield
        return
    before = [{name: value.clone() for name, value in m.named_buffers(recurse=False)} for m in norms]
    momenta = [m.momentum for m in norms]
    training = model.training
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # the mean of all batches
    model.train()
    with torch.no_grad():
        for step in range(BATCHES):
            for _, part in task.split(task.batch(seed, step)):
                task.loss(model, part)
    model.train(training)
    try:
        yield
    finally:
        for m, held, momentum in zip(norms, before, momenta, strict=True):
            m.momentum = momentum
            for name, value in m.named_buffers(recurse=False):
                value.copy_(held[name])
