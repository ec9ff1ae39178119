"""From a curvature matrix to something that can be applied to a gradient.

Every function works on stacks of matrices: L is [blocks, d, d], U is [blocks, d, r], G is [blocks, d, D]. A right-hand
problem G (lambda I + R)^-1 is handed in transposed, so one set of functions serves both sides, the groups of a
convolution and the blocks of the block-diagonal form.

Tensors only: nothing here knows layers or optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngplus.fisher.factors import wide
from ngplus.fisher.sketch import Sketch
from ngplus.utils.finite import RefreshStatus, read_if_on_host

# Damping grows by this factor, this often, before a matrix that will not factorise is handed to float64.
GROWTH, RETRIES = 10.0, 4


def damped(matrix: Tensor, damping: Tensor) -> Tensor:
    """lambda I + L."""
    out = matrix.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(damping)
    return out


def dense_inverse(matrix: Tensor, damping: Tensor, status: RefreshStatus | None = None) -> Tensor:
    """(lambda I + L)^-1 by Cholesky, d^3 FLOPs a block.

    If Cholesky fails, the damping is multiplied by 10, up to four times; then float64 is tried; then I / damping is
    returned, the plain gradient step. On an accelerator, the host retries only if ``status.may_wait`` is set; otherwise
    a failure gives I / damping and is noted in ``status``. L must be finite.
    """
    status = status or RefreshStatus(may_wait=True)
    if matrix.shape[-1] == 1:
        return (matrix + damping).clamp_min(torch.finfo(matrix.dtype).tiny).reciprocal()
    inverse, failed = _cholesky_inverse(damped(matrix, damping))
    seen = status.read_flag(failed.any())
    if seen is False:
        return inverse
    status.add("retried", failed.any())
    level = torch.maximum(damping.expand(len(matrix), 1), _floor(matrix))
    if seen:
        inverse, failed, level = _retry_with_more_damping(matrix, level, inverse, failed, status)
    plain = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device) / level[:, :, None]
    return torch.where(failed[:, None, None], plain, inverse)


def _retry_with_more_damping(
    matrix: Tensor, level: Tensor, inverse: Tensor, failed: Tensor, status: RefreshStatus
) -> tuple[Tensor, Tensor, Tensor]:
    """Retries the blocks that failed: with more damping, then in float64. Returns the last damping and what failed."""
    for attempt in range(RETRIES + 1):
        last = attempt == RETRIES
        level = level if last else level * GROWTH
        retry, still = _cholesky_inverse(damped(matrix.to(wide(matrix)) if last else matrix, level))
        inverse = torch.where((failed & ~still)[:, None, None], retry.to(inverse), inverse)
        failed = failed & still
        if not status.read_flag(failed.any()):
            return inverse, failed, level
    status.add("plain", failed.any())
    return inverse, failed, level


def _floor(matrix: Tensor) -> Tensor:
    """A tenth of the first damping that leaves an inverse some accuracy, for each block: sqrt(eps) of its largest entry
    on the diagonal."""
    largest = matrix.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
    kind = torch.finfo(matrix.dtype)
    return (largest * kind.eps**0.5 / GROWTH).clamp_min(kind.tiny)


def _cholesky_inverse(matrix: Tensor) -> tuple[Tensor, Tensor]:
    factor, info = torch.linalg.cholesky_ex(matrix)
    failed = info != 0
    # A failed factor may hold zeros on its diagonal: invert the identity in its place.
    safe = torch.where(failed[:, None, None], torch.eye(matrix.shape[-1]).to(matrix), factor)
    inverse = torch.cholesky_inverse(safe)
    # Every entry of X^T X that is not finite leaves its trace on the diagonal.
    return inverse, failed | ~inverse.diagonal(dim1=-2, dim2=-1).isfinite().all(-1)


def woodbury_core(factor: Tensor, damping: Tensor, status: RefreshStatus | None = None) -> Tensor:
    """(lambda I + U^T U)^-1, r x r: what Woodbury's identity needs beside U."""
    return dense_inverse(factor.mT @ factor, damping, status)


def woodbury_apply(factor: Tensor, core: Tensor, damping: Tensor, gradient: Tensor) -> Tensor:
    """(lambda I + U U^T)^-1 G = (G - U (lambda I + U^T U)^-1 U^T G) / lambda, 4 d r D FLOPs."""
    return (gradient - factor @ (core @ (factor.mT @ gradient))) / damping


def sketched_core(factor: Tensor, damping: Tensor, sketch: Sketch, status: RefreshStatus | None = None) -> Tensor:
    """The solution operator of the sketched least-squares problem, r x q.

    Z = argmin ||Omega U Z - Omega G||^2 + lambda ||Z||^2 = C (Omega G) with
    C = (lambda I + (Omega U)^T (Omega U))^-1 (Omega U)^T.
    """
    short = sketch(factor.mT)  # (Omega U)^T
    return dense_inverse(short @ short.mT, damping, status) @ short


def sketched_apply(factor: Tensor, core: Tensor, damping: Tensor, gradient: Tensor, sketch: Sketch) -> Tensor:
    """(G - U Z) / lambda with Z of the sketched least-squares problem; exact for an orthogonal Omega."""
    return (gradient - factor @ (core @ sketch(gradient.mT).mT)) / damping


def inverse_root(matrix: Tensor, damping: Tensor, status: RefreshStatus | None = None) -> Tensor:
    """(L + lambda I)^(-1/2) of a stack [blocks, p, p], with ``damping`` [blocks, 1, 1].

    Where float32 does not converge, float64 is tried; then the root is that of the diagonal.
    """
    attempts = dict.fromkeys((matrix.dtype, wide(matrix)))
    for i, dtype in enumerate(attempts, 1):
        try:
            values, vectors = torch.linalg.eigh(matrix.to(dtype))
            converged = read_if_on_host(values.isfinite().all()) is not False  # MKL may return NaN and no error
        except RuntimeError:  # LinAlgError
            converged = False
        if converged:
            scaled = vectors * (values.clamp_min(0).unsqueeze(-2) + damping).rsqrt()
            return (scaled @ vectors.mT).to(matrix.dtype)
        if status is not None:
            status.add("retried" if i < len(attempts) else "plain", torch.ones((), dtype=torch.bool))
    return torch.diag_embed((matrix.diagonal(dim1=-2, dim2=-1).clamp_min(0) + damping[..., 0]).rsqrt())


def times(matrix: Tensor, gradient: Tensor) -> Tensor:
    """M G, [blocks, p, D], with the memory layout of G, so that a later sum with G reads both in the same order. For a
    transposed view, as on the right side, it is a transposed view."""
    if is_transposed(gradient):
        return torch.bmm(gradient.mT, matrix.mT).mT
    return torch.bmm(matrix, gradient)


def is_transposed(x: Tensor) -> bool:
    """Returns True if the entries of a column, not of a row, are adjacent in memory."""
    return x.stride(-2) == 1 and x.stride(-1) != 1
