"""Learning-rate schedules as pure functions of the step: nothing to save, and the same family for every optimizer.

A schedule is written as its name, with numbers after colons where it takes some:

=================================== =========================================================================
constant                            1
cosine                              from 1 to 0 as half a cosine
linear, polynomial[:power]          (1 - t)^power with t the part of the run that is over; power 1 where not given
inverse-sqrt[:unit[:offset]]        max((step - offset) / unit, 1)^-1/2; unit is the warm-up where not given
=================================== =========================================================================

With a warm-up of w steps, the first w steps are multiplied by 1/w, 2/w, …; the decay begins after it.
"""

from __future__ import annotations

import math

from ngplus.lab.optimizers import check_name

FAMILIES = ("constant", "cosine", "linear", "polynomial", "inverse-sqrt")
_ARGUMENTS = {"polynomial": 1, "inverse-sqrt": 2}


def parse(schedule: str) -> tuple[str, tuple[float, ...]]:
    """The family and its numbers; ValueError for anything else."""
    name, *rest = schedule.split(":")
    check_name(name, FAMILIES, "schedule")
    try:
        numbers = tuple(float(text) for text in rest)
    except ValueError:
        raise ValueError(f"The schedule {schedule!r} may only have numbers after its colons") from None
    if len(numbers) > _ARGUMENTS.get(name, 0) or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise ValueError(f"The schedule {schedule!r} takes at most {_ARGUMENTS.get(name, 0)} numbers, of 0 or more")
    return name, numbers


def factor(schedule: str, step: int, steps: int, warmup: int = 0) -> float:
    """What the learning rate of a step is multiplied by; ``step`` counts from 0 to ``steps - 1``."""
    name, numbers = parse(schedule)
    ramp = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    if name == "inverse-sqrt":
        unit = numbers[0] if numbers and numbers[0] > 0 else float(max(warmup, 1))
        offset = numbers[1] if len(numbers) > 1 else 0.0
        return ramp * float(max((step - offset) / unit, 1.0) ** -0.5)
    over = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
    if name == "cosine":
        return ramp * 0.5 * (1.0 + math.cos(math.pi * over))
    if name in ("linear", "polynomial"):
        return ramp * float((1.0 - over) ** (numbers[0] if numbers else 1.0))
    return ramp
