"""From directions to parameters: weight decay, momentum, and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.fisher.inverses import Product
from ngplus.utils.dtensor import like, local
from ngplus.utils.finite import LONGEST_STEP, norms_of, read_if_on_host, zero_where

Group = dict[str, Any]
State = dict[str, Any]
UpdateRule = Callable[
    [Mapping[str, Any], list[nn.Parameter], Sequence[Tensor | Product], MutableMapping[Tensor, State]], list[Tensor]
]


def worked_out(param: nn.Parameter, direction: Tensor | Product) -> Tensor:
    return direction.tensor().reshape(param.shape) if isinstance(direction, Product) else direction


def update_parameters(
    group: Mapping[str, Any],
    directions: Mapping[nn.Parameter, Tensor | Product],
    states: MutableMapping[Tensor, State],
    rule: UpdateRule,
    skip: Tensor | None = None,
) -> tuple[list[nn.Parameter], Tensor]:
    """W <- W - lr * step, where ``rule`` makes the steps of the directions: :func:`sgd_steps`, :func:`adamw_steps`.

    A step that would leave its parameter not finite is left out, and its momentum begins anew: the parameters are
    returned with a flag for each, [n]. Where ``skip`` is set, no parameter changes.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    elif torch.compiler.is_compiling():  # a number becomes a constant of the graph, and a schedule recompiles it
        lr = torch.zeros(()) + lr
    params = [param for param in dict.fromkeys(group["params"]) if param in directions]  # torch allows duplicates
    if not params:
        return params, torch.zeros(0, dtype=torch.bool)
    steps = rule(group, params, [directions[param] for param in params], states)
    parts = [local(param) for param in params]
    bad = _too_long(parts, steps, lr)
    _subtract(parts, steps, lr, bad if skip is None else bad | skip)
    seen = read_if_on_host(bad)
    if seen is None or any(seen):
        buffers = [states[param].get("momentum_buffer") for param in params]
        zero_where(bad, [torch.empty(0) if buffer is None else local(buffer) for buffer in buffers])
    return params, bad


def adamw_steps(
    group: Mapping[str, Any],
    params: list[nn.Parameter],
    directions: Sequence[Tensor | Product],
    states: MutableMapping[Tensor, State],
) -> list[Tensor]:
    """The directions with decoupled weight decay, as in torch.optim.AdamW. Rows of a sparse gradient have none."""
    steps = [worked_out(param, direction) for param, direction in zip(params, directions, strict=True)]
    if group["weight_decay"] != 0:
        dense = [i for i, step in enumerate(steps) if not step.is_sparse]
        weights = [local(params[i]) for i in dense]
        decayed = torch._foreach_add([steps[i] for i in dense], weights, alpha=group["weight_decay"]) if dense else ()
        for i, step in zip(dense, decayed, strict=True):
            steps[i] = step
    return steps


def sgd_steps(
    group: Mapping[str, Any],
    params: list[nn.Parameter],
    directions: Sequence[Tensor | Product],
    states: MutableMapping[Tensor, State],
) -> list[Tensor]:
    """The directions with the weight decay and momentum of torch.optim.SGD.

    Rows of a sparse gradient come and go: they get no momentum, and weight decay refuses them, as SGD does.
    """
    decay, momentum = group["weight_decay"], group["momentum"]
    for param in params if momentum != 0 else ():
        held = states[param].get("momentum_buffer")
        if held is not None and held.dtype != param.dtype:  # the model was cast
            states[param]["momentum_buffer"] = held.to(param.dtype)
    in_product = momentum != 0 and not group["nesterov"] and group["step"] > 0
    steps: list[Tensor] = []
    added, rest = [], []  # those whose momentum is a part of their product, and all others that are not sparse
    for i, (param, direction) in enumerate(zip(params, directions, strict=True)):
        if in_product and isinstance(direction, Product) and "momentum_buffer" in states[param]:
            steps.append(states[param]["momentum_buffer"])
            direction.add_to(steps[-1], momentum)
            added.append(i)
        else:
            steps.append(worked_out(param, direction))
            if not direction.is_sparse:
                rest.append(i)

    def pick(tensors: Sequence[Tensor], which: list[int]) -> list[Tensor]:
        return [tensors[i] for i in which]

    def replace(which: list[int], new: Sequence[Tensor]) -> None:
        for i, step in zip(which, new, strict=True):
            steps[i] = step

    weights = [local(param) for param in params]  # of sharded parameters, the part that is here
    if decay != 0:
        if added:
            torch._foreach_add_(pick(steps, added), pick(weights, added), alpha=decay)
        if rest:
            replace(rest, torch._foreach_add(pick(steps, rest), pick(weights, rest), alpha=decay))
    if rest and momentum != 0:
        replace(rest, _with_momentum(group, [params[i] for i in rest], pick(steps, rest), states))
    return steps


def _too_long(params: Sequence[Tensor], steps: list[Tensor], lr: float | Tensor) -> Tensor:
    """Flags, [n], of the steps that are not finite, or so long that they could leave a parameter not finite."""
    norms = norms_of(steps)
    bad = ~(norms * lr < LONGEST_STEP)  # what is not a number is below nothing
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


def _with_momentum(
    group: Mapping[str, Any], params: list[nn.Parameter], steps: list[Tensor], states: MutableMapping[Tensor, State]
) -> list[Tensor]:
    momentum = group["momentum"]
    # Adam's step length already counts the past: a plain sum of such steps would be 1 / (1 - momentum) times as long.
    dampening = momentum if group.get("graft") == "adam" else 0.0
    old: list[Tensor] = []
    estimate: list[Tensor] = []
    for param, step in zip(params, steps, strict=True):
        state = states[param]
        if "momentum_buffer" not in state or group["step"] == 0:
            state["momentum_buffer"] = like(param, step.clone())
        else:
            old.append(local(state["momentum_buffer"]))
            estimate.append(step)
    if old:
        torch._foreach_mul_(old, momentum)
        torch._foreach_add_(old, estimate, alpha=1 - dampening)
    buffers = [local(states[param]["momentum_buffer"]) for param in params]
    if not group["nesterov"]:
        return buffers
    if dampening:
        return list(torch._foreach_lerp(list(steps), buffers, momentum))
    return list(torch._foreach_add(steps, buffers, alpha=momentum))
