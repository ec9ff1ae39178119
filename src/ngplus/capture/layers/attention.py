"""The rule of nn.MultiheadAttention, which packs its projections and never calls its own ``out_proj``.

Torch's attention is one function, ``F.multi_head_attention_forward``, that takes the projection weights as arguments.
No hook sees the projected queries, keys and values. On a refresh step a pre-hook wraps the inputs in a tensor subclass,
whose ``__torch_function__`` replaces the call of that function: the rule computes the projections, records them, and
calls the function with the identity as each projection. Masks, dropout and heads are still torch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Build, Inputs, LayerRule, autocast_input, has_own_forward, register_layer
from ngplus.capture.layers.hooks import Watcher
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.layers.linear import linear_parts
from ngplus.fisher.factors import Factors, Outer, SomeRows

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@register_layer(nn.MultiheadAttention)
class MultiheadAttentionRule(LayerRule):
    """Packed: [in_proj_weight in_proj_bias] is (3 E, E + 1). Separate: (E, E), (E, kdim), (E, vdim), and the packed
    bias is a vector. [out_proj.weight out_proj.bias] is (E, E + 1). ``bias_k`` and ``bias_v`` use mini-batch curvature;
    so do all parameters of a subclass with its own forward.

    Examples:
        >>> [row.shape for row in ngplus.NGPlus(nn.MultiheadAttention(8, 2)).plan()]
        [(24, 9), (8, 9)]
    """

    claims_children = True

    def matrices(self, module: Any) -> list[MatrixSpec]:
        if has_own_forward(module):
            return []
        out = MatrixSpec(("out_proj.weight", "out_proj.bias"))
        if module._qkv_same_embed_dim:
            return [out, MatrixSpec(("in_proj_weight", "in_proj_bias"))]
        separate = [MatrixSpec((f"{name}_proj_weight",), ("rows",)) for name in "qkv"]
        bias = [] if module.in_proj_bias is None else [MatrixSpec(("in_proj_bias",), ("column",))]
        return [out, *separate, *bias]

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        def before(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            specs = self.matrices(module)
            recording = [watcher.recording(i) for i in range(len(specs))]
            if not any(recording):
                for i in range(len(specs)):
                    watcher.note_samples(i, args[0] if args else kwargs.get("query"))
                return None
            for i, spec in enumerate(specs):
                if module._backward_hooks or module._backward_pre_hooks:
                    watcher.refuse(i, reasons.BACKWARD_HOOKS)
                elif not all(_is_registered(module, name) for name in spec.names):
                    watcher.refuse(i, reasons.PROJECTION)
            given: dict[str, Any] = {**dict(zip(("query", "key", "value"), args[:3], strict=False)), **kwargs}
            inputs = [given.pop(name, None) for name in ("query", "key", "value")]
            if not all(isinstance(x, Tensor) and not x.is_nested for x in inputs):
                return None

            def attend(**arguments: Any) -> Any:
                return _attend(module, watcher, arguments, inputs)

            wrapped = {id(x): _Intercepted.of(x, attend) for x in inputs}  # torch compares q, k and v by identity
            return (*(wrapped[id(x)] for x in inputs), *args[3:]), given

        return [module.register_forward_pre_hook(watcher.hook(before), with_kwargs=True)]


def _is_registered(module: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    return last in module.get_submodule(path)._parameters


class _Intercepted(Tensor):
    """An input of attention. ``attend`` is called in place of F.multi_head_attention_forward; other functions see the
    plain tensor."""

    plain: Tensor
    attend: Callable[..., Any]

    @classmethod
    def of(cls, x: Tensor, attend: Callable[..., Any]) -> _Intercepted:
        wrapped = x.as_subclass(cls)
        wrapped.plain, wrapped.attend = x, attend
        return wrapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        attend = next(x.attend for x in leaves if isinstance(x, cls))
        args, kwargs = pytree.tree_unflatten([x.plain if isinstance(x, cls) else x for x in leaves], tree)
        if func is F.multi_head_attention_forward:
            return attend(**_SIGNATURE.bind(*args, **kwargs).arguments)
        out = func(*args, **kwargs)
        return cls.of(out, attend) if func is Tensor.transpose else out


class _Identity(Tensor):
    """A weight with which F.linear returns its input without a product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return args[0].contiguous()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _attend(module: nn.MultiheadAttention, watcher: Watcher, given: dict[str, Any], inputs: list[Any]) -> Any:
    """F.multi_head_attention_forward with these arguments, its projections recorded. ``inputs`` are the query, key and
    value of the module."""
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    packed, size, in_bias = module._qkv_same_embed_dim, module.embed_dim, given["in_proj_bias"]

    def swap(x: Tensor) -> Tensor:
        """Converts torch's [length, batch, features] to the module's own order, or back."""
        return x.transpose(0, 1) if module.batch_first and x.dim() == 3 else x

    # One product for all projections of the same input.
    if not packed or key is not value:
        spans = [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    else:
        spans = [(query, 0, 3)] if query is key else [(query, 0, 1), (key, 1, 3)]
    projected: list[Tensor] = []
    for x, first, last in spans:
        rows = slice(first * size, last * size)
        weight = given["in_proj_weight"][rows] if packed else given[f"{'qkv'[first]}_proj_weight"]
        x = autocast_input(swap(x))
        out = F.linear(x, weight, None if in_bias is None else in_bias[rows])
        if packed:
            watcher.record(1, out, (x,), _build(module, rows.start, 3 * size), inputs[first])
        else:
            watcher.record(1 + first, out, (x,), _build(module, 0, size), inputs[first])
            watcher.record(4, out, (x,), _build(module, rows.start, 3 * size, bias_only=True), inputs[first])
        projected += (swap(part) for part in out.chunk(last - first, dim=-1))
    eye = torch.eye(size, dtype=given["out_proj_weight"].dtype, device=query.device)
    same = eye.as_subclass(_Identity)  # the out projection is a plain tensor: torch dispatches on the others' types
    identities = {
        "in_proj_weight": None, "in_proj_bias": None, "out_proj_weight": eye, "out_proj_bias": None,
        "use_separate_proj_weight": True, "q_proj_weight": same, "k_proj_weight": same, "v_proj_weight": same,
    }  # fmt: skip
    q, k, v = projected
    attended, weights = F.multi_head_attention_forward(q, k, v, **{**given, **identities})
    attended = autocast_input(attended)
    out = F.linear(attended, given["out_proj_weight"], given["out_proj_bias"])
    watcher.record(0, out, (attended,), _build(module, 0, size, torch_order=True), inputs[0])
    return out, weights


def _build(
    module: nn.MultiheadAttention, start: int, total: int, bias_only: bool = False, torch_order: bool = False
) -> Build:
    """The factors of a projection that has the rows from ``start`` of a matrix with ``total`` rows."""

    def build(inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        assert x is not None
        if torch_order and module.batch_first and x.dim() == 3:
            x, grad = x.transpose(0, 1), grad.transpose(0, 1)

        def place(part: Outer) -> Outer:
            assert isinstance(part.left, Tensor)
            left = SomeRows(part.left, start, total)
            return part if part.rows == total else Outer(left, part.right, part.ones, part.sizes)

        return linear_parts(x, grad, (False, True) if bias_only else active, _batch(module, x, batch), place)

    return build


def _batch(module: nn.MultiheadAttention, x: Tensor, batch: Batch) -> Batch:
    """The samples of x: along attention's batch dimension or, for packed sequences, along their positions."""
    own = 0 if module.batch_first else 1
    if batch.dim is not None and (x.dim() == 2 or x.shape[own] == 1):
        positions = 0 if x.dim() == 2 else 1 - own
        if x.shape[positions] in batch.ragged:
            return replace(batch, dim=positions)
    return replace(batch, dim=None if x.dim() == 2 or batch.dim is None else own)
