"""GFIM and EFIM: what L = 1/N sum_i G_i G_i^T says about EFIM = 1/N sum_i vec(G_i) vec(G_i)^T.

The EFIM is n x n blocks of m x m, block (j, k) = 1/N sum_i g_ij g_ik^T for columns g_ij of G_i. So L is the *sum* of
the diagonal blocks, and I ⊗ L/n is the multiple, and the best of the form I ⊗ M, that is nearest to it in Frobenius
norm: <EFIM, I ⊗ M> = <L, M>. With columns that are independent, of mean zero and of one distribution,
E[EFIM] = I ⊗ E[L]/n. For Gaussian columns with correlation rho,

    E ||block (1,1) - L/n||_F^2 / m = (m + 1)/N (1 - 1/n) (1 - rho^2),

which *falls* with rho, as the first block has no error of the others. That of the whole matrix rises:
||E EFIM - I ⊗ E L/n|| / ||E EFIM|| = sqrt(n (n-1)) rho / sqrt(n + n (n-1) rho^2).

No matrix of size mn is made: blocks come from columns, norms and directions from the N x N products <G_i, G_j>.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from ngplus.lab.figures import common
from ngplus.lab.figures.common import BLUE, GREEN, GREY, INK, ORANGE, VERMILION, Outcome

CHUNK = 50  # matrices drawn at a time


def gaussian_sums(
    size: int, counts: list[int], rho: float, seed: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """L and the first EFIM block after each of the counts, R and the block (1, 2) after the last.

    G_i = sqrt(1 - rho) Z_i + sqrt(rho) z_i 1^T: standard Gaussian columns, any two with correlation rho.
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
    first, cross = torch.zeros_like(left), torch.zeros_like(left)
    seen, out = 0, []
    for count in counts:
        while seen < count:
            some = min(CHUNK, count - seen)
            own = torch.randn(some, size, size, generator=generator)
            shared = torch.randn(some, size, 1, generator=generator)
            g = math.sqrt(1 - rho) * own + math.sqrt(rho) * shared
            tall = g.mT.reshape(-1, size)
            left += tall.mT @ tall
            flat = g.reshape(-1, size)
            right += flat.mT @ flat
            one, two = g[:, :, 0], g[:, :, 1]
            first += one.mT @ one
            cross += one.mT @ two
            seen += some
        out.append((left / seen, first / seen))
    return out, right / seen, cross / seen


def block_error(left: Tensor, first: Tensor) -> float:
    """||block (1,1) - L/n||_F / ||I||_F for square standard Gaussian matrices."""
    size = len(left)
    return float((first - left / size).norm()) / math.sqrt(size)


def expected_block_error(size: int, count: int, rho: float = 0.0) -> float:
    return math.sqrt((size + 1) / count * (1 - 1 / size) * (1 - rho**2))


def expected_whole_error(size: int, rho: float) -> float:
    pairs = size * (size - 1)
    return math.sqrt(pairs) * rho / math.sqrt(size + pairs * rho**2)


