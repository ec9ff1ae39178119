"""The coordinates that ``ngplus tune`` searches in: a learning rate or a damping as a multiple of what is measured on
the task, so that one range fits every task.

================== ===================================================================================================
unit               a value x stands for
================== ===================================================================================================
""                 x itself
"step"             x * s with s = loss / mean |G_i|^2, the step that would bring the loss of one sample to 0 (Polyak)
"eigenvalue"       x * e with e the mean eigenvalue |G_i|^2 / (m n) of a layer's Fisher matrix, geometric mean of layers
"step * damping"   x * s * damping: where damping outweighs the curvature, a step is lr / damping times the gradient
================== ===================================================================================================

G_i is the gradient of one sample at the initial weights. A learning rate without a unit is a multiple of the preset's
``rate``, which is 1 but for fine-tuning.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ngplus.lab.optimizers import Range
    from ngplus.lab.workloads import Task


RATES = ("lr", "adamw_lr")


@dataclass(frozen=True)
class Scales:
    """What is measured of a task: see above."""

    step: float = 1.0
    eigenvalue: float = 1.0
    rate: float = 1.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(task: Task, seed: int, device: str = "cpu") -> Scales:
    """The scales of a task at the initial weights of a seed, from its first batch."""
    import torch

    import ngplus

    torch.manual_seed(seed)
    model = task.model().to(device).train()
    optimizer = ngplus.NGPlus(
        model, lr=0.0, curvature="sample", side="smaller", sample_index=getattr(model, "sample_index", None)
    )
    loss = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matrices with mini-batch curvature are said in the runs
        for weight, part in task.split(task.batch(seed, 0)):
            part_loss = weight * task.loss(model, part)
            part_loss.backward()
            loss += float(part_loss)
        optimizer.step()
    squares, eigenvalues = [], []  # the mean of |G_i|^2 is the trace of L, and of R
    for row in optimizer.plan():
        with suppress(RuntimeError):  # a parameter that is frozen, or not used, has no curvature
            square = float(optimizer.curvature(row.name).matrix.diagonal(dim1=-2, dim2=-1).sum())
            squares.append(square)
            if min(row.shape) > 1 and square > 0:
                eigenvalues.append(square / (row.groups * row.shape[0] * row.shape[1]))
    total = sum(squares)
    if not (0 < loss < math.inf and 0 < total < math.inf and eigenvalues):
        return Scales(rate=task.rate)
    return Scales(loss / total, statistics.geometric_mean(eigenvalues), task.rate)


def hyper(ranges: Mapping[str, Range], point: Mapping[str, float], scales: Scales) -> dict[str, float]:
    """The hyper-parameters that a point in these ranges stands for."""
    found: dict[str, float] = {}
    for name, entry in sorted(ranges.items(), key=lambda pair: pair[1].unit == "step * damping"):
        own = scales.rate if name in RATES else 1.0
        units = {"": own, "step": scales.step, "eigenvalue": scales.eigenvalue}
        unit = scales.step * found["damping"] if entry.unit == "step * damping" else units[entry.unit]
        found[name] = point[coordinate(name, entry)] * unit
    return found


def coordinate(name: str, entry: Range) -> str:
    """How a study names it."""
    return f"{name} / ({entry.unit})" if entry.unit else name
