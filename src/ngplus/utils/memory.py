"""The bytes of tensors: of those that are given, and of those that a computation makes, measured while it runs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ngplus.utils.dtensor import local

Storages = dict[int, int]  # bytes by the address of the storage's record


def storages(tensors: Iterable[Tensor]) -> Storages:
    """Returns the bytes of what the tensors are stored in: those of several views once."""
    found = (local(x).untyped_storage() for x in tensors)
    return {storage._cdata: storage.nbytes() for storage in found}


class HeldStorages:
    """What several owners keep. A storage that several of them keep counts once.

    Attributes:
        total: bytes of all of them.
        limit: the most that these may be.
    """

    def __init__(self) -> None:
        self.total = self.limit = 0
        self._of: dict[Any, Storages] = {}
        self._owners: Counter[int] = Counter()

    def of(self, owner: Any) -> int:
        """Returns the bytes that an owner keeps."""
        return sum(self._of.get(owner, {}).values())

    def add(self, owner: Any, found: Storages) -> None:
        """Adds storages to those of an owner."""
        held = self._of.setdefault(owner, {})
        for key, number in found.items():
            if key not in held:
                held[key] = number
                self.total += 0 if self._owners[key] else number
                self._owners[key] += 1

    def release(self, owner: Any) -> None:
        """Removes those of an owner."""
        for key, number in self._of.pop(owner, {}).items():
            self._owners[key] -= 1
            if not self._owners[key]:
                del self._owners[key]
                self.total -= number


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is active and still exist.

    Args:
        on_growth: called with these bytes each time that they grow. What it raises ends the computation.
    """

    def __init__(self, on_growth: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._live = 0
        self._on_growth = on_growth
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._seen.add(x.untyped_storage())  # views and results in place are not new
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self._live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        if self._live > self.peak:
            self.peak = self._live
            if self._on_growth is not None:
                self._on_growth(self.peak)
        return out

    def _free(self, number: int) -> None:
        self._live -= number
