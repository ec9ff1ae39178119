"""Modules that no rule knows: per-sample gradients by torch.func, where vmap can follow the module's forward.

It applies to a module with parameters of its own and no children that have any: calling it again on one sample at a
time costs about as much as the module itself. Parameters of a larger module, such as a class token, get mini-batch
curvature.
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

from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample, Watcher
from ngplus.capture.layers.layout import Layout, MatrixSpec, kind_of
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors, Rows


class UnknownModuleRule(LayerRule):
    """A ``weight...`` joins the ``bias...`` of the same name; every other parameter is a matrix of its own.

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

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        shapes = {name: p.shape for name, p in module._parameters.items() if p is not None}
        specs, taken = [], set()
        for name, shape in shapes.items():
            partner = name.replace("weight", "bias")
            if len(shape) < 2 or partner == name or shapes.get(partner) != shape[:1]:
                continue
            specs.append(MatrixSpec((name, partner)))
            taken |= {name, partner}
        for name, shape in shapes.items():
            if name not in taken:
                specs.append(MatrixSpec((name,), (kind_of(shape),)))
        return specs

    def watch(self, module: nn.Module, watcher: Watcher) -> list[Any]:
        specs = self.matrices(module)
        versions: dict[int, list[int]] = {}  # of the inputs of the call that each thread is in

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if any(watcher.recording(i) for i in range(len(specs))):
                versions[threading.get_ident()] = _versions((args, dict(kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            given = (args, dict(kwargs))
            leaves, tree = pytree.tree_flatten(given)
            changed = versions.pop(threading.get_ident(), None) not in (None, _versions(given))
            tensors = tuple(x.detach() if isinstance(x, Tensor) else None for x in leaves)
            outputs = pytree.tree_leaves(output)
            found = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
            for i, spec in enumerate(specs):
                if not watcher.recording(i):
                    continue
                if changed:
                    watcher.refuse(i, f"{type(module).__name__} changes its inputs in place")
                elif len(found) == 1:
                    build = _Build(module, spec, leaves, tree, found[0])
                    watcher.record(i, outputs[found[0]], tensors, build)
                elif found:
                    watcher.refuse(i, f"{type(module).__name__} has several outputs")

        return [
            module.register_forward_pre_hook(watcher.hook(before), with_kwargs=True),
            module.register_forward_hook(watcher.hook(after), with_kwargs=True, prepend=True),
        ]


class _Build:
    """G_i = d <f(W; x_i), g_i> / dW for each sample i, by vmap over the module's forward."""

    def __init__(
        self, module: nn.Module, spec: MatrixSpec, leaves: list[Any], tree: pytree.TreeSpec, output: int
    ) -> None:
        self.module, self.spec, self.tree, self.output = module, spec, tree, output
        self.constants = [None if isinstance(x, Tensor) else x for x in leaves]

    def __call__(self, inputs: Inputs, gradient: Tensor, active: Active, batch: Batch) -> Factors:
        dim = batch.dim
        names = [name for name, on in zip(self.spec.names, active, strict=True) if on]
        kinds = [kind for kind, on in zip(self.spec.kinds, active, strict=True) if on]
        # Copies, since the module may change its weights, or a part of its inputs, in place once more.
        own = (*self.module.named_parameters(), *self.module.named_buffers())
        state = {name: p.detach().clone() for name, p in own}
        fixed = {name: p for name, p in state.items() if name not in names}
        varied = {name: state[name] for name in names}
        batched = dim is not None
        if dim is None:
            inputs, gradient, dim = tuple(None if x is None else x[None] for x in inputs), gradient[None], 0

        def one(x: Tensor) -> Tensor:
            """A sample as the module wants it: a batch of one, unless it has no batch dimension."""
            return x.unsqueeze(dim) if batched else x

        count = gradient.shape[dim]
        along = [None if x is None or x.dim() <= dim or x.shape[dim] != count else dim for x in inputs]

        if all(axis is None for axis in along):
            raise NotPerSample(f"no input of {type(self.module).__name__} shares the batch dimension of its output")
        missing = [x is None for x in inputs]
        bare = _without_hooks(self.module)

        def inner(params: dict[str, Tensor], tensors: list[Tensor], g: Tensor) -> Tensor:
            leaves = [
                constant if absent else x if axis is None else one(x)
                for constant, absent, x, axis in zip(self.constants, missing, tensors, along, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(leaves, self.tree)
            output = functional_call(bare, {**fixed, **params}, args, kwargs)
            return (pytree.tree_leaves(output)[self.output] * one(g)).sum()

        tensors = [torch.zeros(()) if x is None else x.clone() for x in inputs]
        try:
            with torch.enable_grad():
                per_row = vmap(grad(inner), in_dims=(None, along, dim))(varied, tensors, gradient)
        except Exception as error:  # whatever vmap cannot follow
            raise NotPerSample(f"vmap does not apply: {str(error).splitlines()[0]}") from error
        layout = Layout([varied[name].shape for name in names], kinds)
        values = torch.stack([layout.join([per_row[n][i] for n in names])[0] for i in range(count)])
        return Rows(batch.sums(values)[None])


def _without_hooks(module: nn.Module) -> nn.Module:
    """The same module to be called once more: hooks do not run again, and what it notes of a call stays as it was."""
    bare = object.__new__(type(module))
    seen: dict[int, Any] = {}
    for name, value in module.__dict__.items():
        bare.__dict__[name] = _copied(value, seen)
    bare.__dict__["_modules"] = {name: child and _without_hooks(child) for name, child in module._modules.items()}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        bare.__dict__[name] = OrderedDict()
    return bare


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """Containers with the containers in them; all else as it is. ``seen``: what has been copied already."""
    if not isinstance(value, MutableSequence | MutableMapping | MutableSet):
        return value
    if id(value) in seen:
        return seen[id(value)]
    new: Any = copy.copy(value)
    seen[id(value)] = new
    places: Any = () if isinstance(value, MutableSet) else range(len(value))  # in a set there are no containers
    for place in list(value) if isinstance(value, MutableMapping) else places:
        inner = new[place]
        if (copied := _copied(inner, seen)) is not inner:
            new[place] = copied
    return new


def _versions(tree: Any) -> list[int]:
    """How often each tensor has been changed in place."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and not x.is_inference()]
    return [x._version for x in tensors]
