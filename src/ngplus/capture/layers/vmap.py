"""The rule of modules without a rule: per-sample gradients by torch.func, if vmap applies to the module's forward.

It covers modules with parameters whose children have none: another forward pass then costs about as much
as the module itself. Bare parameters of larger modules, such as a class token, get mini-batch curvature.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample
from ngplus.capture.layers.hooks import Watcher
from ngplus.capture.layers.layout import Layout, MatrixSpec, spec_of
from ngplus.fisher.factors import Factors, OnDemand, tensor_version
from ngplus.fisher.factors.base import Samples
from ngplus.utils.memory import PeakBytes
from ngplus.utils.warnings import no_vmap_warnings

Measured = dict[tuple[Any, ...], int]  # bytes that one row takes, by the shapes of inputs and parameters


class _State:
    """Copies of a module's parameters and buffers, since its forward may change them in place."""

    def __init__(self, module: nn.Module) -> None:
        self.version = _state_version(module)
        own = (*module.named_parameters(), *module.named_buffers())
        self.tensors = {name: x.detach().clone() for name, x in own}


class _Shared:
    """What the calls of one module share: what rows took in earlier refreshes, and the copies of its state that other
    calls hold."""

    def __init__(self) -> None:
        self.measured: Measured = {}
        self._state: weakref.ref[_State] | None = None

    def state(self, module: nn.Module) -> _State:
        held = None if self._state is None else self._state()
        if held is None or held.version != _state_version(module):
            held = _State(module)
            self._state = weakref.ref(held)
        return held


def _state_version(module: nn.Module) -> list[Any]:
    return [tensor_version(x) for x in (*module.parameters(), *module.buffers())]


