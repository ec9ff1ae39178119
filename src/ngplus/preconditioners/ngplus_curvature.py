"""The curvature of one matrix for NGPlus: estimated, averaged, inverted, applied.

The functions read the options of a parameter group and keep their results in the matrix's ``state``, a dict of tensors:

============================ ==================================================== =========================
key                          what                                                 kept by
============================ ==================================================== =========================
curvature                    the moving average of L or R                         "momentum", "batch"
curvature_side               0 for L, 1 for R: a square matrix may change sides   "momentum", "batch"
inverse                      (lambda I + L)^-1                                    solver "dense"
factor, core                 U and the r x r (or r x q) matrix beside it          "woodbury", "sketched"
sketch_seed                  of the sketch in the core                            "sketched"
damping                      lambda of the last refresh                           all
longest                      the longest step, from trace(L)                      graft "sgd"
graft_exp_avg, ..._sq, _step Adam's moments of the plain gradient                 graft "adam"
refreshed                    what the last refresh was made for, as a number      all
============================ ==================================================== =========================

A tensor is a stack [groups * blocks, p, ...]; where the last block is smaller, it lies beside it under ``..._tail``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngplus.capture.accumulator import Accumulator, keeps_low_rank
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher import inverses
from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import wide
from ngplus.fisher.sketch import Sketch, SketchSpec
from ngplus.utils.finite import RefreshStatus, all_finite
from ngplus.utils.typing import Group, State

StateEntries = dict[str, Any]  # new entries of a state; the stacks of a matrix are a list

TAILS = ("", "_tail")
DAMPING_FLOOR = 1e-30  # of relative damping alone, for a zero matrix


class Curvature(NamedTuple):
    """A matrix's side, "left" or "right", and its dense L or R: [d, d], or [groups, d, d] for a grouped convolution.

    For NGAdam, it is the smaller side.

    Examples:
        >>> side, matrix = Curvature("left", torch.eye(2))
        >>> side, tuple(matrix.shape)
        ('left', (2, 2))
    """

    side: str
    matrix: Tensor


@dataclass
class CurvatureEstimate:
    """L (or R) of one refresh, divided by its number of samples: as it is, or as U with L = U U^T. The gradient is at
    most ``gradients`` sqrt(trace(L)) long: see :func:`longest_step`."""

    matrices: list[Tensor] | None
    low_rank: list[Tensor] | None = None
    gradients: float = 1.0

    def dense(self) -> list[Tensor]:
        if self.matrices is not None:
            return self.matrices
        assert self.low_rank is not None
        return [u @ u.mT for u in self.low_rank]

    def finite(self) -> Tensor:
        """One flag: L is finite, which U alone does not say."""
        return all_finite(self.matrices or [u.square() for u in self.low_rank or []])

    def zero_where(self, bad: Tensor) -> CurvatureEstimate:
        """The same form; zeros where the flag is set."""

        def chosen(stacks: list[Tensor] | None) -> list[Tensor] | None:
            return None if stacks is None else [stack.masked_fill(bad, 0) for stack in stacks]

        return CurvatureEstimate(chosen(self.matrices), chosen(self.low_rank), self.gradients)

    def diagonals(self) -> list[Tensor]:
        """Of L."""
        if self.matrices is not None:
            return [m.diagonal(dim1=-2, dim2=-1) for m in self.matrices]
        return [u.square().sum(-1) for u in self.low_rank or []]


def per_sample(
    gathered: Accumulator, group: Group, partition: BlockPartition, grad_scale: Tensor | float = 1.0
) -> CurvatureEstimate:
    """L = 1/|S_k| sum over S_k of G_i G_i^T, from the sums over captured gradients c_i.

    Where the loss is a mean over the batch of N samples, .grad = 1/N sum_i G_i, so G_i = N c_i; on W ranks whose
    gradients are averaged, G_i = N/W c_i. Where it is a sum, .grad = sum_i G_i and G_i = c_i; on W ranks each takes W
    times its own, so that the average is the sum, and G_i = c_i / W. ``grad_scale`` is the loss scale of mixed
    precision.
    """
    scale = (gathered.samples if group["loss_reduction"] == "mean" else 1) / gathered.ranks / grad_scale
    weight = scale * scale / gathered.used
    gradients = 1.0 if group["loss_reduction"] == "mean" else float(gathered.samples)
    if gathered.low_rank and gathered.product_sum is None:
        factors = [torch.cat(stack, dim=-1) * weight**0.5 for stack in zip(*gathered.low_rank, strict=True)]  # U
        if keeps_low_rank(group, factors[0].shape[-1], partition.size):
            return CurvatureEstimate(None, factors, gradients)
        return CurvatureEstimate([u @ u.mT for u in factors], None, gradients)
    total = gathered.products()
    assert total is not None
    return CurvatureEstimate([stack * weight for stack in total], None, gradients)


def mini_batch(matrix: ParameterMatrix, gradient: Tensor, group: Group, seed: int) -> CurvatureEstimate:
    """G_B G_B^T or G_B^T G_B of the mini-batch gradient [groups, m, n] (or its rows, where it is sparse)."""
    side = matrix.side(group["side"])
    spec = SketchSpec.parse(group["sketch"])
    curved = gradient if side == "left" else gradient.mT
    if group["solver"] == "sketched":
        spec = None
    if spec is not None and spec.size < curved.shape[-1]:
        curved = Sketch(spec, curved.shape[-1], seed)(curved)
    partition = matrix.partition_of(group)
    stacks = partition.split(curved)
    if group["solver"] in ("woodbury", "sketched"):
        return CurvatureEstimate(
            None, [stack.clone() for stack in stacks]
        )  # .grad may change in place before the next refresh
    return CurvatureEstimate([stack @ stack.mT for stack in stacks])


def average(state: State, estimate: CurvatureEstimate, side: str, group: Group) -> CurvatureEstimate:
    """Lbar_k = beta Lbar_(k-1) + (1 - beta) L_k, with Lbar_0 = L_0."""
    matrices = estimate.dense()
    old = _last_average(state, matrices, side, group)
    if old is not None:
        matrices = list(torch._foreach_lerp(old, matrices, 1.0 - group["beta"]))
    write(state, "curvature", matrices)
    return CurvatureEstimate(matrices, None, estimate.gradients)


def _last_average(state: State, matrices: list[Tensor], side: str, group: Group) -> list[Tensor] | None:
    """The moving average in the state, in the dtype of ``matrices``; None where it is of another side or size, or none.
    The state is for this side from now on."""
    number = ("left", "right").index(side)
    same = state.get("curvature_side", number) == number
    state["curvature_side"] = number
    old = read(state, "curvature")
    if group["step"] == 0 or not same or old is None or [o.shape for o in old] != [m.shape for m in matrices]:
        return None
    return [o.to(m) for o, m in zip(old, matrices, strict=True)]


def accumulated(state: State, group: Group) -> CurvatureEstimate:
    """Ltilde_k, which is gamma G_B G_B^T at least."""
    stacks = read(state, "curvature")
    assert stacks is not None
    return CurvatureEstimate(stacks, None, group["gamma"] ** -0.5 if group["gamma"] > 0 else math.inf)


def accumulate_batches(state: State, estimate: CurvatureEstimate, side: str, group: Group) -> None:
    """Ltilde_k = beta Ltilde_(k-1) + gamma G_B G_B^T in every step, the first included, started from lambda_0 I."""
    matrices = estimate.dense()
    beta, gamma = group["beta"], group["gamma"]
    old = _last_average(state, matrices, side, group)
    if old is None:
        start = damping_of(group, [gamma * m.diagonal(dim1=-2, dim2=-1) for m in matrices])
        old = [inverses.damped(torch.zeros_like(m), start) for m in matrices]
    # A product that has overflowed is left out. The device decides, since this happens in every step.
    new = [torch.where(m.isfinite().all(), beta * o + gamma * m, o) for o, m in zip(old, matrices, strict=True)]
    write(state, "curvature", new)


def damping_of(group: Group, diagonals: Sequence[Tensor]) -> Tensor:
    """lambda = damping + relative_damping * trace(L)/d, the mean eigenvalue of the whole layer, from L's diagonals."""
    damping = diagonals[0].new_zeros(()) + group["damping"]  # no constant: a compiled step follows a schedule
    if group["relative_damping"] == 0:
        return damping
    mean = torch.cat([diagonal.flatten() for diagonal in diagonals]).mean()
    return (damping + group["relative_damping"] * mean).clamp_min(DAMPING_FLOOR)


