"""OnlineNGPlus: its inverse, its projections with their certificates, and the conventions of torch.optim."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus.optimizers import online
from ngplus.optimizers.online import project, woodbury_update


def spd(d: int, condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    return q * torch.logspace(0, math.log10(condition), d, dtype=torch.float64) @ q.mT


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distance(a: Tensor, b: Tensor, curvature: Tensor) -> float:
    return float(((a - b) * (curvature @ (a - b))).sum().sqrt())


# -------------------------------------------------------------------------------------------------- the inverse


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (6, 1), (6, 3), (6, 6), (5, 20), (7, 4)])
def test_woodbury_is_the_inverse_of_the_sum(shape: tuple[int, int]) -> None:
    curvature = 0.5 * torch.eye(shape[0], dtype=torch.float64)
    inverse = torch.linalg.inv(curvature)
    for t in range(60):
        gradient = randn(*shape, seed=t)
        curvature = curvature + gradient @ gradient.mT
        woodbury_update(inverse, gradient)
    assert torch.allclose(inverse, torch.linalg.inv(curvature), rtol=1e-9, atol=0)
    assert torch.equal(inverse, inverse.mT)


def test_no_large_system_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    factorise = torch.linalg.cholesky

    def watch(matrix: Tensor) -> Tensor:
        sizes.append(matrix.shape[-1])
        return factorise(matrix)

    def never(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("an m x m inversion")

    monkeypatch.setattr(online.torch.linalg, "cholesky", watch)
    monkeypatch.setattr(online.torch.linalg, "inv", never)
    monkeypatch.setattr(online.torch.linalg, "solve", never)
    for shape in ((8, 3), (8, 8), (8, 50)):
        w = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        w.grad = randn(*shape)
        ngplus.OnlineNGPlus([w]).step()
    assert max(sizes) <= 4


@pytest.mark.parametrize("side", ["left", "right", "auto"])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4,), (), (3, 2, 2)])
def test_steps_follow_the_formula(shape: tuple[int, ...], side: str) -> None:
    w = nn.Parameter(randn(*shape, seed=3) if shape else torch.tensor(0.7, dtype=torch.float64))
    optimizer = ngplus.OnlineNGPlus([w], alpha=0.7, eps=0.3, side=side)
    matrix = w.detach().clone().reshape(shape[0] if shape else 1, -1)
    left = side == "left" or (side == "auto" and matrix.shape[0] <= matrix.shape[1])
    d = matrix.shape[0 if left else 1]
    curvature = 0.3 * torch.eye(d, dtype=torch.float64)
    for t in range(8):
        gradient = randn(*matrix.shape, seed=10 + t)
        w.grad = gradient.reshape(shape).clone()
        optimizer.step()
        curvature = curvature + (gradient @ gradient.mT if left else gradient.mT @ gradient)
        inverse = torch.linalg.inv(curvature)
        matrix = matrix - (inverse @ gradient if left else gradient @ inverse) / 0.7
        assert torch.allclose(w.detach().reshape(matrix.shape), matrix, rtol=1e-10)
        assert torch.equal(w.grad.reshape(matrix.shape), gradient)  # .grad is left as it was


# -------------------------------------------------------------------------------------------------- projections


def reference(point: Tensor, curvature: Tensor, radius: float, ball: str) -> Tensor:
    """Projected gradient steps, many of them: slow and plain."""
    step = 1 / float(torch.linalg.eigvalsh(curvature)[-1])
    z = y = torch.zeros_like(point)
    momentum = 1.0
    for _ in range(20_000):
        moved = y - step * curvature @ (y - point)
        if ball == "frobenius":
            new = moved * min(1.0, radius / float(moved.norm()))
        else:
            left, values, right = torch.linalg.svd(moved, full_matrices=False)
            new = left * values.clamp_max(radius) @ right
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y = new + (momentum - 1) / following * (new - z)
        if float((new - z).norm()) < 1e-13:
            break
        z, momentum = new, following
    return z


@pytest.mark.parametrize("ball", online.BALLS)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_projection_agrees_with_a_plain_solver(ball: str, shape: tuple[int, int]) -> None:
    curvature, point = spd(shape[0], 50.0), 2 * randn(*shape)
    done = project(point, 1.0, ball, torch.linalg.inv(curvature), 1e-11)
    exact = reference(point, curvature, 1.0, ball)
    assert distance(done.point, exact, curvature) < 1e-6
    assert float(torch.linalg.matrix_norm(done.point, 2 if ball == "spectral" else "fro")) <= 1 + 1e-12


@pytest.mark.parametrize("ball", online.BALLS)
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_certificate_bounds_the_distance(ball: str, condition: float, radius: float) -> None:
    """A loose projection is within its certificate of a tight one; both are in the ball."""
    curvature, point = spd(6, condition), 2 * randn(6, 4)
    inverse = torch.linalg.inv(curvature)
    tight = project(point, radius, ball, inverse, 1e-10)
    size = distance(point, torch.zeros_like(point), curvature)
    assert tight.bound <= 1e-10 * size
    loose = project(point, radius, ball, inverse, 1e-3)
    assert distance(loose.point, tight.point, curvature) <= loose.bound + tight.bound
    assert loose.bound <= 1e-3 * size


@pytest.mark.parametrize("ball", online.BALLS)
def test_projection_is_optimal_in_the_norm_of_l(ball: str) -> None:
    """<V - Z, X - Z>_L <= 0 for every X in the ball: the variational inequality."""
    curvature, point = spd(5, 100.0), 3 * randn(5, 4)
    done = project(point, 1.0, ball, torch.linalg.inv(curvature), 1e-12)
    for seed in range(200):
        x = project(randn(5, 4, seed=seed), 1.0, ball).point
        assert float(((point - done.point) * (curvature @ (x - done.point))).sum()) <= 1e-7


def test_plain_projections() -> None:
    point = 3 * randn(4, 3)
    assert torch.allclose(project(point, 1.0, "frobenius").point, point / point.norm())
    values = torch.linalg.svdvals(project(point, 1.0, "spectral").point)
    assert torch.allclose(values, torch.linalg.svdvals(point).clamp_max(1.0))
    inside = 0.01 * point
    for ball in online.BALLS:
        assert project(inside, 1.0, ball, spd(4, 10.0)).point is inside
        identity = torch.eye(4, dtype=torch.float64)
        same = project(point, 1.0, ball, identity, 1e-12).point
        assert torch.allclose(same, project(point, 1.0, ball).point, atol=1e-10)


def test_the_two_balls_are_one_for_a_vector() -> None:
    point, inverse = 3 * randn(5, 1), torch.linalg.inv(spd(5, 30.0))
    balls = [project(point, 1.0, ball, inverse).point for ball in online.BALLS]
    assert torch.equal(*balls)


def test_a_projection_that_does_not_get_there_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "MAX_ITERATIONS", 3)
    with pytest.warns(UserWarning, match="spectral ball stopped after 3 iterations"):
        done = project(3 * randn(5, 4), 1.0, "spectral", torch.linalg.inv(spd(5, 1e4)), 1e-12)
    assert math.isfinite(done.bound)


@pytest.mark.parametrize("ball", online.BALLS)
@pytest.mark.parametrize("norm", online.NORMS)
def test_parameters_stay_in_the_ball(ball: str, norm: str) -> None:
    w = nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    optimizer = ngplus.OnlineNGPlus([w], alpha=0.01, radius=0.8, ball=ball, norm=norm)
    for t in range(20):
        w.grad = randn(5, 3, seed=t)
        optimizer.step()
        assert float(torch.linalg.matrix_norm(w.detach(), 2 if ball == "spectral" else "fro")) <= 0.8 + 1e-12
    assert optimizer.state[w]["projection_bound"] < 1e-6


def test_eps_of_the_theorem() -> None:
    for ball, diameter in (("frobenius", 6.0), ("spectral", 6.0 * math.sqrt(2))):
        w = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
        optimizer = ngplus.OnlineNGPlus([w], alpha=0.5, radius=3.0, ball=ball)
        w.grad = torch.zeros_like(w)
        optimizer.step()
        expected = 0.5 * diameter**2 / 2 * torch.eye(4, dtype=torch.float64)
        assert torch.allclose(optimizer.state[w]["inverse"], expected)


# -------------------------------------------------------------------------------------------------- torch's conventions


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0.0}, {"alpha": -1.0}, {"alpha": math.inf}, {"alpha": "1"}, {"eps": 0.0}, {"radius": -1.0},
        {"ball": "cube"}, {"norm": "none"}, {"side": "top"}, {"tolerance": 0.0}, {"alpha": True},
    ],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        ngplus.OnlineNGPlus([nn.Parameter(torch.zeros(2))], **options)
    with pytest.raises(ValueError, match=f"Invalid {name}"):
        ngplus.OnlineNGPlus([{"params": [nn.Parameter(torch.zeros(2))], **options}])


def test_project_knows_two_balls() -> None:
    with pytest.raises(ValueError, match="Invalid ball: 'cube'"):
        ngplus.online.project(torch.eye(2), 2.0, "cube")


def test_bad_gradients_change_nothing() -> None:
    a, b = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = ngplus.OnlineNGPlus([a, b])
    a.grad, b.grad = torch.ones(2, 2), torch.full((2, 2), math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step()
    assert torch.equal(a.detach(), torch.ones(2, 2))
    b.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="complex"):
        ngplus.OnlineNGPlus([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


def test_closure_zero_gradient_and_no_gradient() -> None:
    w, idle = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    optimizer = ngplus.OnlineNGPlus([w, idle])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w * 0.0).sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 0.0  # type: ignore[arg-type]
    assert torch.equal(w.detach(), torch.ones(3, 2))
    assert idle not in optimizer.state


def test_maximize_is_the_negated_gradient() -> None:
    up, down = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    gradient = randn(3, 2).float()
    up.grad, down.grad = gradient.clone(), -gradient
    ngplus.OnlineNGPlus([up], maximize=True).step()
    ngplus.OnlineNGPlus([down]).step()
    assert torch.equal(up, down)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_state_goes_through_a_checkpoint(tmp_path, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    def rounds(w: nn.Parameter, optimizer: ngplus.OnlineNGPlus, first: int) -> None:
        for t in range(first, first + 5):
            w.grad = randn(4, 3, seed=t).to(dtype)
            optimizer.step()

    w = nn.Parameter(torch.zeros(4, 3, dtype=dtype))
    options = {"alpha": 0.1, "radius": 1.0, "ball": "spectral"}
    optimizer = ngplus.OnlineNGPlus([w], **options)
    rounds(w, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twin = nn.Parameter(w.detach().clone())
    other = ngplus.OnlineNGPlus([twin])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.state[twin]["inverse"].dtype == torch.float64
    third = copy.deepcopy(other)
    rounds(w, optimizer, 5)
    rounds(twin, other, 5)
    assert torch.equal(w, twin)
    assert third.state[third.param_groups[0]["params"][0]]["step"] == 5


def test_regret_is_kept_on_the_side_of_the_losses_alone() -> None:
    """1/2 (w^T x - y)^2 with a direction that is rarely seen: on the right its steps shrink with those of the other."""
    rounds = 2500
    generator = torch.Generator().manual_seed(0)
    rare = torch.rand(rounds, generator=generator, dtype=torch.float64) < 0.01
    x = torch.stack([~rare, rare], dim=1).double()
    y = torch.where(rare, 1, torch.randint(2, (rounds,), generator=generator) * 2 - 1).double()
    best = torch.tensor([float(y[~rare].mean()), 1.0], dtype=torch.float64)  # inside of the ball, or next to it
    regret = {}
    for side in ("left", "right"):
        w = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
        optimizer = ngplus.OnlineNGPlus([w], alpha=0.25, radius=1.0, ball="spectral", side=side)
        total = 0.0
        for one, answer in zip(x, y, strict=True):
            error = float(one @ w.detach()[:, 0] - answer)
            total += 0.5 * error**2
            w.grad = (one * error)[:, None]
            optimizer.step()
        regret[side] = total - float(0.5 * (x @ best - y).square().sum())
    bound = 2 / (2 * 0.25) * math.log(1 + rounds * 4 / 2) + 0.25 * 2 * 4 / 2
    assert regret["left"] < bound
    assert regret["right"] > 1.5 * regret["left"]
