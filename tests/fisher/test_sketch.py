"""Sketches: their shape, that they are unbiased, at what rate their mean converges, and that a seed fixes them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from factor_cases import random
from torch import Tensor

from ngplus.fisher.sketch import KINDS, Sketch, SketchSpec, hadamard

SPECS = {kind: SketchSpec(4, kind) for kind in KINDS} | {"no replacement": SketchSpec(4, "uniform", replacement=False)}


def omega(spec: SketchSpec, n: int, seed: int) -> Tensor:
    """Omega itself, [n, q], by sketching the identity."""
    return Sketch(spec, n, seed)(torch.eye(n, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ one Omega


@pytest.mark.parametrize("n", [4, 5, 7, 8, 33])
@pytest.mark.parametrize("name", SPECS)
def test_shape_and_linearity(name: str, n: int) -> None:
    """x @ Omega along the last dimension, whatever stands before it."""
    sketch = Sketch(SPECS[name], n, seed=3)
    matrix = omega(SPECS[name], n, seed=3)
    assert matrix.shape == (n, 4)
    for shape in ((n,), (3, n), (2, 3, n), (2, 1, 3, n)):
        x = random(*shape)
        assert sketch(x).shape == (*shape[:-1], 4)
        torch.testing.assert_close(sketch(x), x @ matrix)
    assert sketch(random(2, n).float()).dtype == torch.float32
    torch.testing.assert_close(sketch(random(n, 2).mT), random(n, 2).mT @ matrix)  # not contiguous


@pytest.mark.parametrize("name", SPECS)
def test_input_is_left_alone(name: str) -> None:
    x = random(3, 7)
    before = x.clone()
    Sketch(SPECS[name], 7, seed=0)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", SPECS)
def test_a_seed_fixes_omega(name: str) -> None:
    state = torch.get_rng_state()
    draws = [omega(SPECS[name], 16, seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(state, torch.get_rng_state())  # the user's own stream of numbers is not touched


def test_columns_of_uniform_sampling() -> None:
    """Each column is sqrt(n/q) e_j, and with replacement a j may come again."""
    n, q, again = 6, 4, False
    for seed in range(20):
        matrix = omega(SketchSpec(q), n, seed)
        assert torch.equal((matrix != 0).sum(0), torch.ones(q, dtype=torch.long))
        torch.testing.assert_close(matrix.sum(0), torch.full((q,), math.sqrt(n / q), dtype=torch.float64))
        again |= bool(((matrix != 0).sum(1) > 1).any())
        apart = omega(SketchSpec(q, replacement=False), n, seed)
        assert int((apart != 0).sum(1).max()) == 1
    assert again


def test_rows_of_countsketch_have_one_sign_each() -> None:
    matrix = omega(SketchSpec(5, "countsketch"), 40, seed=2)
    assert torch.equal(matrix.abs().sum(1), torch.ones(40, dtype=torch.float64))
    assert set(matrix[matrix != 0].tolist()) == {-1.0, 1.0}


def test_entries_of_srht_have_equal_size() -> None:
    """sqrt(N/q) D H P with N = 8: every entry is +-1 / sqrt(q)."""
    torch.testing.assert_close(omega(SketchSpec(4, "srht"), 7, 1).abs(), torch.full((7, 4), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_uniform_without_replacement_and_q_equal_n_is_exact(n: int) -> None:
    matrix = omega(SketchSpec(n, "uniform", replacement=False), n, seed=5)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(n, dtype=torch.float64), rtol=0, atol=0)
    g = random(3, n)
    short = Sketch(SketchSpec(n, "uniform", replacement=False), n, seed=5)(g)
    torch.testing.assert_close(short @ short.mT, g @ g.mT, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_one_column_of_one(kind: str) -> None:
    x = random(3, 1)
    short = Sketch(SketchSpec(1, kind), 1, seed=0)(x)
    assert short.shape == (3, 1)
    if kind != "gaussian":
        torch.testing.assert_close(short.abs(), x.abs())


def test_more_columns_than_there_are_without_replacement() -> None:
    with pytest.raises(ValueError, match="sketch size: 5 of 4"):
        Sketch(SketchSpec(5, "uniform", replacement=False), 4, seed=0)


# ------------------------------------------------------------------------------------------------ many of them

TRIALS = 2048


@pytest.mark.parametrize("n", [5, 8])
@pytest.mark.parametrize("name", SPECS)
def test_expectation_of_omega_omega_t_is_the_identity(name: str, n: int) -> None:
    """Each entry of the mean lies within 5 standard errors (of the trials themselves) of the identity's."""
    draws = torch.stack([o @ o.mT for o in (omega(SPECS[name], n, seed) for seed in range(TRIALS))])
    error = (draws.mean(0) - torch.eye(n, dtype=torch.float64)).abs()
    assert bool((error <= 5 * draws.std(0) / math.sqrt(TRIALS) + 1e-12).all()), error
    assert float(draws.std(0).max()) > 0.1  # one draw is far from it