def _gaussian(size: int, count: int, seed: int, small: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    counts = [c for c in common.log_spaced(10, count, 6 if small else 12) if c >= 10]
    sums, _, _ = gaussian_sums(size, counts, 0.0, seed)
    left, first = sums[-1]
    rhos = [0.0, 0.05, 0.2, 0.5, 0.9] if small else [0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95]
    rows = []
    for rho in rhos:
        (pair,), right, cross = gaussian_sums(size, [count], rho, seed + 1)
        columns = right / size  # m E[C] is E[R]: the correlation of the columns
        rows.append(
            {
                "rho": rho,
                "block": block_error(*pair),
                "block_expected": expected_block_error(size, count, rho),
                "whole": float((columns - columns.diagonal().mean() * torch.eye(size)).norm() / columns.norm()),
                "whole_expected": expected_whole_error(size, rho),
                "block_12_mean": float(cross.diagonal().mean()),
            }
        )
    numbers = {
        "m": size,
        "n": size,
        "matrices": count,
        "trace_of_gfim_over_trace_of_block": float(left.trace() / first.trace()),
        "error": [
            {"samples": c, "block": block_error(*pair), "expected": expected_block_error(size, c)}
            for c, pair in zip(counts, sums, strict=True)
        ],
        "dependence": rows,
    }
    return numbers, {"gfim": left / size, "block": first, "difference": left / size - first}


def study_layer(g: Tensor, a: Tensor, dampings: list[float]) -> dict[str, Any]:
    """How far I ⊗ L/n is from the EFIM of G_i = g_i a_i^T, and how far its direction is from the natural gradient.

    ||EFIM||^2 = 1/N^2 sum_ij <G_i, G_j>^2, <EFIM, I ⊗ L/n> = ||I ⊗ L/n||^2 = ||L||^2/n. Kronecker factors A, B of KFAC:
    <EFIM, A ⊗ B> = 1/N sum_i (a_i^T A a_i)(g_i^T B g_i). Directions for damping lambda, relative to the EFIM's largest
    eigenvalue, by Woodbury with the N x N products.
    """
    count, n = a.shape
    inner = (a @ a.mT) * (g @ g.mT)
    efim = inner.norm() / count
    weights = a.square().sum(1, keepdim=True)
    left = g.mT @ (weights * g) / count
    whole = (1 - left.square().sum() / n / efim**2).clamp_min(0).sqrt()
    factor_a, factor_b = a.mT @ a / count, g.mT @ g / count
    product = (((a @ factor_a) * a).sum(1) * ((g @ factor_b) * g).sum(1)).mean()
    size = factor_a.norm() * factor_b.norm()
    kfac = (efim**2 - 2 * product + size**2).clamp_min(0).sqrt() / efim
    blocks = [g.mT @ (a[:, j : j + 1] ** 2 * g) / count for j in range(n)]
    diagonal = sum(float(block.square().sum()) for block in blocks)
    errors = [float((block - left / n).norm() / block.norm().clamp_min(1e-300)) for block in blocks]
    gradient = g.mT @ a / count
    top = float(torch.linalg.eigvalsh(inner / count)[-1])
    rows = []
    for relative in dampings:
        damping = relative * top
        projected = ((g @ gradient) * a).sum(1)  # <G_i, G>
        core = torch.linalg.solve(inner / count + damping * torch.eye(count).to(inner), projected)
        natural = (gradient - g.mT @ (core[:, None] * a) / count) / damping
        rows.append(
            {
                "damping": relative,
                "gfim_over_n": _cosine(natural, _direction(left / n, damping, gradient)),
                "gfim": _cosine(natural, _direction(left, damping, gradient)),
                "kfac": _cosine(natural, _kronecker_direction(factor_a, factor_b, damping, gradient)),
                "gradient": _cosine(natural, gradient),
            }
        )
    return {
        "samples": count,
        "m": g.shape[1],
        "n": n,
        "whole_error": float(whole),
        "whole_error_kfac": float(kfac),
        "share_in_diagonal_blocks": diagonal / float(efim) ** 2,
        "block_errors": sorted(errors),
        "cosines": rows,
    }


def _direction(matrix: Tensor, damping: float, gradient: Tensor) -> Tensor:
    return torch.linalg.solve(matrix + damping * torch.eye(len(matrix)).to(matrix), gradient)


def _kronecker_direction(a: Tensor, b: Tensor, damping: float, gradient: Tensor) -> Tensor:
    """(lambda I + A ⊗ B)^-1 vec(G), damped exactly, in the eigenbases."""
    (u, p), (v, q) = torch.linalg.eigh(b), torch.linalg.eigh(a)
    return p @ ((p.mT @ gradient @ q) / (u[:, None] * v[None, :] + damping)) @ q.mT


def _cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def compute(seed: int = 0, small: bool = False) -> Outcome:
    size, count = (24, 400) if small else (200, 2000)
    numbers, arrays = _gaussian(size, count, seed, small)
    images, labels, _, _ = common.digits()
    some = 200 if small else 1000
    dampings = [10.0**e for e in ((-3, -1, 1) if small else (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1))]
    model = common.network((64, 64, 32, 10), seed)
    layer = {"at the start": study_layer(*common.linear_factors(model, 2, images[:some], labels[:some]), dampings)}
    common.train(model, 2 if small else 8, seed)
    factors = common.linear_factors(model, 2, images[:some], labels[:some])
    layer["trained"] = study_layer(*factors, dampings)
    return Outcome({"gaussian": numbers, "digits": layer}, arrays)


def draw(outcome: Outcome) -> Figure:
    gaussian, layer = outcome.numbers["gaussian"], outcome.numbers["digits"]
    m, n, count = gaussian["m"], gaussian["n"], gaussian["matrices"]
    figure, axes = common.canvas(6, f"GFIM and EFIM: {count:,} Gaussian {m} × {n} matrices, and digits")
    titles = (("gfim", "GFIM / n"), ("block", "EFIM, first diagonal block"), ("difference", "difference"))
    spread = float(outcome.arrays["difference"].abs().max())
    for ax, (key, title) in zip(axes[:3], titles, strict=True):
        limits = (
            {"vmin": -spread, "vmax": spread, "cmap": "RdBu_r"} if key == "difference" else {"vmin": 0, "vmax": 1.1}
        )
        shown = ax.imshow(outcome.arrays[key].numpy(), interpolation="nearest", **limits)  # type: ignore[arg-type, unused-ignore]
        ax.set_title(title)
        ax.grid(False)
        ax.set_xticks([0, m - 1], ["1", str(m)])
        ax.set_yticks([0, m - 1], ["1", str(m)])
        figure.colorbar(shown, ax=ax, shrink=0.85)

    ax = axes[3]
    samples = [row["samples"] for row in gaussian["error"]]
    ax.loglog(samples, [row["expected"] for row in gaussian["error"]], color=GREY, label="√((m + 1)(1 − 1/n) / N)")
    ax.loglog(samples, [row["block"] for row in gaussian["error"]], "o", color=BLUE, label="measured")
    ax.set(title="first block: error against samples", xlabel="number of matrices N", ylabel="relative error")
    ax.legend()

    ax = axes[4]
    rows = gaussian["dependence"]
    rho = [row["rho"] for row in rows]
    fine = torch.linspace(0, max(rho), 200).tolist()
    ax.plot(fine, [expected_whole_error(n, r) for r in fine], color=VERMILION, label="whole EFIM")
    ax.plot(rho, [row["whole"] for row in rows], "o", color=VERMILION)
    ax.plot(fine, [expected_block_error(m, count, r) for r in fine], color=BLUE, label="first diagonal block")
    ax.plot(rho, [row["block"] for row in rows], "o", color=BLUE)
    ax.plot([], [], "o", color=GREY, label="measured")
    ax.set(title="dependence between columns", xlabel="correlation ρ of two columns", ylabel="relative error")
    ax.set_ylim(-0.03, 1.12)
    ax.legend(loc="center right")

    ax = axes[5]
    trained = layer["trained"]
    x = [row["damping"] for row in trained["cosines"]]
    lines = (
        ("gfim_over_n", BLUE, "NG+, λ as for L/n"),
        ("gfim", GREEN, "NG+, the same λ for L"),
        ("kfac", ORANGE, "KFAC"),
        ("gradient", GREY, "the gradient itself"),
    )
    for key, colour, label in lines:
        ax.semilogx(x, [row[key] for row in trained["cosines"]], "o-", color=colour, label=label)
    ax.set(
        title=f"digits, trained layer {trained['m']} × {trained['n']}",
        xlabel="damping λ / largest eigenvalue of the EFIM",
        ylabel="cosine with the natural gradient",
    )
    ax.set_ylim(0, 1.25)
    ax.legend(loc="lower right")
    ax.text(
        0.03,
        0.97,
        f"relative error of the matrix:\nI ⊗ L/n {trained['whole_error']:.2f}, KFAC {trained['whole_error_kfac']:.2f}",
        transform=ax.transAxes,
        va="top",
        fontsize=8.5,
        color=INK,
    )
    return figure


def summary(outcome: Outcome) -> Table:
    gaussian, layer = outcome.numbers["gaussian"], outcome.numbers["digits"]
    out = common.table("GFIM and EFIM", "quantity", "measured", "expected")
    last = gaussian["error"][-1]
    ratio = gaussian["trace_of_gfim_over_trace_of_block"]
    out.add_row("trace of GFIM over trace of first block", f"{ratio:.1f}", f"n = {gaussian['n']}")
    out.add_row(f"first block, N = {last['samples']:,}", f"{last['block']:.4f}", f"{last['expected']:.4f}")
    for row in gaussian["dependence"][:: max(1, len(gaussian["dependence"]) // 3)]:
        out.add_row(f"ρ = {row['rho']:g}: first block", f"{row['block']:.4f}", f"{row['block_expected']:.4f}")
        out.add_row(f"ρ = {row['rho']:g}: whole EFIM", f"{row['whole']:.4f}", f"{row['whole_expected']:.4f}")
    for when, one in layer.items():
        out.add_row(f"digits {when}: whole EFIM, I⊗L/n", f"{one['whole_error']:.3f}", "")
        out.add_row(f"digits {when}: whole EFIM, KFAC", f"{one['whole_error_kfac']:.3f}", "")
    return out
