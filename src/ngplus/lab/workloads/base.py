"""What a workload is: a model, data and a measure, in a small and a paper-sized preset.

A :class:`Workload` is a description that costs nothing to import. ``open`` reads its data and gives a :class:`Task`,
all that a training loop needs. Batches depend on the seed and the step alone, so a run can go on from any step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn


class DataError(Exception):
    """Data that is missing or damaged; the message says what was looked for, where to get it and how to lay it out."""


@dataclass(frozen=True)
class Preset:
    """The size of a run. ``target`` is a value of the workload's measure that separates good from bad."""

    steps: int
    batch_size: int
    evaluate_every: int
    target: float
    schedule: str = "cosine"  # the schedule family, the same for every optimizer
    warmup: int = 0  # steps
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model and the data
    decay: float | None = None  # lr * weight_decay of every optimizer; None leaves each its own weight_decay
    rate: float = 1.0  # what the default and the range of every learning rate are multiplied by; less in fine-tuning


class Task(ABC):
    """A workload with its data in memory."""

    max_grad_norm: float = math.inf  # gradients with a larger norm, over all parameters, are scaled down to it
    rate: float = 1.0  # the preset's

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; its weights come from torch's global random numbers, which the caller seeds."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> Any:
        """The mini-batch of a step, the same whenever it is asked for."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, to call backward on."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Validation metrics in eval mode, ``loss`` among them, and the workload's measure."""

    def split(self, batch: Any) -> Iterator[tuple[float, Any]]:
        """The parts of a batch that is too large for one pass, with their shares of it, for accumulated gradients::

        for share, part in task.split(batch):
            (share * task.loss(model, part)).backward()
        """
        yield 1.0, batch

    def final(self, model: nn.Module) -> dict[str, float]:
        """What is measured once, at the end of a run, since it takes long; nothing here."""
        return {}


class Workload(ABC):
    """A named experiment."""

    name: ClassVar[str]
    title: ClassVar[str]
    measure: ClassVar[str]  # the metric that the target is about
    higher_is_better: ClassVar[bool]
    presets: ClassVar[Mapping[str, Preset]]  # "small" and "paper"
    # options that the code reads and not every preset has, each with its default; None for one that may be left open
    optional: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def open(self, preset: Preset, data: Path | None) -> Task:
        """Reads the data from the folder that the user names, or raises :class:`DataError`."""
