"""From L to an inverse that can be applied: exactness of each solver, batches, and what happens when one fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factor_cases import random
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import ngplus
from helpers.training import all_finite, failing_eigh
from ngplus.fisher import inverses
from ngplus.fisher.factors import base
from ngplus.fisher.sketch import KINDS, Sketch, SketchSpec
from ngplus.utils.finite import RefreshStatus

BLOCKS = (1, 3)
DIMENSIONS = (1, 2, 5)
DAMPINGS = (1e-3, 0.5, 20.0)


def number(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def exact(matrix: Tensor, damping: float, gradient: Tensor) -> Tensor:
    """(lambda I + L)^-1 G by a general solver, in float64."""
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64)
    return torch.linalg.solve(matrix.double() + damping * eye, gradient.double())


def orthogonal(d: int) -> Sketch:
    """A permutation: q = d columns, each once."""
    return Sketch(SketchSpec(d, "uniform", replacement=False), d, seed=4)


# ------------------------------------------------------------------------------------------------ exactness


def test_damped_leaves_its_argument_alone() -> None:
    matrix = random(2, 3, 3)
    before = matrix.clone()
    torch.testing.assert_close(inverses.damped(matrix, number(0.5)), matrix + 0.5 * torch.eye(3, dtype=torch.float64))
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("damping", [0.0, *DAMPINGS])
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_dense_inverse(blocks: int, d: int, damping: float) -> None:
    u, g = random(blocks, d, d + 3), random(blocks, d, 7, seed=1)
    matrix = u @ u.mT
    inverse = inverses.dense_inverse(matrix, number(damping))
    torch.testing.assert_close(inverse @ g, exact(matrix, damping, g), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(inverse, inverse.mT, rtol=0, atol=0)


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_woodbury(blocks: int, d: int, r: int, damping: float) -> None:
    """NOTES' first misprint: both terms carry 1/lambda."""
    u, g, lam = random(blocks, d, r), random(blocks, d, 7, seed=1), number(damping)
    got = inverses.woodbury_apply(u, inverses.woodbury_core(u, lam), lam, g)
    torch.testing.assert_close(got, exact(u @ u.mT, damping, g), rtol=1e-9, atol=1e-9 / damping)


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_sketched_least_squares_with_an_orthogonal_sketch_is_exact(blocks: int, d: int, r: int, damping: float) -> None:
    u, g, lam, omega = random(blocks, d, r), random(blocks, d, 7, seed=1), number(damping), orthogonal(d)
    got = inverses.sketched_apply(u, inverses.sketched_core(u, lam, omega), lam, g, omega)
    torch.testing.assert_close(got, exact(u @ u.mT, damping, g), rtol=1e-9, atol=1e-9 / damping)


def stacked_least_squares(u: Tensor, g: Tensor, damping: float) -> Tensor:
    """Z = argmin ||U Z - G||^2 + lambda ||Z||^2 by lstsq on [U; sqrt(lambda) I] Z = [G; 0]."""
    blocks, _, r = u.shape
    eye = damping**0.5 * torch.eye(r, dtype=u.dtype).expand(blocks, r, r)
    zero = torch.zeros(blocks, r, g.shape[-1], dtype=u.dtype)
    return torch.linalg.lstsq(torch.cat([u, eye], 1), torch.cat([g, zero], 1)).solution


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("r", [1, 4, 9])
def test_least_squares_form_equals_woodbury(r: int, damping: float) -> None:
    """NOTES' second misprint: the unknown is Z (r x n), and the direction is (G - U Z) / lambda."""
    u, g, lam = random(2, 6, r), random(2, 6, 5, seed=1), number(damping)
    z = stacked_least_squares(u, g, damping)
    assert z.shape == (2, r, 5)
    wanted = (g - u @ z) / damping
    torch.testing.assert_close(wanted, exact(u @ u.mT, damping, g), rtol=1e-8, atol=1e-8 / damping)
    by_woodbury = inverses.woodbury_apply(u, inverses.woodbury_core(u, lam), lam, g)
    torch.testing.assert_close(by_woodbury, wanted, rtol=1e-8, atol=1e-8 / damping)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q", [2, 5, 9])
