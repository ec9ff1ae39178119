"""The preconditioners of NGAdam. That of a matrix is

    D = sqrt(tr L) (L + lambda I)^(-1/2) M (R + lambda I)^(-1/2)

L and R are moving averages of G G^T and G^T G, with G the mini-batch gradient. If the gradient has
more than 256 columns, each step adds some of them to L; if it has more than 256 rows, some of them to R
(:func:`ngplus.reference.some_columns`). Long sides are split into blocks, each with its own L or R. Blocks of one row
make it diagonal, with all columns in each step. With both sides diagonal, the update is that of Adafactor.

========== ================================================ ===========================
key        what                                             shape
========== ================================================ ===========================
exp_avg    M                                                [groups, m, n]
left       L in blocks                                      [groups * blocks, p, p]
right      R in blocks                                      [groups * blocks, q, q]
left_root  sqrt(tr L) (L + lambda I)^(-1/2)                 as left
right_root (R + lambda I)^(-1/2)                            as right
step       number of gradients in M, L and R                a number
========== ================================================ ===========================

References:
    Gupta, Koren, Singer: Shampoo: Preconditioned Stochastic Tensor Optimization (2018).
    Shazeer, Stern: Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018): factored second moment, update
    clipping.
    Vyas et al.: SOAP: Improving and Stabilizing Shampoo using Adam (2024): Claim 1 relates the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher.blocks import TwoSidedPartition
from ngplus.fisher.inverses import inverse_root
from ngplus.preconditioners.base import Direction, MatrixPreconditioner, MatrixUpdate
from ngplus.reference import some_columns
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import Group, State

DAMPING = 1e-5  # lambda, as a part of the mean eigenvalue; more in the first steps
FLOOR = 1e-30  # of the trace: gradients of this squared norm and below count as zeros
MAX_RMS = 0.3  # of a direction: usually 0.1 to 0.3, but larger where gradients grow between two refreshes

WHOLE = 160  # rows of a side that is one block
BLOCK = 128  # rows of a block of a longer side, at most
SMALLEST_PART = 64  # rows of a block of queries, keys or values; smaller ones lose more than a cut across
KERNEL_BLOCK = 144  # columns of a block of a convolution's inputs, at most: whole channels
DIAGONAL_ABOVE, DIAGONAL_RATIO = 640, 5  # a side above 640 that is at least 5 times the other one has a diagonal L or R


def block_size(length: int, other: int, unit: int = 1) -> int:
    """Rows of a block of a side. Blocks of a convolution's inputs hold whole channels of ``unit`` columns. Queries,
    keys and values that are one matrix have the blocks of three matrices, or others that do not cut across them."""
    if length <= WHOLE:
        return length
    if has_diagonal(length, other):
        return 1
    if length == 3 * other and unit == 1:
        rows = next(rows for rows in (block_size(other, other), *range(WHOLE, 0, -1)) if other % rows == 0)
        if rows >= SMALLEST_PART:
            return rows
    units = length // unit
    blocks = ceil(units / max(1, (BLOCK if unit == 1 else KERNEL_BLOCK) // unit))
    return unit * ceil(units / blocks)


def has_diagonal(length: int, other: int) -> bool:
    """Returns True if L or R of a side is diagonal, as for embedding tables."""
    return length > DIAGONAL_ABOVE and length >= DIAGONAL_RATIO * other


def damping_at(step: int) -> float:
    """lambda, as a part of the mean eigenvalue. L and R of few gradients are of low rank: it is 1 / t^2 at first."""
    return max(DAMPING, 1.0 / (step * step))


def row_blocks(x: Tensor, rows: int) -> Tensor:
    """[groups, m, n] as [groups * blocks, rows, n], with zeros at the end where a block is not full."""
    missing = -x.shape[-2] % rows
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(-2, (-1, rows)).flatten(0, 1)


def products(gradient: Tensor, rows: int) -> Tensor:
    """G G^T in diagonal blocks, [groups * blocks, rows, rows]; zeros where it overflows."""
    blocks = row_blocks(gradient, rows)
    found = blocks.square().sum(-1, keepdim=True) if rows == 1 else blocks @ blocks.mT
    return found.masked_fill_(~found.diagonal(dim1=-2, dim2=-1).sum().isfinite(), 0)


def multiply(root: Tensor, x: Tensor) -> Tensor:
    """A block-diagonal matrix, in blocks [groups * blocks, rows, rows], times x [groups, m, n]."""
    groups, m, _ = x.shape
    if root.shape[-1] == 1:
        return root.view(groups, m, 1) * x
    return (root @ row_blocks(x, root.shape[-1])).unflatten(0, (groups, -1)).flatten(1, 2)[:, :m]


class AveragingPreconditioner(MatrixPreconditioner):
    """A preconditioner of moving averages that begin with zeros and follow the dtype and device of the model."""

    def update(self, update: MatrixUpdate) -> None:
        """Adds a gradient to the averages."""
        state, gradient = self.state, update.gradient
        for key, value in state.items():
            if isinstance(value, Tensor) and (value.dtype, value.device) != (gradient.dtype, gradient.device):
                state[key] = value.to(gradient)
        if not self.fits():
            for key in [key for key in state if key != "refreshed"]:
                del state[key]
            state["step"] = 0
            self.begin(gradient)
        state["step"] += 1
        self.average(gradient)

    def begin(self, gradient: Tensor) -> None:
        """Creates the averages."""
        raise NotImplementedError

    def average(self, gradient: Tensor) -> None:
        """Updates the averages."""
        raise NotImplementedError

    def initialised(self) -> None:
        self.state["step"] = 0

    def _has(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Returns True if the state has tensors of these shapes, its dtype and device, and a step count."""
        state, place = self.state, (self.matrix.dtype, self.matrix.params[0].device)
        return (
            isinstance(state.get("step"), int)
            and state["step"] >= 0
            and all(
                key in state and state[key].shape == shape and (state[key].dtype, state[key].device) == place
                for key, shape in shapes.items()
            )
        )


