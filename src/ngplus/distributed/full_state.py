"""``full_state_dict=True`` of torch.distributed.checkpoint.state_dict: the state that owners keep, on all ranks.

torch gathers DTensors for it, and takes other tensors to be equal on all ranks. The state that one rank alone keeps
would be lost, so the owners broadcast it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ngplus.distributed.collectives import RankGroup
from ngplus.utils.typing import State

MODULE, SAVES, LOADS = "torch.distributed.checkpoint.state_dict", "_get_optim_state_dict", "_load_optim_state_dict"


def is_wanted() -> bool:
    """Is ``state_dict()`` called by torch's functions for ``full_state_dict=True``? They do not pass on their options,
    so these are read from their frames.

    Before a full state is loaded, torch asks each rank which entries it has. Without ``broadcast_from_rank0`` it fails
    if those are not all.
    """
    frame: Any = sys._getframe(1)
    options = None
    while frame is not None:
        if frame.f_globals.get("__name__") == MODULE:
            if frame.f_code.co_name == SAVES:
                options = frame.f_locals["info"]
                if options.full_state_dict:
                    return True
            elif frame.f_code.co_name == LOADS and options is not None:
                return not options.broadcast_from_rank0
        frame = frame.f_back
    return False


def is_loading() -> bool:
    """Is ``load_state_dict()`` called by torch's functions?"""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == MODULE and frame.f_code.co_name == LOADS:
            return True
        frame = frame.f_back
    return False


def gather(ranks: RankGroup, owners: Sequence[int], states: Sequence[State], device: torch.device) -> list[State]:
    """The states, each as its owner has it. All ranks call this with the same ``owners``."""
    forms: list[list[State]] = [[] for _ in range(ranks.size)]
    dist.all_gather_object(forms, [{key: _form(x) for key, x in state.items()} for state in states], group=ranks.group)
    found: list[State] = []
    sent: list[tuple[Tensor, int]] = []
    for i, (owner, state) in enumerate(zip(owners, states, strict=True)):
        entries = dict(forms[owner][i])
        for key, form in entries.items():
            if isinstance(form, tuple):
                shape, dtype = form
                entries[key] = state[key] if owner == ranks.rank else torch.empty(shape, dtype=dtype, device=device)
                sent.append((entries[key], owner))
        found.append(entries)
    ranks.broadcast([tensor for tensor, _ in sent], [owner for _, owner in sent])
    return found


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value
