"""Finds values that are not finite and replaces them, without synchronisation with a device.

A flag is a boolean tensor. On the CPU the host reads it. On an accelerator both results are computed, and torch.where
selects one by the flag.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The longest step that is taken: below it, finite parameters stay finite (a number near the end of float32's range does
# not change by adding it), and its square is finite, too.
LONGEST_STEP = 1e18
LARGE = 2**15  # entries of a tensor whose norm is computed by a call of its own
SEEN = ("cpu",)  # devices whose memory the host reads without waiting


def read_if_on_host(flag: Tensor) -> Any:
    """A flag as a bool, several as a list; None where the host would have to wait for the device."""
    if torch.compiler.is_compiling():  # a graph has no numbers to look at
        return None
    return flag.tolist() if flag.device.type in SEEN else None


def copy_to_host(counts: Tensor) -> tuple[Tensor, Any]:
    """An asynchronous copy in pinned memory, and the event after which it is complete."""
    if counts.is_cpu:
        return counts, None
    copy = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
    event = torch.Event(counts.device)
    event.record()
    return copy, event


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """One flag for all tensors, by the sum of their entries. It overflows only for entries too large to be used."""
    return torch.stack([t.sum() for t in tensors]).sum().isfinite()


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norms of tensors that may be sparse, half precision, or on several devices: [n], on the first one's.

    That of a sparse tensor is the norm of its values; values of the same index are not added up, which would be slow.
    """
    dense = [t._values() if t.is_sparse else t for t in tensors]
    if len({(t.dtype, t.device) for t in dense}) == 1 and dense[0].dtype in (torch.float32, torch.float64):
        return torch.stack(_norms(dense))
    by_type: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(dense):  # the squares of 16 bits do not fit into 16 bits
        by_type.setdefault(torch.float64 if t.dtype == torch.float64 else torch.float32, []).append(i)
    norms: dict[int, Tensor] = {}
    for dtype, own in by_type.items():
        norms.update(zip(own, torch._foreach_norm([dense[i] for i in own], 2, dtype), strict=True))
    home, wide = dense[0].device, torch.float64 if torch.float64 in by_type else torch.float32
    alike = len(by_type) == 1 and all(norm.device == home for norm in norms.values())
    return torch.stack([norms[i] if alike else norms[i].to(home, wide) for i in range(len(dense))])


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Of one type and device. On a processor a large one is the root of its product with itself, by BLAS: half the time
    of torch's norm."""
    if torch.compiler.is_compiling() or not tensors[0].is_cpu:
        return list(torch._foreach_norm(tensors))
    large = [LARGE <= t.numel() < 2**31 and t.is_contiguous() for t in tensors]  # BLAS counts in 32 bits
    small = [t for t, alone in zip(tensors, large, strict=True) if not alone]
    rest = iter(torch._foreach_norm(small) if small else ())
    return [_length(t.view(-1)) if alone else next(rest) for t, alone in zip(tensors, large, strict=True)]


def _length(vector: Tensor) -> Tensor:
    return torch.dot(vector, vector).sqrt_()


def zero_where(bad: Tensor, tensors: Sequence[Tensor]) -> None:
    """Sets each tensor whose flag in ``bad``, [n], is set to zero, in place."""
    seen = read_if_on_host(bad)
    if seen is None:
        for tensor, flag in zip(tensors, bad.unbind(), strict=True):
            tensor.masked_fill_(flag.to(tensor.device), 0)
        return
    for tensor, flag in zip(tensors, seen, strict=True):
        if flag:
            tensor.zero_()


@dataclass
class RefreshStatus:
    """The faults of one refresh of a matrix. ``may_wait``: the host may read flags even if it has to wait for them."""

    may_wait: bool = False
    dropped: Tensor | None = None  # L is not finite
    retried: Tensor | None = None  # it did not factorise at once
    plain: Tensor | None = None  # nor with more damping, nor in float64: the plain gradient step

    def add(self, kind: str, flag: Tensor) -> None:
        held = getattr(self, kind)
        setattr(self, kind, flag if held is None else held | flag)

    def read_flag(self, flag: Tensor) -> bool | None:
        """The flag, if it is on the host or ``may_wait`` is set; else None."""
        seen = read_if_on_host(flag)
        return bool(flag) if seen is None and self.may_wait else seen

    @property
    def unsolved(self) -> Tensor | None:
        """A flag on the device: the refresh has failed, and the state before it is to be restored. None if the host
        knows."""
        flags = [self.dropped, None if self.may_wait else self.retried]
        lazy = [flag for flag in flags if flag is not None and read_if_on_host(flag) is None]
        return torch.stack(lazy).any() if lazy else None


def keep_last_good(state: MutableMapping[str, Any], held: Mapping[str, Any], bad: Tensor) -> None:
    """Restores the state from before the refresh where ``bad`` is set, on the device.

    A state of another form, such as a factor of another rank or a sketch of another seed, cannot be chosen number by
    number: the host has to look.
    """

    def form(entries: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {k: (v.shape, v.dtype, v.device) for k, v in entries.items() if isinstance(v, Tensor)}
        return {**entries, **tensors}

    if form(state) == form(held):
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        state.update({key: torch.where(bad, held[key], value) for key, value in tensors.items()})
    elif any(isinstance(value, Tensor) for value in held.values()) and bool(bad):
        state.clear()
        state.update(held)
