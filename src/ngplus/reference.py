"""NGPlus and NGAdam in plain PyTorch: dense matrices, one sample at a time. Start reading here.

The optimizers compute the same directions without a loop over samples, for every layer type, in blocks and on several
ranks. The tests compare them with these functions.

Symbols, as in the paper: W (m x n) is a weight matrix, with its bias as the last column where it has one; G is the
gradient of the mini-batch loss, G_i that of sample i; lambda is the damping, T the number of steps between refreshes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["gfim", "inverse_root", "is_refresh", "ngadam_direction", "ngplus_direction", "ngplus_step", "some_columns"]

Loss = Callable[[Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------------ NGPlus, the paper


def per_sample_gradients(model: nn.Module, loss_fn: Loss, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of each sample's own loss, by the names of the parameters."""
    gradients = []
    for i in range(len(x)):
        one = copy.deepcopy(model)
        one.zero_grad()
        loss_fn(one(x[i : i + 1]), y[i : i + 1]).backward()
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in one.named_parameters()})
    return gradients


def matrix_names(model: nn.Module) -> list[list[str]]:
    """The names of the parameters that form a matrix: a weight and its bias, or a parameter alone."""
    names = dict(model.named_parameters())
    pairs = [[n, n[:-6] + "bias"] for n in names if n.endswith("weight") and n[:-6] + "bias" in names]
    paired = {n for pair in pairs for n in pair}
    return pairs + [[n] for n in names if n not in paired]


def as_matrix(tensors: Sequence[Tensor]) -> Tensor:
    """[W b], m x n. The dimensions of a kernel after the first are columns; vectors alone are one column each."""
    return torch.cat([t.reshape(len(t) if t.dim() else 1, -1) for t in tensors], dim=1)


def gfim(gradients: Sequence[Tensor], side: str) -> Tensor:
    r"""$L = \frac{1}{S} \sum_i G_i G_i^\top$ (left), or $R = \frac{1}{S} \sum_i G_i^\top G_i$ (right).

    Examples:
        >>> ngplus.reference.gfim([torch.eye(2), 3 * torch.eye(2)], "left")[0]
        tensor([5., 0.])
    """
    products = [g @ g.mT if side == "left" else g.mT @ g for g in gradients]
    return torch.stack(products).mean(0)


def ngplus_direction(gradient: Tensor, curvature: Tensor, side: str, damping: float) -> Tensor:
    r"""$(\lambda I + L)^{-1} G$ (left), or $G (\lambda I + R)^{-1}$ (right).

    Examples:
        >>> ngplus.reference.ngplus_direction(torch.ones(1, 2), torch.eye(2), "right", damping=1.0)
        tensor([[0.5000, 0.5000]])
    """
    damped = curvature + damping * torch.eye(len(curvature), dtype=curvature.dtype)
    return torch.linalg.solve(damped, gradient) if side == "left" else torch.linalg.solve(damped, gradient.mT).mT


