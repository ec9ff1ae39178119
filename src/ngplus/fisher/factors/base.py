"""The interface of per-sample gradients: G_i, their sum, and the tall matrices that L or R is computed from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ngplus.fisher.sketch import Sketch

Samples = Tensor | slice  # indices of samples
Pair = tuple[Tensor, Tensor]


class LazyFactor(Protocol):
    """A factor computed on demand for some samples, such as the patches of a convolution's input."""

    shape: tuple[int, ...]

    def take(self, samples: Samples) -> Tensor:
        """r of these samples, [groups, samples, positions, n]."""

    def columns(self, cols: slice, samples: slice) -> Tensor:
        """These columns of r: those of whole channels, or a part of one's."""

    def outer(self, samples: Samples, left: Tensor, side: str, ones: bool) -> Tensor:
        """The matrices sum_p l_ip r_ip^T stacked vertically, [groups, samples * m, n]; for the left side each of them
        transposed, [groups, samples * n, m]. With ``ones``, r has an additional column of ones."""

    def outer_memory(self, m: int) -> int:
        """Entries per sample that ``outer`` needs besides its result, for m rows."""

    def gram(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        """r_ip . r_iq, [groups, samples, positions, positions]."""

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it keeps."""

    @property
    def gram_memory(self) -> int:
        """Entries per sample that ``gram`` needs besides its result."""

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` per sample."""


class LazyGradients(Protocol):
    """G_i computed on demand for some samples, as those of a module without a rule."""

    shape: tuple[int, int, int, int]  # [groups, samples, m, n]
    half_precision: bool  # are they computed from float16 or bfloat16?
    entries: int  # temporary entries of ``take`` per sample, besides its result

    def take(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        """G_i of these samples, [groups, samples, m, n]."""

    def total(self, dtype: torch.dtype) -> Tensor:
        """sum_i G_i, [groups, m, n]."""

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it keeps."""


Factor = Tensor | LazyFactor
CHUNK = 2**20  # entries that ``gradient_sum`` computes at a time
NARROW = ("mps",)  # devices without float64


def wide(tensor: Tensor) -> torch.dtype:
    """float64, or float32 on a device without float64."""
    return torch.float32 if tensor.device.type in NARROW else torch.float64


class Selected(Protocol):
    """What can be made for some samples."""

    def take(self, samples: Samples) -> Tensor:
        """[groups, samples, positions, m] of these samples."""


def take(factor: Tensor | Selected, samples: Samples) -> Tensor:
    return factor[:, samples] if isinstance(factor, Tensor) else factor.take(samples)


def tensor_version(tensor: Tensor) -> object:
    """Compares equal for the same tensor as long as it is not changed: its address, version, shape and strides."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()


def block_of(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """sum_i G_i and sum_i |G_i|^2 of [groups, samples, m, n]."""
    return gradients.sum(1), gradients.square().sum()


class Factors:
    """Per-sample gradients G_i (m x n) of one matrix, in factored form.

    "Explicit" means that each G_i itself is computed. The curved dimension d is the size of L or R: m on the left, n on
    the right; D is the other one.
    """

    groups: int
    samples: int
    positions: int
    rows: int
    cols: int

    def gradients(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        """G_i, [groups, samples, m, n]."""
        raise NotImplementedError

    @property
    def half_precision(self) -> bool:
        """Whether a factor is float16 or bfloat16."""
        return any(isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in vars(self).values())

    def gradient_sum(self, dtype: torch.dtype) -> Tensor:
        """sum_i G_i, [groups, m, n]."""
        return self.gradients(slice(None), dtype).sum(1)

    def gradient_block(self, rows: slice, cols: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows and columns of sum_i G_i, and the sum of their squares over all G_i, or an estimate of that.

        ``cols`` does not include the column of ones. This default computes each G_i.
        """
        return block_of(self.gradients(slice(None), dtype)[..., rows, cols])

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it keeps."""
        for x in vars(self).values():
            if isinstance(x, Tensor):
                yield x
            elif hasattr(x, "tensors"):
                yield from x.tensors()

    @property
    def extra_bytes(self) -> int:
        """Bytes of temporaries whatever the number of samples."""
        return 0

    def pair(self, side: str, form: str, samples: Samples, sketch: Sketch | None, dtype: torch.dtype) -> Pair:
        """Y and Z, [groups, k, d], with Y^T Z the sum over these samples. This default computes each G_i."""
        gradients = self.gradients(samples, dtype)
        if side == "left":
            gradients = gradients.mT
        if sketch is not None:
            gradients = sketch(gradients.mT).mT
        tall = gradients.flatten(1, 2)
        return tall, tall

    def low_rank(self, side: str, samples: Samples, dtype: torch.dtype) -> Tensor:
        """U, [groups, d, r], with U U^T the sum over these samples."""
        return self.pair(side, "explicit", samples, None, dtype)[0].mT

    def low_rank_form(self, side: str) -> str:
        """The form that ``low_rank`` computes, whose temporary entries ``memory`` returns."""
        return "explicit"

    def curved_and_other(self, side: str) -> tuple[int, int]:
        """d and D."""
        return (self.rows, self.cols) if side == "left" else (self.cols, self.rows)

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        """Multiplications per sample of each form that applies."""
        d, _ = self.curved_and_other(side)
        return {"explicit": float(d * other * block)}

    def rank(self, side: str) -> int:
        """Number of columns of ``root`` for all samples."""
        return self.samples * self.curved_and_other(side)[1]

    def memory(self, side: str, form: str, other: int) -> int:
        """Temporary entries per sample of ``pair``."""
        return 2 * self.groups * self.rows * self.cols
