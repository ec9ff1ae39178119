"""Capture: watches the model on refresh steps, and hands each layer's factors on during backward.

A forward hook on each watched module puts a tensor hook on the module's output. When the output's gradient arrives, the
layer's rule turns it, with the saved input, into factors. Once all uses of a matrix in a call of the model are in, they
are joined, handed to the sink and forgotten. Unless a matrix is armed, a hook returns at once.

Why so: full backward hooks break on in-place activations and on modules called several times. The input is kept by an
autograd node's own saved tensors, so that activation checkpointing and saved-tensor hooks treat it as any activation.

What belongs together: all uses of a matrix in one call of the model, and in calls that take part in one backward pass,
see the same samples. Calls with backward passes of their own are micro-batches. A backward pass that retains its graph
may be followed by another one for the same samples, so its gradients are kept, and added up, until the step.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from ngplus.capture.calls import (
    BatchDims,
    Build,
    ForwardCall,
    PendingGradient,
    SampleIndex,
    SampleIndexReader,
    Saved,
    batch_dims,
)
from ngplus.capture.hooks import Hook, ModuleWatcher, lie_plainly
from ngplus.capture.layers import Batch
from ngplus.capture.layers.base import NotPerSample, no_mixed_precision
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.fisher.factors import Factors, join
from ngplus.utils.compiled import CompiledCalls, uncompiled

Sink = Callable[[ParameterMatrix, Factors], None]


class Recorder:
    """Watches the uses of a model's matrices. ``sink`` is called, under no_grad, with each matrix's joined factors;
    ``on_forward`` before each pass over the model, with the matrices that have changed since the last one,
    ``on_gradients`` when a backward pass brings the first gradient, before it has added to any .grad of a matrix that
    it will bring, and ``on_backward`` after it."""

    def __init__(
        self,
        model: nn.Module,
        uses: list[Use],
        sink: Sink,
        batch_dim: BatchDims = 0,
        on_forward: Callable[[list[ParameterMatrix]], None] | None = None,
        on_backward: Callable[[], None] | None = None,
        on_gradients: Callable[[], None] | None = None,
        sample_index: SampleIndex | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._sink, self._on_forward, self._on_backward = sink, on_forward, on_backward
        self._on_gradients = on_gradients
        self._dims = batch_dims(model, batch_dim)
        self._root_dim = self._dims.get(model, 0)
        self._told_rows = SampleIndexReader(sample_index)
        self._matrices = list({id(use.matrix): use.matrix for use in uses}.values())
        self.forward_seen = False
        self.in_eval = False  # record in eval mode, too: for study, never in training
        self.armed = False  # is any matrix?
        self._depth = 0
        self._thread = 0  # of the outermost call
        self._call: ForwardCall | None = None
        self._calls: weakref.WeakKeyDictionary[ForwardCall, None] = weakref.WeakKeyDictionary()  # in their order
        self._task = -1  # the outermost backward pass under way
        self._task_call: ForwardCall | None = None
        self._ready: dict[int, list[tuple[ForwardCall, Factors]]] = {}
        self._kept: list[PendingGradient] = []
        self._handles: list[Any] = []
        by_rule: dict[tuple[int, int], dict[int, Use]] = {}
        for use in uses:
            by_rule.setdefault((id(use.module), id(use.rule)), {})[use.spec_index] = use
        this = weakref.ref(self)
        for group in by_rule.values():
            use = next(iter(group.values()))
            self._handles += use.rule.watch(use.module, ModuleWatcher(this, group))

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (capture := this()) is not None:
                capture._before_forward((args, kwargs))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (capture := this()) is not None:
                capture._after_forward(output)

        self._handles += [
            model.register_forward_pre_hook(Hook(this, before), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(this, after), always_call=True),
        ]
        self.compiled_calls = CompiledCalls(
            [model, *(use.module for use in uses)], this, lambda function: Hook(this, function), self._handles
        )
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self.uncompiled = uncompiled()  # made here, since it cannot be made while a graph is traced

    def look_for_compiled_calls(self) -> None:
        """While a refresh is due: has a module been compiled in place?"""
        model = self._model()
        if self.armed and model is not None:
            self.compiled_calls.add_compiled_in_place(model)

    def note_armed(self) -> None:
        """After matrices have been armed or disarmed."""
        self.armed = any(matrix.armed for matrix in self._matrices)

    def listening(self) -> bool:
        """Would a call at this point be recorded?"""
        model = self._model()
        return self.armed and torch.is_grad_enabled() and model is not None and (model.training or self.in_eval)

    def expects(self) -> bool:
        """Before a compiled call: the look that the model's own hook, which is compiled with it, cannot take."""
        if torch.is_grad_enabled() and self._depth == 0:
            self._notice()
        return self.listening()

    def remove(self) -> None:
        """Takes all hooks off the model."""
        self._finalizer()

    def kept(self) -> set[int]:
        """The matrices, by id, whose gradients are kept until the step."""
        return {id(slot.use.matrix) for slot in self._kept}

    def discard(self, matrix: ParameterMatrix | None = None) -> None:
        """Forgets what has arrived, for one matrix or all; the gradients of a forward pass already made may still
        come."""
        gone = [slot for slot in self._kept if matrix is None or slot.use.matrix is matrix]
        self._kept = [slot for slot in self._kept if not (matrix is None or slot.use.matrix is matrix)]
        for slot in gone:
            slot.forget()
        if matrix is None:
            self._ready.clear()

    def flush(self) -> None:
        """Hands on all that has arrived: at the step, or for study."""
        kept, self._kept = self._kept, []
        for slot in kept:
            self._make_ready(slot)
        self._flush_all()
        for matrix in self._matrices:
            matrix.settle()

    def complaint(self) -> str:
        """What the user is to be told of ``sample_index``, after all has been handed on; "" for nothing."""
        return self._told_rows.complaint()

    # ------------------------------------------------------------------------------------------ forward

    def _before_forward(self, inputs: Any) -> None:
        if not torch.is_grad_enabled() or _functional():
            return
        if self._depth and self._thread == threading.get_ident() and not self._is_called_by_itself():
            self._depth, self._call = 0, None  # Ctrl-C has broken the last call off: no hook runs then
        self._depth += 1
        if self._depth == 1:
            self._thread = threading.get_ident()
        if self._depth > 1 or torch._C._current_graph_task_id() != -1:
            return
        self._task = -1
        self._notice()
        if not self.armed:
            return
        rows = self._told_rows.of(*inputs) if self.listening() else {}
        self._call = self._new_call()
        self._call.rows = rows
        self._sizes = Counter(size for size, _ in self._leading(inputs))
        self._short = bool(self._root_dim) and _has_short(inputs)
        # Until the output is known: the most common first dimension, of the tensor with the most dimensions.
        ranked = sorted(self._leading(inputs), key=lambda s: (-self._sizes[s[0]], -s[1]))
        self._call.batch_size = self._call.expected = ranked[0][0] if ranked else None
        if rows:
            self._call.batch_size = next(iter(rows.values())).samples

    def _is_called_by_itself(self) -> bool:
        """Is the call that begins a part of one that is still under way?"""
        frame, model, found = inspect.currentframe(), self._model(), 0
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model:
                found += 1
            frame = frame.f_back
        return found > 1

    def _notice(self) -> None:
        """A training pass begins: parameters may have been frozen, thawed or cast since the last one."""
        self.forward_seen = True
        changed = [matrix for matrix in self._matrices if matrix.update_layout()]
        if self._on_forward is not None:
            self._on_forward(changed)

    def _after_forward(self, output: Any) -> None:
        if self._depth == 0 or not torch.is_grad_enabled() or _functional():
            return
        self._depth -= 1
        if self._depth or self._call is None:
            return
        call, self._call = self._call, None
        if call.rows:
            return  # how many samples there are is known
        votes, first = Counter(self._sizes), call.batch_size
        sizes = [size for size, _ in self._leading(output)]
        if self._root_dim and not sizes and not votes and self._short and _has_short(output):
            raise ValueError(
                f"Invalid batch_dim: {self._root_dim}. It counts from 0, and no tensor that goes into the model or "
                f"comes out of it has more than {self._root_dim} dimensions"
            )
        for size in sizes:
            if not first or size % first:  # else it may have rows for each sample, as after flatten(0, 1)
                votes[size] += 2  # a mask or a table of positions comes in, but it does not come out
        # The first that comes in and goes out, too, is the batch, however many states, weights or layers go along.
        through = next((size for size in self._sizes if size in sizes), None)
        likeliest = max(votes, key=lambda s: (votes[s], s == first)) if votes else None
        call.batch_size = likeliest if through is None else through

    def _leading(self, tree: Any) -> Iterator[tuple[int, int]]:
        """The sizes of the batch dimension that a tree of tensors may have, with their numbers of dimensions."""
        dim = self._root_dim
        for x in pytree.tree_leaves(_plain(tree)):
            if dim is not None and isinstance(x, Tensor) and x.dim() > dim and not (x.is_nested and dim):
                yield x.size(dim), x.dim()  # of a nested one the first dimension alone has a size

    def _new_call(self) -> ForwardCall:
        call = ForwardCall()
        self._calls[call] = None
        return call

    def _present_call(self) -> ForwardCall:
        """The call that a module's forward belongs to."""
        if self._call is not None:
            return self._call
        if torch._C._current_graph_task_id() != -1:  # checkpointing makes a forward again, during backward
            if self._task_call is not None:
                return self._task_call
            open_calls = [call for call in self._calls if sum(call.waiting.values()) + sum(call.hidden.values())]
            if open_calls:
                return open_calls[-1]
        self._told_rows.note_part(self._model())
        return self._new_call()  # a part of the model was called by itself

    def recording(self, matrix: ParameterMatrix) -> bool:
        if not matrix.armed or matrix.source == "batch" or not any(matrix.active):
            return False
        model = self._model()
        if model is not None and not (model.training or self.in_eval):
            return False
        if torch.is_grad_enabled():
            return not _functional()
        call = self._call  # read once: another thread's call may end in between
        if call is not None and torch._C._current_graph_task_id() == -1:
            call.hidden[id(matrix)] += 1
        return False

    def batch(self, use: Use) -> Batch:
        """For a module's forward, which may be run again in backward: what was expected when the call began."""
        again = self._call is None and torch._C._current_graph_task_id() != -1
        call = self._present_call() if again else self._call
        size, rows = (None, {}) if call is None else (call.expected, call.rows)
        return Batch(self._dims.get(use.module, 0), size, rows)

    def record(
        self,
        use: Use,
        output: Tensor,
        inputs: tuple[Tensor | None, ...],
        build: Build,
    ) -> None:
        """Waits for the gradient of ``output`` to build the factors of this use."""
        if not output.requires_grad or not any(use.active):
            return
        matrix = use.matrix
        if not lie_plainly(output, *inputs):
            matrix.give_up("its module takes or gives a sparse or nested tensor")
            return
        call = self._present_call()
        anchor = torch.zeros((), requires_grad=True)
        saved = [None if x is None else x.detach() for x in inputs]
        held = Saved.apply(anchor, *saved)  # type: ignore[no-untyped-call]
        if torch._C._current_graph_task_id() != -1:
            self._enter_backward()
            if call.hidden[id(matrix)] > 0:
                call.hidden[id(matrix)] -= 1
            elif call.waiting[id(matrix)]:
                return  # checkpointing without reentry runs the forward again; the first run waits already
        call.waiting[id(matrix)] += 1
        slot = PendingGradient(use, call, build, held, output.shape, self._dims.get(use.module, 0))
        this = weakref.ref(self)

        def arrive(grad: Tensor) -> None:
            capture = this()
            if capture is not None and matrix.armed and not _batched(grad) and _reaches(matrix):
                capture._arrive(slot, grad)

        _hook_target(output).register_hook(arrive)

    # ------------------------------------------------------------------------------------------ backward

    def _arrive(self, slot: PendingGradient, grad: Tensor) -> None:
        self._enter_backward()
        call, matrix = slot.call, slot.use.matrix
        if slot.grad is None:
            call.waiting[id(matrix)] -= 1
        if self._task_call is None:
            self._task_call = call
        elif call.first is not self._task_call.first:
            call.first.partner = self._task_call.first
        grad = grad.detach()
        call.retained = call.retained or torch._C._autograd._get_current_graph_task_keep_graph()
        if call.retained:
            if slot.grad is None:
                self._kept.append(slot)
            slot.grad = grad if slot.grad is None else slot.grad + grad
            return
        slot.grad = grad
        last = not any(other.unfinished(matrix) for other in self._calls)
        self._make_ready(slot)
        if last:
            self._flush(matrix)

    def _make_ready(self, slot: PendingGradient) -> None:
        matrix, call = slot.use.matrix, slot.call
        assert slot.grad is not None
        with torch.no_grad(), no_mixed_precision(slot.grad.device):
            try:
                factors = None if matrix.given_up else slot.factors()
            except NotPerSample as reason:
                matrix.give_up(str(reason))
                self._ready.pop(id(matrix), None)
                return
            finally:
                slot.grad = None
                if not call.retained:
                    slot.held = None  # the graph, and with it this slot, lives on as long as the loss
        if factors is not None:
            self._ready.setdefault(id(matrix), []).append((call, factors))

    def _flush_all(self) -> None:
        for matrix in self._matrices if self._ready else ():
            self._flush(matrix)

    def _flush(self, matrix: ParameterMatrix) -> None:
        together: dict[ForwardCall, list[Factors]] = {}
        for call, factors in self._ready.pop(id(matrix), []):
            together.setdefault(call.first, []).append(factors)
        with torch.no_grad(), no_mixed_precision(matrix.params[0].device):
            for uses in together.values():
                for factors in join(uses):
                    self._sink(matrix, factors)

    def _enter_backward(self) -> None:
        """Once for each outermost pass: what it brings is handed on at its end."""
        if self._task == -1:
            self._task = torch._C._current_graph_task_id()
            self._ready.clear()  # of a pass that has failed: at its end there would be nothing left
            this = weakref.ref(self)
            Variable._execution_engine.queue_callback(lambda: _end_of_backward(this))
            if self._on_gradients is not None:
                with torch.no_grad():
                    self._on_gradients()

    def _leave_backward(self) -> None:
        """Uses that this pass did not reach are not waited for: the next pass brings other samples."""
        self._task, self._task_call = -1, None
        self._flush_all()
        if self._on_backward is not None:
            with torch.no_grad():
                self._on_backward()


