"""health(): a table to read and to use."""

from __future__ import annotations

import warnings

import pytest

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
