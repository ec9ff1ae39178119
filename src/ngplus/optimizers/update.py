"""From directions to parameters: weight decay, momentum, and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from ngplus.utils.dtensor import like, local
from ngplus.utils.finite import LONGEST_STEP, norms_of, read_if_on_host, zero_where
from ngplus.utils.typing import Group, State

# From the options of a group, its parameters, their directions and their states to their steps.
UpdateRule = Callable[[Group, list[nn.Parameter], list[Tensor], MutableMapping[Tensor, State]], list[Tensor]]


def update_parameters(
    group: Group,
    directions: Mapping[nn.Parameter, Tensor],
    states: MutableMapping[Tensor, State],
    rule: UpdateRule,
    skip: Tensor | None = None,
) -> tuple[list[nn.Parameter], Tensor, Tensor]:
    """W <- W - lr * step, where ``rule`` makes the steps of dense directions: :func:`sgd_steps`, :func:`adamw_steps`.
    A sparse direction is a step: its rows have no momentum and no weight decay.

    A step that would leave its parameter not finite is left out, and its momentum is reset: the parameters are
    returned with the length of each one's change and a flag, [n]. Where ``skip`` is set, no parameter changes.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    elif torch.compiler.is_compiling():  # a number becomes a constant of the graph, and a schedule recompiles it
        lr = torch.zeros(()) + lr
    params = [param for param in dict.fromkeys(group["params"]) if param in directions]  # torch allows duplicates
    if not params:
        return params, torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    dense = [param for param in params if not directions[param].is_sparse]
    made = rule(group, dense, [directions[param] for param in dense], states) if dense else []
    ready = {**directions, **dict(zip(dense, made, strict=True))}
    steps = [ready[param] for param in params]
    parts = [local(param) for param in params]
    lengths = norms_of(steps) * lr
    bad = _too_long(parts, steps, lengths, lr)
    _subtract(parts, steps, lr, bad if skip is None else bad | skip)
    seen = read_if_on_host(bad)
    if seen is None or any(seen):
        buffers = [states[param].get("momentum_buffer") for param in params]
        zero_where(bad, [torch.empty(0) if buffer is None else local(buffer) for buffer in buffers])
    return params, lengths, bad


def adamw_steps(
    group: Group, params: list[nn.Parameter], directions: list[Tensor], states: MutableMapping[Tensor, State]
) -> list[Tensor]:
    """The directions with decoupled weight decay, as in torch.optim.AdamW. In place: directions are no one else's."""
    if group["weight_decay"] != 0:
        torch._foreach_add_(directions, [local(p) for p in params], alpha=group["weight_decay"])
    return directions


def sgd_steps(
    group: Group, params: list[nn.Parameter], directions: list[Tensor], states: MutableMapping[Tensor, State]
) -> list[Tensor]:
    """The directions with the weight decay and momentum of torch.optim.SGD."""
    steps = directions
    if group["weight_decay"] != 0:
        steps = list(torch._foreach_add(directions, [local(p) for p in params], alpha=group["weight_decay"]))
    momentum = group["momentum"]
    if momentum == 0:
        return steps
    # Adam's step length already counts the past: a plain sum of such steps would be 1 / (1 - momentum) times as long.
    dampening = momentum if group.get("graft") == "adam" else 0.0
    old, new = [], []
    for param, step in zip(params, steps, strict=True):
        state = states[param]
        if "momentum_buffer" not in state or group["step"] == 0:
            state["momentum_buffer"] = like(param, step.clone())
            continue
        if state["momentum_buffer"].dtype != param.dtype:  # the model was cast
            state["momentum_buffer"] = state["momentum_buffer"].to(param.dtype)
        old.append(local(state["momentum_buffer"]))
        new.append(step)
    if old:
        torch._foreach_mul_(old, momentum)
        torch._foreach_add_(old, new, alpha=1 - dampening)
    buffers = [local(states[param]["momentum_buffer"]) for param in params]
    if not group["nesterov"]:
        return buffers
    if dampening:
        return list(torch._foreach_lerp(steps, buffers, momentum))
    return list(torch._foreach_add(steps, buffers, alpha=momentum))


def _too_long(params: Sequence[Tensor], steps: list[Tensor], lengths: Tensor, lr: float | Tensor) -> Tensor:
    """Flags, [n], of the steps that are not finite, or so long that they could leave a parameter not finite."""
    bad = ~(lengths < LONGEST_STEP)  # what is not a number is below nothing
    for i, (param, step) in enumerate(zip(params, steps, strict=True)):
        if param.dtype == torch.float16:  # whose range ends at 65504
            bad[i] |= ~((param.float() - lr * step.float()).to(param.dtype).isfinite().all())
    return bad


def _subtract(params: Sequence[Tensor], steps: list[Tensor], lr: float | Tensor, bad: Tensor) -> None:
    """W <- W - lr * step, but for those that are bad."""
    seen = read_if_on_host(bad)
    if seen is None:
        flags = [flag.to(step.device) for flag, step in zip(bad.unbind(), steps, strict=True)]
        steps = [_masked(step, flag) for step, flag in zip(steps, flags, strict=True)]
    elif any(seen):
        params = [param for param, flag in zip(params, seen, strict=True) if not flag]
        steps = [step for step, flag in zip(steps, seen, strict=True) if not flag]
    for param, step in zip(params, steps, strict=True):
        if step.is_sparse:
            param.add_(step * -lr) if isinstance(lr, Tensor) else param.add_(step, alpha=-lr)
    weights = [param for param, step in zip(params, steps, strict=True) if not step.is_sparse]
    dense = [step for step in steps if not step.is_sparse]
    if weights and isinstance(lr, Tensor):
        torch._foreach_add_(weights, torch._foreach_mul(dense, -lr.to(weights[0].device)))
    elif weights:
        torch._foreach_add_(weights, dense, alpha=-lr)  # type: ignore[arg-type]


def _masked(step: Tensor, flag: Tensor) -> Tensor:
    if not step.is_sparse:
        return step.masked_fill(flag, 0)
    values = step.values().masked_fill(flag, 0)
    return torch.sparse_coo_tensor(step.indices(), values, step.shape, is_coalesced=True, check_invariants=False)
