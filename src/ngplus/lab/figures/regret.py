r"""The regret of online NG+ on the appendix's example f_t(W) = 1/2 ||W^T x_t - y_t||^2.

||x|| <= 1, ||y|| <= R and K the spectral ball of radius R give ||W^T x - y|| <= 2R, so that alpha = 1/(4 R^2) satisfies
the assumption and ||G_t||_F <= 2R. With D = 2R sqrt(min(m, n)) and eps = 2/(alpha D^2) the proof gives

    Regret_T <= 1/(2 alpha) sum_t ||G_t||^2_{L_t^-1} + 1 <= 1/(2 alpha) log det(L_T)/det(L_0) + 1
             <= m/(2 alpha) log(1 + T (2R)^2/eps) + 1,

with m, the size of L_t = eps I + sum G_t G_t^T, where the paper prints n.

The best fixed point in hindsight minimises 1/2 trace(W^T A W) - trace(W^T B) over K, A = sum x x^T, B = sum x y^T: it
is the projection of A^-1 B in the norm of A, and the certificate c of that projection bounds its own gap by c^2/2.

The other methods take the step sizes of their own regret bounds, which fall as 1/sqrt(t); with noise in y each round
then costs a multiple of the step, sqrt(T) in all. Beside them: the best factor on those step sizes in hindsight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

import ngplus
from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Outcome

FACTORS = (0.1, 0.3, 3.0)  # tried beside 1
RADIUS = 1.0  # R


@dataclass(frozen=True)
class Example:
    """The rounds x_t (T x m) and y_t (T x n)."""

    x: Tensor
    y: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[1], self.y.shape[1]

    @property
    def alpha(self) -> float:
        return 1 / (4 * RADIUS**2)

    @property
    def diameter(self) -> float:
        return 2 * RADIUS * math.sqrt(min(self.shape))

    @property
    def eps(self) -> float:
        return 2 / (self.alpha * self.diameter**2)

    def bound(self, rounds: Tensor, dimension: int) -> Tensor:
        """d/(2 alpha) log(1 + T L_G^2/eps) + 1 with L_G = 2R; the proof has d = m."""
        return dimension / (2 * self.alpha) * torch.log1p(rounds.double() * 4 * RADIUS**2 / self.eps) + 1


def example(m: int, n: int, rounds: int, seed: int) -> Example:
    """y = W^T x + noise, cut to length R. W has singular values above R, so that the constraint is active, and the
    variances of x's directions spread over two orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x = normal(rounds, m) * torch.logspace(0, -1, m, dtype=torch.float64) @ torch.linalg.qr(normal(m, m)).Q
    x = x / x.norm(dim=1, keepdim=True).clamp_min(1.0)
    left, values, right = torch.linalg.svd(normal(m, n), full_matrices=False)
    truth = left * torch.linspace(1.3, 0.6, len(values), dtype=torch.float64) @ right * RADIUS
    y = x @ truth + normal(rounds, n) * (0.6 * RADIUS / math.sqrt(n))
    return Example(x, y * (RADIUS / y.norm(dim=1, keepdim=True)).clamp_max(1.0))


# -------------------------------------------------------------------------------------------------- the players


def play_ngplus(data: Example, norm: str = "curvature") -> dict[str, Any]:
    """The losses of OnlineNGPlus, and sum_t ||G_t||^2_{L_t^-1}, its potential."""
    w = torch.nn.Parameter(torch.zeros(data.shape, dtype=torch.float64))
    optimizer = ngplus.OnlineNGPlus([w], alpha=data.alpha, radius=RADIUS, ball="spectral", norm=norm)
    losses, potential = [], []
    for x, y in zip(data.x, data.y, strict=True):
        residual = w.detach().mT @ x - y
        losses.append(0.5 * float(residual.square().sum()))
        w.grad = x[:, None] * residual[None, :]
        optimizer.step()
        potential.append(float((w.grad * (optimizer.state[w]["inverse"] @ w.grad)).sum()))
    state = optimizer.state[w]
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "potential": torch.tensor(potential, dtype=torch.float64).cumsum(0),
        "log_det": float(-torch.logdet(state["inverse"]) - len(w) * math.log(data.eps)),
        "projection_bound": state["projection_bound"],
    }


def play_rival(name: str, data: Example, factor: float) -> Tensor:
    """The losses of a method whose steps fall as 1/sqrt(t), projected onto K in the plain norm."""
    m, n = data.shape
    w = torch.zeros(m, n, dtype=torch.float64)
    squares, left, right = torch.zeros_like(w), 1e-3 * torch.eye(m).double(), 1e-3 * torch.eye(n).double()
    losses = []
    for t, (x, y) in enumerate(zip(data.x, data.y, strict=True), start=1):
        residual = w.mT @ x - y
        losses.append(0.5 * float(residual.square().sum()))
        g = x[:, None] * residual[None, :]
        if name == "OGD":  # D / (L_G sqrt(t))
            step = data.diameter / (2 * RADIUS * math.sqrt(t)) * g
        elif name == "AdaGrad":
            squares += g.square()
            step = RADIUS * g / (squares.sqrt() + 1e-8)
        else:
            left += g @ g.mT
            right += g.mT @ g
            step = RADIUS * _root(left) @ g @ _root(right)
        w = ngplus.online.project(w - factor * step, RADIUS, "spectral").point
    return torch.tensor(losses, dtype=torch.float64)


