"""The patches of a convolution: inner and outer products without unfolding, against the unfolded input."""

from __future__ import annotations

import itertools

import pytest
import torch

from ngplus.capture.layers.conv import Patches

CHANNELS = 8

CASES = {
    "plain": ((CHANNELS, 7, 6), (3, 3), (1, 1), (1, 1), 1),
    "one dimension": ((CHANNELS, 11), (4,), (1,), (1,), 1),
    "three dimensions": ((CHANNELS, 4, 5, 3), (2, 3, 1), (1, 1, 1), (1, 2, 1), 1),
    "dilated": ((CHANNELS, 9, 8), (3, 2), (1, 1), (2, 3), 1),
    "strided": ((CHANNELS, 9, 8), (3, 3), (2, 1), (1, 1), 1),
    "stride beyond the kernel": ((CHANNELS, 9, 8), (1, 2), (3, 2), (1, 1), 1),
    "groups": ((2 * CHANNELS, 6, 6), (3, 3), (1, 1), (1, 1), 2),
    "few channels": ((2, 6, 7), (3, 3), (1, 1), (1, 1), 1),
    "few channels, strided and dilated, in groups": ((4, 11, 9), (3, 2), (2, 3), (2, 1), 2),
    "few channels, three dimensions": ((1, 4, 5, 3), (2, 3, 2), (1, 2, 1), (1, 1, 2), 1),
    "one by one": ((CHANNELS, 5, 5), (1, 1), (1, 1), (1, 1), 1),
}


def pixels(case: str, rows: int, samples: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(samples * rows, *CASES[case][0], dtype=torch.float64)


def patches(case: str, rows: int = 1, samples: int = 3, flip: bool = False) -> Patches:
    _, kernel, stride, dilation, groups = CASES[case]
    return Patches(pixels(case, rows, samples), kernel, stride, dilation, groups, samples, flip)


@pytest.mark.parametrize("chosen", [slice(None), torch.tensor([2, 0])], ids=["all", "some"])
@pytest.mark.parametrize("flip", [False, True], ids=["", "flipped"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_patches_are_the_pixels_around_each_position(
    case: str, rows: int, flip: bool, chosen: slice | torch.Tensor
) -> None:
    (channels, *size), kernel, stride, dilation, groups = CASES[case]
    x = pixels(case, rows, 3).view(3, rows, groups, channels // groups, *size)[chosen]
    spans = zip(size, kernel, stride, dilation, strict=True)
    starts = [range(0, length - d * (k - 1), s) for length, k, s, d in spans]
    places = list(itertools.product(*(range(k) for k in kernel)))
    found = []
    for start in itertools.product(*starts):
        each = places[::-1] if flip else places
        at = [tuple(b + o * d for b, o, d in zip(start, place, dilation, strict=True)) for place in each]
        found.append(torch.stack([x[(..., *a)] for a in at], -1))  # [samples, rows, groups, in, kernel]
    wanted = torch.stack(found, 2).permute(3, 0, 1, 2, 4, 5).flatten(2, 3).flatten(3)
    assert torch.equal(patches(case, rows, flip=flip).take(chosen), wanted)


@pytest.mark.parametrize("chosen", [slice(None), torch.tensor([2, 0])], ids=["all", "some"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_inner_products(case: str, rows: int, chosen: slice | torch.Tensor) -> None:
    made = patches(case, rows)
    unfolded = made.take(chosen)
    torch.testing.assert_close(made.gram(chosen, torch.float64), unfolded @ unfolded.mT)


def outer_by_hand(unfolded: torch.Tensor, left: torch.Tensor, side: str, ones: bool) -> torch.Tensor:
    """All G_i, or on the left side all G_i^T, one under the other."""
    right = torch.cat((unfolded, torch.ones_like(unfolded[..., :1])), -1) if ones else unfolded
    gradients = torch.einsum("gspm,gspn->gsmn", left, right)
    return torch.cat(list((gradients.mT if side == "left" else gradients).transpose(0, 1)), dim=1)


@pytest.mark.parametrize("ones", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_outer_products(case: str, rows: int, side: str, ones: bool) -> None:
    made = patches(case, rows)
    unfolded = made.take(slice(1, 3))
    left = torch.randn(*unfolded.shape[:3], 5, dtype=torch.float64)
    by_hand = outer_by_hand(unfolded, left, side, ones)
    torch.testing.assert_close(made.outer(slice(1, 3), left, side, ones), by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["", "bfloat16"])
@pytest.mark.parametrize("ones", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("flip", [False, True], ids=["", "flipped"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_outer_products_by_a_convolution_for_each_sample(
    case: str, rows: int, flip: bool, side: str, ones: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, kernel, stride, dilation, groups = CASES[case]
    monkeypatch.setattr("ngplus.capture.layers.conv.MIN_WORK_PER_SAMPLE", 0)
    torch.manual_seed(0)
    made = Patches(torch.randn(3 * rows, *shape).to(dtype), kernel, stride, dilation, groups, 3, flip)
    taken = _calls_of(monkeypatch, made)
    for chosen in (slice(1, 3), torch.tensor([2, 0])):
        unfolded = made.take(chosen)
        left = torch.randn(*unfolded.shape[:3], 5)
        by_hand = outer_by_hand(unfolded.double(), left.double(), side, ones)
        torch.testing.assert_close(made.outer(chosen, left, side, ones), by_hand.float(), atol=1e-5, rtol=1e-5)
    assert len(taken) == (0 if case == "one by one" else 2)


def _calls_of(monkeypatch: pytest.MonkeyPatch, made: Patches) -> list[str]:
    """Fills as ``_outer_by_torch`` is called."""
    calls: list[str] = []
    method = made._outer_by_torch
    monkeypatch.setattr(made, "_outer_by_torch", lambda *args: (calls.append("called"), method(*args))[1])
    return calls


def test_pixels_cost_less_than_patches_where_the_image_is_small() -> None:
    x = torch.zeros(1, 256, 16, 16)
    made = Patches(x, (3, 3), (1, 1), (1, 1), 1, 1)
    assert made.gram_cost < made.shape[2] ** 2 * made.shape[3] / 3
