"""Parameters as a user gives them: found in a wrapped model, named, and refused where NG+ cannot take them; groups of
them with and without weight decay."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ngplus.capture.matrices import collect, named
from ngplus.utils.validation import number

# The end of a hint, where the module would make a difference.
GIVE_MODULE = (
    "Pass the module in place of its parameters, or as model=, to change this. docs/training.md shows how, also for "
    "frameworks that create the optimizer"
)


def inside(model: nn.Module) -> nn.Module:
    """The model that torch.compile or DistributedDataParallel has wrapped, whose parameters have their plain names."""
    for wrapper in ("module", "_orig_mod"):
        inner = getattr(model, wrapper, None)
        wraps = wrapper == "_orig_mod" or isinstance(model, nn.parallel.DistributedDataParallel)
        if wraps and isinstance(inner, nn.Module):
            return inside(inner)
    return model


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model of FSDP1, whose parameters do not have their own shapes."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if wrapper is not None and any(isinstance(module, wrapper) for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) flattens parameters into one vector, and NG+ needs their matrices: shard "
            "the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )


def labels(group: int, count: int) -> list[str]:
    """Names for parameters that have none."""
    return [f"param_groups[{group}]['params'][{i}]" for i in range(count)]


def with_names(
    param_group: dict[str, Any], groups: Sequence[Mapping[str, Any]], model: nn.Module | None
) -> dict[str, Any]:
    """Torch wants all groups named or none; a model names its parameters, so later groups get their names, too."""
    if not groups or "param_names" not in groups[0]:
        return param_group
    given = param_group["params"]
    params = [given] if isinstance(given, Tensor) else list(given)
    if any(isinstance(p, tuple) for p in params):
        return {**param_group, "params": params}
    names: dict[Any, str] = dict(named(model.named_parameters())) if model is not None else {}
    others = labels(len(groups), len(params))
    pairs = [(names.get(p, label), p) for p, label in zip(params, others, strict=True)]
    return {**param_group, "params": pairs}


def check_parameters(group: Mapping[str, Any]) -> None:
    """Raises ValueError, with the name, for the first parameter that is not supported."""
    params = group["params"]
    names = group.get("param_names") or [f"number {i}" for i in range(len(params))]
    for name, param in zip(names, params, strict=True):
        if is_lazy(param):
            raise ValueError(
                f"Parameter {name} is uninitialized, as in a lazy layer before its first call: call the model with a "
                "batch before you create the optimizer"
            )
        if getattr(param, "_is_flat_param", False):
            raise ValueError(f"Parameter {name} is a flat parameter of FSDP1: shard the model with fully_shard (FSDP2)")
        if param.is_complex():
            raise ValueError(f"Parameter {name} is complex, which is not supported: store torch.view_as_real of it")
        if not param.is_floating_point():
            raise ValueError(f"Parameter {name} is {param.dtype}, not floating-point: register it as a buffer")


def decay_groups(model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True) -> list[dict[str, Any]]:
    """Returns parameter groups with weight decay on matrices, and none on biases, norm layers and other vectors.

    There are at most two groups, of named parameters, for any torch optimizer. Pass ``model=`` to NGPlus and NGAdam,
    too. A tied parameter is in one group, once. A table with sparse gradients has no decay. Frozen parameters are in
    the groups, so that they can be trained later.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        >>> groups = ngplus.decay_groups(model, 0.1)
        >>> [(group["weight_decay"], [name for name, _ in group["params"]]) for group in groups]
        [(0.1, ['0.weight', '2.weight']), (0.0, ['0.bias', '1.weight', '1.bias', '2.bias'])]
        >>> optimizer = ngplus.NGAdam(groups, model=model)
        >>> optimizer = torch.optim.AdamW(ngplus.decay_groups(model, 0.1))

    Args:
        model (Module): the model, which may be compiled or wrapped by DistributedDataParallel.
        weight_decay (float): the weight decay of the first group.
        decay_embeddings (bool): whether embedding tables have weight decay, also those that are the weight of the
            output layer (default: True).
    """
    number("weight_decay", weight_decay)
    check_model(model)
    model = inside(model)
    names = named(model.named_parameters())
    decayed: set[nn.Parameter] = set()
    for matrix in collect(model, {param: name for param, name in names.items() if param.numel() > 0})[0]:
        if matrix.sparse or (matrix.lookup and not decay_embeddings):
            continue
        parts = zip(matrix.names, matrix.params, matrix.kinds, strict=True)
        decayed.update(param for name, param, kind in parts if kind != "column" and not name.endswith("bias"))
    groups = [
        {"params": [(name, p) for p, name in names.items() if (p in decayed) is decays], "weight_decay": amount}
        for decays, amount in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]
