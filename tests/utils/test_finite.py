"""The norms by which gradients and steps are judged: the same for tensors of every size, order and type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ngplus.utils import finite
from ngplus.utils.finite import LARGE, norms_of

ROWS = 256
COLS = LARGE // ROWS


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Small, just below ``LARGE``, ``LARGE``, above and transposed, four dimensions, empty, strides of its own."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        make(3),
        make(ROWS, COLS - 1),
        make(ROWS, COLS),
        make(ROWS, 3 * COLS).T,
        make(2, ROWS, COLS, 2),
        make(0, 4),
        make(2 * ROWS, 2 * COLS)[::2, ::2],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_norms_are_those_of_the_numbers(dtype: torch.dtype) -> None:
    given = tensors(dtype)
    expected = torch.stack([t.double().square().sum().sqrt() for t in given])
    torch.testing.assert_close(norms_of(given).double(), expected, rtol=1e-5, atol=0)


def test_large_tensors_alone_go_to_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = finite._length

    def watched(vector: Tensor) -> Tensor:
        sizes.append(len(vector))
        return real(vector)

    monkeypatch.setattr(finite, "_length", watched)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        norms_of(tensors(dtype))
    assert sizes == [LARGE, 4 * LARGE] * 2  # neither the transposed one nor 16 bits


def test_a_mixture_of_types_and_a_sparse_tensor() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.ones(2, LARGE), (9, LARGE))
    given = [*tensors(torch.float32), *tensors(torch.float64), sparse]
    expected = torch.stack([t.to_dense().double().square().sum().sqrt() for t in given])
    torch.testing.assert_close(norms_of(given).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e20], ids=str)
@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
@pytest.mark.parametrize("turned", [False, True])
def test_one_bad_number_among_many_is_found(number: float, place: int, turned: bool) -> None:
    """1e20 is finite, its square is not: such a gradient is skipped as well."""
    bad = torch.ones(ROWS, COLS)
    bad.view(-1)[place] = number
    norms = norms_of([torch.ones(ROWS, COLS), bad.T if turned else bad, torch.ones(3)])
    assert norms.isfinite().tolist() == [True, False, True]


def test_zeros_and_small_numbers() -> None:
    norms = norms_of([torch.zeros(LARGE), torch.full((LARGE,), 1e-15), torch.full((LARGE,), 1e15)])
    torch.testing.assert_close(norms, torch.tensor([0.0, 1e-15, 1e15]) * LARGE**0.5, rtol=1e-5, atol=0)
