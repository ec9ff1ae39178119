"""nn.MultiheadAttention, which packs its projections and never calls its own ``out_proj``.

Torch's attention is one function that takes the projection weights as arguments, so no hook can see the projected
queries, keys and values. On a refresh step the rule makes the projections itself, in plain sight, and hands the results
to torch's function with the identity as projection: masks, dropout, heads and weights stay torch's own work.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _module
from torch import Tensor, nn

from ngplus.capture.layers.base import Active, Inputs, LayerRule, Watcher, has_own_forward, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.layers.linear import linear_factors
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors, Outer

_Build = Callable[[Inputs, Tensor, Active, Batch], Factors]


@register_layer(nn.MultiheadAttention)
class MultiheadAttentionRule(LayerRule):
    """Packed: [in_proj_weight in_proj_bias] is (3 E, E + 1). Separate: (E, E), (E, kdim), (E, vdim), and the packed
    bias is a vector. [out_proj.weight out_proj.bias] is (E, E + 1). ``bias_k`` and ``bias_v`` get mini-batch curvature;
    so does all of a subclass with a forward of its own, which may do anything before and after torch's.

    Examples:
        >>> [row.shape for row in ngplus.NGPlus(nn.MultiheadAttention(8, 2)).plan()]
        [(24, 9), (8, 9)]
    """

    claims_children = True

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, nn.MultiheadAttention)
        if has_own_forward(module):
            return []
        out = MatrixSpec(("out_proj.weight", "out_proj.bias"))
        if module._qkv_same_embed_dim:
            return [out, MatrixSpec(("in_proj_weight", "in_proj_bias"))]
        separate = [MatrixSpec((f"{name}_proj_weight",), ("rows",)) for name in "qkv"]
        bias = [] if module.in_proj_bias is None else [MatrixSpec(("in_proj_bias",), ("column",))]
        return [out, *separate, *bias]

    def watch(self, module: nn.Module, watcher: Watcher) -> list[Any]:
        assert isinstance(module, nn.MultiheadAttention)
        calls = _Calls(module)
        handles: list[Any] = []

        def stands_between(module: nn.MultiheadAttention) -> bool:
            """Would any other hook see projected inputs, or an output without its projection?"""
            first, last = next(iter(module._forward_hooks)), next(reversed(module._forward_pre_hooks))
            others = (module._backward_hooks, module._backward_pre_hooks, _module._global_forward_hooks)
            return [last, first] != [handle.id for handle in handles] or any(others)

        def before(module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.enter()
            matrices = range(len(self.matrices(module)))
            if not any(watcher.recording(i) for i in matrices):
                return None
            reason = ""
            if stands_between(module):
                reason = "a hook stands between its module's inputs or output and the projections"
            elif not _are_plain(module):
                reason = "a projection of its module is no plain parameter"
            for i in matrices if reason else ():
                watcher.refuse(i, reason)
            if reason:
                return None
            given: dict[str, Any] = {**dict(zip(("query", "key", "value"), args[:3], strict=False)), **kwargs}
            query, key, value = given.get("query"), given.get("key"), given.get("value")
            if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
                return None
            if query.is_nested:
                return None
            if not calls.keep_out_others():
                return None
            q, k, v = _project(module, query, key, value, watcher)
            _hide_projections(module, query)
            rest = {n: x for n, x in kwargs.items() if n not in ("query", "key", "value")}
            return (q, k, v, *args[3:]), rest

        def after(module: nn.MultiheadAttention, args: tuple[Any, ...], output: Any) -> Any:
            if not calls.leave():
                return None
            if output is None:  # the call raised; hooks run all the same, so that nothing stays hidden
                return None
            attended, *rest = output
            # In the memory order of torch's own projection: the dropout that follows draws its mask in that order.
            transposed = module.batch_first and attended.dim() == 3
            flat = attended.transpose(0, 1) if transposed else attended
            out = F.linear(flat, module.out_proj.weight, module.out_proj.bias)
            out = out.transpose(0, 1) if transposed else out
            watcher.record(0, out, (attended,), _build_linear(module))
            return (out, *rest)

        handles += [
            module.register_forward_pre_hook(watcher.hook(before), with_kwargs=True),
            module.register_forward_hook(watcher.hook(after), always_call=True, prepend=True),
        ]
        return handles


class _Calls:
    """The calls of one module that are under way, one for each thread, and whose projections are hidden.

    What is hidden is so for all threads, so that one which hides them waits for the others to leave, and these wait for
    it. A call that is broken off by Ctrl-C does not leave, since torch's hooks then do not run: the next one of its
    thread does it for it.
    """

    PATIENCE = 10.0  # seconds until a refresh does without this call

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self._module = weakref.ref(module)
        self._hidden_by: dict[int, bool] = {}
        self._waits = False
        self._changed = threading.Condition()

    def _others(self) -> list[bool]:
        """Of each other thread that is inside: does it hide the projections?"""
        own = threading.get_ident()
        others = {ident: hidden for ident, hidden in self._hidden_by.items() if ident != own}
        alive = {thread.ident for thread in threading.enumerate()} if others else set()
        return [hidden for ident, hidden in others.items() if ident in alive]

    def enter(self) -> None:
        """Waits for a thread that hides the projections, or is about to."""
        with self._changed:
            self._leave()
            self._changed.wait_for(lambda: not (self._waits or any(self._others())), self.PATIENCE)
            self._hidden_by[threading.get_ident()] = False

    def keep_out_others(self) -> bool:
        """For the rest of this thread's call, so that projections can be hidden; False where another thread waits for
        the same, or one does not come to an end."""
        with self._changed:
            if self._waits:
                return False
            self._waits = True
            try:
                alone = self._changed.wait_for(lambda: not self._others(), self.PATIENCE)
            finally:
                self._waits = False
            self._hidden_by[threading.get_ident()] = alone
            self._changed.notify_all()
            return alone

    def leave(self) -> bool:
        """Shows what this thread's call has hidden; False where that is nothing."""
        with self._changed:
            return self._leave()

    def _leave(self) -> bool:
        module, hidden = self._module(), self._hidden_by.pop(threading.get_ident(), False)
        if hidden and module is not None:
            _show_projections(module)
        self._changed.notify_all()
        return hidden


