"""Numbers that are not fit for a step: found and put right where they lie, without the host waiting for a device.

Tensors only. A flag is a boolean tensor beside the numbers that it tells about. What lies in the host's own memory can
be looked at for nothing; on an accelerator a look would wait for everything that was queued, so there both outcomes are
worked out and the flag chooses between them.
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
LARGE = 2**15  # with so many numbers, a tensor is worth a call of its own
SEEN = ("cpu",)  # where numbers lie in the host's own memory


def read_if_on_host(flag: Tensor) -> Any:
    """A flag as a bool, several as a list of them; None where the host would have to wait for them."""
    if torch.compiler.is_compiling():  # a graph has no numbers to look at
        return None
    return flag.tolist() if flag.device.type in SEEN else None


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """One flag for all: a sum is finite where every summand is, unless they are too large to be of use."""
    return torch.stack([t.sum() for t in tensors]).sum().isfinite()


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norms of tensors that may be sparse, half precision, or on several devices: [n], on the first one's.

    Of a sparse one those of its entries as they are: equal ones are not added up, which takes longer than all else.
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
    """In place: zeros in each tensor whose flag in ``bad``, [n], is set."""
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
    """What a refresh of one matrix has met. ``climb``: the host may look at flags, since the last one failed."""

    climb: bool = False
    dropped: Tensor | None = None  # L is not finite
    retried: Tensor | None = None  # it did not factorise at once
    plain: Tensor | None = None  # nor with more damping, nor in float64: the plain gradient step

    def add(self, kind: str, flag: Tensor) -> None:
        held = getattr(self, kind)
        setattr(self, kind, flag if held is None else held | flag)

    def looks(self, flag: Tensor) -> bool | None:
        """The flag, where the host may see it: for nothing, or because this matrix needs its help."""
        seen = read_if_on_host(flag)
        return bool(flag) if seen is None and self.climb else seen

    @property
    def unsolved(self) -> Tensor | None:
        """Does the new state not stand for this refresh's L? Known to the device only."""
        flags = [self.dropped, None if self.climb else self.retried]
        lazy = [flag for flag in flags if flag is not None and read_if_on_host(flag) is None]
        return torch.stack(lazy).any() if lazy else None


def keep_last_good(state: MutableMapping[str, Any], held: Mapping[str, Any], bad: Tensor) -> None:
    """Where ``bad``, the state from before the refresh again, chosen on the device.

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
