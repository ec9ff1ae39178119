"""The multi-step trade-off: loss reached against T, the number of steps that L or R and its inverse are kept.

A step costs 2 d^2 D FLOPs (NGPlus), or the products of both sides (NGAdam), whatever T is; a refresh is shared by T
steps. A large T saves work and uses old curvature. Both train a network on digits from the same start with the same
batches, the learning rate falling to zero in a line; every T has the best of three learning rates, by the mean loss of
its runs. NGAdam refreshes in its first steps whatever T is.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.table import Table

import ngplus
from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, ORANGE, Outcome
from ngplus.lab.optimizers import PAPER_FORM

BATCH = 64
METHODS: dict[str, Callable[..., Any]] = {
    "ngplus": partial(ngplus.NGPlus, **PAPER_FORM, damping=0.3),
    "ngadam": ngplus.NGAdam,
}
RATES = {"ngplus": (0.03, 0.1, 0.3), "ngadam": (0.01, 0.03, 0.1)}
COLOURS = {"ngplus": BLUE, "ngadam": ORANGE}


def train(method: str, lr: float, every: int, steps: int, seed: int) -> dict[str, float]:
    """The loss on all training images after the steps, the seconds of a step and the FLOPs that NG+ adds to it."""
    images, labels, _, _ = common.digits()
    model = common.network((64, 64, 32, 10), seed)
    optimizer = METHODS[method](model, lr=lr, update_every=every)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    seconds = 0.0
    for _ in range(steps):
        index = torch.randint(len(labels), (BATCH,), generator=generator)
        start = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
        seconds += time.process_time() - start
        schedule.step()
    with torch.no_grad():
        loss = float(F.cross_entropy(model(images), labels))
    plan = optimizer.plan()
    refreshes = math.ceil(steps / every) / steps
    return {
        "loss": loss,
        "seconds_a_step": seconds / steps,
        "step_flops": float(plan.step_flops),
        "refresh_flops": float(plan.refresh_flops),
        "extra_flops_a_step": plan.step_flops + refreshes * plan.refresh_flops,
    }


def _mean_loss(runs: list[dict[str, float]]) -> float:
    loss = statistics.fmean(one["loss"] for one in runs)
    return loss if math.isfinite(loss) else math.inf


def compute(seed: int = 0, small: bool = False) -> Outcome:
    steps, seeds = (60, 1) if small else (200, 2)
    frequencies = [1, 10, 60] if small else [1, 2, 5, 10, 20, 50, 100, 200]
    numbers: dict[str, Any] = {"steps": steps, "batch": BATCH, "seeds": seeds, "methods": {}}
    for method in METHODS:
        rows = []
        for every in frequencies:
            rates = RATES[method][1:2] if small else RATES[method]
            tries = {lr: [train(method, lr, every, steps, seed + s) for s in range(seeds)] for lr in rates}
            best = min(tries, key=lambda lr, tries=tries: _mean_loss(tries[lr]))  # type: ignore[misc]
            runs = tries[best]
            losses = [one["loss"] for one in runs]
            rows.append(
                {
                    "T": every,
                    "lr": best,
                    "loss": statistics.mean(losses),
                    "loss_spread": statistics.stdev(losses) if seeds > 1 else 0.0,
                    **{key: statistics.mean(one[key] for one in runs) for key in runs[0] if key != "loss"},
                }
            )
        numbers["methods"][method] = rows
    return Outcome(numbers)


def draw(outcome: Outcome) -> Figure:
    numbers = outcome.numbers
    title = (
        f"Multi-step: {numbers['steps']} steps on digits, batch {numbers['batch']}, mean of {numbers['seeds']} seeds"
    )
    figure, axes = common.canvas(3, title)
    for method, rows in numbers["methods"].items():
        colour, every = COLOURS[method], [row["T"] for row in rows]
        low = [max(row["loss"] - row["loss_spread"], 1e-6) for row in rows]
        high = [row["loss"] + row["loss_spread"] for row in rows]
        axes[0].fill_between(every, low, high, color=colour, alpha=0.15, linewidth=0)
        axes[0].plot(every, [row["loss"] for row in rows], "o-", color=colour, label=method)
        axes[1].plot(every, [row["extra_flops_a_step"] / 1e6 for row in rows], "o-", color=colour, label=method)
        axes[1].axhline(rows[0]["step_flops"] / 1e6, color=colour, linestyle=":", linewidth=1)
        axes[2].plot(
            [row["seconds_a_step"] * 1e3 for row in rows],
            [row["loss"] for row in rows],
            "o-",
            color=colour,
            label=method,
        )
        for row in (rows[0], rows[-1]):
            place = (row["seconds_a_step"] * 1e3, row["loss"])
            axes[2].annotate(f"T = {row['T']}", place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes[0].set(title="loss reached", xlabel="T", ylabel="training loss after the last step")
    axes[1].set(title="what NG+ adds to a step (dotted: T = ∞)", xlabel="T", ylabel="MFLOP")
    axes[2].set(
        title="loss reached against time", xlabel="milliseconds of processor time a step", ylabel="training loss"
    )
    shown = [row["T"] for row in next(iter(numbers["methods"].values()))]
    for ax in axes[:2]:
        ax.set_xscale("log")
        ax.set_ylim(0, None)
        ax.set_xticks(shown, [str(one) for one in shown])
        ax.minorticks_off()
    axes[2].set_ylim(0, None)
    for ax in axes:
        ax.legend()
    return figure


def summary(outcome: Outcome) -> Table:
    numbers = outcome.numbers
    out = common.table(
        f"{numbers['steps']} steps on digits", "method", "T", "lr", "loss", "spread", "extra MFLOP", "ms a step"
    )
    for method, rows in numbers["methods"].items():
        for row in rows:
            out.add_row(
                method,
                str(row["T"]),
                f"{row['lr']:g}",
                f"{row['loss']:.4f}",
                f"{row['loss_spread']:.4f}",
                f"{row['extra_flops_a_step'] / 1e6:.2f}",
                f"{row['seconds_a_step'] * 1e3:.2f}",
            )
    return out
