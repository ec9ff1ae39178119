"""Step-length grafting: the direction of one method at the length of another one's step.

References:
    Agarwal, Anil, Hazan, Koren, Zhang: Disentangling Adaptive Gradient Methods from Learning Rates (2020).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngplus.utils.typing import Group, State

# Of the step whose length graft="adam" takes.
GRAFT_BETA2, GRAFT_EPS = 0.95, 1e-8


def graft_length(state: State, gradient: Tensor, group: Group, sparse: bool) -> Tensor:
    """The length of the step that the grafted method would make for this matrix; with SGD at most ``longest`` of the
    last refresh."""
    if group["graft"] == "sgd" or sparse:
        length = torch.linalg.vector_norm(gradient)
        longest = state.get("longest") if group["graft"] == "sgd" else None
        return length if longest is None else torch.minimum(length, longest.to(length))
    beta1, beta2 = group["momentum"], GRAFT_BETA2
    if "graft_exp_avg" not in state or state["graft_exp_avg"].shape != gradient.shape or group["step"] == 0:
        state["graft_exp_avg"], state["graft_exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["graft_step"] = 0
    if state["graft_exp_avg"].dtype != gradient.dtype:  # the model was cast
        for key in ("graft_exp_avg", "graft_exp_avg_sq"):
            state[key] = state[key].to(gradient.dtype)
    step = state["graft_step"] = int(state["graft_step"]) + 1
    first = state["graft_exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
    second = state["graft_exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**step)
    return torch.linalg.vector_norm(first / (second.sqrt() + GRAFT_EPS))


def with_length(direction: Tensor, length: Tensor) -> Tensor:
    """The direction at another length; a zero direction stays zero."""
    norm = torch.linalg.vector_norm(direction)
    return direction * torch.where(norm > 0, length / norm, torch.zeros_like(norm))
