from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers.ranks import Pool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Pool]]:
    """``ranks(2)``: a pool of two ranks, started when it is first asked for, or when the last one has failed."""
    pools: dict[int, Pool] = {}

    def of(world: int) -> Pool:
        if world not in pools or not pools[world].alive:
            pools[world] = Pool(world, tmp_path_factory.mktemp(f"ranks{world}"))
        return pools[world]

    yield of
    for pool in pools.values():
        if pool.alive:
            pool.close()
