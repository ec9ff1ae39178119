"""The rule of modules without a rule: per-sample gradients by torch.func, if vmap applies to the module's forward.

It covers modules with parameters of their own whose children have none: another forward pass then costs about as much
as the module itself. Bare parameters of larger modules, such as a class token, get mini-batch curvature.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample
from ngplus.capture.layers.hooks import Watcher
from ngplus.capture.layers.layout import Layout, MatrixSpec, kind_of
from ngplus.fisher.factors import Factors, Rows
from ngplus.utils.warnings import no_vmap_warnings


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
        pairs = {
            name: bias
            for name, shape in shapes.items()
            if (bias := name.replace("weight", "bias")) != name and len(shape) > 1 and shapes.get(bias) == shape[:1]
        }
        single = [name for name in shapes if name not in {*pairs, *pairs.values()}]
        return [MatrixSpec(pair) for pair in pairs.items()] + [MatrixSpec((n,), (kind_of(shapes[n]),)) for n in single]

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        specs = self.matrices(module)
        versions: dict[int, list[int]] = {}  # of the inputs of each thread's current call

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
                    build = _VmapBuild(module, spec, given, found[0])
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

    def __init__(self, module: nn.Module, spec: MatrixSpec, given: Any, output: int) -> None:
        self._module, self._spec, self._output = module, spec, output
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
        # Copies, since the forward may change parameters, buffers or inputs in place.
        own = (*self._module.named_parameters(), *self._module.named_buffers())
        state = {name: p.detach().clone() for name, p in own}
        varied = {name: state.pop(name) for name in names}
        tensors = [x.clone() for x in inputs if x is not None]
        batched, dim = batch.dim is not None, batch.dim or 0
        if not batched:
            tensors, gradient = [x[None] for x in tensors], gradient[None]
        count = gradient.shape[dim]
        in_dims = [dim if x.dim() > dim and x.shape[dim] == count else None for x in tensors]
        if all(axis is None for axis in in_dims):
            raise NotPerSample(reasons.with_detail(reasons.VMAP_NO_BATCH, type(self._module).__name__))
        module = _without_hooks(self._module)

        def one(x: Tensor) -> Tensor:
            """A sample as a batch of one, if the module has a batch dimension."""
            return x.unsqueeze(dim) if batched else x

        def inner(params: dict[str, Tensor], tensors: list[Tensor], g: Tensor) -> Tensor:
            leaves = list(self._constants)
            for i, x, axis in zip(self._positions, tensors, in_dims, strict=True):
                leaves[i] = x if axis is None else one(x)
            args, kwargs = pytree.tree_unflatten(leaves, self._tree)
            output = functional_call(module, {**state, **params}, args, kwargs)
            return (pytree.tree_leaves(output)[self._output] * one(g)).sum()

        try:
            with torch.enable_grad(), no_vmap_warnings():
                grads = vmap(grad(inner), in_dims=(None, in_dims, dim))(varied, tensors, gradient)
        except Exception as error:  # whatever vmap does not support
            raise NotPerSample(reasons.with_detail(reasons.VMAP_FAILED, str(error).splitlines()[0])) from error
        layout = Layout([varied[name].shape for name in names], kinds)
        values = torch.stack([layout.join([grads[name][i] for name in names])[0] for i in range(count)])
        return Rows(batch.sums(values)[None])


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
