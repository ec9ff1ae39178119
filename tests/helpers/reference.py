"""Plain references: per-sample gradients by a loop over samples, and dense formulas of NG+ and NGAdam.

It shares no code with the package. A parameter matrix is described by the names of its parameters and a function that
lays their gradients out as [groups, m, n].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Lay = Callable[[Sequence[Tensor]], Tensor]


def rows(*tensors: Tensor) -> Tensor:
    """[W b]: the first tensor's dimension 0 is m, vectors are columns."""
    m = tensors[0].shape[0]
    return torch.cat([t.reshape(m, -1) for t in tensors], dim=1)[None]


def grouped(groups: int) -> Callable[..., Tensor]:
    def lay(*tensors: Tensor) -> Tensor:
        return torch.cat([rows(*(t.chunk(groups)[g] for t in tensors)) for g in range(groups)])

    return lay


def transposed(groups: int) -> Callable[..., Tensor]:
    """A transposed weight (in, out/groups, ...): rows are outputs, columns are (input, kernel)."""

    def lay(weight: Tensor, *bias: Tensor) -> Tensor:
        out = []
        for g, part in enumerate(weight.chunk(groups)):
            matrix = part.transpose(0, 1).reshape(part.shape[1], -1)
            out.append(rows(matrix, *(b.chunk(groups)[g] for b in bias)))
        return torch.cat(out)

    return lay


def columns(*tensors: Tensor) -> Tensor:
    """Every tensor is one column: scale and shift, or a lone vector."""
    return torch.stack([t.flatten() for t in tensors], dim=1)[None]


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], samples: Sequence[tuple[Any, Any]]
) -> list[dict[str, Tensor]]:
    """The gradient of each sample's own loss, for every parameter by name; a copy of the model per sample."""
    out = []
    for x, y in samples:
        one = copy.deepcopy(model)
        one.zero_grad()
        loss_fn(one(*x) if isinstance(x, tuple) else one(x), y).backward()
        grads = {}
        for name, p in one.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            grads[name] = grad.to_dense() if grad.is_sparse else grad
        out.append(grads)
    return out


def gfim(stack: Tensor, side: str) -> Tensor:
    """L or R of per-sample gradients [samples, groups, m, n], as [groups, d, d]."""
    pattern = "sgij,sgkj->gik" if side == "left" else "sgji,sgjk->gik"
    return torch.einsum(pattern, stack, stack) / len(stack)


def side_of(matrix: Tensor) -> str:
    return "left" if matrix.shape[-2] <= matrix.shape[-1] else "right"


def direction(gradient: Tensor, curvature: Tensor, side: str, damping: float) -> Tensor:
    """(lambda I + L)^-1 G or G (lambda I + R)^-1 for [groups, m, n]."""
    inverse = torch.linalg.inv(curvature + damping * torch.eye(curvature.shape[-1]).to(curvature))
    return inverse @ gradient if side == "left" else gradient @ inverse


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def woodbury(stack: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(lambda I + 1/S sum_i vec(G_i) vec(G_i)^T)^-1 vec(G), by a dense solve. ``stack`` is [samples, ...]."""
    flat = stack.flatten(1)
    fisher = flat.T @ flat / len(flat) + damping * torch.eye(flat.shape[1]).to(flat)
    return torch.linalg.solve(fisher, gradient.flatten()).view_as(gradient)


# ------------------------------------------------------------------------------------------------ NGAdam

BETA1, BETA2, DAMPING, MAX_RMS = 0.9, 0.95, 1e-5, 0.3


def average(terms: list[Tensor], beta: float) -> Tensor:
    """The moving average without its bias, written out."""
    weights = [(1 - beta) * beta ** (len(terms) - 1 - k) for k in range(len(terms))]
    return sum(w * x for w, x in zip(weights, terms, strict=True)) / (1 - beta ** len(terms))  # type: ignore[return-value]


def inverse_root(x: Tensor, damping: float) -> Tensor:
    """By a singular value decomposition of the damped matrix."""
    d = x.shape[-1]
    u, values, v = torch.linalg.svd(x + damping * x.trace() / d * torch.eye(d))
    return u @ torch.diag(values**-0.5) @ v


def dense_direction(gradients: list[Tensor], mask: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """The direction after all gradients; ``mask`` cuts L and R."""
    left, right = mask(average([g @ g.mT for g in gradients], BETA2), average([g.mT @ g for g in gradients], BETA2))
    momentum = average(gradients, BETA1) * (1 - BETA1 ** len(gradients))
    ahead = (BETA1 * momentum + (1 - BETA1) * gradients[-1]) / (1 - BETA1 ** len(gradients))
    damping = max(DAMPING, len(gradients) ** -2)
    direction = left.trace().sqrt() * inverse_root(left, damping) @ ahead @ inverse_root(right, damping)
    return direction / max(1.0, direction.square().mean().sqrt().item() / MAX_RMS)


def random_gradients(m: int, n: int, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    scale = torch.rand(n) * 3
    return [torch.randn(m, n) * scale for _ in range(steps)]
