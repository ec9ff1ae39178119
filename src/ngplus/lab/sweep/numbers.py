"""What is computed from a sweep's runs: steps to a level, means over seeds, wins and ties, widths of learning rates."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ngplus.lab.sweep.rows import RESULT, TIMED, TRIAL, Row, Timing, of

BASELINE = "adamw"
TIE = 0.05  # the part by which steps or times may differ and still be called a tie
NEAR = 1.02  # learning rates count where the error is at most this much of the best one's
COLLAPSE = 0.1  # see ngplus.lab.runs.collapsed


def higher_is_better(row: Row) -> bool:
    if row.config is not None:
        return row.config.higher_is_better
    from ngplus.lab import workloads

    return workloads.get(row.workload).higher_is_better


def measure(row: Row) -> str:
    if row.config is not None:
        return row.config.measure
    from ngplus.lab import workloads

    return workloads.get(row.workload).measure


def error(value: float, row: Row) -> float:
    """What means over workloads are taken of: the loss or error itself, or 1 - accuracy."""
    return 1 - value if higher_is_better(row) else value


def badness(row: Row) -> float:
    """Less is better: the error at the end; infinite where the run diverged."""
    return math.inf if row.final is None or not math.isfinite(row.final) else error(row.final, row)


# ------------------------------------------------------------------------------------------------ runs of a comparison


def best_trial(rows: Iterable[Row]) -> Row | None:
    """Of the trials of one workload and optimizer that with the best measure at the end."""
    trials = [row for row in rows if row.kind == TRIAL]
    best = min(trials, key=badness, default=None)
    return None if best is None or best.final is None else best


def compared(rows: Iterable[Row], workload: str, optimizer: str) -> list[Row]:
    """The runs with the settings of the best trial on the seeds of the comparison."""
    own = of(rows, workload, optimizer)
    results = [row for row in own if row.kind == RESULT]
    best = best_trial(own)
    if best is None:  # those with -time have one setting
        return [row for row in results if row.hyper == results[0].hyper]
    return [row for row in results if row.hyper == best.hyper]


def mean_curve(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """The mean over the seeds at each evaluation; not a number where a run has diverged."""
    longest = max((row.curve for row in rows), key=len)
    found = []
    for place, (step, _) in enumerate(longest):
        values = [row.curve[place][1] if place < len(row.curve) else math.nan for row in rows]
        found.append((step, statistics.mean(values)))
    return found


def final(rows: Sequence[Row]) -> float:
    """The mean measure at the end; not a number where a run has diverged."""
    return math.nan if any(row.final is None for row in rows) else mean_curve(rows)[-1][1]


def spread(values: Iterable[float | None]) -> float:
    """The standard deviation of what is known and finite; 0 of one value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.stdev(known) if len(known) > 1 else 0.0


# ------------------------------------------------------------------------------------------------ steps to a level


def steps_to(curve: Iterable[tuple[int, float]], level: float, higher_is_better: bool) -> float:
    """The step at which a curve first is at a level, by linear interpolation between evaluations; infinite if never."""
    sign = -1.0 if higher_is_better else 1.0
    before: tuple[float, float] | None = None
    for step, value in curve:
        if sign * value <= sign * level:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - level) / (before[1] - value)
        before = (step, value)
    return math.inf


def share_of_budget(rows: Sequence[Row], level: float) -> float:
    """Steps of the mean curve to a level, as a part of all its steps; infinite where a run diverged, or the curve ends
    behind the level by more than a tenth of its way there."""
    curve, better = mean_curve(rows), higher_is_better(rows[0])
    end, goal, start = (error(value, rows[0]) for value in (curve[-1][1], level, curve[0][1]))
    if any(row.final is None for row in rows) or not end - goal <= COLLAPSE * abs(start - goal):
        return math.inf
    return steps_to(curve, level, better) / curve[-1][0]


def spread_of_shares(rows: Sequence[Row], level: float) -> float:
    """The standard deviation of the same over the seeds that get there."""
    return spread(share_of_budget([row], level) for row in rows)


def verdict(ours: float, theirs: float, spread: float) -> str:
    """wins, ties or loses; a tie is a difference of at most 5 %, or of the spread over the seeds."""
    if ours == theirs == math.inf:
        return "neither gets there"
    if math.inf not in (ours, theirs) and abs(ours - theirs) <= max(TIE * max(ours, theirs), spread):
        return "ties"
    return "wins" if ours < theirs else "loses"


def geometric_mean(values: Sequence[float]) -> float:
    if 0.0 in values:
        return 0.0
    return math.exp(statistics.mean(math.log(value) if value < math.inf else math.inf for value in values))


# ------------------------------------------------------------------------------------------------ times, rates


