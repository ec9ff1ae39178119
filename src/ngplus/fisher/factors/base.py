"""What every form of per-sample gradients is asked for: G_i, their sum, and the pair or root that L comes from."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ngplus.fisher.sketch import Sketch


class Lazy(Protocol):
    """A factor that is made only for the samples asked for, such as the patches of a convolution's input."""

    shape: tuple[int, ...]

    def take(self, samples: Tensor | slice) -> Tensor:
        """[groups, samples, positions, n] of these samples."""

    def outer(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        """sum_p l_ip r_ip^T one under the other, [groups, samples * m, n], or for the left side each of them
        transposed, [groups, samples * n, m], by whatever way is best; with ``ones`` r has one more column, of ones."""

    def outer_memory(self, m: int) -> int:
        """Numbers a sample that ``outer`` needs beside its result, for m rows."""

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """r_ip . r_iq, [groups, samples, positions, positions], by whatever way is best."""

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` a sample."""


Factor = Tensor | Lazy


NARROW = ("mps",)  # devices without float64


def wide(tensor: Tensor) -> torch.dtype:
    """The precision of what must not lose digits: float64, where the device has it."""
    return torch.float32 if tensor.device.type in NARROW else torch.float64


def take(factor: Factor, samples: Tensor | slice) -> Tensor:
    return factor[:, samples] if isinstance(factor, Tensor) else factor.take(samples)


def mark(tensor: Tensor) -> object:
    """What tells a tensor from others, and from itself before a change: where it lies, its version and its form."""
    return tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride()


class Factors:
    """Per-sample gradients G_i (m x n) of one matrix, in a form that need not be multiplied out."""

    groups: int
    samples: int
    positions: int
    rows: int
    cols: int

    def gradients(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """G_i multiplied out, [groups, samples, m, n]."""
        raise NotImplementedError

    @property
    def coarse(self) -> bool:
        """Are the numbers of 16 bits?"""
        return any(isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) for x in vars(self).values())

    def total(self, dtype: torch.dtype) -> Tensor:
        """sum_i G_i, [groups, m, n]: the mini-batch gradient as far as these factors know it."""
        return self.gradients(slice(None), dtype).sum(1)

    def pair(
        self, side: str, form: str, samples: Tensor | slice, sketch: Sketch | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Y and Z, [groups, k, d], whose product Y^T Z is the sum over these samples. Here: from the gradients."""
        gradients = self.gradients(samples, dtype)
        if side == "left":
            gradients = gradients.mT
        if sketch is not None:
            gradients = sketch(gradients.mT).mT
        tall = gradients.flatten(1, 2)
        return tall, tall

    def root(self, side: str, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """U, [groups, d, r], with U U^T the sum over these samples."""
        return self.pair(side, "explicit", samples, None, dtype)[0].mT

    def curved_and_other(self, side: str) -> tuple[int, int]:
        """d and D."""
        return (self.rows, self.cols) if side == "left" else (self.cols, self.rows)

    def costs(self, side: str, other: int, block: int) -> dict[str, float]:
        """Multiplications a sample of each form that applies."""
        d, _ = self.curved_and_other(side)
        return {"explicit": float(d * other * block)}

    @property
    def writing_cost(self) -> float:
        """Multiplications a sample that go into G_i itself, where the form is "explicit"."""
        return 0.0

    def rank(self, side: str) -> int:
        """Columns of ``root`` for all samples."""
        return self.samples * self.curved_and_other(side)[1]

    def memory(self, side: str, form: str, other: int) -> int:
        """Numbers that a sample needs while it is worked on."""
        return self.groups * self.rows * self.cols
