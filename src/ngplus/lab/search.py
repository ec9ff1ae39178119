"""Where ``ngplus tune`` and ``ngplus sweep`` search: points of Sobol's sequence over the ranges of an optimizer. A
coordinate is a learning rate or a damping as a multiple of what is measured on the task, so that one range fits every
task.

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
LOCAL = 1 / 3  # the part of each range, around the best point so far, that is searched more closely


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
    """The hyper-parameters that a point in these ranges stands for, in four digits: machines differ in the last one of
    what is measured."""
    found: dict[str, float] = {}
    for name, entry in sorted(ranges.items(), key=lambda pair: pair[1].unit == "step * damping"):
        found[name] = rounded(point[coordinate(name, entry)] * _unit(name, entry, found, scales))
    return found


def point_of(ranges: Mapping[str, Range], values: Mapping[str, float], scales: Scales) -> dict[str, float]:
    """The inverse of :func:`hyper`. ValueError for other hyper-parameters, or outside of the ranges."""
    if set(values) != set(ranges):
        raise ValueError(f"--start takes {', '.join(ranges)}, not {', '.join(values) or 'nothing'}")
    found = {}
    for name, entry in ranges.items():
        unit = _unit(name, entry, values, scales)
        value = found[coordinate(name, entry)] = values[name] / unit
        if not entry.low <= value <= entry.high:
            span = f"{entry.low * unit:.3g} to {entry.high * unit:.3g}"
            raise ValueError(f"--start {name}={values[name]:g} is outside of the range {span}")
    return found


def _unit(name: str, entry: Range, values: Mapping[str, float], scales: Scales) -> float:
    own = scales.rate if name in RATES else 1.0
    units = {"": own, "step": scales.step, "eigenvalue": scales.eigenvalue}
    return scales.step * values["damping"] if entry.unit == "step * damping" else units[entry.unit]


def coordinate(name: str, entry: Range) -> str:
    """How a study names it."""
    return f"{name} / ({entry.unit})" if entry.unit else name


def points(
    ranges: Mapping[str, Range], number: int, around: Mapping[str, float] | None = None
) -> list[dict[str, float]]:
    """The first ``number`` points of Sobol's sequence behind its first, the corner, as coordinates: over the whole
    ranges, or over a third of each of them ``around`` a point.

    In one dimension these are 1/2, 3/4, 1/4, 3/8, 7/8, 5/8, 1/8, ... of a range, by logarithms.
    """
    from torch.quasirandom import SobolEngine

    engine = SobolEngine(len(ranges))
    engine.fast_forward(1)
    named = {coordinate(name, entry): entry for name, entry in ranges.items()}
    found = []
    for parts in engine.draw(number).tolist():
        point = dict(zip(named, parts, strict=True))
        if around is not None:
            near = {key: part_of(named[key], around[key]) + LOCAL * (part - 0.5) for key, part in point.items()}
            point = {key: min(1.0, max(0.0, part)) for key, part in near.items()}
        found.append({key: at(named[key], part) for key, part in point.items()})
    return found


def at(entry: Range, part: float) -> float:
    """The value at a part of a range: 0 is its lower end, 1 its upper one."""
    if entry.log:
        return min(entry.high, max(entry.low, entry.low * (entry.high / entry.low) ** part))
    return entry.low + part * (entry.high - entry.low)


def part_of(entry: Range, value: float) -> float:
    """The inverse of :func:`at`."""
    if entry.log:
        return math.log(value / entry.low) / math.log(entry.high / entry.low)
    return (value - entry.low) / (entry.high - entry.low)


def rounded(value: float) -> float:
    """In four digits."""
    return float(f"{value:.4g}")
