"""Sections 2.4 and 2.5 as a table: FLOPs, bytes of state and bytes on the wire of NG+, KFAC, Shampoo and SENG. NG+ is
that of the paper, with the inverse of one side; ``ngplus plan -o ngadam`` counts what NGAdam does.

A layer is a matrix m x n (the bias is one of the n columns) with kappa positions a sample; S samples, d = min(m, n),
D = max(m, n). A multiplication and an addition are two FLOPs. All methods refresh at the same steps. c(d) = d^3 is a
Cholesky inverse (d^3/3 to factorise, 2 d^3/3 to invert), e(d) = 9 d^3 a symmetric eigendecomposition.

========== ============================== ================== ========================== ======================
method     products of a refresh          and factorisations a step                     numbers kept
========== ============================== ================== ========================== ======================
NG+        kappa = 1: 2 S d^2; else the   c(d)               2 d^2 D                    d^2
           smaller of gram and explicit
KFAC       2 S kappa (m^2 + n^2)          c(m) + c(n)        2 m n (m + n)              m^2 + n^2
Shampoo    2 m n (m + n)                  e(m) + e(n) and    2 m n (m + n)              2 (m^2 + n^2): sums
                                          2 (m^3 + n^3)                                 and roots
SENG       kappa = 1: 2 S^2 (m + n);      c(S)               4 S m n + 2 S^2            S^2 and the factors
           else 2 S kappa m n + 2 S^2 m n                                               S (m + n), or S m n
========== ============================== ================== ========================== ======================

with, for a sample of NG+, gram 2 kappa^2 (m + n) + 2 kappa d^2 and explicit 2 kappa m n + 2 d^2 D. SENG is the exact
form of its direction (G - U (lambda I + U^T U)^-1 U^T G) / lambda, with U = [vec(G_i)]/sqrt(S) in factors where
kappa = 1. An embedding has m rows of which a sample looks kappa up: NG+ and SENG work on those rows alone.

On the wire, beside the mini-batch gradient that every method averages: NG+ d^2 (nothing for mini-batch curvature), KFAC
m^2 + n^2, Shampoo nothing, SENG the factors that it keeps, once a refresh. Numbers are of four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

from ngplus.lab.amounts import amount
from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREEN, INK, ORANGE, VERMILION, FigureError, Outcome
from ngplus.lab.planning import build

METHODS = ("NG+", "KFAC", "Shampoo", "SENG")
WIDTH = 4  # bytes of a number


@dataclass(frozen=True)
class Layer:
    """A matrix m x n with kappa positions a sample; ``rows``: its m rows are looked up (an embedding)."""

    m: int
    n: int
    kappa: int = 1
    rows: bool = False

    @property
    def d(self) -> int:
        return min(self.m, self.n)

    @property
    def other(self) -> int:
        return max(self.m, self.n)


@dataclass(frozen=True)
class Cost:
    """FLOPs of a refresh (its products and its factorisations) and of a step, numbers kept and on the wire."""

    products: int
    factorisations: int
    step: int
    state: int
    wire: int

    def __add__(self, more: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self.values, more.values, strict=True)))

    @property
    def values(self) -> tuple[int, ...]:
        return (self.products, self.factorisations, self.step, self.state, self.wire)

    @property
    def refresh(self) -> int:
        return self.products + self.factorisations

    def per_step(self, every: int) -> float:
        """step + refresh / T."""
        return self.step + self.refresh / every


def cost(method: str, layer: Layer, samples: int) -> Cost:
    """The module's table, for one layer."""
    m, n, k, d, other = layer.m, layer.n, layer.kappa, layer.d, layer.other
    if method == "NG+":
        if layer.rows or k == 1:
            products = 2 * samples * k * d * d  # an embedding: one row of R's factor for each row looked up
        else:
            products = samples * min(2 * k * k * (m + n) + 2 * k * d * d, 2 * k * m * n + 2 * d * d * other)
        # An embedding's gradient has at most S kappa rows that are not zero.
        step = 2 * d * d * (min(other, samples * k) if layer.rows else other)
        return Cost(products, d**3, step, d * d, d * d)
    if method == "KFAC":
        return Cost(2 * samples * k * (m * m + n * n), m**3 + n**3, 2 * m * n * (m + n), m * m + n * n, m * m + n * n)
    if method == "Shampoo":
        both = 2 * m * n * (m + n)
        return Cost(both, 11 * (m**3 + n**3), both, 2 * (m * m + n * n), 0)
    if method == "SENG":
        if layer.rows:  # indices and rows in place of one-hot factors
            kept, products = samples * k * (n + 1), 2 * (samples * k) ** 2 * n
            step = 4 * samples * k * n + 2 * samples * samples
            return Cost(products, samples**3, step, kept + samples**2, kept)
        if k == 1:
            kept, products = samples * (m + n), 2 * samples * samples * (m + n)
        else:
            kept, products = samples * m * n, 2 * samples * k * m * n + 2 * samples * samples * m * n
        return Cost(products, samples**3, 4 * samples * m * n + 2 * samples * samples, kept + samples**2, kept)
    raise FigureError(f"There is no method {method!r} (known: {', '.join(METHODS)})")


