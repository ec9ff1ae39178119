"""health(): a table to read and to use."""

from __future__ import annotations

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
    assert lines[-1].split() == ["4.weight", "1", "0", "0", "0", "0"]


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