class UnknownModuleRule(LayerRule):
    """A ``weight...`` and the ``bias...`` of the same name form one matrix, every other parameter one of its own.

    Examples:
        >>> class Scale(nn.Module):  # nothing is registered for it
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(3))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> ngplus.NGPlus(Scale()).plan()["weight"].source
        'vmap'
    """

    def matrices(self, module: Any) -> list[MatrixSpec]:
        shapes = {name: p.shape for name, p in module._parameters.items() if p is not None}
        alone = {name: spec_of(name, shape, module) for name, shape in shapes.items()}
        biases = {name: name.replace("weight", "bias") for name in shapes if "weight" in name}
        joined = []
        for name, bias in biases.items():
            kind, shape = alone[name].kinds[0], shapes[name]
            if len(shape) > 1 and shapes.get(bias) == shape[: 2 if kind == "batched" else 1]:
                kinds = (kind if kind == "batched" else "rows", "column")
                joined.append(MatrixSpec((name, bias), kinds, alone[name].groups))
        found = {name for spec in joined for name in spec.names}
        return joined + [spec for name, spec in alone.items() if name not in found]

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        specs = self.matrices(module)
        versions: dict[int, list[int]] = {}  # of the inputs of each thread's current call
        shared = _Shared()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if any(watcher.recording(i) for i in range(len(specs))):
                versions[threading.get_ident()] = _versions((args, dict(kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            given = (args, dict(kwargs))
            changed = versions.pop(threading.get_ident(), None) not in (None, _versions(given))
            outputs = pytree.tree_leaves(output)
            found = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
            for i, spec in enumerate(specs):
                if not watcher.recording(i):
                    continue
                if changed:
                    watcher.refuse(i, reasons.with_detail(reasons.VMAP_IN_PLACE, type(module).__name__))
                elif len(found) == 1:
                    build = _VmapBuild(module, spec, given, found[0], shared)
                    watcher.record(i, outputs[found[0]], build.tensors(given), build)
                elif found:
                    watcher.refuse(i, reasons.with_detail(reasons.VMAP_OUTPUTS, type(module).__name__))

        return [
            module.register_forward_pre_hook(watcher.hook(before), with_kwargs=True),
            module.register_forward_hook(watcher.hook(after), with_kwargs=True, prepend=True),
        ]


class _VmapBuild:
    """Builds G_i = d <f(W; x_i), g_i> / dW for each sample i, by vmap over the module's forward.

    ``given`` are the arguments of the call, ``output`` is the index of the output tensor whose gradient arrives.
    """

    def __init__(self, module: nn.Module, spec: MatrixSpec, given: Any, output: int, shared: _Shared) -> None:
        self._module, self._spec, self._output, self._shared = module, spec, output, shared
        leaves, self._tree = pytree.tree_flatten(given)
        self._positions = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self._constants = [None if isinstance(x, Tensor) else x for x in leaves]  # tensors are saved by the recorder

    def tensors(self, given: Any) -> Inputs:
        leaves = pytree.tree_leaves(given)
        return tuple(leaves[i] for i in self._positions)

    def __call__(self, inputs: Inputs, gradient: Tensor, active: Active, batch: Batch) -> Factors:
        names, kinds = zip(
            *((n, k) for n, k, on in zip(self._spec.names, self._spec.kinds, active, strict=True) if on), strict=True
        )
        state = self._shared.state(self._module)
        tensors = [x for x in inputs if x is not None]
        if batch.dim is None:
            tensors, gradient = [x[None] for x in tensors], gradient[None]
        dim = batch.dim or 0
        count = gradient.shape[dim]
        in_dims = [dim if x.dim() > dim and x.shape[dim] == count else None for x in tensors]
        if all(axis is None for axis in in_dims):
            raise NotPerSample(reasons.with_detail(reasons.VMAP_NO_BATCH, type(self._module).__name__))
        module, batched = _without_hooks(self._module), batch.dim is not None

        def one(x: Tensor) -> Tensor:
            """A row as a batch of one, if the module has a batch dimension."""
            return x.unsqueeze(dim) if batched else x

        def inner(params: dict[str, Tensor], rest: dict[str, Tensor], tensors: list[Tensor], g: Tensor) -> Tensor:
            leaves = list(self._constants)
            for i, x, axis in zip(self._positions, tensors, in_dims, strict=True):
                leaves[i] = x if axis is None else one(x)
            args, kwargs = pytree.tree_unflatten(leaves, self._tree)
            output = functional_call(module, {**rest, **params}, args, kwargs)
            return (pytree.tree_leaves(output)[self._output] * one(g)).sum()

        layout = Layout([state.tensors[name].shape for name in names], kinds, self._spec.groups)
        given = (tensors, in_dims), (gradient, dim)
        return OnDemand(_VmapGradients(inner, state, names, layout, *given, batch, self._shared.measured))


class _VmapGradients:
    """The gradients of each sample's <f(W; x_i), g_i>, by vmap over some rows of the inputs at a time.

    A sample has one row along the batch dimension, or several if samples were flattened into it.

    Args:
        inner: of the varied parameters, the other ones, the inputs and the output gradient of one row.
        state: the parameters and buffers as they are now.
        names: of the varied ones.
        layout: of the matrix that they form.
        inputs: the tensors, and the batch dimension of each; None for one that all rows share.
        gradient: of the output, and its batch dimension.
        batch: the samples.
        measured: the bytes that one row takes, where they are known.
    """

    def __init__(
        self,
        inner: Callable[[dict[str, Tensor], dict[str, Tensor], list[Tensor], Tensor], Tensor],
        state: _State,
        names: Sequence[str],
        layout: Layout,
        inputs: tuple[list[Tensor], list[int | None]],
        gradient: tuple[Tensor, int],
        batch: Batch,
        measured: Measured,
    ) -> None:
        self._inner, self._state, self._names, self._layout = inner, state, names, layout
        (self._inputs, self._in_dims), (self._gradient, self._dim) = inputs, gradient
        rows = self._gradient.shape[self._dim]
        self._order, self._sizes = _rows_by_sample(batch, rows, self._gradient.device)
        self._ends = list(accumulate(self._sizes))
        self.shape = (layout.groups, len(self._sizes), layout.rows, layout.cols)
        self.half_precision = state.tensors[names[0]].dtype in (torch.float16, torch.bfloat16)
        copies = list(state.tensors.values())
        each = self._gradient.element_size()
        key = (*self._names, *(x.shape for x in copies))
        key += tuple(x.shape if axis is None else x.select(axis, 0).shape for x, axis in zip(*inputs, strict=True))
        if key not in measured:
            batch.check_bytes(sum(x.nbytes for x in copies) + 2 * layout.groups * layout.rows * layout.cols * each)
            with PeakBytes(batch.check_bytes) as found:
                next(self._by_rows(self._each_row, self._order[:1], 1))
            measured[key] = found.peak
        self._step = max(1, batch.part_bytes // max(1, measured[key]))  # rows at a time
        self.entries = -(-measured[key] * min(self._step, max(self._sizes)) // each)

    def take(self, samples: Samples, dtype: torch.dtype) -> Tensor:
        chosen = range(len(self._sizes))[samples] if isinstance(samples, slice) else samples.tolist()
        spans = [self._order[self._ends[i] - self._sizes[i] : self._ends[i]] for i in chosen]
        owner = torch.arange(len(spans)).repeat_interleave(torch.tensor([len(span) for span in spans]))
        groups, _, m, n = self.shape
        out = self._gradient.new_zeros(len(spans), groups, m, n, dtype=dtype)

        start = 0
        for values in self._by_rows(self._each_row, torch.cat(spans), self._step):
            out.index_add_(0, owner[start : start + len(values)].to(out.device), values.to(dtype))
            start += len(values)
        return out.transpose(0, 1)

    def tensors(self) -> Iterator[Tensor]:
        yield from (*self._state.tensors.values(), *self._inputs, self._gradient)

    def _each_row(self, state: dict[str, Tensor], varied: dict[str, Tensor], inputs: list[Tensor], g: Tensor) -> Tensor:
        def joined(inputs: list[Tensor], g: Tensor) -> Tensor:
            found = grad(self._inner)(varied, state, inputs, g)
            return self._layout.join([found[name] for name in self._names])

        return vmap(joined, in_dims=(self._in_dims, self._dim))(inputs, g)

    def total(self, dtype: torch.dtype) -> Tensor:
        def summed(state: dict[str, Tensor], varied: dict[str, Tensor], inputs: list[Tensor], g: Tensor) -> Tensor:
            def of_rows(params: dict[str, Tensor]) -> Tensor:
                rows = vmap(lambda x, g: self._inner(params, state, x, g), in_dims=(self._in_dims, self._dim))
                return rows(inputs, g).sum()

            found = grad(of_rows)(varied)
            return self._layout.join([found[name] for name in self._names])

        groups, _, m, n = self.shape
        out = self._gradient.new_zeros(groups, m, n, dtype=dtype)
        for part in self._by_rows(summed, self._order, self._step):
            out += part
        return out

    def _by_rows(self, function: Callable[..., Tensor], rows: Tensor, step: int) -> Iterator[Tensor]:
        """Calls the function with copies of the state and of some rows at a time: the forward may change them."""
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            inputs = [
                x.clone() if axis is None else x.index_select(axis, chunk)
                for x, axis in zip(self._inputs, self._in_dims, strict=True)
            ]
            state = {name: x.clone() for name, x in self._state.tensors.items()}
            varied = {name: state.pop(name) for name in self._names}
            try:
                with torch.enable_grad(), no_vmap_warnings():
                    found = function(state, varied, inputs, self._gradient.index_select(self._dim, chunk))
            except (NotPerSample, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever vmap does not support
                line = (str(error).splitlines() or [type(error).__name__])[0]
                raise NotPerSample(reasons.with_detail(reasons.VMAP_FAILED, line)) from error
            yield found.detach()


def _rows_by_sample(batch: Batch, rows: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """The rows in the order of their samples, and the number of each sample's."""
    ragged = None if batch.dim is None else batch.ragged.get(rows)
    if ragged is not None:
        ragged.used = True
        return ragged.index.argsort(stable=True).to(device), ragged.sizes
    order = batch.by_sample(torch.arange(rows, device=device))
    return order.flatten(), [order.shape[1]] * len(order)


def _without_hooks(module: nn.Module) -> nn.Module:
    """Copies a module without hooks. Attributes that the copy's forward changes stay as they are in the module."""
    bare = object.__new__(type(module))
    copies: dict[int, Any] = {}
    bare.__dict__.update({name: _copy_containers(value, copies) for name, value in module.__dict__.items()})
    bare.__dict__["_modules"] = {name: child and _without_hooks(child) for name, child in module._modules.items()}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        bare.__dict__[name] = OrderedDict()
    return bare


def _copy_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copies lists, dicts and sets, and those inside of them; returns anything else as it is."""
    if not isinstance(value, MutableSequence | MutableMapping | MutableSet):
        return value
    if id(value) not in copies:
        new: Any = copy.copy(value)
        copies[id(value)] = new
        if isinstance(new, MutableMapping | MutableSequence):  # a set has no containers in it
            for key, inner in list(new.items() if isinstance(new, MutableMapping) else enumerate(new)):
                if (copied := _copy_containers(inner, copies)) is not inner:
                    new[key] = copied
    return copies[id(value)]


def _versions(tree: Any) -> list[int]:
    """The version of each tensor, which counts its changes in place."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and not x.is_inference()]
    return [x._version for x in tensors]
