"""Times of things done in turn, and what is made of them: paired ratios, their median and quartiles.

A time is a pair, wall and CPU seconds. The things that are compared take turns within a round, so that whatever else
the machine does meets all of them; a ratio is formed within a round, and the median is taken over the rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Times = dict[str, Array]  # by name, [rounds, 2]: wall and CPU seconds


class Stopwatch:
    """Collects times by name. While it is paused, what it times is not kept: that is a warm-up."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[float, float]]] = {}
        self.paused = False

    @contextmanager
    def time(self, name: str, count: int = 1) -> Iterator[None]:
        """The time of the block, divided by the ``count`` of equal things that it does."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.add(name, wall / count, cpu / count)

    def add(self, name: str, wall: float, cpu: float) -> None:
        if not self.paused:
            self._kept.setdefault(name, []).append((wall, cpu))

    def times(self) -> Times:
        return {name: np.array(pairs) for name, pairs in self._kept.items()}


Turn = Callable[[Stopwatch], None]


def take_turns(
    turns: Mapping[str, Turn], repeats: int, warmup: int = 1, say: Callable[[str], None] = lambda text: None
) -> Times:
    """``repeats`` rounds after ``warmup`` ones that do not count. Each round begins with the next of the turns, so that
    no one always follows the same other; the garbage collector works between turns only."""
    names, watch = list(turns), Stopwatch()
    for number in range(-warmup, repeats):
        watch.paused = number < 0
        shift = max(number, 0) % len(names)
        for name in names[shift:] + names[:shift]:
            say(f"{'warm-up' if watch.paused else f'round {number + 1} of {repeats}'}: {name}")
            gc.collect()
            gc.disable()
            try:
                turns[name](watch)
            finally:
                gc.enable()
    return watch.times()


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Spread:
        low, median, high = (float(x) for x in np.percentile(values, (25, 50, 75)))
        return cls(median, low, high)


def amortised(plain: Array, refresh: Array, every: int) -> Array:
    """The mean cost of a step where one in ``every`` refreshes: ((T - 1) plain + refresh) / T."""
    mean: Array = ((every - 1) * plain + refresh) / every
    return mean


def exponents(sizes: list[int], times: list[Array]) -> Array:
    """For each round, wall and CPU: the exponent of the power law of time over size, by least squares of logarithms."""
    x = np.log(np.array(sizes, dtype=float))
    y = np.log(np.maximum(np.stack(times), 1e-9))  # [sizes, rounds, 2]; a CPU clock may show nothing at all
    x = x - x.mean()
    slopes: Array = np.einsum("s,srk->rk", x, y) / np.square(x).sum()
    return slopes
