"""NGAdam's preconditioner: from L, R and the momentum M of a matrix to its direction

    D = sqrt(tr L) (L + lambda I)^(-1/2) M (R + lambda I)^(-1/2)

L and R are moving averages of G G^T and G^T G, with G the mini-batch gradient. Long sides fall into blocks, each with
an L or R of its own; a side with blocks of one row has a diagonal L or R. With both sides diagonal, the update is that
of Adafactor.

========== ================================================ ===========================
key        what                                             shape
========== ================================================ ===========================
exp_avg    M                                                [groups, m, n]
left       L in blocks                                      [groups * blocks, p, p]
right      R in blocks                                      [groups * blocks, q, q]
left_root  sqrt(tr L) (L + lambda I)^(-1/2)                 as left
right_root (R + lambda I)^(-1/2)                            as right
step       gradients that M, L and R have taken in          a number
========== ================================================ ===========================

References:
    Gupta, Koren, Singer: Shampoo: Preconditioned Stochastic Tensor Optimization (2018).
    Shazeer, Stern: Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (2018): factored second moment, update
    clipping.
    Vyas et al.: SOAP: Improving and Stabilizing Shampoo using Adam (2024): Claim 1 relates the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from ngplus.fisher.inverses import inverse_root
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import State

DAMPING = 1e-5  # lambda, as a part of the mean eigenvalue; more in the first steps
FLOOR = 1e-30  # of the trace: gradients of this squared norm and below count as zeros
MAX_RMS = 0.3  # of a direction: it is usually 0.1 to 0.3, and a burst of gradients meets roots of earlier steps

WHOLE = 160  # rows of a side that is one block
BLOCK = 128  # rows of a block of a longer side, at most
KERNEL_BLOCK = 144  # columns of a block of a convolution's inputs, at most: whole channels
LONG, LONGER = 640, 5  # a side of more rows than that, and of so many times the other one's, has a diagonal L or R


def block_size(length: int, other: int, unit: int = 1) -> int:
    """Rows of a block of a side. Blocks of a convolution's inputs hold whole channels of ``unit`` columns."""
    if length <= WHOLE:
        return length
    if length > LONG and length >= LONGER * other:
        return 1
    units = length // unit
    blocks = ceil(units / max(1, (BLOCK if unit == 1 else KERNEL_BLOCK) // unit))
    return unit * ceil(units / blocks)


def damping_at(step: int) -> float:
    """lambda, as a part of the mean eigenvalue. L and R of few gradients are of low rank: it is 1 / t^2 at first."""
    return max(DAMPING, step**-2)


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


@dataclass(frozen=True)
class RootsPreconditioner:
    """The direction of one matrix [groups, m, n], whose L has blocks of ``rows`` rows, and R of ``cols``."""

    state: State
    betas: tuple[float, float]
    rows: int
    cols: int

    def update(self, gradient: Tensor) -> None:
        """Takes the gradient into M, L and R."""
        state, (beta1, beta2) = self.state, self.betas
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["left"].lerp_(products(gradient, self.rows), 1 - beta2)
        state["right"].lerp_(products(gradient.mT, self.cols), 1 - beta2)

    def refresh(self, status: RefreshStatus) -> None:
        """Makes the roots of L and R anew."""
        state, (groups, m, n) = self.state, self.state["exp_avg"].shape
        left, right = (state[key] / (1 - self.betas[1] ** state["step"]) for key in ("left", "right"))
        trace = left.diagonal(dim1=-2, dim2=-1).reshape(groups, -1).sum(1).clamp_min(FLOOR)
        damping = damping_at(state["step"])
        state["left_root"] = _root(left, damping / m * trace, status) * _each(trace.sqrt(), left)
        state["right_root"] = _root(right, damping / n * trace, status)

    def precondition(self, gradient: Tensor) -> Tensor:
        """D, before the learning rate."""
        state, beta1, (_, m, n) = self.state, self.betas[0], gradient.shape
        ahead = state["exp_avg"].lerp(gradient, 1 - beta1).div_(1 - beta1 ** state["step"])  # Nesterov's momentum
        direction = multiply(state["left_root"], multiply(state["right_root"], ahead.mT).mT)
        return clip(direction, (m * n) ** 0.5)

    def begin(self, gradient: Tensor) -> None:
        """The state before the first step."""
        groups, m, n = gradient.shape
        self.state.update(step=0, exp_avg=torch.zeros_like(gradient))
        self.state["left"] = gradient.new_zeros(groups * ceil(m / self.rows), self.rows, self.rows)
        self.state["right"] = gradient.new_zeros(groups * ceil(n / self.cols), self.cols, self.cols)

    def fits(self, groups: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Is there a state of this shape and precision?"""
        left, right = ((groups * ceil(length / size), size, size) for length, size in ((m, self.rows), (n, self.cols)))
        shapes = {"exp_avg": (groups, m, n), "left": left, "left_root": left, "right": right, "right_root": right}
        return _has(self.state, shapes, dtype, device)


@dataclass(frozen=True)
class RowsPreconditioner:
    """The direction of the rows [1, r, n] of a sparse gradient: D = G (R + lambda I)^(-1/2), with R the mean over rows.

    Rows come and go: they have no momentum and no L, so that nothing of the table's size is kept.
    """

    state: State
    betas: tuple[float, float]
    length: int  # n
    cols: int

    def update(self, gradient: Tensor) -> None:
        state = self.state
        state["step"] += 1
        mean = products(gradient.mT, self.cols) / max(1, gradient.shape[1])
        state["right"].lerp_(mean, 1 - self.betas[1])

    def refresh(self, status: RefreshStatus) -> None:
        right = self.state["right"] / (1 - self.betas[1] ** self.state["step"])
        diagonal = right.diagonal(dim1=-2, dim2=-1)
        trace = diagonal.sum()[None].clamp_min(FLOOR)
        self.state["right_root"] = _root(right, damping_at(self.state["step"]) / self.length * trace, status)

    def precondition(self, gradient: Tensor) -> Tensor:
        direction = multiply(self.state["right_root"], gradient.mT).mT
        return clip(direction, max(1, gradient[0].numel()) ** 0.5)

    def begin(self, gradient: Tensor) -> None:
        self.state.update(step=0)
        self.state["right"] = gradient.new_zeros(ceil(gradient.shape[-1] / self.cols), self.cols, self.cols)

    def fits(self, groups: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
        shape = (ceil(n / self.cols), self.cols, self.cols)
        return "exp_avg" not in self.state and _has(self.state, {"right": shape, "right_root": shape}, dtype, device)


@dataclass(frozen=True)
class AdamPreconditioner:
    """Adam's direction with Nesterov's momentum, for vectors."""

    state: State
    betas: tuple[float, float]
    eps: float

    def update(self, gradient: Tensor) -> None:
        state, (beta1, beta2) = self.state, self.betas
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - beta2)

    def refresh(self, status: RefreshStatus) -> None:
        """Nothing: there is no root to make."""

    def precondition(self, gradient: Tensor) -> Tensor:
        state, (beta1, beta2) = self.state, self.betas
        ahead = state["exp_avg"].lerp(gradient, 1 - beta1).div_(1 - beta1 ** state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_()
        return ahead.div_(root.add_(self.eps))

    def begin(self, gradient: Tensor) -> None:
        self.state.update(step=0, exp_avg=torch.zeros_like(gradient), exp_avg_sq=torch.zeros_like(gradient))

    def fits(self, groups: int, m: int, n: int, dtype: torch.dtype, device: torch.device) -> bool:
        return _has(self.state, {"exp_avg": (groups, m, n), "exp_avg_sq": (groups, m, n)}, dtype, device)


def clip(direction: Tensor, root_of_count: float) -> Tensor:
    """In place: a root mean square of ``MAX_RMS`` at most, of each group."""
    rms = torch.linalg.vector_norm(direction, dim=(-2, -1), keepdim=True) / root_of_count
    return direction.div_((rms / MAX_RMS).clamp_min_(1.0))


def _has(state: State, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> bool:
    """Are these tensors there, and the number of steps?"""
    step = state.get("step")
    return (
        isinstance(step, int)
        and step >= 0
        and all(
            key in state and state[key].shape == shape and (state[key].dtype, state[key].device) == (dtype, device)
            for key, shape in shapes.items()
        )
    )


def _root(x: Tensor, damping: Tensor, status: RefreshStatus) -> Tensor:
    each = _each(damping.clamp_min(torch.finfo(x.dtype).tiny), x)
    return (x + each).rsqrt() if x.shape[-1] == 1 else inverse_root(x, each, status)


def _each(numbers: Tensor, x: Tensor) -> Tensor:
    """A number for each group as one for each of its blocks, [groups * blocks, 1, 1]."""
    return numbers.repeat_interleave(len(x) // len(numbers)).view(-1, 1, 1)