def test_sketched_least_squares_solves_the_sketched_problem(kind: str, q: int) -> None:
    """Z with Omega U and Omega G from lstsq on the stacked system; then (G - U Z) / lambda with U and G whole."""
    d, r, damping = 9, 4, 0.3
    u, g, lam = random(2, d, r), random(2, d, 5, seed=1), number(damping)
    sketch = Sketch(SketchSpec(q, kind), d, seed=6)
    omega = sketch(torch.eye(d, dtype=torch.float64)).mT  # q x m, as in the paper
    assert omega.shape == (q, d)
    z = stacked_least_squares(omega @ u, omega @ g, damping)
    core = inverses.sketched_core(u, lam, sketch)
    assert core.shape == (2, r, q)
    torch.testing.assert_close(core @ (omega @ g), z, rtol=1e-9, atol=1e-9)
    got = inverses.sketched_apply(u, core, lam, g, sketch)
    torch.testing.assert_close(got, (g - u @ z) / damping, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_longer_sketches_come_closer_to_the_exact_direction(kind: str) -> None:
    d, damping = 64, 0.5
    u, g, lam = random(1, d, 3), random(1, d, 4, seed=1), number(damping)
    want = exact(u @ u.mT, damping, g)

    def error(q: int) -> float:
        total = 0.0
        for seed in range(16):
            sketch = Sketch(SketchSpec(q, kind), d, seed)
            got = inverses.sketched_apply(u, inverses.sketched_core(u, lam, sketch), lam, g, sketch)
            total += float((got - want).norm())
        return total

    assert error(512) < 0.5 * error(16)


@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("d", DIMENSIONS)
@pytest.mark.parametrize("blocks", BLOCKS)
def test_inverse_root(blocks: int, d: int, damping: float) -> None:
    """Its square is the inverse, with a damping for each block; rank d - 1, so that one eigenvalue is the damping."""
    u, g = random(blocks, d, d - 1), random(blocks, d, 7, seed=1)
    matrix, each = u @ u.mT, damping * torch.arange(1.0, blocks + 1, dtype=torch.float64).view(-1, 1, 1)
    root = inverses.inverse_root(matrix, each)
    wanted = torch.linalg.solve(matrix + each * torch.eye(d, dtype=torch.float64), g)
    torch.testing.assert_close(root @ root @ g, wanted, rtol=1e-9, atol=1e-9 / damping)
    torch.testing.assert_close(root, root.mT)
    assert float(torch.linalg.eigvalsh(root).min()) > 0


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("d", DIMENSIONS)
def test_inverse_root_at_any_scale(d: int, scale: float) -> None:
    u = random(2, d, d + 1)
    matrix = scale * (u @ u.mT)
    root = inverses.inverse_root(matrix.float(), torch.full((2, 1, 1), 1e-3 * scale))
    wanted = inverses.inverse_root(matrix, torch.full((2, 1, 1), 1e-3 * scale, dtype=torch.float64))
    torch.testing.assert_close(root.double(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_inverse_root_where_float32_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As LAPACK has failed on a real layer with many dead units: float64 takes over."""
    matrix, damping = (u := random(2, 20, 30)) @ u.mT / 20, torch.full((2, 1, 1), 0.1, dtype=torch.float64)
    wanted = inverses.inverse_root(matrix, damping)
    failing_eigh(monkeypatch, torch.float32)
    status = RefreshStatus()
    root = inverses.inverse_root(matrix.float(), damping.float(), status)
    assert status.retried is not None
    assert status.plain is None
    assert root.dtype == torch.float32
    torch.testing.assert_close(root.double(), wanted, rtol=1e-4, atol=1e-4)


def test_inverse_root_where_nothing_converges(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the diagonal."""
    failing_eigh(monkeypatch, torch.float32, torch.float64)
    matrix, status = (u := random(2, 5, 7).float()) @ u.mT, RefreshStatus()
    root = inverses.inverse_root(matrix, torch.tensor([0.1, 0.2]).view(2, 1, 1), status)
    wanted = torch.stack([torch.diag((matrix[i].diagonal() + (i + 1) / 10).rsqrt()) for i in range(2)])
    torch.testing.assert_close(root, wanted)
    assert status.plain is not None


# ------------------------------------------------------------------------------------------------ failure


def is_usable(inverse: Tensor) -> None:
    """Finite, symmetric, and no direction is turned uphill."""
    assert inverse.isfinite().all()
    torch.testing.assert_close(inverse, inverse.mT, rtol=1e-5, atol=1e-6 * float(inverse.abs().max()))
    scaled = inverse.double() / inverse.double().abs().amax((1, 2), keepdim=True).clamp_min(1e-300)
    assert float(torch.linalg.eigvalsh(scaled).min()) > -1e-5
    assert bool((inverse.diagonal(dim1=-2, dim2=-1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1.0, 1e10, 1e20])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("d", [1, 3, 8])
def test_singular_matrix_without_damping(d: int, rank: int, scale: float, dtype: torch.dtype) -> None:
    u = random(2, d, rank).to(dtype)
    is_usable(inverses.dense_inverse(scale * (u @ u.mT), number(0.0, dtype)))


@pytest.mark.parametrize("damping", [1e-20, 1e-8, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1.0, 1e10, 1e20])
@pytest.mark.parametrize("d", [1, 3, 8])
def test_scales_in_float32(d: int, scale: float, damping: float) -> None:
    """Full rank: right to float32's rounding where lambda I + L is well conditioned, usable everywhere."""
    u = random(2, d, 4 * d).float()
    matrix = scale * (u @ u.mT)
    inverse = inverses.dense_inverse(matrix, number(damping, torch.float32))
    is_usable(inverse)
    want = exact(matrix, float(number(damping, torch.float32)), torch.eye(d, dtype=torch.float64).expand(2, d, d))
    torch.testing.assert_close(inverse.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("relative", [0.0, 1e-9])
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_indefinite_by_rounding(scale: float, relative: float) -> None:
    """A product of low rank whose smallest eigenvalues came out a little below zero."""
    damping = relative * scale
    u = random(1, 6, 2).float()
    matrix = scale * (u @ u.mT - 1e-6 * torch.eye(6))
    assert float(torch.linalg.eigvalsh(matrix.double()).min()) < -damping
    is_usable(inverses.dense_inverse(matrix, number(damping, torch.float32)))


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_hopeless_matrix_becomes_the_plain_gradient_step(damping: float) -> None:
    """What no damping of the ladder makes definite: a multiple of the identity."""
    matrix = torch.tensor([[[1.0, 1e12], [1e12, 1.0]]])
    inverse = inverses.dense_inverse(matrix, number(damping, torch.float32))
    is_usable(inverse)
    torch.testing.assert_close(inverse, inverse[:, :1, :1] * torch.eye(2))
    if damping:
        last = damping * inverses.GROWTH**inverses.RETRIES
        torch.testing.assert_close(inverse, torch.eye(2)[None] / last)  # over the last damping tried


def test_a_failure_leaves_the_other_blocks_exact() -> None:
    u = random(3, 4, 6).float()
    matrix = u @ u.mT
    want = torch.linalg.inv(matrix.double())
    matrix[1] = torch.ones(4, 4) - 0.1 * torch.eye(4)  # indefinite
    inverse = inverses.dense_inverse(matrix, number(0.0, torch.float32))
    is_usable(inverse)
    for block in (0, 2):
        torch.testing.assert_close(inverse[block].double(), want[block], rtol=1e-3, atol=1e-4)


def test_a_block_does_not_depend_on_its_neighbours() -> None:
    """A small singular block beside a large one gets the damping of its own scale, not of the other's."""
    small, large = 1e-8 * torch.ones(3, 3), 1e8 * torch.eye(3)
    alone = inverses.dense_inverse(small[None], number(0.0, torch.float32))
    both = inverses.dense_inverse(torch.stack([small, large]), number(0.0, torch.float32))
    torch.testing.assert_close(both[0], alone[0])
    torch.testing.assert_close(both[1], torch.eye(3) / 1e8)


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_low_rank_solvers_stay_finite_in_float32(scale: float) -> None:
    """U with columns that are equal: U^T U is singular."""
    u = scale * random(2, 6, 1).float().expand(2, 6, 4)
    g = random(2, 6, 3, seed=1).float()
    lam = number(1e-2 * scale * scale, torch.float32)
    omega = orthogonal(6)
    want = exact(u @ u.mT, float(lam), g)
    for got in (
        inverses.woodbury_apply(u, inverses.woodbury_core(u, lam), lam, g),
        inverses.sketched_apply(u, inverses.sketched_core(u, lam, omega), lam, g, omega),
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-3 * float(want.abs().max()))


class NoFloat64(TorchDispatchMode):
    """Stands in for a device that has none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            assert not isinstance(x, Tensor) or x.dtype != torch.float64, func
        return out


@pytest.mark.parametrize(
    ("kind", "options"),
    [(ngplus.NGPlus, {}), (ngplus.NGPlus, {"solver": "dense", "damping": 0.0}), (ngplus.NGAdam, {})],
    ids=["NGPlus", "without damping", "NGAdam"],
)
def test_devices_without_float64(monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]) -> None:
    monkeypatch.setattr(base, "NARROW", ("cpu",), raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).float()
    optimizer = kind(model, update_every=1, **options)
    with NoFloat64():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
        assert optimizer.curvature("0.weight").matrix.isfinite().all()
        hopeless = -torch.eye(3, dtype=torch.float32)[None]
        assert inverses.dense_inverse(hopeless, torch.zeros((), dtype=torch.float32)).isfinite().all()
    assert all_finite(model)