class RootsPreconditioner(AveragingPreconditioner):
    """D = sqrt(tr L) (L + lambda I)^(-1/2) M (R + lambda I)^(-1/2), with L and R in the blocks of the matrix."""

    def __init__(self, matrix: ParameterMatrix, group: Group, state: State) -> None:
        super().__init__(matrix, group, state)
        partition = matrix.partition_of(group)
        assert isinstance(partition, TwoSidedPartition)
        self.rows, self.cols = partition.size, partition.other_size

    def fits(self) -> bool:
        groups, m, n = self.matrix.groups, self.matrix.layout.rows, self.matrix.layout.cols
        left = (groups * ceil(m / self.rows), self.rows, self.rows)
        right = (groups * ceil(n / self.cols), self.cols, self.cols)
        shapes = {"exp_avg": (groups, m, n), "left": left, "left_root": left, "right": right, "right_root": right}
        return self._has(shapes)

    def begin(self, gradient: Tensor) -> None:
        groups, m, n = gradient.shape
        self.state["exp_avg"] = torch.zeros_like(gradient)
        self.state["left"] = gradient.new_zeros(groups * ceil(m / self.rows), self.rows, self.rows)
        self.state["right"] = gradient.new_zeros(groups * ceil(n / self.cols), self.cols, self.cols)

    def average(self, gradient: Tensor) -> None:
        """M, L and R."""
        state, (beta1, beta2) = self.state, self.group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        for side, x, rows in (("left", gradient, self.rows), ("right", gradient.mT, self.cols)):
            taken = x if rows == 1 else some_columns(x, state["step"])
            state[side].lerp_(products(taken, rows), 1 - beta2)

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        """Computes the roots of L and R."""
        state, (groups, m, n) = self.state, self.state["exp_avg"].shape
        status.may_wait = True  # a failed eigendecomposition raises on the host
        left, right = (state[key] / (1 - self.group["betas"][1] ** state["step"]) for key in ("left", "right"))
        trace = left.diagonal(dim1=-2, dim2=-1).reshape(groups, -1).sum(1).clamp_min(FLOOR)
        damping = damping_at(state["step"])
        state["left_root"] = _root(left, damping / m * trace, status) * _each(trace.sqrt(), left)
        state["right_root"] = _root(right, damping / n * trace, status)

    def precondition(self, update: MatrixUpdate) -> Direction:
        """D, before the learning rate."""
        state, beta1 = self.state, self.group["betas"][0]
        ahead = state["exp_avg"].lerp(update.gradient, 1 - beta1)  # Nesterov's
        direction = multiply(state["left_root"], multiply(state["right_root"], ahead.mT).mT)
        return clip(direction, 1 / (1 - beta1 ** state["step"])), update.rows

    def eigenvalue_bounds(self) -> tuple[float, float] | None:
        """The smallest and largest eigenvalue of the matrix whose inverse takes the momentum to the direction, before
        the bound on its root mean square; None before the first refresh."""
        if not self.fits():
            return None
        groups, m, n = self.state["exp_avg"].shape
        left, right = _spectra(self.state["left_root"], groups, m), _spectra(self.state["right_root"], groups, n)
        largest, smallest = left.amax(1) * right.amax(1), left.amin(1) * right.amin(1)
        return 1 / float(largest.max()), 1 / max(float(smallest.min()), torch.finfo(torch.float64).tiny)


