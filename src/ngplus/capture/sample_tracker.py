"""Follows the samples of a batch through the torch functions of a forward pass.

A forward pass begins with inputs whose samples lie along one dimension. :class:`SampleTracker` sees every torch
function that the model calls, and derives from the sample axes of its arguments that of its result, by the rules of
:mod:`ngplus.capture.axis_rules`. Of the result of a function without a rule, or of one that moves rows in an order that
depends on the data (a routing, a mask, a sort), it is not known. A tensor that does not depend on the inputs has no
samples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.weak import WeakTensorKeyDictionary

from ngplus.capture import axis_indexing as axis_indexing  # registers its rules
from ngplus.capture import axis_layers, axis_rules, reasons
from ngplus.capture.batch import Batch
from ngplus.capture.sample_axis import RULES, Location, SampleAxis, UnknownAxis, tensors
from ngplus.utils.dtensor import is_dtensor


class SampleTracker(TorchFunctionMode):
    """Knows where the samples of a tensor are, for every tensor of one forward pass.

    Args:
        samples: the number of samples.
        inputs: the arguments of the model. Tensors with that size of dimension ``dim`` have the samples there. Tensors
            of size 1 have none. Of others it is not known.
        dim: the dimension of the samples in the inputs.
    """

    of_rows = False

    def __init__(self, samples: int, inputs: Any, dim: int) -> None:
        super().__init__()
        self.samples, self.active, self._dim = samples, True, dim
        self._frame: FrameType | None = None  # of the call of the model
        self.unbatched = self.crossed = False
        self.across = ""
        self._locations: Any = WeakTensorKeyDictionary()
        for x in tensors(inputs):
            if not x.is_nested and (location := self._of_input(x)) is not None:
                self._locations[x] = location

    def _of_input(self, x: Tensor) -> Location:
        size = x.shape[self._dim] if x.dim() > self._dim else 1
        if size == self.samples:
            return SampleAxis(self._dim)
        return None if size == 1 else UnknownAxis("the inputs of the model")

    def start(self, model: nn.Module) -> None:
        """Begins to follow the functions that this thread calls. Call this in a forward pre-hook of the model."""
        self._frame = _frame_of_call(model)
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Ends that. If a mode that was entered later is still active, this one only becomes idle."""
        self.active, self._frame = False, None
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def of(self, x: Any) -> Location:
        """Returns where the samples of a tensor are."""
        if not isinstance(x, Tensor):
            return None
        location = self._locations.get(x)
        plain = getattr(x, "plain", None)
        if location is None and isinstance(plain, Tensor):  # a subclass of ours around it
            return self._locations.get(plain)
        if location is None and is_dtensor(x):  # made of a local tensor, which no torch function does
            location = self._locations.get(x._local_tensor)  # type: ignore[attr-defined]
            return location if self._fits(x, location) else None
        return location

    def batch(self, x: Tensor) -> Batch | str:
        """Returns the samples of a tensor, or the reason why they are not known."""
        location = self.of(x)
        if isinstance(location, SampleAxis):
            return Batch(location.dim, self.samples, {}, location.outer)
        if location is None:
            return reasons.SHARED_INPUT
        return reasons.with_detail(reasons.ROWS_UNKNOWN, f"after {location.function}")

    def mark(self, x: Tensor, location: Location) -> None:
        """Sets where the samples of a tensor are."""
        if location is None:
            self._locations.pop(x, None)
        else:
            self._locations[x] = location
            if is_dtensor(x) and self._fits(x._local_tensor, location):  # type: ignore[attr-defined]
                self._locations[x._local_tensor] = location  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.active and self.interrupted():
            self.active, self._frame = False, None
            self._locations.clear()
        if self.active:
            name = name_of(func)
            if isinstance(out, Tensor | tuple | list) or name == "__setitem__":
                self._follow(name, args, kwargs, out)
        return out

    def interrupted(self) -> bool:
        """Returns True if the call of the model ended without a call of the hook, as after Ctrl-C."""
        frame = sys._getframe(1)
        while frame is not self._frame and frame.f_back is not None:
            frame = frame.f_back
        return self._frame is not None and frame is not self._frame

    def may_be_those_of(self, output: Any) -> bool:
        """Returns True if the samples can be those of the model's output. They cannot if they were summed up, as the
        nodes of graphs or the time steps of a batch along another dimension."""
        found = [x for x in tensors(output) if x.requires_grad and not x.is_nested]
        known = any(isinstance(self.of(x), SampleAxis) for x in found)
        return all(self._may_be_in(x, known) for x in found)

    def _may_be_in(self, x: Tensor, known: bool) -> bool:
        """``known``: they are known to be those of another output."""
        location = self.of(x)
        if isinstance(location, SampleAxis):
            return True
        if x.numel() == 1:  # a loss
            return not isinstance(location, UnknownAxis) or location.function not in SUMS_OF_ROWS
        if axis_layers.summed_up(location):
            return False
        chosen = isinstance(location, UnknownAxis) and location.chosen  # as the outputs at masked tokens
        other = known and not (isinstance(location, UnknownAxis) and location.function in SUMS_OF_ROWS)
        return chosen or other or self.samples in x.shape[: max(2, self._dim + 1)]

    def _follow(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        given = [location for x in tensors((args, kwargs)) if (location := self.of(x)) is not None]
        if not given:
            return
        unknown, rule = self._unknown(name, given), RULES.get(name)
        try:
            found = unknown if rule is None else rule(self, args, kwargs, out)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # arguments that the rule does not expect
            found = unknown
        results = [args[0]] if name == "__setitem__" else list(tensors(out))
        each = found if isinstance(found, list) else [found] * len(results)
        for x, location in zip(results, each, strict=True):
            self.mark(x, unknown if location is ... or not self._fits(x, location) else location)
        base = args[0]._base if _in_place(name) and isinstance(args[0], Tensor) else None
        if base is not None:  # a part of it was written to
            held = self.of(base)
            kept = isinstance(held, SampleAxis) and not held.blank and not isinstance(self.of(args[0]), UnknownAxis)
            self.mark(base, held if kept else unknown)

    def _unknown(self, name: str, given: Sequence[Location]) -> UnknownAxis:
        """The location of a result of which it is not known, from those of the arguments."""
        if name in SUMS_OF_ROWS:
            return UnknownAxis(name)
        began = [each for each in given if isinstance(each, UnknownAxis)] or [UnknownAxis(name)]
        unknown = next((each for each in began if each.function in SUMS_OF_ROWS), began[0])
        rule = RULES.get(name)
        keeps = rule in (axis_rules.entrywise, axis_layers.linear)
        breaks = name in WRITES or (rule is not None and rule is not axis_rules.reduction)
        moved = breaks and any(isinstance(each, SampleAxis) and not each.blank for each in given)
        moved = moved or (name not in WRITES and any(each.moved for each in began))
        return replace(unknown, chosen=unknown.chosen and keeps, moved=moved)

    def _fits(self, x: Tensor, location: Location) -> bool:
        if not isinstance(location, SampleAxis):
            return True
        size = location.outer * self.samples * location.inner
        return 0 <= location.dim < x.dim() and x.shape[location.dim] == size


#: Functions that may put rows back into their own order.
WRITES = {"__setitem__", "index_copy", "index_copy_", "index_put", "index_put_", "scatter", "scatter_"}
SUMS_OF_ROWS = {
    f"{name}{end}"
    for name in ("index_add", "index_reduce", "put", "scatter_add", "scatter_reduce", "segment_reduce")
    for end in ("", "_")
}


def _in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _frame_of_call(model: nn.Module) -> FrameType | None:
    """Finds the call of a module that its hook was called by."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model:
            return frame
        frame = frame.f_back
    return None


def name_of(func: Any) -> str:
    """Returns the name of a torch function, method or attribute."""
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", "")
    return str(owner.__name__) if name == "__get__" and owner is not None else str(name).partition(".")[0]