@pytest.mark.parametrize("name", SPECS)
def test_mean_of_sketched_products_converges_as_one_over_root_trials(name: str) -> None:
    """log error against log trials has the slope -1/2: an unbiased estimate, and independent seeds.

    The error is the root mean square over several disjoint sets of trials. A bias of a tenth of one draw's error would
    bend the slope to about -0.3.
    """
    n, counts = 12, [8, 32, 128, 512]
    g = random(4, n, seed=1)
    exact = g @ g.mT
    draws = []
    for seed in range(4 * counts[-1]):
        short = Sketch(SPECS[name], n, seed)(g)
        draws.append(short @ short.mT - exact)
    stack = torch.stack(draws)
    errors = [float(stack.unflatten(0, (-1, c)).mean(1).square().sum((1, 2)).mean().sqrt()) for c in counts]
    x = torch.tensor(counts, dtype=torch.float64).log2()
    y = torch.tensor(errors, dtype=torch.float64).log2()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert -0.65 < slope < -0.4, (slope, errors)
    assert errors[-1] < 0.2 * float(exact.norm())


@pytest.mark.parametrize("name", SPECS)
def test_longer_sketches_are_closer(name: str) -> None:
    g = random(4, 16, seed=1)
    exact, spec = g @ g.mT, SPECS[name]

    def error(q: int) -> float:
        shorts = [Sketch(SketchSpec(q, spec.kind, spec.replacement), 16, seed)(g) for seed in range(64)]
        return float(torch.stack([(s @ s.mT - exact).norm() for s in shorts]).mean())

    assert error(12) < 0.8 * error(3)


# ------------------------------------------------------------------------------------------------ the transform


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_hadamard_is_orthonormal(n: int) -> None:
    matrix = hadamard(torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full((n, n), n**-0.5, dtype=torch.float64))
    torch.testing.assert_close(hadamard(matrix), torch.eye(n, dtype=torch.float64))  # its own inverse


@pytest.mark.parametrize(("n", "size"), [(3, 4), (5, 8), (9, 16)])
def test_hadamard_pads_to_a_power_of_two(n: int, size: int) -> None:
    x = random(2, n)
    assert hadamard(x).shape == (2, size)
    torch.testing.assert_close(hadamard(x), hadamard(torch.nn.functional.pad(x, (0, size - n))))
    torch.testing.assert_close(hadamard(x).norm(dim=-1), x.norm(dim=-1))


# ------------------------------------------------------------------------------------------------ the argument


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (None, None),
        (7, SketchSpec(7, "uniform", True)),
        ({"size": 3}, SketchSpec(3, "uniform", True)),
        ({"size": 3, "kind": "srht"}, SketchSpec(3, "srht", True)),
        ({"size": 3, "replacement": False}, SketchSpec(3, "uniform", False)),
    ],
    ids=str,
)
def test_parse(value: Any, spec: SketchSpec | None) -> None:
    assert SketchSpec.parse(value) == spec
    if spec is not None:
        assert SketchSpec.parse(dataclasses.asdict(spec)) == spec


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "sketch size: 0"),
        (-3, "sketch size: -3"),
        (2.5, "sketch size: 2.5"),
        (True, "sketch size: True"),
        ("8", "sketch size: '8'"),
        ({"size": None}, "sketch size: None"),
        ({}, "Invalid sketch: "),
        ({"kind": "srht"}, "Invalid sketch: "),
        ({"size": 3, "colour": "red"}, "Invalid sketch: "),
        ({"size": 3, "kind": "fourier"}, "sketch kind: 'fourier'"),
    ],
    ids=str,
)
def test_parse_errors(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SketchSpec.parse(value)