class RowsPreconditioner(AveragingPreconditioner):
    """The direction of the rows [1, r, n] of a sparse gradient: D = G (R + lambda I)^(-1/2), with R the mean over rows.

    There is no momentum and no L, so that the state does not grow with the number of rows of the table.
    """

    def __init__(self, matrix: ParameterMatrix, group: Group, state: State) -> None:
        super().__init__(matrix, group, state)
        self.cols = matrix.partition_of(group).size

    def fits(self) -> bool:
        shape = (ceil(self.matrix.layout.cols / self.cols), self.cols, self.cols)
        return "exp_avg" not in self.state and self._has({"right": shape, "right_root": shape})

    def begin(self, gradient: Tensor) -> None:
        self.state["right"] = gradient.new_zeros(ceil(gradient.shape[-1] / self.cols), self.cols, self.cols)

    def average(self, gradient: Tensor) -> None:
        """R."""
        mean = products(gradient.mT, self.cols) / max(1, gradient.shape[1])
        self.state["right"].lerp_(mean, 1 - self.group["betas"][1])

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        status.may_wait = True
        right = self.state["right"] / (1 - self.group["betas"][1] ** self.state["step"])
        trace = right.diagonal(dim1=-2, dim2=-1).sum()[None].clamp_min(FLOOR)
        damping = damping_at(self.state["step"]) / self.matrix.layout.cols
        self.state["right_root"] = _root(right, damping * trace, status)

    def precondition(self, update: MatrixUpdate) -> Direction:
        direction = multiply(self.state["right_root"], update.gradient.mT).mT
        return clip(direction), update.rows


class AdamPreconditioner(AveragingPreconditioner):
    """Adam's direction with Nesterov's momentum, for vectors."""

    def fits(self) -> bool:
        shape = (self.matrix.groups, self.matrix.layout.rows, self.matrix.layout.cols)
        return self._has({"exp_avg": shape, "exp_avg_sq": shape})

    def begin(self, gradient: Tensor) -> None:
        self.state.update(exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))

    def average(self, gradient: Tensor) -> None:
        """Both moments."""
        beta1, beta2 = self.group["betas"]
        self.state["exp_avg"].lerp_(gradient, 1 - beta1)
        self.state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        """Does nothing: Adam has no roots."""

    def precondition(self, update: MatrixUpdate) -> Direction:
        state, (beta1, beta2) = self.state, self.group["betas"]
        ahead = state["exp_avg"].lerp(update.gradient, 1 - beta1).div_(1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_()
        return ahead.div_(root.add_(self.group["eps"])), update.rows


def clip(direction: Tensor, factor: float = 1.0) -> Tensor:
    """In place: the direction times a factor, with a root mean square of ``MAX_RMS`` at most in each group."""
    rms = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True) * (
        factor / max(1, direction[0].numel()) ** 0.5
    )
    return direction.mul_(factor / (rms / MAX_RMS).clamp_min_(1.0))


def _root(x: Tensor, damping: Tensor, status: RefreshStatus) -> Tensor:
    each = _each(damping.clamp_min(torch.finfo(x.dtype).tiny), x)
    return (x + each).rsqrt() if x.shape[-1] == 1 else inverse_root(x, each, status)


def _spectra(root: Tensor, groups: int, length: int) -> Tensor:
    """The eigenvalues of each group's root, [groups, length], in float64, without the rows that fill up a block."""
    blocks = root.double().unflatten(0, (groups, -1))
    if blocks.shape[2] == 1:
        return blocks.flatten(1)
    filled = blocks.shape[1] * blocks.shape[2] - length
    rest = blocks.shape[2] - filled
    parts = [torch.linalg.eigvalsh(blocks[:, :-1]).flatten(1), torch.linalg.eigvalsh(blocks[:, -1, :rest, :rest])]
    return torch.cat(parts, dim=1).clamp_min(0)


def _each(numbers: Tensor, x: Tensor) -> Tensor:
    """Repeats the number of each group for its blocks, [groups * blocks, 1, 1]."""
    return numbers.repeat_interleave(len(x) // len(numbers)).view(-1, 1, 1)
