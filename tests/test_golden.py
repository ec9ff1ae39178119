"""The golden values of golden.py hold."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import golden
from distributed.conftest import ranks  # noqa: F401
from helpers.ranks import Pool

STORED = json.loads(golden.FILE.read_text())


def test_every_configuration_is_stored() -> None:
    assert list(STORED) == list(golden.CONFIGS)


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_parameters_after_training(name: str, ranks: Callable[[int], Pool], one_thread: None) -> None:  # noqa: F811
    found, within = golden.run(name, ranks), golden.tolerance(golden.CONFIGS[name])
    assert {key: found[key] for key in ("squares", "weighted")} == pytest.approx(
        {key: STORED[name][key] for key in ("squares", "weighted")}, rel=within
    )