def _end_of_backward(capture: weakref.ref[Recorder]) -> None:
    if (this := capture()) is not None:
        this._leave_backward()


def _functional() -> bool:
    """Is this a call by torch.func (the vmap fallback makes such calls) or by a tracer, and no training?"""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing()


def _batched(grad: Tensor) -> bool:
    """Many gradients at once (``is_grads_batched``, a vectorised Jacobian), none of which is for a step?"""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(grad) or functorch.is_legacy_batchedtensor(grad)


def _reaches(matrix: ParameterMatrix) -> bool:
    """Does this backward pass go on to the matrix's parameters, or only to an input whose gradient is asked for?"""
    managed = [matrix.managed[i]._unsharded_param for i in matrix.parts] if matrix.managed else None
    for param in managed or matrix.active_params:
        with torch.enable_grad():
            view = param.view_as(param).grad_fn  # which works without memory, too, as FSDP2 leaves it
        leaf = None if view is None else view.next_functions[0][0]
        try:
            if leaf is None or torch._C._will_engine_execute_node(leaf):
                return True
        except RuntimeError:  # autograd.grad for this parameter itself
            return True
    return False


def _hook_target(output: Tensor) -> Tensor:
    """The tensor whose hook sees the output's gradient, whatever is done to the output in place.

    A Linear on N-D input returns a view. An in-place activation on a view leaves the view's own node out of the graph;
    the gradient then reaches the base, which has the same entries.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base if base.requires_grad else output


def _plain(tree: Any) -> Any:
    """Containers that pytree does not open, such as the outputs of transformers, as dicts."""
    return dict(tree) if isinstance(tree, Mapping) else tree


def _has_short(tree: Any) -> bool:
    """Does it hold a tensor that could have had a batch dimension? A number, such as a loss, could not; the sizes of
    what is nested are not known."""
    return any(isinstance(x, Tensor) and x.dim() > 0 and not x.is_nested for x in pytree.tree_leaves(_plain(tree)))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
