"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ngplus.utils import finite


def pytest_configure() -> None:
    """The workers of pytest-xdist share the cores: threads of one that wait for those of another cost more than tests.

    Processes that a test starts take over the same number.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        torch.set_num_threads(threads)


@pytest.fixture
def double() -> Iterator[None]:
    """float64 as the default, and a seed: for comparisons with brute force."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring at the sizes of tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For commands, which leave runs where they are called, and look for data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NGPLUS_DATA", raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["host", "device"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does the host see the flags of numbers that are not finite? On an accelerator it does not wait for them."""
    if request.param == "device":
        monkeypatch.setattr(finite, "SEEN", ())
    return bool(request.param == "host")