def invert(estimate: CurvatureEstimate, group: Group, seed: int, status: RefreshStatus | None = None) -> StateEntries:
    """The dense inverse of lambda I + L, or U and the core of Woodbury's identity."""
    damping = damping_of(group, estimate.diagonals())
    scalars = {"damping": damping}
    if group["graft"] == "sgd":
        scalars["longest"] = longest_step(estimate)
    if estimate.low_rank is None:
        return {**scalars, "inverse": [inverses.dense_inverse(m, damping, status) for m in estimate.dense()]}
    if group["solver"] == "sketched":
        cores = [
            inverses.sketched_core(root, damping, _sketch(group, root, seed), status) for root in estimate.low_rank
        ]
        return {**scalars, "factor": estimate.low_rank, "core": cores, "sketch_seed": seed}
    cores = [inverses.woodbury_core(u, damping, status) for u in estimate.low_rank]
    return {**scalars, "factor": estimate.low_rank, "core": cores}


def longest_step(estimate: CurvatureEstimate) -> Tensor:
    """A bound on the length of the gradient G, the mean of the G_i: |G|^2 <= mean |G_i|^2 = trace(L) (Jensen). The
    gradients of later steps are held to it, so that one outlier does not ruin the run. L = 0 bounds nothing."""
    trace = torch.cat([diagonal.flatten() for diagonal in estimate.diagonals()]).sum()
    most = torch.finfo(trace.dtype).max
    return torch.where(trace > 0, estimate.gradients * trace.sqrt(), most).clamp(max=most)


