"""The forward hooks on the model's modules, which pass inputs and outputs to the recorder."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngplus.capture.layers import Watcher
from ngplus.capture.layers.base import Build, Inputs
from ngplus.capture.layers.embedding import ForAllSamples
from ngplus.capture.matrices import Use

if TYPE_CHECKING:
    from ngplus.capture.recorder import Recorder


class Hook:
    """Calls ``function`` as long as its recorder exists. Does nothing in a copied or unpickled module."""

    def __init__(
        self, recorder: weakref.ref[Recorder] | None = None, function: Callable[..., Any] | None = None
    ) -> None:
        self.recorder, self.function = recorder, function

    def __call__(self, *args: Any) -> Any:
        recorder = None if self.recorder is None else self.recorder()
        if self.function is None or recorder is None:
            return None
        if torch.compiler.is_compiling():  # traced with the model: breaks the graph only if a refresh is due
            return recorder.uncompiled(self.function, *args) if recorder.listening() else None
        return self.function(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


class ModuleWatcher(Watcher):
    """The watcher of one module. ``uses`` are by index into the list of ``LayerRule.matrices``."""

    def __init__(self, recorder: weakref.ref[Recorder], uses: dict[int, Use]) -> None:
        self._recorder, self._uses = recorder, uses

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return Hook(self._recorder, function)

    def recording(self, matrix: int) -> bool:
        recorder, use = self._recorder(), self._uses.get(matrix)
        return recorder is not None and use is not None and recorder.recording(use.matrix)

    def refuse(self, matrix: int, reason: str) -> None:
        if matrix in self._uses:
            self._uses[matrix].matrix.fall_back_at_step(reason)

    def record(self, matrix: int, output: Tensor, inputs: Inputs, build: Build) -> None:
        recorder, use = self._recorder(), self._uses.get(matrix)
        if recorder is not None and use is not None and use.matrix.armed and use.matrix.source != "batch":
            recorder.record(use, output, inputs, build)

    def forward_hook(self, matrix: int) -> Callable[..., Any]:
        use = self._uses[matrix]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            if not use.matrix.armed:  # the common case first
                return None
            recorder = self._recorder()
            if recorder is None or not recorder.recording(use.matrix):
                return None
            inputs = use.rule.inputs(module, args, kwargs)
            tensors = [x for x in inputs if x is not None]
            if not tensors or not all(isinstance(x, Tensor) for x in (output, *tensors)):
                self.refuse(matrix, f"{type(module).__name__} takes or gives what is no tensor")
                return None
            if not (use.active[0] or use.rule.bias_needs_input):
                inputs = (None,) * len(inputs)
            if not is_strided(output, *inputs):  # before the rule reads them
                self.refuse(matrix, "its module takes or gives a sparse or nested tensor")
                return None
            adapted = use.rule.adapt(module, inputs, output, recorder.batch(use))
            recorded = adapted
            if isinstance(adapted, ForAllSamples):  # a lookup without a batch dimension
                reason = "its output, the same for all samples, is used in other ways than to be added"
                recorded, adapted.on_other_use = adapted.by_sample, partial(self.refuse, matrix, reason)
            recorder.record(use, recorded, inputs, partial(use.rule.factors, module))
            return None if adapted is output else adapted

        return Hook(self._recorder, after)


def is_strided(*tensors: Tensor | None) -> bool:
    """Returns True if no tensor is sparse or nested."""
    return all(x is None or (x.layout is torch.strided and not x.is_nested) for x in tensors)


def weak_method(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a bound method without keeping its object alive. Calls do nothing once the object is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call