def total(method: str, layers: list[Layer], samples: int) -> Cost:
    return sum((cost(method, layer, samples) for layer in layers), Cost(0, 0, 0, 0, 0))


# -------------------------------------------------------------------------------------------------- layers of models


def layers_of(model: nn.Module, *inputs: Any) -> list[Layer]:
    """The matrices of a model's Linear, Conv and Embedding layers, with the positions that ``inputs`` give them."""
    found: list[Layer] = []
    handles = []

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        if isinstance(module, nn.Embedding):
            rows, width = module.weight.shape
            found.append(Layer(rows, width, math.prod(args[0].shape[1:]), rows=True))
            return
        weight = module.weight
        assert isinstance(weight, Tensor)
        bias = int(module.bias is not None)
        if isinstance(module, nn.Linear):
            found.append(Layer(weight.shape[0], weight.shape[1] + bias, math.prod(out.shape[1:-1])))
        else:
            groups = int(module.groups)  # type: ignore[arg-type]
            one = Layer(weight.shape[0] // groups, weight[0].numel() + bias, math.prod(out.shape[2:]))
            found.extend([one] * groups)

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding):
            handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise FigureError("The model has no Linear, Conv or Embedding layer")
    return found


def resnet50(size: int = 224) -> list[Layer]:
    """The 53 convolutions and the classifier of ResNet-50, v1.5 (the stride is in the 3 x 3 convolution)."""
    layers = [Layer(64, 3 * 49, (size // 2) ** 2)]
    wide, side = 64, size // 4
    for stage, blocks in enumerate((3, 4, 6, 3)):
        base = 64 * 2**stage
        for block in range(blocks):
            before = side
            side = side // 2 if stage and not block else side
            layers += [Layer(base, wide, before**2), Layer(base, 9 * base, side**2), Layer(4 * base, base, side**2)]
            if not block:
                layers.append(Layer(4 * base, wide, side**2))
            wide = 4 * base
    return [*layers, Layer(1000, wide + 1)]


def transformer(width: int = 512, inner: int = 1024, tokens: int = 32, words: int = 10_000) -> list[Layer]:
    """The paper's iwslt_de_en: six encoder and six decoder layers, and an embedding for each language."""
    attention = [Layer(3 * width, width + 1, tokens), Layer(width, width + 1, tokens)]
    feed = [Layer(inner, width + 1, tokens), Layer(width, inner + 1, tokens)]
    return 6 * (attention + feed) + 6 * (2 * attention + feed) + 2 * [Layer(words, width, tokens, rows=True)]


def dlrm() -> list[Layer]:
    """DLRM on Criteo: a table of ten million rows among others, and two small perceptrons."""
    tables = [Layer(rows, 16, 1, rows=True) for rows in (10_000_000, 2_000_000, 300_000, 10_000, 100)]
    sizes = [(512, 14), (256, 513), (64, 257), (16, 65), (512, 368), (256, 513), (1, 257)]
    return tables + [Layer(m, n) for m, n in sizes]


KNOWN: dict[str, tuple[Callable[[], list[Layer]], int]] = {  # with the batch of a device
    "resnet50": (resnet50, 32),
    "transformer": (transformer, 128),
    "dlrm": (dlrm, 128),
}


def find(name: str) -> tuple[list[Layer], int]:
    """A known model's layers, or those of ``package.module:function``, which returns a model and a tuple of inputs."""
    if name in KNOWN:
        make, samples = KNOWN[name]
        return make(), samples
    if ":" not in name:
        raise FigureError(f"There is no model {name!r} (known: {', '.join(KNOWN)}; or module:function)")
    try:
        model, inputs = build(name)
    except ValueError as error:
        raise FigureError(str(error)) from error
    if not inputs:
        raise FigureError(f"{name} must return a model and a tuple with a batch of its inputs")
    return layers_of(model, *inputs), len(inputs[0])


# -------------------------------------------------------------------------------------------------- the figure


def forward_backward(layers: list[Layer], samples: int) -> int:
    """2 m n for the forward pass and 4 m n for the backward one, a sample and position; a look-up is free."""
    return sum(6 * samples * layer.kappa * layer.m * layer.n for layer in layers if not layer.rows)


def compute(seed: int = 0, small: bool = False, model: str | None = None) -> Outcome:
    names = (model,) if model else ("transformer",) if small else tuple(KNOWN)
    rows = []
    for name in names:
        layers, samples = find(name)
        base, numbers = forward_backward(layers, samples), sum(layer.m * layer.n for layer in layers)
        methods = {}
        for method in METHODS:
            one = total(method, layers, samples)
            methods[method] = {
                "refresh_products_flops": one.products,
                "refresh_factorisation_flops": one.factorisations,
                "refresh_flops": one.refresh,
                "step_flops": one.step,
                "state_bytes": WIDTH * one.state,
                "wire_bytes_a_refresh": WIDTH * one.wire,
                "extra_flops_over_forward_and_backward": {
                    str(every): one.per_step(every) / base for every in (1, 10, 50, 100, 500, 1000)
                },
            }
        rows.append(
            {
                "model": name,
                "layers": len(layers),
                "samples": samples,
                "parameter_bytes": WIDTH * numbers,
                "forward_backward_flops": base,
                "methods": methods,
            }
        )
    return Outcome({"models": rows})


def draw(outcome: Outcome) -> Figure:
    rows = outcome.numbers["models"]
    figure, axes = common.canvas(4 * len(rows), "Extra cost of a method, at equal refresh frequency")
    colours = (BLUE, ORANGE, VERMILION, GREEN)
    bars = (
        ("refresh_flops", "FLOPs of a refresh"),
        ("state_bytes", "bytes of state"),
        ("wire_bytes_a_refresh", "bytes on the wire, a refresh"),
    )
    for r, row in enumerate(rows):
        for c, (key, title) in enumerate(bars):
            ax = axes[4 * r + c]
            values = [row["methods"][method][key] for method in METHODS]
            shown = ax.bar(METHODS, [max(float(value), 1.0) for value in values], color=colours, width=0.65)
            ax.set_yscale("log")
            positive = [float(value) for value in values if value > 0]
            ax.set_ylim(min(positive) / 20, max(positive) * 12)
            ax.bar_label(shown, [amount(value) if value else "" for value in values], fontsize=8, padding=2)
            for i, value in enumerate(values):
                if not value:
                    ax.text(i, min(positive) / 15, "0", fontsize=8, ha="center")
            ax.grid(False, axis="x")
            ax.set_title(f"{row['model']}: {title}")
            if key == "state_bytes":
                ax.axhline(row["parameter_bytes"], color=INK, linewidth=0.9, linestyle="--")
                ax.text(-0.4, row["parameter_bytes"] * 1.2, "the parameters", fontsize=7.5)
        ax = axes[4 * r + 3]
        for method, colour in zip(METHODS, colours, strict=True):
            extra = row["methods"][method]["extra_flops_over_forward_and_backward"]
            ax.loglog([int(t) for t in extra], list(extra.values()), "o-", color=colour, label=method)
        ax.axhline(1, color=INK, linewidth=0.9, linestyle="--")
        ax.set(title=f"{row['model']}: a step / (forward and backward)", xlabel="refresh every T steps")
        ax.legend(fontsize=7.5)
    return figure


def summary(outcome: Outcome) -> Table:
    out = common.table(
        "Extra cost beside SGD", "model", "method", "refresh", "a step", "state", "wire", "step / (fwd + bwd), T = 50"
    )
    for row in outcome.numbers["models"]:
        for method in METHODS:
            one = row["methods"][method]
            out.add_row(
                f"{row['model']}, batch {row['samples']}" if method == METHODS[0] else "",
                method,
                amount(one["refresh_flops"], "FLOP"),
                amount(one["step_flops"], "FLOP"),
                amount(one["state_bytes"], "B"),
                amount(one["wire_bytes_a_refresh"], "B"),
                f"{one['extra_flops_over_forward_and_backward']['50']:.3g}",
            )
    return out
