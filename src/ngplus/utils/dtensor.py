"""DTensors of sharded parameters: a rank's shard, the full tensor, and back. Plain tensors are returned as they are.

A DTensor is recognised by its methods, since importing torch.distributed.tensor is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like(param: Tensor, part: Tensor) -> Tensor:
    """A DTensor with the placements of ``param``, from this rank's shard."""
    if not is_dtensor(param):
        return part
    kind: Any = param
    return type(kind.data).from_local(
        part, kind.device_mesh, kind.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def many_ranks() -> bool:
    """Whether torch.distributed runs several processes."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def holds_gradients(record: Any) -> bool:
    """Whether FSDP2 has gradients of this parameter (an ``FSDPParam``) that it has not reduced over ranks yet."""
    whole = getattr(record, "_unsharded_param", None)
    return record.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