def time_ratio(timings: Sequence[Timing], workload: str, optimizer: str) -> tuple[float, float, float] | None:
    """A training step's time by the baseline's in the same round: median and quartiles. None where it was not timed."""
    import numpy as np

    from ngplus.lab.bench.timing import Spread

    held = {timing.optimizer: timing for timing in timings if timing.workload == workload}  # the last ones
    if optimizer not in held or BASELINE not in held or held[optimizer].began != held[BASELINE].began:
        return None
    ours, theirs = (np.array(held[name].milliseconds) for name in (optimizer, BASELINE))
    found = Spread.of(ours / theirs)
    return found.median, found.low, found.high


@dataclass(frozen=True)
class Width:
    """The learning rates with an error near the best one. ``open``: it may be wider than what was tried."""

    low: float
    high: float
    open: bool

    @property
    def factor(self) -> float:
        return self.high / self.low


def width(rows: Iterable[Row], workload: str, optimizer: str) -> Width | None:
    """From the runs on the tuning seed that differ from the best trial in the learning rate alone; between two rates
    the error is interpolated over the logarithm of the rate. None for fewer than three rates."""
    own = of(rows, workload, optimizer)
    best = best_trial(own)
    if best is None:
        return None
    rest = {name: value for name, value in best.hyper.items() if name != "lr"}
    held = {
        row.hyper["lr"]: badness(row)
        for row in own
        if row.kind != RESULT and {name: value for name, value in row.hyper.items() if name != "lr"} == rest
    }
    if len(held) < 3:
        return None
    curve = sorted(held.items())
    least = min(curve, key=lambda pair: pair[1])
    place, bound = curve.index(least), NEAR * least[1]
    low, low_open = _edge(curve[place::-1], bound)
    high, high_open = _edge(curve[place:], bound)
    return Width(low, high, low_open or high_open)


def _edge(curve: Sequence[tuple[float, float]], bound: float) -> tuple[float, bool]:
    """Where a curve that begins below a bound passes it, and whether it never does."""
    for (rate, inside), (beyond, outside) in itertools.pairwise(curve):
        if outside > bound:
            part = (bound - inside) / (outside - inside)  # 0 where the run beyond diverged
            return rate * (beyond / rate) ** part, False
    return curve[-1][0], True


def is_budgeted(name: str) -> bool:
    """Does the name stand for runs with a budget of equal time?"""
    return name.endswith(TIMED)


# ------------------------------------------------------------------------------------------------ who is compared


OURS = "ngadam"
EARLIER = "roots-5-decay"  # its name in files of earlier versions, where "ngplus" is a form that is gone
NO_RIVALS = (OURS, "ngplus", "ngplus-paper")


def of_today(rows: Iterable[Row]) -> list[Row]:
    """The runs of optimizers that there are, by their names of today."""
    from ngplus.lab.optimizers import OPTIMIZERS

    held = list(rows)
    if all(row.optimizer != OURS for row in held):
        held = [replace(row, optimizer=OURS) if row.optimizer == EARLIER else row for row in held]
    return [row for row in held if row.optimizer in OPTIMIZERS and (row.config or row.optimizer != "ngplus")]


def label(name: str) -> str:
    from ngplus.lab.optimizers import OPTIMIZERS

    return OPTIMIZERS[name].title if name in OPTIMIZERS else name


@dataclass(frozen=True)
class Standing:
    """An optimizer on a task: its measure at the end, and its steps to the baseline's, as a part of the budget."""

    name: str
    runs: tuple[Row, ...]
    final: float
    final_spread: float
    share: float
    share_spread: float

    @property
    def error(self) -> float:
        """Infinite where a run diverged."""
        return error(self.final, self.runs[0]) if math.isfinite(self.final) else math.inf


def standings(rows: Sequence[Row], task: str) -> list[Standing]:
    """NGAdam first, then the baseline, then the others by the measure at the end. Only optimizers that are compared."""
    from ngplus.lab.optimizers import OPTIMIZERS

    level = final(compared(rows, task, BASELINE))
    known = [OURS, *(name for name in OPTIMIZERS if name not in NO_RIVALS)]
    found = []
    for name in known:
        if runs := compared(rows, task, name):
            spreads = spread(row.final for row in runs), spread_of_shares(runs, level)
            found.append(Standing(name, tuple(runs), final(runs), spreads[0], share_of_budget(runs, level), spreads[1]))
    return sorted(found, key=lambda one: (one.name != OURS, one.name != BASELINE, one.error))


def is_level(one: Standing, other: Standing) -> bool:
    """Is the measure at the end at least as good, or within a seed's spread?"""
    return one.error - other.error <= max(one.final_spread, other.final_spread)
