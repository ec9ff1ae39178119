"""From directions to parameters: grafted step lengths, weight decay, momentum, and the update itself.

On the way from gradient to step: the end. Directions become steps.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.dtensor import like, local

Group = dict[str, Any]
State = dict[str, Any]


def update_parameters(
    group: Mapping[str, Any], directions: Mapping[nn.Parameter, Tensor], states: MutableMapping[Tensor, State]
) -> None:
    """Momentum and weight decay of torch.optim.SGD on the directions, then W <- W - lr * direction.

    Rows of a sparse gradient come and go: they get no momentum, and weight decay refuses them, as SGD does.
    """
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    elif torch.compiler.is_compiling():  # a number becomes a constant of the graph, and a schedule recompiles it
        lr = torch.zeros(()) + lr
    whole: list[nn.Parameter] = []
    steps: list[Tensor] = []
    for param in group["params"]:
        direction = directions.get(param)
        if direction is None:
            continue
        if direction.is_sparse:
            param.add_(direction, alpha=-float(lr))
        else:
            whole.append(param)
            steps.append(direction)
    if not whole:
        return
    params = [local(param) for param in whole]  # of sharded parameters, the part that is here
    if decay != 0 and group["decoupled_weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * decay)
    elif decay != 0:
        steps = list(torch._foreach_add(steps, params, alpha=decay))
    if group["momentum"] != 0 and group["scaling"] == "inverse":
        steps = _with_momentum(group, whole, steps, states)
    if isinstance(lr, Tensor):
        torch._foreach_add_(params, torch._foreach_mul(steps, -lr.to(params[0].device)))
    else:
        torch._foreach_add_(params, steps, alpha=-lr)


def _with_momentum(
    group: Mapping[str, Any], params: list[nn.Parameter], steps: list[Tensor], states: MutableMapping[Tensor, State]
) -> list[Tensor]:
    momentum = group["momentum"]
    # Adam's step length already counts the past: a plain sum of such steps would be 1 / (1 - momentum) times as long.
    dampening = momentum if group["graft"] == "adam" else 0.0
    old: list[Tensor] = []
    fresh: list[Tensor] = []
    for param, step in zip(params, steps, strict=True):
        state = states[param]
        if "momentum_buffer" not in state or group["step"] == 0:
            state["momentum_buffer"] = like(param, step.clone())
        else:
            old.append(local(state["momentum_buffer"]))
            fresh.append(step)
    if old:
        torch._foreach_mul_(old, momentum)
        torch._foreach_add_(old, fresh, alpha=1 - dampening)
    buffers = [local(states[param]["momentum_buffer"]) for param in params]
    return list(torch._foreach_add(steps, buffers, alpha=momentum)) if group["nesterov"] else buffers


def graft_length(state: State, gradient: Tensor, group: Group, sparse: bool) -> Tensor:
    """The length of the step that the grafted method would make for this matrix."""
    if group["graft"] == "sgd" or sparse:
        return torch.linalg.vector_norm(gradient)
    beta1, beta2 = group["momentum"], group["beta2"]
    if "graft_exp_avg" not in state or state["graft_exp_avg"].shape != gradient.shape or group["step"] == 0:
        state["graft_exp_avg"], state["graft_exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["graft_step"] = 0
    step = state["graft_step"] = int(state["graft_step"]) + 1
    first = state["graft_exp_avg"].lerp_(gradient, 1 - beta1) / (1 - beta1**step)
    second = state["graft_exp_avg_sq"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**step)
    return torch.linalg.vector_norm(first / (second.sqrt() + group["eps"]))


def with_length(direction: Tensor, length: Tensor) -> Tensor:
    """The direction at another length; a zero direction stays zero."""
    norm = torch.linalg.vector_norm(direction)
    return direction * torch.where(norm > 0, length / norm, torch.zeros_like(norm))
