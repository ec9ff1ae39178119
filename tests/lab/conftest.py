from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def figure_conditions() -> Iterator[None]:
    """One thread, and the look of all figures."""
    from ngplus.lab.figures import common

    with common.conditions():
        yield
