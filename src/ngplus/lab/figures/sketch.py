"""The two sketches on real gradients: error against q, for the four kinds.

**Product**: L = 1/S sum_i G_i G_i^T by G_i G_i^T ~ (G_i Omega)(G_i Omega)^T with Omega (n x q), E[Omega Omega^T] = I.
The estimate is unbiased, and its error falls as q^-1/2 for every kind; ``product_expected`` has the constant of the
Gaussian one.

**Least squares**: Z = argmin ||Omega U Z - Omega G||^2 + lambda ||Z||^2 with Omega (q x m), D = (G - U Z)/lambda,
against the exact direction.

Both come out of ``ngplus.Preconditioner`` as a user has them, on the layers of a digits network.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

import ngplus
from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREEN, GREY, ORANGE, VERMILION, Outcome
from ngplus.lab.optimizers import PAPER_FORM

KINDS = {"uniform": BLUE, "gaussian": ORANGE, "countsketch": GREEN, "srht": VERMILION}


def measure(model: nn.Sequential, at: int, images: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """L or R and the direction [W b] of one layer by a Preconditioner with these options."""
    model = copy.deepcopy(model)  # its hooks go with it
    layer = model[at]
    preconditioner = ngplus.Preconditioner(layer, **{**PAPER_FORM, **options})
    F.cross_entropy(model(images), labels).backward()
    preconditioner.step()
    curvature = preconditioner.curvature("weight").matrix.double()
    weight, bias = layer.weight.grad, layer.bias.grad
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    return curvature, torch.cat((weight, bias[:, None]), 1).double()


def errors(exact: Tensor, tries: list[Tensor]) -> dict[str, float]:
    """Mean and spread of ||X - exact|| / ||exact||, and the cosine."""
    sizes = [float((one - exact).norm() / exact.norm()) for one in tries]
    cosines = [float((one * exact).sum() / (one.norm() * exact.norm())) for one in tries]
    return {
        "error": statistics.mean(sizes),
        "spread": statistics.stdev(sizes) if len(sizes) > 1 else 0.0,
        "root_mean_square": statistics.fmean(size * size for size in sizes) ** 0.5,
        "cosine": statistics.mean(cosines),
    }


def product_expected(g: Tensor, a: Tensor, q: int) -> float:
    """sqrt(E ||L_q - L||_F^2) / ||L||_F of the Gaussian kind, for G_i = g_i a_i^T.

    L_q - L = 1/S sum_i (||Omega^T a_i||^2 - ||a_i||^2) g_i g_i^T, and
    cov(||Omega^T a_i||^2, ||Omega^T a_j||^2) = 2 <a_i, a_j>^2 / q.
    """
    count = len(g)
    squared = 2 / q * ((a @ a.mT).square() * (g @ g.mT).square()).sum() / count**2
    left = g.mT @ (a.square().sum(1, keepdim=True) * g) / count
    return float(squared.sqrt() / left.norm())


def compute(seed: int = 0, small: bool = False) -> Outcome:
    images, labels, _, _ = common.digits()
    model = common.network((64, 256, 32, 10), seed)
    common.train(model, 1 if small else 4, seed)
    draws = 6 if small else 20

    # Layer 2 is 32 x 257: the left side is kept, the 257 columns are sketched.
    some, targets = images[:256], labels[:256]
    exact, _ = measure(model, 2, some, targets, side="left", solver="dense", damping=0.1)
    g, a = common.linear_factors(model, 2, some, targets)
    product = []
    for q in (8, 64) if small else (4, 8, 16, 32, 64, 128, 256):
        row: dict[str, Any] = {"q": q, "expected_gaussian": product_expected(g, a, q)}
        for kind in KINDS:
            option = {"size": q, "kind": kind}
            tries = [
                measure(model, 2, some, targets, side="left", solver="dense", damping=0.1, sketch=option, seed=s)[0]
                for s in range(draws)
            ]
            row[kind] = errors(exact, tries)
        product.append(row)

    # Layer 1, 256 x 65, on its left side with 48 samples: U is 256 x 48.
    some, targets = images[:48], labels[:48]
    relative = 0.1 if small else 0.01
    least = []
    exact_l, _ = measure(model, 0, some, targets, side="left", solver="dense", damping=0.1)
    damping = relative * float(torch.linalg.eigvalsh(exact_l)[-1])
    _, gradient = measure(model, 0, some, targets, side="left", solver="dense", damping=1e9)
    _, exact = measure(model, 0, some, targets, side="left", solver="woodbury", damping=damping)
    for q in (64, 200) if small else (16, 32, 64, 96, 128, 192, 256, 384):
        row = {"q": q}
        for kind in KINDS:
            option = {"size": q, "kind": kind}
            common_options = {"side": "left", "solver": "sketched", "damping": damping, "sketch": option}
            tries = [measure(model, 0, some, targets, **common_options, seed=s)[1] for s in range(draws)]
            row[kind] = errors(exact, tries)
        least.append(row)
    cosine = float((gradient * exact).sum() / (gradient.norm() * exact.norm()))
    return Outcome(
        {
            "draws": draws,
            "product": {"m": 32, "n": 257, "samples": 256, "rows": product},
            "least_squares": {
                "m": 256, "rank": 48, "damping": damping, "damping_over_largest_eigenvalue": relative,
                "cosine_of_the_gradient": cosine, "rows": least,
            },
        }
    )  # fmt: skip


def draw(outcome: Outcome) -> Figure:
    product, least = outcome.numbers["product"], outcome.numbers["least_squares"]
    figure, axes = common.canvas(3, "Sketches on gradients of a digits network")
    ax = axes[0]
    _lines(ax, product["rows"], "error", logarithmic=True)
    q = [row["q"] for row in product["rows"]]
    ax.plot(q, [row["expected_gaussian"] for row in product["rows"]], ":", color=GREY, label="expected, gaussian")
    ax.set(
        title=f"product: L ({product['m']} × {product['m']}), n = {product['n']}", xlabel="q", ylabel="‖L_q − L‖ / ‖L‖"
    )
    ax.legend()
    name = f"least squares: m = {least['m']}, rank {least['rank']}"
    _lines(axes[1], least["rows"], "error", logarithmic=True)
    axes[1].axvline(least["rank"], color=GREY, linestyle="--", linewidth=1, label="q = rank of U")
    axes[1].set(title=name, xlabel="q", ylabel="‖D_q − D‖ / ‖D‖")
    axes[1].legend()
    _lines(axes[2], least["rows"], "cosine", logarithmic=False)
    axes[2].axhline(least["cosine_of_the_gradient"], color=GREY, linestyle="--", linewidth=1, label="the gradient")
    axes[2].set(title=name, xlabel="q", ylabel="cosine with the exact direction")
    axes[2].legend(loc="lower right")
    return figure


def _lines(ax: Any, rows: list[dict[str, Any]], key: str, logarithmic: bool) -> None:
    q = [row["q"] for row in rows]
    for kind, colour in KINDS.items():
        ax.plot(q, [row[kind][key] for row in rows], "o-", color=colour, label=kind)
    ax.set_xscale("log", base=2)
    if logarithmic:
        ax.set_yscale("log")
    ax.set_xticks(q, [str(one) for one in q])
    ax.minorticks_off()


def summary(outcome: Outcome) -> Table:
    out = common.table("Relative error of the sketch, mean over draws", "what", "q", *KINDS)
    for name, key in (("product L", "product"), ("least squares D", "least_squares")):
        for row in outcome.numbers[key]["rows"]:
            out.add_row(name, str(row["q"]), *(f"{row[kind]['error']:.3f}" for kind in KINDS))
    return out
