"""The block-diagonal form: direction error and cost against the block size p.

diag{B_1, ..., B_s} of the p x p diagonal blocks of L takes d p^2 FLOPs to invert in place of d^3, d p numbers in place
of d^2, and 2 d p D FLOPs in a step in place of 2 d^2 D. p = d is the exact form, p = 1 a scaling of the rows. The
damping decides how much is lost: a large lambda hides what is left out.

Directions come out of ``ngplus.Preconditioner``, costs out of its ``plan()``, on a digits network.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

import ngplus
from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREY, PALETTE, VERMILION, Outcome
from ngplus.lab.figures.sketch import measure
from ngplus.lab.optimizers import PAPER_FORM

WIDTHS = (64, 128, 128, 10)
LAYER = 2  # 128 x 129, left


def planned(model: nn.Sequential, p: int, images: Tensor, labels: Tensor) -> dict[str, float]:
    """FLOPs and bytes of the layer by the plan, and the seconds of its refresh: the best of three."""
    model = copy.deepcopy(model)
    preconditioner = ngplus.Preconditioner(
        model[LAYER], **{**PAPER_FORM, "damping": 0.1, "solver": "dense", "block_size": p, "update_every": 1}
    )
    seconds = []
    for _ in range(3):
        seconds.append(_step_seconds(model, preconditioner, images, labels))
    row = preconditioner.plan()["weight"]
    return {
        "state_bytes": row.state_bytes,
        "step_flops": row.step_flops,
        "refresh_flops": row.refresh_flops,
        "seconds": min(seconds),
    }


def _step_seconds(model: nn.Module, preconditioner: Any, images: Tensor, labels: Tensor) -> float:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    start = time.process_time()
    preconditioner.step()
    return time.process_time() - start


def compute(seed: int = 0, small: bool = False) -> Outcome:
    images, labels, _, _ = common.digits()
    images, labels = images[:256], labels[:256]
    model = common.network(WIDTHS, seed)
    common.train(model, 1 if small else 4, seed)
    exact, _ = measure(model, LAYER, images, labels, side="left", solver="dense", damping=1.0)
    top, d = float(torch.linalg.eigvalsh(exact)[-1]), len(exact)
    sizes = [1, 32, d] if small else [1, 2, 4, 8, 16, 32, 48, 64, 96, d]
    masks = {p: (torch.arange(d)[:, None] // p == torch.arange(d)[None, :] // p) for p in sizes}
    curves = []
    for relative in (0.1, 0.001) if small else (1.0, 0.1, 0.01, 0.001):
        options = {"side": "left", "solver": "dense", "damping": relative * top}
        _, best = measure(model, LAYER, images, labels, **options)
        _, plain = measure(model, LAYER, images, labels, side="left", solver="dense", damping=1e6 * top)
        rows = []
        for p in sizes:
            _, direction = measure(model, LAYER, images, labels, **options, block_size=p)
            rows.append(
                {
                    "p": p,
                    "error": float((direction - best).norm() / best.norm()),
                    "cosine": float((direction * best).sum() / (direction.norm() * best.norm())),
                }
            )
        cosine = float((plain * best).sum() / (plain.norm() * best.norm()))
        curves.append({"damping": relative, "cosine_of_the_gradient": cosine, "rows": rows})
    costs = []
    for p in sizes:
        kept = float((exact * masks[p]).norm() / exact.norm())
        costs.append({"p": p, "share_of_norm_kept": kept, **planned(model, p, images, labels)})
    return Outcome({"d": d, "D": WIDTHS[1] + 1, "largest_eigenvalue": top, "dampings": curves, "costs": costs})


def draw(outcome: Outcome) -> Figure:
    numbers = outcome.numbers
    figure, axes = common.canvas(3, f"Blocks of p rows: digits, layer of {numbers['d']} × {numbers['D']}")
    p = [row["p"] for row in numbers["costs"]]
    for curve, colour in zip(numbers["dampings"], PALETTE, strict=False):
        rows = curve["rows"]
        label = f"λ = {curve['damping']:g} of the largest eigenvalue"
        axes[0].plot(p, [row["error"] for row in rows], "o-", color=colour, label=label)
        axes[1].plot(p, [row["cosine"] for row in rows], "o-", color=colour, label=f"λ = {curve['damping']:g}")
        axes[1].axhline(curve["cosine_of_the_gradient"], color=colour, linestyle=":", linewidth=1)
    axes[0].set(title="direction error", xlabel="block size p", ylabel="‖D_p − D‖ / ‖D‖")
    axes[1].set(
        title="direction (dotted: the gradient)", xlabel="block size p", ylabel="cosine with the exact direction"
    )
    ax = axes[2]
    last = numbers["costs"][-1]
    lines = (
        ("refresh_flops", "FLOPs of a refresh", VERMILION),
        ("step_flops", "FLOPs of a step", BLUE),
        ("seconds", "seconds of a refresh, measured", GREY),
    )
    for key, label, colour in lines:
        ax.plot(p, [row[key] / last[key] for row in numbers["costs"]], "o-", color=colour, label=label)
    ax.plot(p, [row["state_bytes"] / last["state_bytes"] for row in numbers["costs"]], "k:", label="bytes of state")
    ax.set(title="cost, of that of p = d", xlabel="block size p", ylabel="share")
    ax.set_yscale("log")
    shown = [one for one in p if one & (one - 1) == 0]
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(shown, [str(one) for one in shown])
        ax.minorticks_off()
        ax.legend()
    return figure


def summary(outcome: Outcome) -> Table:
    numbers = outcome.numbers
    heads = [f"error, λ {curve['damping']:g}" for curve in numbers["dampings"]]
    out = common.table("Block-diagonal form", "p", "refresh", "a step", "state", *heads)
    for i, row in enumerate(numbers["costs"]):
        out.add_row(
            str(row["p"]),
            f"{row['refresh_flops'] / 1e6:.2f} MFLOP",
            f"{row['step_flops'] / 1e6:.2f} MFLOP",
            f"{row['state_bytes'] / 1e3:.1f} kB",
            *(f"{curve['rows'][i]['error']:.3f}" for curve in numbers["dampings"]),
        )
    return out
