r"""Theorems 2 and 3 on problems whose constants are known.

**The problem.** psi_i(W) = sum_a phi((W x_i - y_i)_a) with phi(r) = log(1 + r^2/2) and ||x_i|| = 1: smooth and not
convex. |phi'| <= 1/sqrt(2) and |phi''| <= 1, so with W (m x n)

    L_Psi = largest eigenvalue of 1/N sum_i x_i x_i^T,   G_i G_i^T <= (m/2) I,
    h_1 = lambda,   h_2 = lambda + m/2,   sigma^2 = (m/2)/|B|   (B drawn with replacement).

**Theorem 3 as its proof gives it.** The proof's first inequality, with alpha_k = 2 h_1^2/(L_Psi h_2) k^-beta, is

    w_k E||grad_k||^2 <= E Delta_k - E Delta_{k+1} + alpha_k k^-beta sigma^2 / h_2,   w_k = alpha_k (1 - k^-beta) / h_2,

with Delta = Psi - Psi^*. Divided by w_k and summed by parts (1/w_k grows as k^beta), with M >= E Delta_k for all k,

    1/N sum_k E||grad_k||^2 <= M / (N w_N) + O(sigma^2 N^-beta / (1 - beta)),   1 / (N w_N) = O(N^-(1-beta)).

The paper prints N^-1 for the first term: its last step takes sum_k (1/alpha_k - 1/alpha_{k-1}) for nothing, where the
sum is 1/alpha_N. The printed terms lack M, and carry 1/h_2^2 where the algebra leaves none, so they change with the
units of the loss. ``proved_bound`` is the sum above, term by term; ``printed_bound`` the paper's.

**A problem that is as slow as that.** Psi = 1/2 sum_j mu_j ||w_j||^2 over columns w_j, with mu_j = 2^-j and the same
gap mu_j ||w_j||^2 / 2 in each: at any time some column has just begun to move, and the average falls as N^-(1-beta).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREEN, GREY, INK, ORANGE, PALETTE, PURPLE, VERMILION, Outcome

BETAS = (0.55, 0.65, 0.75, 0.85, 0.95)


@dataclass(frozen=True)
class Constants:
    """What the theorems assume to be known."""

    lipschitz: float  # L_Psi
    h1: float
    h2: float
    variance: float  # sigma^2
    gap: float  # Psi(W_1) - Psi^*, or a bound on it

    @property
    def largest_step(self) -> float:
        """2 h_1^2 / (L_Psi h_2)."""
        return 2 * self.h1**2 / (self.lipschitz * self.h2)


def printed_bound(c: Constants, beta: float, steps: Tensor) -> Tensor:
    """L_Psi h_2^2/h_1^2 N^-1 + 2 sigma^2 / (h_2^2 (1 - beta)) N^-beta."""
    return c.lipschitz * c.h2**2 / c.h1**2 / steps + 2 * c.variance / (c.h2**2 * (1 - beta)) * steps**-beta


def proved_bound(c: Constants, beta: float, first: float, count: int) -> Tensor:
    """The module's bound for N = 1..count; ``first`` is ||grad_1||^2, since w_1 = 0 says nothing about it.

    M = Delta_1 + sum_k alpha_k k^-beta sigma^2 / h_2, from the same inequality without its first term.
    """
    k = torch.arange(2, count + 1, dtype=torch.float64)
    decay = k**-beta
    inverse = c.h2 / (c.largest_step * decay * (1 - decay))  # 1 / w_k
    rise = torch.cat((inverse[:1], inverse.diff().clamp_min(0))).cumsum(0)
    largest = c.gap + c.largest_step * c.variance / c.h2 * (1 + (decay * decay).cumsum(0))
    noise = (c.variance * decay / (1 - decay)).cumsum(0)
    return torch.cat((torch.tensor([first], dtype=torch.float64), (first + largest * rise + noise) / k))


class Robust:
    """The robust regression of the module's docstring, for a stack of runs [..., m, n]."""

    def __init__(self, m: int, n: int, samples: int, batch: int, damping: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, n, generator=generator, dtype=torch.float64)
        self.x = x / x.norm(dim=1, keepdim=True)
        truth = 2.0 * torch.randn(m, n, generator=generator, dtype=torch.float64)
        noise = torch.randn(samples, m, generator=generator, dtype=torch.float64)
        self.y = self.x @ truth.mT + 0.5 * noise
        self.batch, self.damping, self.generator, self.exact = batch, damping, generator, False
        self.start = torch.zeros(m, n, dtype=torch.float64)
        lipschitz = float(torch.linalg.eigvalsh(self.x.mT @ self.x / samples)[-1])
        gap = float(torch.log1p(self.y.square() / 2).sum(1).mean())  # Psi^* >= 0
        self.constants = Constants(lipschitz, damping, damping + m / 2, m / 2 / batch, gap)

    def slopes(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """phi'(W x - y) for samples along the dimension before the last: G_i is slopes_i x_i^T."""
        r = x @ w.mT - y
        return r / (1 + r.square() / 2)

    def gradient(self, w: Tensor) -> Tensor:
        return self.slopes(w, self.x, self.y).mT @ self.x / len(self.x)

    def draw(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """A mini-batch for each run; all the samples, and sigma = 0, where ``exact`` is set."""
        if self.exact:
            return self.x, self.y
        index = torch.randint(len(self.x), (*w.shape[:-2], self.batch), generator=self.generator)
        return self.x[index], self.y[index]

    def step(self, w: Tensor, alpha: Tensor) -> Tensor:
        """W - alpha (lambda I + L_k)^-1 G_k. L_k is of samples of its own: the proof takes it as independent of G_k."""
        x, y = self.draw(w)
        gradient = self.slopes(w, x, y).mT @ x / x.shape[-2]
        s = self.slopes(w, *self.draw(w))
        curvature = s.mT @ s / s.shape[-2]
        curvature.diagonal(dim1=-2, dim2=-1).add_(self.damping)
        return w - alpha * torch.linalg.solve(curvature, gradient)


class Slow:
    """The quadratic with a wide spectrum of the module's docstring; exact gradients, L = G G^T."""

    def __init__(self, columns: int, damping: float) -> None:
        self.mu = 2.0 ** -torch.arange(columns, dtype=torch.float64)
        self.start = (2 / (columns * self.mu)).sqrt().expand(1, -1).clone()  # a gap of 1/columns in each column
        self.damping = damping
        # Psi falls in every step, so ||G||^2 <= 2 L_Psi Psi(W_1) = 2
        self.constants = Constants(1.0, damping, damping + 2.0, 0.0, 1.0)

    def gradient(self, w: Tensor) -> Tensor:
        return w * self.mu

    def step(self, w: Tensor, alpha: Tensor) -> Tensor:
        gradient = self.gradient(w)
        return w - alpha * gradient / (self.damping + gradient.square().sum((-2, -1), keepdim=True))


Schedule = Callable[[int], Tensor]


def run(problem: Robust | Slow, schedule: Schedule, runs: tuple[int, ...], steps: int) -> Tensor:
    """||grad Psi(W_k)||^2 for k = 1..steps, [steps, *runs], from W_{k+1} = W_k - alpha_k (lambda I + L_k)^-1 G_k."""
    w = problem.start.expand(*runs, *problem.start.shape).clone()
    out = torch.empty(steps, *runs, dtype=torch.float64)
    for k in range(1, steps + 1):
        out[k - 1] = problem.gradient(w).square().sum((-2, -1))
        w = problem.step(w, schedule(k))
    return out


def powers(constants: Constants, betas: tuple[float, ...], extra: int) -> Schedule:
    """alpha_k = 2 h_1^2/(L_Psi h_2) k^-beta, one for each beta along the first dimension of the runs."""
    exponents = torch.tensor(betas, dtype=torch.float64).reshape(-1, *(1,) * extra)
    return lambda k: constants.largest_step * float(k) ** -exponents


def average(norms: Tensor) -> Tensor:
    """1/N sum_{k <= N} along the first dimension."""
    count = torch.arange(1, len(norms) + 1, dtype=norms.dtype).reshape(-1, *(1,) * (norms.dim() - 1))
    return norms.cumsum(0) / count


def _theorem(problem: Robust | Slow, runs: int, steps: int, small: bool) -> dict[str, Any]:
    c = problem.constants
    norms = run(problem, powers(c, BETAS, 3), (len(BETAS), runs), steps)
    means = average(norms.mean(2))
    at = torch.tensor(common.log_spaced(1, steps, 15 if small else 60))
    tail = at[at >= steps // 10]
    rows = []
    for b, beta in enumerate(BETAS):
        proved = proved_bound(c, beta, float(norms[0, b, 0]), steps)
        printed = printed_bound(c, beta, torch.arange(1, steps + 1, dtype=torch.float64))
        rows.append(
            {
                "beta": beta,
                "average": means[at - 1, b],
                "proved": proved[at - 1],
                "printed": printed[at - 1],
                "below_proved": bool((means[:, b] <= proved).all()),
                "below_printed": bool((means[:, b] <= printed).all()),
                "rate": common.slope(tail, means[tail - 1, b]),
                "rate_of_proved_bound": common.slope(tail, proved[tail - 1]),
                "norm_median": norms[at - 1, b].median(1).values.sqrt(),
                "norm_largest": norms[at - 1, b].amax(1).sqrt(),
            }
        )
    constants = {"L_Psi": c.lipschitz, "h_1": c.h1, "h_2": c.h2, "sigma^2": c.variance, "gap": c.gap}
    constants["largest_step"] = c.largest_step
    return {"constants": constants, "runs": runs, "steps": steps, "k": at, "betas": rows}


def _outside(problem: Robust, runs: int, steps: int, small: bool) -> dict[str, Any]:
    """Step sizes c k^-beta that break one assumption each, beside some that keep them all."""
    c = problem.constants
    limit = c.largest_step
    cases = (
        ("σ > 0: β = 0.75", limit, 0.75, False),
        ("σ > 0: constant, an eighth, Σα²σ² = ∞", limit / 8, 0.0, False),
        ("σ > 0: β = 2, Σα < ∞", limit, 2.0, False),
        ("σ = 0: constant", limit, 0.0, True),
        ("σ = 0: constant, 8 times the largest α", 8 * limit, 0.0, True),
    )
    at = torch.tensor(common.log_spaced(1, steps, 15 if small else 60))
    rows = []
    for name, scale, power, exact in cases:
        problem.exact = exact

        def schedule(k: int, scale: float = scale, power: float = power) -> Tensor:
            return torch.tensor(scale * float(k) ** -power, dtype=torch.float64)

        norms = run(problem, schedule, (1 if exact else runs,), steps)
        kept = name in (cases[0][0], cases[3][0])
        rows.append({"name": name, "kept": kept, "norm": norms[at - 1].mean(1).sqrt()})
    return {"k": at, "rows": rows}


def compute(seed: int = 0, small: bool = False) -> Outcome:
    runs, steps = (8, 600) if small else (16, 6000)

    def robust() -> Robust:
        return Robust(m=3, n=6, samples=64 if small else 128, batch=2, damping=8.0, seed=seed)

    theorem = _theorem(robust(), runs, steps, small)
    slow = _theorem(Slow(columns=16 if small else 24, damping=1.0), 1, 2000 if small else 100_000, small)
    # The same run in other units: a loss s times as large, lambda s^2 times, moves W in the same way.
    scale, c = 10.0, robust().constants
    units = Constants(scale * c.lipschitz, scale**2 * c.h1, scale**2 * c.h2, scale**2 * c.variance, scale * c.gap)
    ratio = {}
    for row in theorem["betas"]:
        one = row["average"] / row["printed"]
        other = scale**2 * row["average"] / printed_bound(units, row["beta"], theorem["k"].double())
        ratio[f"{row['beta']:g}"] = {"as it is": float(one.max()), "in other units": float(other.max())}
    outside = _outside(robust(), runs, steps, small)
    return Outcome(
        {"theorem": theorem, "slow": slow, "printed_over_units": ratio, "units_scale": scale, "outside": outside}
    )


def draw(outcome: Outcome) -> Figure:
    figure, axes = common.canvas(4, r"Convergence of NG+ where $L_\Psi$, $h_1$, $h_2$ and $\sigma$ are known")
    theorem, slow, outside = (outcome.numbers[key] for key in ("theorem", "slow", "outside"))
    ax = axes[0]
    for row, colour in zip(theorem["betas"][::2], PALETTE[::2], strict=False):
        ax.loglog(theorem["k"], row["norm_median"], color=colour, label=f"β = {row['beta']:g}")
        ax.loglog(theorem["k"], row["norm_largest"], color=colour, linewidth=0.9, linestyle=":")
    ax.set(
        title="Theorem 2: the gradient norm falls",
        xlabel="step k",
        ylabel="‖∇Ψ(W_k)‖, median (dotted: largest)",
    )
    ax.legend()

    ax = axes[1]
    _bounds(ax, theorem, "Theorem 3: robust regression, σ > 0", lambda row: -row["beta"])
    ax = axes[2]
    _bounds(ax, slow, "Theorem 3: wide spectrum, σ = 0", lambda row: -(1 - row["beta"]))
    ax = axes[3]
    for row, colour in zip(outside["rows"], (BLUE, ORANGE, PURPLE, GREEN, VERMILION), strict=True):
        name = f"{row['name']} (kept)" if row["kept"] else row["name"]
        ax.loglog(outside["k"], row["norm"], color=colour, label=name, linestyle="-" if row["kept"] else "--")
    ax.set(title="outside of the assumptions on the step size", xlabel="step k", ylabel="root mean square of ‖∇Ψ(W_k)‖")
    ax.set_ylim(5e-5, 1)
    ax.legend(loc="lower right")
    return figure


def _bounds(ax: Any, numbers: dict[str, Any], title: str, exponent: Callable[[dict[str, Any]], float]) -> None:
    k = torch.as_tensor(numbers["k"]).double()
    shown, guide = k >= 3, k >= k[-1] / 50
    for row, colour in zip(numbers["betas"][::2], PALETTE[::2], strict=False):
        mean, rate = torch.as_tensor(row["average"]), exponent(row)
        ax.loglog(k, mean, color=colour, label=f"β = {row['beta']:g}: rate {row['rate']:.2f}, thin line {rate:.2f}")
        ax.loglog(k[shown], torch.as_tensor(row["proved"])[shown], color=colour, linestyle="--", linewidth=1.3)
        ax.loglog(k, row["printed"], color=colour, linestyle=":", linewidth=1.3)
        ax.loglog(k[guide], 1.35 * float(mean[-1]) * (k[guide] / k[-1]) ** rate, color=INK, linewidth=0.8)
    ax.loglog([], [], color=GREY, linestyle="--", linewidth=1.3, label="bound, as the proof gives it")
    ax.loglog([], [], color=GREY, linestyle=":", linewidth=1.3, label="bound, as printed")
    ax.set(title=title, xlabel="steps N", ylabel="mean of ‖∇Ψ(W_k)‖² over N steps")
    lowest = min(float(torch.as_tensor(row["average"]).min()) for row in numbers["betas"])
    ax.set_ylim(lowest / 300, None)
    ax.legend(loc="lower left", fontsize=8)


def summary(outcome: Outcome) -> Table:
    out = common.table(
        "Theorem 3: average of ‖∇Ψ‖²",
        "problem",
        "β",
        "below the proved bound",
        "below the printed one",
        "rate",
        "−β",
        "−(1−β)",
    )
    for name in ("theorem", "slow"):
        for row in outcome.numbers[name]["betas"]:
            out.add_row(
                "robust, σ > 0" if name == "theorem" else "wide spectrum, σ = 0",
                f"{row['beta']:g}",
                "yes" if row["below_proved"] else "no",
                "yes" if row["below_printed"] else "no",
                f"{row['rate']:.3f}",
                f"{-row['beta']:.2f}",
                f"{row['beta'] - 1:.2f}",
            )
    return out
