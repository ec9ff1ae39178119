"""The forward hooks on the modules, which pass inputs and outputs to the recorder."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.layers.base import Build, Inputs
from ngplus.capture.layers.computed import WeightRule, sources_of
from ngplus.capture.layers.embedding import ForAllSamples
from ngplus.capture.sample_axis import SampleAxis

if TYPE_CHECKING:
    from ngplus.capture.matrices import Use
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


class Watcher:
    """Records calls of a module; the argument of ``LayerRule.watch``.

    ``matrix`` is an index into the list that ``LayerRule.matrices`` returns.

    Examples:
        A rule for a module whose output is a tuple, its first element the result:

        >>> class FirstOutput(ngplus.layers.LinearRule):
        ...     def watch(self, module, watcher):
        ...         def build(inputs, grad, active, batch):
        ...             return self.factors(module, inputs, grad, active, batch)
        ...         def after_forward(module, args, output):
        ...             if watcher.recording(0):
        ...                 watcher.record(0, output[0], (args[0],), build)
        ...         return [module.register_forward_hook(watcher.hook(after_forward))]
    """

    def __init__(self, recorder: weakref.ref[Recorder], uses: dict[int, Use]) -> None:
        self._recorder, self._uses = recorder, uses

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a hook so that it does nothing in a copy of the module."""
        return Hook(self._recorder, function)

    def recording(self, matrix: int) -> bool:
        """Returns True if the current forward call is part of a refresh."""
        recorder, use = self._recorder(), self._uses.get(matrix)
        return recorder is not None and use is not None and recorder.recording(use.matrix)

    def listening(self, matrix: int) -> bool:
        """Returns True if a forward call may be part of a refresh. ``recording`` also counts the call."""
        use = self._uses.get(matrix)
        recorder = self._recorder() if use is not None and use.matrix.armed else None
        return recorder is not None and recorder.listening()

    def note_samples(self, matrix: int, output: Any) -> None:
        """Remembers where the samples of an output are, if it is computed under no_grad and again later."""
        recorder, use = self._recorder(), self._uses.get(matrix)
        if recorder is not None and use is not None:
            recorder.note_samples(use, output)

    def depends_on_inputs(self, x: Tensor) -> bool:
        """Returns True if a tensor was computed from the inputs of the model."""
        recorder = self._recorder()
        return recorder is not None and any(tracker.of(x) is not None for tracker in recorder.trackers)

    def refuse(self, matrix: int, reason: str) -> None:
        """Makes the matrix use mini-batch curvature."""
        if matrix in self._uses:
            self._uses[matrix].matrix.fall_back_at_step(reason)

    def record(self, matrix: int, output: Tensor, inputs: Inputs, build: Build, like: Tensor | None = None) -> None:
        """Calls ``build(inputs, gradient, active, batch)`` when the gradient of ``output`` arrives. ``like`` is a
        tensor with the same samples, for an output that is not a result of torch functions of the forward pass."""
        recorder, use = self._recorder(), self._uses.get(matrix)
        if recorder is not None and use is not None and use.matrix.armed and use.matrix.source != "batch":
            recorder.record(use, output, inputs, build, like)

    def forward_hook(self, matrix: int) -> Callable[..., Any]:
        """Returns the default forward hook, which calls ``inputs``, ``adapt`` and ``factors`` of the rule."""
        use = self._uses[matrix]

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
            if not use.matrix.armed:  # the common case first
                return None
            recorder = self._recorder()
            if recorder is None:
                return None
            if not recorder.recording(use.matrix):
                recorder.note_samples(use, output)
                return None
            if isinstance(use.rule, WeightRule) and sources_of(module):
                self.refuse(matrix, reasons.COMPUTED_SINCE)
                return None
            build = partial(use.rule.factors, module)
            return self.record_call(matrix, module, use.rule.inputs(module, args, kwargs), output, build)

        return Hook(self._recorder, after)

    def record_call(self, matrix: int, module: nn.Module, inputs: Inputs, output: Any, build: Build) -> Any:
        """Records a call; the first of ``inputs`` are those of the rule. Returns what takes the place of its output,
        or None if nothing does."""
        recorder, use = self._recorder(), self._uses.get(matrix)
        if recorder is None or use is None:
            return None
        tensors = [x for x in inputs if x is not None]
        if not tensors or not all(isinstance(x, Tensor) for x in (output, *tensors)):
            self.refuse(matrix, reasons.with_detail(reasons.NO_TENSOR, type(module).__name__))
            return None
        if not (use.active[0] or use.rule.bias_needs_input):
            inputs = (None,) * len(inputs)
        if not is_strided(output, *inputs):  # before the rule reads them
            self.refuse(matrix, reasons.NOT_STRIDED)
            return None
        adapted = use.rule.adapt(module, inputs, output, recorder.batch(use))
        recorded = adapted
        if isinstance(adapted, ForAllSamples):  # a lookup without a batch dimension
            recorded, adapted.on_other_use = adapted.by_sample, partial(self.refuse, matrix, reasons.SHARED_OUTPUT)
            for tracker in recorder.trackers:
                tracker.mark(recorded, SampleAxis(0))
        recorder.record(use, recorded, inputs, build)
        return None if adapted is output else adapted


def is_strided(*tensors: Tensor | None) -> bool:
    """Returns True if no tensor is sparse or nested."""
    return all(x is None or (x.layout is torch.strided and not x.is_nested) for x in tensors)
