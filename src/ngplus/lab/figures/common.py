"""What the figures share: their look, their files, and the digits that their real gradients come from."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from rich.table import Table
from torch import Tensor, nn

# Colours that readers with any colour vision can tell apart (Okabe and Ito), in the order of use.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#6B7280",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY)
INK, GRID = "#1F2937", "#E5E7EB"

_LOOK: Any = {
    "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelcolor": INK, "axes.edgecolor": "#9CA3AF", "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.8,
    "lines.markersize": 4.5, "figure.facecolor": "white", "axes.facecolor": "white", "svg.hashsalt": "ngplus",
    "image.cmap": "viridis", "figure.constrained_layout.use": True, "path.simplify_threshold": 0.5,
}  # fmt: skip

# What stands for a colour on a dark page, as matplotlib writes colours into SVG.
_DARK = {
    "#000000": "#e6e8ee",
    "#ffffff": "#1b1e27", "#1f2937": "#e6e8ee", "#e5e7eb": "#343b4b", "#9ca3af": "#6b7280", "#6b7280": "#a3acbd",
    "#0072b2": "#58a6e8", "#d55e00": "#ff8a3d", "#009e73": "#35c29a",
}  # fmt: skip
_NARROW = ContextVar("narrow", default=False)


class FigureError(Exception):
    """A request that a figure cannot meet; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """The numbers of a figure, which go into its JSON file, and arrays that are only drawn."""

    numbers: dict[str, Any]
    arrays: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def conditions(narrow: bool = False) -> Iterator[None]:
    """How every figure is made: in the common look, and with one thread, which for matrices this small is faster than
    two and gives the same sums on every machine. ``narrow`` puts all panels in one column, for a phone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    token = _NARROW.set(narrow)
    try:
        with matplotlib.rc_context(_LOOK):
            yield
    finally:
        _NARROW.reset(token)
        torch.set_num_threads(threads)


def canvas(panels: int, title: str) -> tuple[Figure, list[Axes]]:
    """An empty figure for so many panels, two in a row; in a narrow figure, one."""
    columns = 1 if _NARROW.get() else 2
    rows = math.ceil(panels / columns)
    figure, axes = grid(rows, columns, (4.4 * columns, 3.5 * rows + 0.4), textwrap.fill(title, 42 * columns))
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def grid(rows: int, columns: int, size: tuple[float, float], title: str) -> tuple[Figure, list[Axes]]:
    """An empty figure with its axes row by row; no window system is needed."""
    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(title, fontsize=12.5, fontweight="bold", x=0.01, ha="left")
    return figure, [ax for row in axes for ax in row]


def dark(svg: str) -> str:
    """A figure of the common look, in SVG, for a dark page."""
    return re.sub("|".join(_DARK), lambda found: _DARK[found[0]], svg)


def save(name: str, figure: Figure, outcome: Outcome, out: Path) -> list[Path]:
    """NAME.png, NAME.svg and NAME.json; the same numbers give the same bytes."""
    paths = save_pictures(name, figure, out)
    numbers = out / f"{name}.json"
    numbers.write_text(json.dumps(plain(outcome.numbers), indent=1) + "\n", encoding="utf-8")
    return [*paths, numbers]


def save_pictures(name: str, figure: Figure, out: Path) -> list[Path]:
    """NAME.png and NAME.svg."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("png", "svg")]
    figure.savefig(paths[0], dpi=110)
    Image.open(paths[0]).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(paths[0], optimize=True)
    figure.savefig(paths[1], metadata={"Date": None}, dpi=110)
    return paths


def plain(value: Any) -> Any:
    """Numbers, lists and dicts that JSON knows; what is not finite becomes null."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def table(title: str, *headings: str) -> Table:
    """A rich table: the first column on the left, numbers on the right."""
    out = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    return out


def slope(x: Tensor, y: Tensor) -> float:
    """The exponent of the power law through the points: the least-squares slope of log y over log x."""
    a, b = x.double().log(), y.double().log()
    a = a - a.mean()
    return float((a * (b - b.mean())).sum() / a.square().sum())


def log_spaced(low: int, high: int, count: int) -> list[int]:
    """Whole numbers from low to high, evenly spread in their logarithm."""
    steps = torch.logspace(math.log10(low), math.log10(high), count, dtype=torch.float64)
    return sorted({int(x) for x in steps.round()} | {low, high})


# -------------------------------------------------------------------------------------------------- digits


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1,797 images of 8 x 8 pixels: 1,400 to train on and the rest, flat, pixels in [0, 1]."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(bunch.data, dtype=torch.float32) / 16)[order]
    labels = torch.tensor(bunch.target, dtype=torch.long)[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def network(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """A fully connected tanh network of these widths."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layers += ([nn.Tanh()] if i else []) + [nn.Linear(fan_in, fan_out)]
    return nn.Sequential(*layers)


def train(model: nn.Module, epochs: int, seed: int, batch: int = 64, lr: float = 0.1) -> None:
    """Plain SGD with momentum on the digits: gradients of a network that has learned something."""
    images, labels, _, _ = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(labels), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()


def linear_factors(model: nn.Sequential, at: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """g_i (S x m) and a_i (S x n, with the bias's 1) of a Linear layer: G_i = g_i a_i^T, in float64."""
    inside = images
    inside = model[:at](inside).detach()
    out = model[at](inside).detach().requires_grad_()
    loss = F.cross_entropy(model[at + 1 :](out), labels, reduction="sum")
    (grad,) = torch.autograd.grad(loss, out)
    return grad.double(), F.pad(inside, (0, 1), value=1.0).double()