def _batch(module: nn.MultiheadAttention, x: Tensor, batch: Batch) -> Batch:
    """Where the samples are: in attention's own batch dimension, or, of packed sequences, along their positions."""
    own = 0 if module.batch_first else 1
    if batch.dim is not None and (x.dim() == 2 or x.shape[own] == 1):
        along = 0 if x.dim() == 2 else 1 - own
        if x.shape[along] in batch.rows:
            return Batch(along, batch.size, batch.rows)
    if x.dim() == 2 or batch.dim is None:
        return Batch(None)
    return Batch(own, batch.size if module.batch_first else None, batch.rows)


def _build_linear(module: nn.MultiheadAttention) -> _Build:
    def build(inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        assert x is not None
        return linear_factors(x, grad, active, _batch(module, x, batch))

    return build


def _build_rows(module: nn.MultiheadAttention, start: int, total: int, vector: bool = False) -> _Build:
    """A use of some rows only: the left factor is zero in the others."""

    def build(inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        assert x is not None
        part = linear_factors(x, grad, (False, True) if vector else active, _batch(module, x, batch))
        assert isinstance(part.left, Tensor)
        left = part.left if part.rows == total else F.pad(part.left, (start, total - start - part.rows))
        return Outer(left, part.right, ones=part.ones)

    return build


def _project(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, watcher: Watcher
) -> tuple[Tensor, ...]:
    size, bias = module.embed_dim, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        outs = []
        for i, x in enumerate((query, key, value)):
            weight = getattr(module, f"{'qkv'[i]}_proj_weight")
            out = F.linear(x, weight, None if bias is None else bias[i * size : (i + 1) * size])
            watcher.record(1 + i, out, (x,), _build_linear(module))
            if bias is not None:
                watcher.record(4, out, (x,), _build_rows(module, i * size, 3 * size, vector=True))
            outs.append(out)
        return tuple(outs)
    # One product for all rows that see the same input: all three, or keys and values.
    if key is not value:
        spans = [(query, 0, 1), (key, 1, 2), (value, 2, 3)]
    else:
        spans = [(query, 0, 3)] if query is key else [(query, 0, 1), (key, 1, 3)]
    outs = []
    for x, first, last in spans:
        rows = slice(first * size, last * size)
        out = F.linear(x, module.in_proj_weight[rows], None if bias is None else bias[rows])
        watcher.record(1, out, (x,), _build_rows(module, first * size, 3 * size))
        outs += out.chunk(last - first, dim=-1)
    return tuple(outs)


class _Identity(Tensor):
    """A weight with which F.linear gives its input, without the product. (torch's attention looks at its out projection
    before it begins, and would hand the whole of its work to such a tensor: there the identity is a plain one.)"""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return args[0].contiguous()
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _are_plain(module: nn.MultiheadAttention) -> bool:
    """Are all projections registered parameters, which an attribute of the instance can stand before? A parametrized
    one is a property of its class, which comes first."""
    owners: list[tuple[nn.Module, str]] = [(module, name) for name in ("in_proj_weight", *_SHADOWED)]
    owners += [(module.out_proj, name) for name in ("weight", "bias")]
    return all(name in owner._parameters and not hasattr(type(owner), name) for owner, name in owners)


_SHADOWED = ("in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def _hide_projections(module: nn.MultiheadAttention, like: Tensor) -> None:
    """Attributes of the instance come before registered parameters, which stay untouched. Packed projections become
    separate ones for the time of the call."""
    eye = torch.eye(module.embed_dim, dtype=module.out_proj.weight.dtype, device=like.device)
    same = eye.as_subclass(_Identity)
    module.__dict__.update(in_proj_bias=None, q_proj_weight=same, k_proj_weight=same, v_proj_weight=same)
    module.__dict__["_qkv_same_embed_dim"] = False
    module.out_proj.__dict__.update(weight=eye, bias=None)


def _show_projections(module: nn.MultiheadAttention) -> None:
    for name in _SHADOWED:
        module.__dict__.pop(name, None)
    module._qkv_same_embed_dim = module.in_proj_weight is not None
    module.out_proj.__dict__.pop("weight", None)
    module.out_proj.__dict__.pop("bias", None)
