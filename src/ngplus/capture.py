"""Capture: watches the model on refresh steps, and hands each layer's factors on during backward.

A forward hook on each watched module puts a tensor hook on the module's output. When the output's gradient arrives, the
layer's rule turns it, with the saved input, into factors; once all uses of a matrix in this pass are in, they are
joined, handed to the sink and forgotten. Unless a matrix is armed, a hook returns at once.

Why so: full backward hooks break on in-place activations and on modules called several times. The input is kept by an
autograd node's own saved tensors, so that activation checkpointing and saved-tensor hooks treat it as any activation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from ngplus.fisher import Factors, join, widen
from ngplus.layers import Batch, Watcher
from ngplus.layers.rule import no_mixed_precision
from ngplus.matrices import ParameterMatrix, Use

Sink = Callable[[ParameterMatrix, Factors], None]
Build = Callable[[tuple[Tensor | None, ...], Tensor, tuple[bool, ...], Batch], Factors]
BatchDims = int | None | Mapping[str, int | None]


class _Saved(torch.autograd.Function):
    """A node beside the graph whose saved tensors are the layer's inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this node holds saved tensors; nothing flows through it")


class _Hook:
    """A hook that works for its capture only: in a copied or unpickled module, and once the capture is gone, it does
    nothing. (A module that is being called may still hold hooks that have just been removed.)"""

    def __init__(
        self, capture: weakref.ref[Capture] | None = None, function: Callable[..., Any] | None = None
    ) -> None:
        self.capture, self.function = capture, function

    def __call__(self, *args: Any) -> Any:
        if self.function is None or self.capture is None or self.capture() is None:
            return None
        return self.function(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


class Capture:
    """Watches the uses of a model's matrices. ``sink`` is called, under no_grad, with each matrix's joined factors."""

    def __init__(self, model: nn.Module, uses: list[Use], sink: Sink, batch_dim: BatchDims = 0) -> None:
        self._model = weakref.ref(model)
        self._sink = sink
        self._batch_size: int | None = None
        self._dims = batch_dims(model, batch_dim)
        self._root_dim = self._dims.get(model, 0)
        self._matrices = list({id(use.matrix): use.matrix for use in uses}.values())
        self._task = -1
        self._busy = False
        self.forward_seen = False
        self.in_eval = False  # record in eval mode, too: for study, never in training
        self._handles: list[Any] = []
        by_rule: dict[tuple[int, int], dict[int, Use]] = {}
        for use in uses:
            by_rule.setdefault((id(use.module), id(use.rule)), {})[use.spec] = use
        for group in by_rule.values():
            use = next(iter(group.values()))
            self._handles += use.rule.watch(use.module, _ModuleWatcher(weakref.ref(self), group))
        this = weakref.ref(self)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            capture = this()
            if capture is not None:
                capture._before_forward((args, kwargs))

        self._handles.append(model.register_forward_pre_hook(_Hook(this, before), with_kwargs=True))
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    def remove(self) -> None:
        """Takes all hooks off the model."""
        self._finalizer()

    def discard(self) -> None:
        """Forgets what has arrived; the gradients of a forward pass already made may still come."""
        for matrix in self._matrices:
            matrix.arrived = []

    def flush(self) -> None:
        """Hands on what is still held back for uses that did not take part in the loss."""
        for matrix in self._matrices:
            self._flush(matrix)

    def _before_forward(self, inputs: Any) -> None:
        if not torch.is_grad_enabled() or self._busy:
            return
        self.forward_seen = True
        for matrix in self._matrices:
            if matrix.update_layout():
                matrix.armed = True
        tensors = (x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.dim() > (self._root_dim or 0))
        first = next(tensors, None)
        self._batch_size = None if first is None or self._root_dim is None else first.shape[self._root_dim]

    def recording(self, matrix: ParameterMatrix) -> bool:
        model = self._model()
        return (
            matrix.armed
            and not self._busy
            and torch.is_grad_enabled()
            and matrix.source != "batch"
            and any(matrix.active)
            and (model is None or model.training or self.in_eval)
        )

    def batch(self, use: Use) -> Batch:
        return Batch(self._dims.get(use.module, 0), self._batch_size)

    def record(self, use: Use, output: Tensor, inputs: tuple[Tensor | None, ...], build: Build) -> None:
        """Waits for the gradient of ``output`` to build the factors of this use."""
        if not output.requires_grad or not any(use.active):
            return
        matrix, batch = use.matrix, self.batch(use)
        anchor = torch.zeros((), requires_grad=True)
        saved = [None if x is None else x.detach() for x in inputs]
        held = _Saved.apply(anchor, *saved).grad_fn  # type: ignore[no-untyped-call]
        if matrix.outstanding and torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing runs the forward again; the first run waits already
        matrix.outstanding += 1
        this, shape = weakref.ref(self), output.shape

        def arrive(grad: Tensor) -> None:
            capture = this()
            if capture is None or not matrix.armed:
                return
            with torch.no_grad(), no_mixed_precision(grad.device):
                saved = held.saved_tensors  # may run a checkpointed forward again, hooks and all
                try:
                    capture._busy = True
                    factors = build(saved, grad.detach().reshape(shape), use.active, batch)
                except Exception as error:
                    if matrix.source != "vmap":
                        raise
                    matrix.fall_back(f"vmap does not apply: {str(error).splitlines()[0]}")
                    return
                finally:
                    capture._busy = False
                capture._arrive(matrix, widen(factors, use.columns, matrix.layout.cols))

        _hook_target(output).register_hook(arrive)

    def _arrive(self, matrix: ParameterMatrix, factors: Factors) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            this = weakref.ref(self)
            Variable._execution_engine.queue_callback(lambda: _end_of_backward(this))
        matrix.arrived.append(factors)
        matrix.outstanding -= 1
        if matrix.outstanding <= 0:
            self._flush(matrix)

    def _flush(self, matrix: ParameterMatrix) -> None:
        arrived, matrix.arrived, matrix.outstanding = matrix.arrived, [], 0
        with torch.no_grad():
            for factors in join(arrived):
                self._sink(matrix, factors)


def _hook_target(output: Tensor) -> Tensor:
    """The tensor whose hook sees the output's gradient, whatever is done to the output in place.

    A Linear on N-D input returns a view. An in-place activation on a view leaves the view's own node out of the graph;
    the gradient then reaches the base, which has the same entries.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not (base.is_contiguous() and output.is_contiguous()):
        return output
    return base if base.requires_grad else output


def _end_of_backward(capture: weakref.ref[Capture]) -> None:
    """Uses that this pass did not reach are not waited for: the next pass brings other samples."""
    this = capture()
    if this is not None:
        this._task = -1
        this.flush()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class _ModuleWatcher(Watcher):
    """The watcher of one module: its matrices by their place in the rule's list."""

    def __init__(self, capture: weakref.ref[Capture], uses: dict[int, Use]) -> None:
        self._capture, self._uses = capture, uses

    def hook(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _Hook(self._capture, function)

    def recording(self, matrix: int) -> bool:
        capture, use = self._capture(), self._uses.get(matrix)
        return capture is not None and use is not None and capture.recording(use.matrix)

    def record(self, matrix: int, output: Tensor, inputs: tuple[Tensor | None, ...], build: Build) -> None:
        capture = self._capture()
        if capture is not None and self.recording(matrix):
            capture.record(self._uses[matrix], output, inputs, build)

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
            adapted = rule.adapt(module, inputs, output, capture.batch(use))

            def build(
                saved: tuple[Tensor | None, ...], grad: Tensor, active: tuple[bool, ...], batch: Batch
            ) -> Factors:
                return rule.factors(module, saved, grad, active, batch)

            capture.record(use, adapted, inputs, build)
            return None if adapted is output else adapted

        return _Hook(self._capture, after)


def batch_dims(model: nn.Module, batch_dim: BatchDims) -> dict[nn.Module, int | None]:
    """The batch dimension of each module: 0, but 1 inside torch's Transformers with batch_first=False.

    A number is for the whole model; a mapping gives module names, each for the module and all below it, and None for
    a module that has no batch dimension.
    """
    if not isinstance(batch_dim, Mapping):
        if batch_dim != 0:
            return dict.fromkeys(model.modules(), batch_dim)
        batch_dim = {}
    dims: dict[nn.Module, int | None] = {}
    for module in model.modules():
        if _batch_second(module):
            dims.update(dict.fromkeys(module.modules(), 1))
    names = dict(model.named_modules())
    for name, dim in batch_dim.items():
        if name not in names:
            raise ValueError(f"Invalid batch_dim: the model has no module {name!r}")
        dims.update(dict.fromkeys(names[name].modules(), dim))
    return dims


def _batch_second(module: nn.Module) -> bool:
    """Does this container of torch's take [length, batch, features]?"""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return any(_batch_second(layer) for layer in module.layers)
    return isinstance(module, nn.Transformer | nn.MultiheadAttention) and not module.batch_first
