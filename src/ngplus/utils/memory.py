"""The bytes of the tensors that a computation makes, measured while it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


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
