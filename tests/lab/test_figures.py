"""The figures of the theory on small instances: their mathematics, then their files and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
from helpers.steps import PAPER
from ngplus.lab import figures
from ngplus.lab.figures import blocks, common, convergence, gfim, regret, sketch, steps

pytestmark = pytest.mark.usefixtures("figure_conditions")


def kron_efim(g: Tensor) -> Tensor:
    """The EFIM of matrices [samples, m, n] in full, with vec stacking columns."""
    flat = g.mT.reshape(len(g), -1)
    return flat.mT @ flat / len(g)


# -------------------------------------------------------------------------------------------------- gfim


def test_gfim_is_the_sum_of_the_diagonal_blocks_and_the_nearest_of_its_kind() -> None:
    g = torch.randn(30, 4, 3, dtype=torch.float64)
    efim, left = kron_efim(g), torch.einsum("sij,skj->ik", g, g) / len(g)
    diagonal = [efim[4 * j : 4 * j + 4, 4 * j : 4 * j + 4] for j in range(3)]
    assert torch.allclose(sum(diagonal, torch.zeros(4, 4, dtype=torch.float64)), left)
    nearest = (efim - torch.kron(torch.eye(3, dtype=torch.float64), left / 3)).norm()
    for seed in range(20):
        noise = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        other = torch.kron(torch.eye(3, dtype=torch.float64), left / 3 + 0.1 * noise)
        assert (efim - other).norm() > nearest


def test_gfim_of_gaussian_matrices_has_the_expected_errors() -> None:
    size, count = 12, 4000
    for rho in (0.0, 0.3, 0.9):
        runs = [gfim.gaussian_sums(size, [count], rho, seed) for seed in range(6)]
        squares = [gfim.block_error(*sums[-1]) ** 2 for sums, _, _ in runs]
        mean = math.sqrt(sum(squares) / len(squares))
        assert mean == pytest.approx(gfim.expected_block_error(size, count, rho), rel=0.12)
        right = runs[0][1] / size
        whole = float((right - right.diagonal().mean() * torch.eye(size)).norm() / right.norm())
        assert whole == pytest.approx(gfim.expected_whole_error(size, rho), abs=0.03)
        assert float(runs[0][2].diagonal().mean()) == pytest.approx(rho, abs=0.03)


def test_gfim_of_a_layer_against_the_full_efim() -> None:
    g, a = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64) + 0.5
    found = gfim.study_layer(g, a, [0.1])
    per_sample = g[:, :, None] * a[:, None, :]
    efim, left = kron_efim(per_sample), torch.einsum("sij,skj->ik", per_sample, per_sample) / 40
    eye = torch.eye(3, dtype=torch.float64)
    whole = float((efim - torch.kron(eye, left / 3)).norm() / efim.norm())
    assert found["whole_error"] == pytest.approx(whole, rel=1e-9)
    kfac = float((efim - torch.kron(a.mT @ a / 40, g.mT @ g / 40)).norm() / efim.norm())
    assert found["whole_error_kfac"] == pytest.approx(kfac, rel=1e-9)
    kept = sum(float(efim[4 * j : 4 * j + 4, 4 * j : 4 * j + 4].square().sum()) for j in range(3))
    assert found["share_in_diagonal_blocks"] == pytest.approx(kept / float(efim.square().sum()), rel=1e-9)
    gradient = per_sample.mean(0)
    damping = 0.1 * float(torch.linalg.eigvalsh(efim)[-1])
    damped = efim + damping * torch.eye(12, dtype=torch.float64)
    natural = torch.linalg.solve(damped, gradient.mT.flatten()).reshape(3, 4).mT
    own = torch.linalg.solve(left / 3 + damping * torch.eye(4, dtype=torch.float64), gradient)
    cosine = float((natural * own).sum() / natural.norm() / own.norm())
    assert found["cosines"][0]["gfim_over_n"] == pytest.approx(cosine, rel=1e-9)


def test_gfim_factors_of_a_layer_are_ngplus_own() -> None:
    images, labels, _, _ = common.digits()
    model = common.network((64, 16, 8, 10), 0)
    g, a = common.linear_factors(model, 2, images[:50], labels[:50])
    left = g.mT @ (a.square().sum(1, keepdim=True) * g) / 50
    exact = ngplus.gfim(model, F.cross_entropy, images[:50], labels[:50])["2.weight"]
    assert exact.side == "left"
    assert torch.allclose(exact.matrix.double(), left, rtol=1e-4, atol=1e-7)


# -------------------------------------------------------------------------------------------------- convergence


def test_convergence_step_is_ngplus_step() -> None:
    """The stacked runs of the figure make the step of the optimizer, given the same samples for L and G."""
    problem = convergence.Robust(m=3, n=5, samples=20, batch=4, damping=0.7, seed=0)
    problem.exact = True
    layer = nn.Linear(5, 3, bias=False).double()
    optimizer = ngplus.NGPlus(layer, lr=0.3, momentum=0.0, damping=0.7, update_every=1, **PAPER)
    w = layer.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        torch.log1p((layer(problem.x) - problem.y).square() / 2).sum(1).mean().backward()
        assert torch.allclose(layer.weight.grad, problem.gradient(w), rtol=1e-8)  # type: ignore[arg-type]
        optimizer.step()
        w = problem.step(w, torch.tensor(0.3, dtype=torch.float64))
        assert torch.allclose(layer.weight, w, rtol=1e-7)


def test_convergence_fails_at_the_printed_limit() -> None:
    """Psi = w^2/2: at alpha = 2 h_1^2/(L_Psi h_2), which Theorem 2 still allows, w goes to and fro; below it, to 0."""
    reached = {}
    for share in (1.0, 0.5):
        c = convergence.Constants(lipschitz=1.0, h1=1.5, h2=1.5, variance=0.0, gap=0.5)
        w = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        options = {**PAPER, "damping": 0.5, "update_every": 1, "momentum": 0.0}
        linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        linear.weight = w
        optimizer = ngplus.NGPlus(linear, lr=share * c.largest_step, **options)
        for _ in range(40):
            optimizer.zero_grad()
            (linear(torch.ones(1, 1, dtype=torch.float64)).square().mean() / 2).backward()
            optimizer.step()
        reached[share] = abs(float(w))
    assert reached[1.0] == pytest.approx(1.0)
    assert reached[0.5] < 1e-3


def test_convergence_constants_hold() -> None:
    problem = convergence.Robust(m=3, n=5, samples=40, batch=4, damping=0.7, seed=1)
    c = problem.constants
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        w, v = (5 * torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(2))
        assert (problem.gradient(w) - problem.gradient(v)).norm() <= c.lipschitz * (w - v).norm() * (1 + 1e-12)
        slopes = problem.slopes(w, problem.x, problem.y)
        own = slopes[:, :, None] * problem.x[:, None, :]
        top = float(torch.linalg.eigvalsh(torch.einsum("sij,skj->ik", own, own) / len(own))[-1])
        assert 0.7 + top <= c.h2
        variance = float((own - own.mean(0)).square().sum((1, 2)).mean()) / problem.batch
        assert variance <= c.variance
    assert c.h1 == 0.7


def test_convergence_small_instance_keeps_the_bound() -> None:
    numbers = convergence.compute(seed=0, small=True).numbers
    for name in ("theorem", "slow"):
        for row in numbers[name]["betas"]:
            assert row["below_proved"], (name, row["beta"])
            assert 0.5 < row["beta"] < 1
    for row in numbers["slow"]["betas"]:  # slower than N^-beta: near N^-(1-beta)
        assert row["rate"] > -(1 - row["beta"]) - 0.2
    assert numbers["slow"]["betas"][-1]["rate"] > -0.5
    assert not numbers["slow"]["betas"][-1]["below_printed"]
    for ratio in numbers["printed_over_units"].values():
        assert ratio["in other units"] > 1
    norm = {row["name"]: row["norm"] for row in numbers["outside"]["rows"]}
    last = {name: float(value[-1]) / float(value[0]) for name, value in norm.items()}
    assert last["σ > 0: β = 0.75"] < 0.25
    assert last["σ = 0: constant"] < 1e-6
    assert last["σ > 0: β = 2, Σα < ∞"] > 0.8
    assert last["σ = 0: constant, 8 times the largest α"] > 0.3
    assert last["σ > 0: constant, an eighth, Σα²σ² = ∞"] > last["σ > 0: β = 0.75"]


def test_convergence_bounds_by_hand() -> None:
    c = convergence.Constants(lipschitz=2.0, h1=1.0, h2=3.0, variance=0.5, gap=1.5)
    printed = convergence.printed_bound(c, 0.75, torch.tensor([16.0], dtype=torch.float64))
    assert float(printed) == pytest.approx(2 * 9 / 16 + 2 * 0.5 / (9 * 0.25) * 16**-0.75)
    beta, step = 0.75, 2 / 6
    w = [step * k**-beta * (1 - k**-beta) / 3 for k in (2, 3, 4)]
    largest = 1.5 + sum(step * k ** (-2 * beta) * 0.5 / 3 for k in (1, 2, 3, 4))
    rise = 1 / w[0] + max(0, 1 / w[1] - 1 / w[0]) + max(0, 1 / w[2] - 1 / w[1])
    noise = sum(0.5 * k**-beta / (1 - k**-beta) for k in (2, 3, 4))
    proved = convergence.proved_bound(c, beta, 0.2, 4)
    assert float(proved[3]) == pytest.approx((0.2 + largest * rise + noise) / 4)


# -------------------------------------------------------------------------------------------------- regret


def test_regret_assumption_holds_on_the_ball() -> None:
    data = regret.example(4, 3, 50, seed=0)
    assert float(data.x.norm(dim=1).max()) <= 1 + 1e-12
    assert float(data.y.norm(dim=1).max()) <= regret.RADIUS + 1e-12
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        a, b = (
            ngplus.online.project(
                2 * torch.randn(4, 3, generator=generator, dtype=torch.float64), 1.0, "spectral"
            ).point
            for _ in range(2)
        )
        x, y = data.x[seed], data.y[seed]
        gradient = x[:, None] * (b.mT @ x - y)[None, :]
        gap = 0.5 * (a.mT @ x - y).square().sum() - 0.5 * (b.mT @ x - y).square().sum() - (gradient * (a - b)).sum()
        assert float(gap) >= data.alpha / 2 * float((gradient.mT @ (a - b)).square().sum()) - 1e-12
        assert float(gradient.norm()) <= 2 * regret.RADIUS


def test_regret_best_fixed_point_is_certified() -> None:
    data = regret.example(4, 3, 300, seed=1)
    loss, gap, w = regret.best_fixed(data, 300)
    assert float(torch.linalg.matrix_norm(w, 2)) == pytest.approx(1.0)  # the ball is felt
    assert gap < 1e-8
    gradient = data.x.mT @ (data.x @ w - data.y)
    # the best a linear function can do on the ball: a lower bound by convexity (Frank and Wolfe's gap)
    lower = loss + float((gradient * -w).sum()) - float(torch.linalg.svdvals(gradient).sum())
    assert loss - lower < 1e-4
    for seed in range(50):
        other = ngplus.online.project(w + 0.1 * torch.randn(4, 3, dtype=torch.float64), 1.0, "spectral").point
        assert 0.5 * float((data.x @ other - data.y).square().sum()) >= loss - gap, seed


def test_regret_is_under_the_chain_of_bounds() -> None:
    numbers = regret.compute(seed=0, small=True).numbers
    own = numbers["curves"]["NG+"]["regret"]
    assert bool((own <= numbers["potential"]).all())
    assert bool((numbers["potential"] <= numbers["bound"]).all())
    assert numbers["largest_gap_of_the_best_fixed_point"] < 1e-8
    assert numbers["largest_projection_certificate"] < 1e-7
    assert numbers["curves"]["NG+"]["missed_by_log"] < numbers["curves"]["NG+"]["missed_by_sqrt"]
    for row in (*numbers["vary_m"], *numbers["vary_n"]):
        assert row["potential"] <= row["log_det"] <= row["m_log"]
        assert row["regret"] <= row["bound"]
    wide, tall = numbers["vary_n"][-1], numbers["vary_m"][-1]
    assert tall["potential"] > tall["n_log"]  # the lemma does not hold with n
    assert tall["potential"] > 2 * wide["potential"]


# ---------------------------------------------------------------------------------------- sketch, blocks, steps


def test_sketch_errors_fall_and_meet_the_expectation() -> None:
    numbers = sketch.compute(seed=0, small=True).numbers
    first, last = numbers["product"]["rows"]
    for kind in sketch.KINDS:
        assert last[kind]["error"] < 0.6 * first[kind]["error"]
        few, many = numbers["least_squares"]["rows"]
        assert many[kind]["error"] < few[kind]["error"]
        assert many[kind]["cosine"] > 0.95
    for row in numbers["product"]["rows"]:
        assert row["expected_gaussian"] == pytest.approx(row["gaussian"]["root_mean_square"], rel=0.6)


def test_sketch_expectation_by_many_draws() -> None:
    g, a = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 7, dtype=torch.float64)
    exact = g.mT @ (a.square().sum(1, keepdim=True) * g) / 10
    total, q, draws = 0.0, 4, 4000
    for omega in torch.randn(draws, 7, q, dtype=torch.float64) / math.sqrt(q):
        short = (a @ omega).square().sum(1, keepdim=True)
        total += float((g.mT @ (short * g) / 10 - exact).square().sum())
    measured = math.sqrt(total / draws) / float(exact.norm())
    assert sketch.product_expected(g, a, q) == pytest.approx(measured, rel=0.06)


def test_blocks_against_the_dense_formula() -> None:
    images, labels, _, _ = common.digits()
    images, labels = images[:64], labels[:64]
    model = common.network((64, 12, 8, 10), 0)
    g, a = common.linear_factors(model, 2, images, labels)
    left, gradient = g.mT @ (a.square().sum(1, keepdim=True) * g) / 64, g.mT @ a / 64
    for p in (1, 3, 8):
        kept = left * (torch.arange(8)[:, None] // p == torch.arange(8)[None, :] // p)
        exact = torch.linalg.solve(kept + 0.05 * torch.eye(8, dtype=torch.float64), gradient)
        _, found = blocks.measure(model, 2, images, labels, solver="dense", damping=0.05, block_size=p)
        assert torch.allclose(found, exact, rtol=1e-3, atol=1e-6)


def test_blocks_small_instance() -> None:
    numbers = blocks.compute(seed=0, small=True).numbers
    d, other = numbers["d"], numbers["D"]
    for curve in numbers["dampings"]:
        first, middle, last = (row["cosine"] for row in curve["rows"])
        assert first <= middle + 1e-6
        assert last == pytest.approx(1.0, abs=1e-5)
        assert curve["rows"][-1]["error"] < 1e-4
    for row in numbers["costs"]:
        assert row["step_flops"] == 2 * d * row["p"] * other
        assert row["state_bytes"] == pytest.approx(4 * d * row["p"], abs=8)  # and the damping of the refresh
    assert numbers["costs"][-1]["share_of_norm_kept"] == pytest.approx(1.0)


def test_steps_small_instance() -> None:
    numbers = steps.compute(seed=0, small=True).numbers
    for method, rows in numbers["methods"].items():
        losses = [row["loss"] for row in rows]
        assert max(losses) < math.log(10) / 6  # far from where it began, whatever T is
        if method == "ngadam":
            assert losses[0] == min(losses)  # at T = 1: old curvature costs loss
        for row in rows:
            refreshes = math.ceil(numbers["steps"] / row["T"]) / numbers["steps"]
            assert row["extra_flops_a_step"] == pytest.approx(row["step_flops"] + refreshes * row["refresh_flops"])
        extra = [row["extra_flops_a_step"] for row in rows]
        assert extra == sorted(extra, reverse=True)


# -------------------------------------------------------------------------------------------------- files and command


def test_command_writes_the_files(tmp_path: Path) -> None:
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from ngplus.lab import figure

    app = typer.Typer()
    app.callback()(lambda: None)
    figure.register(app)
    runner = CliRunner()
    for folder in ("a", "b"):
        result = runner.invoke(app, ["figure", "costs", "--small", "--out", str(tmp_path / folder), "--seed", "3"])
        assert result.exit_code == 0, result.output
        assert "transformer" in result.output
    for name in ("costs.png", "costs.svg", "costs.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "a" / "costs.json").read_text())["models"][0]["model"] == "transformer"
    assert (tmp_path / "a" / "costs.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a" / "costs.svg").read_text()
    assert runner.invoke(app, ["figure", "gfmi"]).exit_code == 2
    assert runner.invoke(app, ["figure", "gfim", "--model", "x"]).exit_code == 2
    assert runner.invoke(app, ["figure", "costs", "--model", "x", "--out", str(tmp_path)]).exit_code == 2


@pytest.mark.parametrize("name", ["gfim", "blocks"])
def test_figures_draw(name: str, tmp_path: Path) -> None:
    outcome, paths = figures.make(name, tmp_path, seed=0, small=True)
    assert [path.suffix for path in paths] == [".png", ".svg", ".json"]
    assert all(path.stat().st_size > 500 for path in paths)
    assert figures.module(name).summary(outcome).row_count > 0
    json.loads(paths[2].read_text())


def test_numbers_become_plain() -> None:
    assert common.plain({"a": torch.tensor([1.0, math.inf]), 2: (1.23456789, True)}) == {
        "a": [1.0, None],
        "2": [1.23457, True],
    }
    x = torch.tensor([1.0, 10.0, 100.0])
    assert common.slope(x, 3 * x**-0.5) == pytest.approx(-0.5)
    assert common.log_spaced(1, 100, 3) == [1, 10, 100]