def ngplus_step(
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
    lr: float,
    damping: float,
    update_every: int = 1,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Performs step k of Algorithm 1, for a loss that is a mean over samples, and returns the state.

    Pass that as ``state`` to the next step. It has k + 1 as "step", and L or R of each matrix by the name of its first
    parameter.

    Examples:
        >>> model = nn.Linear(3, 2)
        >>> x, y = torch.randn(5, 3), torch.randn(5, 2)
        >>> state = None
        >>> for k in range(3):
        ...     state = ngplus.reference.ngplus_step(
        ...         model, nn.functional.mse_loss, x, y, lr=0.1, damping=0.3, update_every=2, state=state
        ...     )
        >>> state["step"], tuple(state["weight"].shape)
        (3, (2, 2))
    """
    state = {"step": 0} if state is None else dict(state)
    each = per_sample_gradients(model, loss_fn, x, y)
    params = dict(model.named_parameters())
    for names in matrix_names(model):
        gradients = [as_matrix([own[name] for name in names]) for own in each]  # G_i
        gradient = torch.stack(gradients).mean(0)  # G_k
        side = "left" if gradient.shape[0] <= gradient.shape[1] else "right"
        if state["step"] % update_every == 0:  # k mod T == 0; else L_k = L_(k-1)
            state[names[0]] = gfim(gradients, side)
        direction = ngplus_direction(gradient, state[names[0]], side, damping)  # -D_k
        widths = [as_matrix([params[name]]).shape[1] for name in names]
        for name, part in zip(names, direction.split(widths, dim=1), strict=True):
            params[name].data -= lr * part.reshape(params[name].shape)
    state["step"] += 1
    return state


# ------------------------------------------------------------------------------------------------ NGAdam


def inverse_root(x: Tensor, damping: Tensor) -> Tensor:
    r"""$(X + \lambda I)^{-1/2}$ of a symmetric positive semi-definite matrix, or of each of a batch.

    Examples:
        >>> ngplus.reference.inverse_root(3 * torch.eye(2), torch.tensor(1.0))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]])
    """
    values, vectors = torch.linalg.eigh(x)
    return (vectors * (values.clamp_min(0) + damping).rsqrt().unsqueeze(-2)) @ vectors.mT


def is_refresh(step: int, update_every: int) -> bool:
    """Returns True at the steps 1, 2, 3, 4 and 6, and every ``update_every`` steps from the first one on.

    Examples:
        >>> [step for step in range(1, 20) if ngplus.reference.is_refresh(step, 5)]
        [1, 2, 3, 4, 6, 11, 16]
    """
    return step in (1, 2, 3, 4, 6) or (step - 1) % update_every == 0


def column_stride(n: int) -> int:
    r"""$q = \min(8, \lceil n / 256 \rceil)$ of :func:`some_columns`, for $n$ columns."""
    return min(8, -(-n // 256))


def some_columns(x: Tensor, step: int) -> Tensor:
    r"""Returns every $q$-th column of $x$, from column ``step`` mod $q$ on, times $\sqrt q$; if there are at most 256,
    all columns.

    The mean of their products over $q$ steps is $x x^\top$. This is the paper's sketched product, with columns in turn
    and not at random.

    Examples:
        >>> tuple(ngplus.reference.some_columns(torch.ones(2, 1000), step=1).shape)
        (2, 250)
    """
    q = column_stride(x.shape[-1])
    return x if q == 1 else x[..., step % q :: q] * q**0.5


def ngadam_direction(
    gradient: Tensor,
    state: dict[str, Any],
    betas: tuple[float, float] = (0.9, 0.95),
    damping: float = 1e-5,
    update_every: int = 5,
    max_rms: float = 0.3,
) -> Tensor:
    r"""Returns the direction $D$ of a matrix, before the learning rate; ``state`` begins empty.

    $$D = \sqrt{\operatorname{tr} L} (L + \lambda I)^{-1/2} N (R + \lambda I)^{-1/2}$$

    $N$ is Nesterov's momentum. L and R are moving averages of $G G^\top$ and $G^\top G$, of wide matrices from
    :func:`some_columns`. $\lambda$ is the larger one of ``damping`` and $t^{-2}$ in step $t$, times the mean eigenvalue
    of L or R. ``max_rms`` bounds the root mean square of D.

    Examples:
        >>> state = {}
        >>> direction = ngplus.reference.ngadam_direction(torch.randn(4, 3), state)
        >>> tuple(direction.shape), state["step"]
        ((4, 3), 1)
    """
    m, n = gradient.shape
    if not state:
        zeros = {"momentum": (m, n), "left": (m, m), "right": (n, n)}
        state.update({key: gradient.new_zeros(size) for key, size in zeros.items()}, step=0)
    state["step"] += 1
    correction1, correction2 = (1 - beta ** state["step"] for beta in betas)
    state["momentum"].lerp_(gradient, 1 - betas[0])
    columns, rows = some_columns(gradient, state["step"]), some_columns(gradient.mT, state["step"])
    state["left"].lerp_(columns @ columns.mT, 1 - betas[1])
    state["right"].lerp_(rows @ rows.mT, 1 - betas[1])
    if is_refresh(state["step"], update_every):
        left, right = state["left"] / correction2, state["right"] / correction2
        trace = left.trace().clamp_min(1e-30)
        relative = max(damping, state["step"] ** -2)
        state["left_root"] = inverse_root(left, relative * trace / m) * trace.sqrt()
        state["right_root"] = inverse_root(right, relative * trace / n)
    ahead = state["momentum"].lerp(gradient, 1 - betas[0]) / correction1  # Nesterov's momentum
    direction = state["left_root"] @ ahead @ state["right_root"]
    return direction / (direction.square().mean().sqrt() / max_rms).clamp_min(1.0)
