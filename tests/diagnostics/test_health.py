"""health(): a table to read and to use."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import ngplus
from helpers.hostile import SPOILS, net, train
from ngplus import NGPlus

pytestmark = [pytest.mark.filterwarnings("ignore:.*Sparse invariant checks"), pytest.mark.usefixtures("looks")]


def test_health_is_a_table_to_read_and_to_use() -> None:
    model = net()
    optimizer = NGPlus(model, update_every=2)
    train(model, optimizer, 1)
    assert optimizer.health().good
    assert "no layer had a fault" in str(optimizer.health())
    SPOILS["one layer"](model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    found = optimizer.health()
    assert not found.good
    assert found.as_dict()["layers"][0]["name"] == "4.weight"
    assert found["0.weight"] == ngplus.LayerHealth("0.weight")
    lines = str(found).splitlines()
    assert lines[0].startswith("2 steps, 1 skipped")
    assert lines[3].split() == ["4.weight", "1", "0", "0", "0", "0"]
    explained = " ".join(lines[4:])
    assert all(f"{head}: " in explained for head in lines[1].split()[1:])
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("solver", ["dense", "woodbury"])
@pytest.mark.parametrize(("damping", "relative"), [(0.3, 0.0), (0.0, 0.5)])
def test_h1_and_h2_are_the_ends_of_the_spectrum(solver: str, damping: float, relative: float) -> None:
    """Of lambda I + L as it was at the last refresh, block by block."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    options = {"damping": damping, "relative_damping": relative, "solver": solver, "curvature": "sample"}
    optimizer = NGPlus(model, **options)
    assert optimizer.health(eigenvalues=True).eigenvalues == ()  # before the first refresh
    model(torch.randn(12, 9).double()).square().sum(1).mean().backward()
    optimizer.step()
    found = {bounds.name: bounds for bounds in optimizer.health(eigenvalues=True).eigenvalues}
    assert list(found) == ["0.weight", "2.weight"]
    for name, bounds in found.items():
        values = torch.linalg.eigvalsh(optimizer.curvature(name).matrix)
        wanted = values + damping + relative * values.mean()
        assert (bounds.h1, bounds.h2) == pytest.approx((float(wanted[0]), float(wanted[-1])), rel=1e-6)
    lines = str(optimizer.health(eigenvalues=True)).splitlines()
    assert lines[0] == "1 steps, 0 skipped; no layer had a fault"
    assert lines[1].split() == ["layer", "h_1", "h_2", "h_2", "/", "h_1"]
    assert optimizer.health().eigenvalues == ()  # not asked for: no decomposition


EVERY = {
    "NGPlus": NGPlus,
    "NGPlus with momentum": lambda model: NGPlus(model, weight_decay=0.1, nesterov=True, lr=0.1),
    "NGAdam": ngplus.NGAdam,
    "NGAdam, tensor lr": lambda model: ngplus.NGAdam(model, lr=torch.tensor(0.1)),
    "KFAC": ngplus.baselines.KFAC,
    "two groups": lambda model: ngplus.NGAdam(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1:].parameters()}], model=model
    ),
}


def rms(tensors: list[torch.Tensor]) -> float:
    return torch.cat([x.detach().flatten() for x in tensors]).square().mean().sqrt().item()


@pytest.mark.parametrize("kind", EVERY)
def test_scalars_have_the_same_names_in_every_step(kind: str) -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = EVERY[kind](model)
    first = optimizer.health().scalars()
    assert math.isnan(first["update_rms"])
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 1)
        if "lr" in kind:
            optimizer.param_groups[0]["lr"].mul_(7)  # as a scheduler does; the step was made with the other one
        found = optimizer.health().scalars()
        assert list(found) == list(first)
        assert all(type(value) is float for value in found.values())
        after = list(model.parameters())
        assert found["update_rms"] == pytest.approx(rms([a - b for a, b in zip(after, before, strict=True)]), rel=1e-4)
        assert found["parameter_rms"] == pytest.approx(rms(after), rel=1e-5)
    assert found["steps"] == 3.0


def test_scalars_count_faults_over_layers() -> None:
    model = net()
    optimizer = NGPlus(model)
    train(model, optimizer, 1)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    found = optimizer.health().scalars()
    assert found["faults/gradients"] == len(list(model.parameters()))
    assert (found["steps"], found["skipped"], found["update_rms"]) == (2.0, 1.0, 0.0)


def test_scalars_of_eigenvalues() -> None:
    torch.manual_seed(0)
    model = net()
    optimizer = ngplus.NGAdam(model)
    assert not any(key.startswith("h1") for key in optimizer.health(eigenvalues=True).scalars())
    train(model, optimizer, 1)
    health = optimizer.health(eigenvalues=True)
    found = health.scalars()
    assert found["h1"] == min(b.h1 for b in health.eigenvalues)
    assert found["h2"] == max(b.h2 for b in health.eigenvalues)
    assert found["condition"] == max(b.h2 / b.h1 for b in health.eigenvalues)
    assert found["h1/0.weight"] == next(b.h1 for b in health.eigenvalues if b.name == "0.weight")
    assert "h1" not in optimizer.health().scalars()


@pytest.mark.parametrize("shape", [(5, 7), (3, 400), (200, 4), (170, 170), (700, 3)])
def test_eigenvalues_of_ngadam_are_those_of_the_direction(shape: tuple[int, int]) -> None:
    """By the map from the momentum to the direction, made from products with the roots of plain blocks."""
    torch.manual_seed(0)
    m, n = shape
    param = nn.Parameter(torch.randn(m, n, dtype=torch.float64))
    optimizer = ngplus.NGAdam([("weight", param)])
    for _ in range(4):
        param.grad = torch.randn_like(param)
        optimizer.step()
    state = optimizer.state[param]

    def spectrum(key: str, length: int) -> torch.Tensor:
        dense = torch.block_diag(*state[key])[:length, :length]
        return torch.linalg.eigvalsh(dense)

    left, right = spectrum("left_root", m), spectrum("right_root", n)
    (bounds,) = optimizer.health(eigenvalues=True).eigenvalues
    assert bounds.h1 == pytest.approx(1 / float(left.max() * right.max()), rel=1e-9)
    assert bounds.h2 == pytest.approx(1 / float(left.min() * right.min()), rel=1e-9)
    momentum = torch.randn_like(param)
    dense = [torch.block_diag(*state[key])[:k, :k] for key, k in (("left_root", m), ("right_root", n))]
    direction = dense[0] @ momentum @ dense[1]
    assert direction.norm() <= momentum.norm() / bounds.h1 * (1 + 1e-9)
    assert direction.norm() >= momentum.norm() / bounds.h2 * (1 - 1e-9)
