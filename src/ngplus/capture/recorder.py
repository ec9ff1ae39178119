"""Records the uses of matrices in forward calls, and passes their factors on during backward.

A forward hook on each watched module puts a tensor hook on the module's output. When the gradient of the output
arrives, the layer's rule builds factors from it and the saved input. Once all uses of a matrix in a call of the model
have arrived, they are joined and passed to the sink. Hooks return at once unless a matrix is armed.

Full backward hooks are not used: they fail with in-place activations and with modules that are called several times.

All uses of a matrix in one call of the model see the same samples. Calls with separate backward passes are
micro-batches. Of several calls in one backward pass it is not known whether their samples are the same, so a matrix
that they share has mini-batch curvature. A backward pass that retains its graph may be followed by another one for the
same samples, so its gradients are added up until the step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ngplus.capture import reasons
from ngplus.capture.autograd import hook_target, in_backward, in_functional_call, is_batched, reaches_parameters
from ngplus.capture.batch import Batch, BatchDims, SampleCount, modules_with_given_dim, sample_dims
from ngplus.capture.calls import BackwardPass, Batches, ForwardCall, PendingGradient, calls_in_progress, entry_modules
from ngplus.capture.layers.base import Build, Inputs, LayerRule
from ngplus.capture.layers.hooks import Hook, Watcher, is_strided
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.sample_index import SampleIndex, SampleIndexReader
from ngplus.capture.sample_tracker import SampleTracker
from ngplus.capture.waiting import Sink, Waiting
from ngplus.utils.compiled import CompiledCalls, uncompiled
from ngplus.utils.weak import weak_method


class Recorder:
    """Records the uses of a model's matrices.

    Args:
        model: the model; it is referenced weakly.
        uses: the uses of matrices in the model's modules.
        sink: called under no_grad with each matrix and its joined factors.
        batch_dim, sample_index: where the samples are, see :mod:`ngplus.capture.batch`.
        on_forward: called before each training call, with the matrices that changed since the last one.
        on_gradients: called when the first gradient of a backward pass arrives, before any .grad of a matrix changes.
        on_record: called with the matrix of a use that is recorded.
        on_backward: called after each backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        uses: list[Use],
        sink: Sink,
        batch_dim: BatchDims = 0,
        on_forward: Callable[[list[ParameterMatrix]], None] | None = None,
        on_backward: Callable[[], None] | None = None,
        on_gradients: Callable[[], None] | None = None,
        on_record: Callable[[ParameterMatrix], None] | None = None,
        sample_index: SampleIndex | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._on_forward, self._on_record = on_forward, on_record
        self._on_gradients, self._on_backward = on_gradients, on_backward
        self._dims = sample_dims(model, batch_dim)
        self._given_dims = modules_with_given_dim(model, batch_dim)
        self._sample_index = SampleIndexReader(sample_index)
        self._matrices = list({id(use.matrix): use.matrix for use in uses}.values())
        self.forward_seen = False
        self.in_eval = False  # record in eval mode as well
        self.armed = False  # is any matrix armed?
        self._depth = 0  # of calls of the model inside of each other
        self._thread = 0  # of the outermost call
        self._call: ForwardCall | None = None  # the outermost call in progress
        self._sample_count: SampleCount | None = None  # of that call
        self._calls: weakref.WeakKeyDictionary[ForwardCall, None] = weakref.WeakKeyDictionary()  # in their order
        self._graph_task = -1  # the outermost backward pass in progress
        self._backward = BackwardPass()
        self._waiting = Waiting(self._matrices, sink)
        self.returned: dict[int, ParameterMatrix] = {}  # of the last pass, by autograd.grad; by id
        self._handles: list[Any] = []
        self._entries = entry_modules(model, {use.module for use in uses})
        self._register_hooks(model, uses)
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self.uncompiled = uncompiled()  # cannot be made while a graph is traced

    def _register_hooks(self, model: nn.Module, uses: list[Use]) -> None:
        this = weakref.ref(self)
        by_module: dict[tuple[nn.Module, LayerRule], dict[int, Use]] = {}
        for use in uses:
            by_module.setdefault((use.module, use.rule), {})[use.spec_index] = use
        for (module, rule), of_module in by_module.items():
            self._handles += rule.watch(module, Watcher(this, of_module))

        before, after = weak_method(self._before_forward), weak_method(self._after_forward)
        for module in self._entries:  # the samples of a call are those of the inputs of its outermost module
            if isinstance(module, torch.jit.ScriptModule):  # the model itself, which then has no uses
                continue
            self._handles += [
                module.register_forward_pre_hook(Hook(this, before), with_kwargs=True, prepend=True),
                module.register_forward_hook(Hook(this, after), always_call=True),
            ]
        self.compiled_calls = CompiledCalls(
            [model, *(use.module for use in uses)], this, lambda function: Hook(this, function), self._handles
        )

    def find_compiled_modules(self) -> None:
        """Finds modules that were compiled in place since the last call. Does nothing unless a refresh is due."""
        model = self._model()
        if self.armed and model is not None:
            self.compiled_calls.add_compiled_in_place(model)

    def note_armed(self) -> None:
        """Call this after matrices have been armed or disarmed."""
        self.armed = any(matrix.armed for matrix in self._matrices)
        self._waiting.update_limit()

    def listening(self) -> bool:
        """Returns True if a call of the model would now be recorded."""
        return self.armed and torch.is_grad_enabled() and self._records_in_this_mode()

    def _records_in_this_mode(self) -> bool:
        model = self._model()
        return model is not None and (model.training or self.in_eval)

    def expects(self) -> bool:
        """Before a compiled call, in whose graph the model's own hook does not run: will it be recorded?"""
        if torch.is_grad_enabled() and self._depth == 0:
            self._begin_training_call()
        return self.listening()

    def remove(self) -> None:
        """Removes all hooks from the model."""
        self._finalizer()

    def retained(self) -> set[int]:
        """The ids of the matrices with gradients of retained graphs."""
        return self._waiting.retained()

    def discard(self, matrix: ParameterMatrix | None = None) -> None:
        """Drops what has arrived, for one matrix or all. Gradients of past forward calls may still arrive."""
        self._end_interrupted_call()
        self._waiting.discard(matrix)

    def flush(self) -> None:
        """Passes on all that has arrived."""
        self._end_interrupted_call()
        self._waiting.flush_all(retained=True)

    def complaint(self) -> str:
        """Returns the warning about ``sample_index`` after ``flush``; "" if none, or if the reasons tell it."""
        text = self._sample_index.complaint()
        told = any(reasons.without_detail(matrix.reason) == reasons.NO_SAMPLE_INDEX for matrix in self._matrices)
        return "" if told else text

    # ------------------------------------------------------------------------------------------ forward

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or in_functional_call():
            return
        self._end_interrupted_call(own=1)
        self._thread = self._thread if self._depth else threading.get_ident()
        self._depth += 1
        if self._call is not None or in_backward():
            return
        if self._depth == 1:
            self._graph_task = -1
            self._begin_training_call()
        if not self.armed:
            return
        whole, dim = model is self._model(), self._dims.get(model, 0)
        ragged = self._sample_index.read(args, kwargs) if whole and self.listening() else {}
        self._sample_count = SampleCount((args, kwargs), dim)
        if whole and not ragged and self._sample_count.from_inputs is None:
            return  # no tensors, as of an object of the user's: the inputs of its parts are read
        call = self._call = self._new_call()
        call.depth, call.ragged = self._depth, ragged
        call.samples = call.samples_from_inputs = self._sample_count.from_inputs
        if ragged:
            call.samples = next(iter(ragged.values())).samples
        elif self._sample_index.given and not whole:
            self._sample_index.note_part(self._model())
            return
        if self.listening() and dim is not None:
            call.follow(model, (args, kwargs), dim, self._sample_count.candidates)

    def _begin_training_call(self) -> None:
        """Parameters may have been frozen, unfrozen or cast since the last call."""
        self.forward_seen = True
        changed = [matrix for matrix in self._matrices if matrix.update_layout()]
        if self._on_forward is not None:
            self._on_forward(changed)

    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._depth == 0 or not torch.is_grad_enabled() or in_functional_call():
            return
        self._depth -= 1
        if self._call is None or self._depth >= self._call.depth:
            return
        call = self._end_call()
        if call is not None and not call.ragged and self._sample_count is not None:
            call.count_samples(self._sample_count, output)

    def _end_interrupted_call(self, own: int = 0) -> None:
        """Ends a call that Ctrl-C broke off, after which torch runs no hook. ``own`` calls that just begin stay."""
        if self._depth and self._thread == threading.get_ident() and calls_in_progress(self._entries) <= own:
            self._end_call()
            self._depth = 0

    def _end_call(self) -> ForwardCall | None:
        call, self._call = self._call, None
        if call is not None:
            call.end()
        return call

    def _new_call(self) -> ForwardCall:
        self._calls[call := ForwardCall()] = None
        return call

    def _current_call(self) -> ForwardCall:
        """Returns the call that a module's forward belongs to."""
        if self._call is not None:
            return self._call
        if in_backward():  # checkpointing runs a forward again
            if self._backward.first_call is not None:
                return self._backward.first_call
            unfinished = [c for c in self._calls if sum(c.waiting.values()) + sum(c.no_grad_uses.values())]
            if unfinished:
                return unfinished[-1]
        self._sample_index.note_part(self._model())
        return self._new_call()  # a part of the model was called directly

    def recording(self, matrix: ParameterMatrix) -> bool:
        """Returns True if a use of this matrix is now to be recorded."""
        if not matrix.armed or matrix.source == "batch" or not any(matrix.active):
            return False
        if self._model() is not None and not self._records_in_this_mode():
            matrix.not_captured = matrix.not_captured or reasons.EVAL
            return False
        if torch.is_grad_enabled():
            if in_functional_call():
                matrix.not_captured = matrix.not_captured or reasons.FUNCTIONAL
                return False
            matrix.not_captured = reasons.NOT_REACHED
            return True
        matrix.not_captured = matrix.not_captured or reasons.NO_GRAD
        call = self._call  # read once: another thread's call may end in between
        if call is not None and not in_backward():
            call.no_grad_uses[id(matrix)] += 1
        return False

    def batch(self, use: Use) -> Batch:
        """Returns the samples of a module's forward, known by the model's inputs alone."""
        call = self._current_call() if self._call is None and in_backward() else self._call
        samples, ragged = (None, {}) if call is None else (call.samples_from_inputs, call.ragged)
        return Batch(self._dims.get(use.module, 0), samples, ragged)

    def note_samples(self, use: Use, output: Any) -> None:
        """Remembers the samples of a use under no_grad, which reentrant checkpointing runs again in backward."""
        call = self._call
        if call is not None and call.no_grad_uses[id(use.matrix)] and isinstance(output, Tensor):
            call.note_no_grad(use, output.shape, self._batches(use, call, output))

    @property
    def trackers(self) -> list[SampleTracker]:
        """Those of the call in progress."""
        return [] if self._call is None else [*self._call.row_trackers, *self._call.trackers]

    def _batches(self, use: Use, call: ForwardCall, x: Tensor) -> Batches:
        """The samples of x, an output of the module or a tensor like it, for each number of samples."""
        dim, given = self._dims.get(use.module, 0), use.module in self._given_dims
        by_length = call.ragged and not call.row_trackers
        if call is self._call or given or dim is None or by_length or call.samples == 0:
            return call.batches_of(x, dim, given)
        return call.no_grad_batches.get((id(use), x.shape), {None: reasons.OUTSIDE})

    def record(self, use: Use, output: Tensor, inputs: Inputs, build: Build, like: Tensor | None = None) -> None:
        """Builds the factors of this use when the gradient of ``output`` arrives. ``like`` is a tensor with the same
        samples as the output, which is not a result of torch functions."""
        if not output.requires_grad or not any(use.active):
            return
        matrix = use.matrix
        if not is_strided(output, *inputs):
            matrix.fall_back_at_step(reasons.NOT_STRIDED)
            return
        call = self._current_call()
        # Made before the return below: a checkpoint has to save the same tensors when it runs again.
        batches = self._batches(use, call, output if like is None else like)
        pending = PendingGradient(use, call, build, inputs, output.shape, batches)
        if in_backward():
            self.enter_backward()
            if call.no_grad_uses[id(matrix)] > 0:
                call.no_grad_uses[id(matrix)] -= 1
            elif call.waiting[id(matrix)]:
                return  # non-reentrant checkpointing runs the forward again; the first run waits already
        call.waiting[id(matrix)] += 1
        if self._on_record is not None:
            self._on_record(matrix)
        this = weakref.ref(self)

        def arrive(grad: Tensor) -> None:
            recorder = this()
            matrix.double_backward = matrix.double_backward or torch.is_grad_enabled()  # create_graph=True
            if recorder is None or not matrix.armed or is_batched(grad) or not (reached := reaches_parameters(matrix)):
                return
            recorder._arrive(pending, grad)
            if reached == "grad":  # after what the last pass returned was dropped
                recorder.returned[id(matrix)] = matrix

        hook_target(output).register_hook(arrive)

    # ------------------------------------------------------------------------------------------ backward

    def _arrive(self, pending: PendingGradient, grad: Tensor) -> None:
        self.enter_backward()
        call, matrix = pending.call, pending.use.matrix
        if pending.grad is None:
            call.waiting[id(matrix)] -= 1
        self._backward.add(matrix, call)
        grad = grad.detach()
        call.retained = call.retained or torch._C._autograd._get_current_graph_task_keep_graph()
        if call.retained:
            self._waiting.retain(pending, grad)
            return
        pending.grad = grad
        self._waiting.add(pending, last=not any(other.unfinished(matrix) for other in self._calls))

    def enter_backward(self) -> None:
        """Runs once for each outermost backward pass, before its first gradient is used."""
        if self._graph_task == -1:
            self._graph_task = torch._C._current_graph_task_id()
            self._backward = BackwardPass()
            self._waiting.discard_factors()  # left by a pass that failed
            Variable._execution_engine.queue_callback(weak_method(self._leave_backward))
            if self._on_gradients is not None:
                with torch.no_grad():
                    self._on_gradients()

    def _leave_backward(self) -> None:
        """Passes on what has arrived. Uses that this pass did not reach are not waited for."""
        self._graph_task, self._backward = -1, BackwardPass()
        self._waiting.flush_all()
        if self._on_backward is not None:
            with torch.no_grad():
                self._on_backward()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