def _root(matrix: Tensor) -> Tensor:
    """The inverse fourth root."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values**-0.25 @ vectors.mT


# -------------------------------------------------------------------------------------------------- regret


def best_fixed(data: Example, rounds: int) -> tuple[float, float, Tensor]:
    """The loss of the best W in K after so many rounds, a bound on its gap to the optimum, and W."""
    x, y = data.x[:rounds], data.y[:rounds]
    a, b = x.mT @ x, x.mT @ y
    a = a + 1e-9 * torch.eye(len(a)).to(a)  # before A has full rank; adds at most 1e-9 ||W||_F^2 / 2 to a loss
    inverse = torch.linalg.inv(a)
    done = ngplus.online.project(inverse @ b, RADIUS, "spectral", inverse, 1e-10)
    loss = 0.5 * float((x @ done.point - y).square().sum())
    return loss, 0.5 * done.bound**2 + 0.5e-9 * RADIUS**2 * min(data.shape), done.point


def regret(losses: Tensor, best: list[float], at: Tensor) -> Tensor:
    return losses.cumsum(0)[at - 1] - torch.tensor(best, dtype=torch.float64)


def growth(at: Tensor, values: Tensor) -> dict[str, float]:
    """The exponent of T over the last decade, and how much of the curve's variance a + b log T and a + b sqrt(T) miss
    there."""
    tail = at >= at[-1] / 10
    t, v = at[tail].double(), values[tail]
    missed = {}
    for name, x in (("log", t.log()), ("sqrt", t.sqrt())):
        x = x - x.mean()
        rest = (v - v.mean()) - x * ((x * (v - v.mean())).sum() / x.square().sum())
        missed[f"missed_by_{name}"] = float(rest.square().sum() / (v - v.mean()).square().sum())
    return {"exponent": common.slope(t, v.clamp_min(1e-12)), **missed}


def _players(data: Example, small: bool) -> dict[str, Any]:
    rounds = len(data.x)
    m, n = data.shape
    at = torch.tensor([t for t in common.log_spaced(2 * m, rounds, 10 if small else 30) if t >= 2 * m])
    fixed = [best_fixed(data, int(t)) for t in at]
    best = [loss for loss, _, _ in fixed]
    curves: dict[str, Any] = {}
    own = play_ngplus(data)
    curves["NG+"] = {"regret": regret(own["losses"], best, at)}
    plain = play_ngplus(data, norm="plain")
    curves["NG+, plain projection"] = {"regret": regret(plain["losses"], best, at)}
    factors = (1.0, 0.3) if small else (1.0, *FACTORS)
    for name in ("OGD", "AdaGrad", "Shampoo"):
        tries = {factor: regret(play_rival(name, data, factor), best, at) for factor in factors}
        factor = min(tries, key=lambda f: float(tries[f][-1]))
        curves[name] = {"regret": tries[1.0], "best_factor": factor, "regret_with_best_factor": tries[factor]}
    for row in curves.values():
        row.update(growth(at, row["regret"]))
    return {
        "m": m, "n": n, "T": at, "alpha": data.alpha, "eps": data.eps, "diameter": data.diameter,
        "curves": curves,
        "bound": data.bound(at, m),
        "bound_with_n": data.bound(at, n),
        "potential": own["potential"][at - 1] / (2 * data.alpha) + 1,
        "largest_projection_certificate": own["projection_bound"],
        "largest_gap_of_the_best_fixed_point": max(gap for _, gap, _ in fixed),
        "spectral_norm_of_the_best_fixed_point": float(torch.linalg.matrix_norm(fixed[-1][2], 2)),
    }  # fmt: skip


def _dimensions(shapes: list[tuple[int, int]], rounds: int, seed: int) -> list[dict[str, Any]]:
    """Regret and potential for shapes; the lemma as printed bounds the potential by n log(1 + T L_G^2/eps)."""
    rows = []
    for m, n in shapes:
        data = example(m, n, rounds, seed)
        played = play_ngplus(data)
        total = torch.tensor(rounds)
        logarithm = float(torch.log1p(total.double() * 4 * RADIUS**2 / data.eps))
        rows.append(
            {
                "m": m,
                "n": n,
                "regret": float(played["losses"].sum()) - best_fixed(data, rounds)[0],
                "bound": float(data.bound(total, m)),
                "potential": float(played["potential"][-1]),
                "log_det": played["log_det"],
                "m_log": m * logarithm,
                "n_log": n * logarithm,
            }
        )
    return rows


def compute(seed: int = 0, small: bool = False) -> Outcome:
    data = example(*((4, 3, 400) if small else (8, 4, 8000)), seed)
    sizes = (2, 12) if small else (2, 4, 8, 16, 32)
    fixed, rounds = (2, 200) if small else (2, 1000)
    numbers = _players(data, small)
    numbers["vary_m"] = _dimensions([(size, fixed) for size in sizes], rounds, seed)
    numbers["vary_n"] = _dimensions([(fixed, size) for size in sizes], rounds, seed)
    return Outcome(numbers)


def draw(outcome: Outcome) -> Figure:
    numbers = outcome.numbers
    m, n = numbers["m"], numbers["n"]
    figure, axes = common.canvas(3, f"Regret of online NG+: ½‖Wᵀx − y‖², W in a spectral ball, {m} × {n}")
    colours = {
        "NG+": BLUE, "NG+, plain projection": SKY, "OGD": ORANGE, "AdaGrad": GREEN, "Shampoo": VERMILION,
    }  # fmt: skip
    ax = axes[0]
    for name, row in numbers["curves"].items():
        style = "--" if "plain" in name else "-"
        ax.loglog(
            numbers["T"], row["regret"], style, color=colours[name], label=f"{name}: $T^{{{row['exponent']:.2f}}}$"
        )
        if "best_factor" in row:
            label = f"{name}, steps × {row['best_factor']:g}"
            ax.loglog(numbers["T"], row["regret_with_best_factor"], ":", color=colours[name], label=label)
    ax.loglog(numbers["T"], numbers["bound"], color=GREY, label="bound for NG+, with m")
    guide = torch.as_tensor(numbers["T"]).double()
    ax.loglog(guide, 2.5 * guide.sqrt(), color=GREY, linewidth=0.8, linestyle="-.", label="a line as √T")
    ax.set(title="regret against T", xlabel="rounds T", ylabel="regret against the best fixed W")
    ax.set_ylim(None, 20 * ax.get_ylim()[1])
    ax.legend(fontsize=7.8, ncols=2, loc="upper left")

    ax = axes[1]
    ax.semilogx(numbers["T"], numbers["curves"]["NG+"]["regret"], color=BLUE, label="NG+, regret")
    ax.semilogx(numbers["T"], numbers["potential"], color=PURPLE, label="Σ‖G_t‖² / 2α + 1, norm of L_t⁻¹")
    ax.semilogx(numbers["T"], numbers["bound"], color=GREY, linestyle=":", label="bound with m")
    ax.semilogx(numbers["T"], numbers["bound_with_n"], color=VERMILION, linestyle=":", label="with n, as printed")
    ax.set(title="logarithmic: a line over log T", xlabel="rounds T", ylabel="regret and its bounds")
    ax.legend()

    ax = axes[2]
    for key, axis, colour in (("vary_m", "m", BLUE), ("vary_n", "n", ORANGE)):
        rows, fixed = numbers[key], "n" if axis == "m" else "m"
        sizes = [row[axis] for row in rows]
        name = f"{axis} grows, {fixed} = {rows[0][fixed]}"
        ax.loglog(sizes, [row["potential"] for row in rows], "o-", color=colour, label=f"potential, {name}")
        ax.loglog(sizes, [row["regret"] for row in rows], "s--", color=colour, label=f"regret, {name}")
    rows = numbers["vary_m"]
    ax.loglog([r["m"] for r in rows], [r["m_log"] for r in rows], ":", color=GREY, label="m log(1 + T·4R²/ε)")
    ax.loglog(
        [r["m"] for r in rows], [r["n_log"] for r in rows], ":", color=VERMILION, label="n log(1 + T·4R²/ε), blue case"
    )
    ax.set(title="which dimension: m", xlabel="the dimension that grows", ylabel="after the last round")
    ax.set_xticks([r["m"] for r in rows], [str(r["m"]) for r in rows], minor=False)
    ax.minorticks_off()
    ax.legend(fontsize=7.5)
    return figure


def summary(outcome: Outcome) -> Table:
    numbers = outcome.numbers
    last = int(numbers["T"][-1])
    out = common.table(
        f"Regret after {last:,} rounds, {numbers['m']} × {numbers['n']}",
        "",
        "regret",
        "exponent",
        "missed by log",
        "by sqrt",
    )
    for name, row in numbers["curves"].items():
        cells = f"{row['exponent']:.2f}", f"{row['missed_by_log']:.1%}", f"{row['missed_by_sqrt']:.1%}"
        out.add_row(name, f"{float(row['regret'][-1]):.2f}", *cells)
        if "best_factor" in row:
            out.add_row(f"{name}, steps × {row['best_factor']:g}", f"{float(row['regret_with_best_factor'][-1]):.2f}")
    out.add_row("bound with m, NG+", f"{float(numbers['bound'][-1]):.1f}")
    out.add_row("largest certificate of a projection", f"{numbers['largest_projection_certificate']:.1e}")
    out.add_row("largest gap of the best fixed W", f"{numbers['largest_gap_of_the_best_fixed_point']:.1e}")
    for row in (numbers["vary_m"][0], numbers["vary_m"][-1], numbers["vary_n"][-1]):
        text = f"{row['potential']:.1f} (m log {row['m_log']:.0f}, n log {row['n_log']:.0f})"
        out.add_row(f"potential for {row['m']} × {row['n']}", text)
    return out
