"""Measures the check that captured gradients sum to the gradient, as a part of a forward and backward pass.

    python tools/check_cost.py resnet transformer

The time inside of :class:`ngplus.capture.coverage.Coverage` in the refreshes after the first one is added up. Let
nothing else run.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import torch

import ngplus
from ngplus.capture import coverage
from ngplus.lab.bench.problems import PROBLEMS
from ngplus.lab.bench.timing import Spread

METHODS = ((coverage.Coverage, "watch"), (coverage.Coverage, "subtract"), (coverage.Coverage, "conclude"))
inside = 0.0  # seconds since the last reset
depth = 0  # of the methods that are being timed


def timed(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global inside, depth
        start, depth = time.perf_counter(), depth + 1
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            inside += (time.perf_counter() - start) if depth == 0 else 0.0

    return call


def measure(name: str, repeats: int) -> Spread:
    global inside
    problem = PROBLEMS[name](False)
    model = problem.model()
    optimizer = ngplus.NGPlus(model, lr=1e-5, update_every=2)
    parts = []
    for step in range(2 * repeats + 2):
        optimizer.zero_grad()
        start = time.perf_counter()
        problem.loss(model).backward()
        seconds = time.perf_counter() - start
        optimizer.step()
        if step % 2:  # no refresh: a plain pass, and the check of the refresh before it
            parts.append(inside / seconds)
            inside = 0.0
    return Spread.of(torch.tensor(parts[1:]).numpy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="*", default=["resnet", "transformer"])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    for owner, method in METHODS:
        setattr(owner, method, timed(getattr(owner, method)))
    coverage._Difference.add_gradient = timed(coverage._Difference.add_gradient)  # type: ignore[method-assign]
    for name in asked.problems:
        spread = measure(name, asked.repeats)
        print(f"{name}: {spread.median:.4f} ({spread.low:.4f} to {spread.high:.4f}) of a pass", flush=True)


if __name__ == "__main__":
    main()
