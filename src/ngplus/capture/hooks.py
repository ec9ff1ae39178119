"""The hooks on the model's modules: what a layer's forward pass hands over to capture."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngplus.capture.calls import Build
from ngplus.capture.layers import Batch, Watcher
from ngplus.capture.layers.embedding import ForAllSamples
from ngplus.capture.matrices import Use
from ngplus.fisher.factors import Factors

if TYPE_CHECKING:
    from ngplus.capture.recorder import Recorder


class Hook:
    """A hook that works for its capture only: in a copied or unpickled module, and once the capture is gone, it does
    nothing. (A module that is being called may still hold hooks that have just been removed.)"""

    def __init__(
        self, capture: weakref.ref[Recorder] | None = None, function: Callable[..., Any] | None = None
    ) -> None:
        self.capture, self.function = capture, function

    def __call__(self, *args: Any) -> Any:
        capture = None if self.capture is None else self.capture()
        if self.function is None or capture is None:
            return None
        if torch.compiler.is_compiling():  # traced with the model: in the graph only where there is something to see
            return capture.uncompiled(self.function, *args) if capture.listening() else None
        return self.function(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return Hook()

    def __reduce__(self) -> Any:
        return Hook, ()


class ModuleWatcher(Watcher):
    """The watcher of one module: its matrices by their place in the rule's list."""

    def __init__(self, capture: weakref.ref[Recorder], uses: dict[int, Use]) -> None:
        self._capture, self._uses = capture, uses

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return Hook(self._capture, function)

    def recording(self, matrix: int) -> bool:
        capture, use = self._capture(), self._uses.get(matrix)
        return capture is not None and use is not None and capture.recording(use.matrix)

    def refuse(self, matrix: int, reason: str) -> None:
        if matrix in self._uses:
            self._uses[matrix].matrix.give_up(reason)

    def record(self, matrix: int, output: Tensor, inputs: tuple[Tensor | None, ...], build: Build) -> None:
        capture, use = self._capture(), self._uses.get(matrix)
        if capture is not None and use is not None and use.matrix.armed and use.matrix.source != "batch":
            capture.record(use, output, inputs, build)

    def forward_hook(self, matrix: int) -> Callable[..., Any]:
        use = self._uses[matrix]
        rule, parameters = use.rule, use.matrix

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            if not parameters.armed:  # the common case, first and cheap
                return None
            capture = self._capture()
            if capture is None or not capture.recording(parameters):
                return None
            inputs = rule.inputs(module, args, kwargs)
            tensors = [x for x in inputs if x is not None]
            if not tensors or not all(isinstance(x, Tensor) for x in (output, *tensors)):
                parameters.give_up(f"{type(module).__name__} takes or gives what is no tensor")
                return None
            if not (use.active[0] or rule.bias_needs_input):
                inputs = (None,) * len(inputs)  # torch keeps no input for a bias either
            if not lie_plainly(output, *inputs):  # before the rule looks at them
                parameters.give_up("its module takes or gives a sparse or nested tensor")
                return None
            adapted = rule.adapt(module, inputs, output, capture.batch(use))

            def build(
                saved: tuple[Tensor | None, ...], grad: Tensor, active: tuple[bool, ...], batch: Batch
            ) -> Factors:
                return rule.factors(module, saved, grad, active, batch)

            watched = adapted
            if isinstance(adapted, ForAllSamples):  # of a lookup without a batch dimension
                reason = "its output, the same for all samples, is used in other ways than to be added"
                watched, adapted.on_other_use = adapted.by_sample, partial(parameters.give_up, reason)
            capture.record(use, watched, inputs, build)
            return None if adapted is output else adapted

        return Hook(self._capture, after)


def lie_plainly(*tensors: Tensor | None) -> bool:
    """Are they in memory entry by entry, none of them sparse or nested?"""
    return all(x is None or (x.layout is torch.strided and not x.is_nested) for x in tensors)
