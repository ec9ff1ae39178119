"""Sharded parameters are DTensors: a rank's part of one, the whole, and the way back. Plain tensors are their own part.

A DTensor is known by its methods: torch.distributed.tensor takes a while to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part; a tensor that is not sharded is its own."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All parts together, on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like(param: Tensor, part: Tensor) -> Tensor:
    """A part of the same place as this rank's part of a parameter, as a tensor of the parameter's kind."""
    if not is_dtensor(param):
        return part
    kind: Any = param
    return type(kind.data).from_local(
        part, kind.device_mesh, kind.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def many_ranks() -> bool:
    """Is this one process of several?"""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def holds_gradients(record: Any) -> bool:
    """Has FSDP2 gradients of this parameter that it has not yet added up over the ranks?"""
    whole = getattr(record, "_unsharded_param", None)
    return record.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