def install(state: State, new: StateEntries) -> None:
    """Replaces the inverse in the state. Its tensors are contiguous, as those of a checkpoint are: products round
    differently with other strides, and a resumed run would differ from one that was not interrupted."""
    clear(state, "inverse", "factor", "core", "longest")
    for key, value in new.items():
        if isinstance(value, list):
            write(state, key, [x.contiguous() for x in value])
        else:
            state[key] = value


def _sketch(group: Group, root: Tensor, seed: int) -> Sketch:
    """Omega of the least-squares problem, for a block of p rows; by default twice as many rows as unknowns."""
    p, r = root.shape[-2:]
    spec = SketchSpec.parse(group["sketch"]) or SketchSpec(min(p, 2 * r), "uniform", replacement=False)
    if spec.kind == "uniform" and not spec.replacement:
        spec = SketchSpec(min(spec.size, p), spec.kind, False)
    return Sketch(spec, p, seed)


def apply(state: State, stacks: list[Tensor], group: Group) -> list[Tensor]:
    """(lambda I + L)^-1 G for the stacks [blocks, p, D] of a gradient."""
    inverse = read(state, "inverse")
    if inverse is not None:
        return [inverses.times(i, g) for i, g in zip(inverse, stacks, strict=True)]
    factors, cores = read(state, "factor"), read(state, "core")
    assert factors is not None
    assert cores is not None
    damping = state["damping"]
    if group["solver"] != "sketched":
        return [inverses.woodbury_apply(u, c, damping, g) for u, c, g in zip(factors, cores, stacks, strict=True)]
    seed = int(state["sketch_seed"])
    return [
        inverses.sketched_apply(u, c, damping, g, _sketch(group, u, seed))
        for u, c, g in zip(factors, cores, stacks, strict=True)
    ]


def dense_curvature(state: State, matrix: ParameterMatrix, group: Group, held: CurvatureEstimate | None) -> Tensor:
    """L or R, [groups, d, d]: as it was estimated, or recovered from the inverse."""
    partition = matrix.partition_of(group)
    whole = [read(state, "curvature"), None if held is None else held.dense()]
    factor, inverse = read(state, "factor"), read(state, "inverse")
    for stacks in (*whole, factor, inverse):
        if stacks is not None and [x.shape[:2] for x in stacks] != partition.shapes:
            raise RuntimeError(
                f"The curvature of {matrix.name!r} has other blocks than the options ask for: the next step computes "
                "it again"
            )
    for stacks in whole:
        if stacks is not None:
            return partition.dense(stacks)
    if factor is not None:
        return partition.dense([u @ u.mT for u in factor])
    if inverse is None:
        raise RuntimeError(f"{matrix.name!r} has no curvature before the first step")
    # float64, since rounding is multiplied by the condition number.
    dtype = wide(inverse[0])
    damping = state["damping"].to(dtype)
    return partition.dense([inverses.damped(torch.linalg.inv(i.to(dtype)), -damping).to(i.dtype) for i in inverse])


def eigenvalue_bounds(state: State) -> tuple[float, float] | None:
    """The smallest and largest eigenvalue of the lambda I + L that is in use; None before the first refresh."""
    inverse, factor = read(state, "inverse"), read(state, "factor")
    if inverse is not None:
        values = torch.cat([torch.linalg.eigvalsh(i.double()).flatten() for i in inverse]).clamp_min(0)
        return 1 / float(values.max()), 1 / max(float(values.min()), torch.finfo(torch.float64).tiny)
    if factor is None:
        return None
    damping = float(state["damping"])
    squares = [torch.linalg.svdvals(u.double()).square() for u in factor]
    whole = all(u.shape[-1] >= u.shape[-2] for u in factor)  # else L has the eigenvalue 0
    least = min(float(s.min()) for s in squares) if whole else 0.0
    return damping + least, damping + max(float(s.max()) for s in squares)


def add_placeholders(state: State, group: Group) -> None:
    """Adds empty entries for every solver that "auto" may choose: a flat distributed checkpoint needs all keys."""
    if group["solver"] == "auto" and group["curvature"] == "sample":
        tails = ("", "_tail") if "inverse_tail" in state or "factor_tail" in state else ("",)
        for key in (key + tail for key in ("inverse", "factor", "core") for tail in tails):
            state.setdefault(key, state["damping"].new_empty(0))


def read(state: State, key: str) -> list[Tensor] | None:
    """The stacks under a key; None where there are none, or a placeholder."""
    if key not in state or state[key].numel() == 0:
        return None
    return [state[name] for tail in TAILS if (name := key + tail) in state] if key + "_tail" in state else [state[key]]


def write(state: State, key: str, stacks: Sequence[Tensor]) -> None:
    for i, tail in enumerate(TAILS):
        if i < len(stacks):
            state[key + tail] = stacks[i]
        else:
            state.pop(key + tail, None)


def clear(state: State, *keys: str) -> None:
    for key in keys:
        write(state, key, ())
