"""Rules of Embedding and EmbeddingBag, whose matrix is (num_embeddings, embedding_dim)."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample, has_own_forward, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.sample_axis import tensors
from ngplus.fisher.factors import Bags, Factors, Lookup, as_lookup, tensor_version

if TYPE_CHECKING:
    from ngplus.capture.layers.hooks import Watcher


class _TableRule(LayerRule):
    """The base of rules whose module looks up rows of a table, by one function of torch.

    A subclass with its own forward may compute positions from its input, or scale the rows. The function is then
    recorded as that forward calls it: the input of the module may be no index of the table.
    """

    looks_up = True
    _function: Callable[..., Tensor]  # its arguments have the names of the module's attributes

    def watch(self, module: Any, watcher: Watcher) -> list[Any]:
        record = watcher.forward_hook(0)
        running: dict[int, _Lookups] = {}  # of each thread

        def before(module: nn.Embedding, args: Any) -> None:
            if watcher.armed(0) and has_own_forward(module):
                running[threading.get_ident()] = _Lookups(self, module, watcher, running)
                running[threading.get_ident()].__enter__()  # type: ignore[no-untyped-call]

        def after(module: nn.Embedding, args: Any, kwargs: Any, output: Any) -> Any:
            return None if threading.get_ident() in running else record(module, args, kwargs, output)

        def end(module: nn.Embedding, args: Any, output: Any) -> None:
            lookups = running.pop(threading.get_ident(), None)
            if lookups is not None:
                lookups.stop()
                if not lookups.found and torch.is_grad_enabled() and output is not None and watcher.recording(0):
                    watcher.refuse(0, reasons.with_detail(reasons.OWN_FORWARD, "it does not look up its table"))

        return [
            module.register_forward_pre_hook(watcher.hook(before)),
            module.register_forward_hook(watcher.hook(after), with_kwargs=True, prepend=True),
            module.register_forward_hook(watcher.hook(end), always_call=True),
        ]


class _Lookups(TorchFunctionMode):
    """Records the lookups in a module's table while its forward runs. Any other use of the table is refused.

    ``running`` has the active one of each thread; others are left by a call that was interrupted, and do nothing.
    """

    def __init__(self, rule: _TableRule, module: nn.Module, watcher: Watcher, running: Mapping[int, _Lookups]) -> None:
        super().__init__()
        self._rule, self._module, self._watcher, self._running = rule, module, watcher, running
        self.found = False

    def stop(self) -> None:
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        table = self._module._parameters.get("weight")
        if self._running.get(threading.get_ident()) is not self or not any(x is table for x in tensors((args, kwargs))):
            return out
        if func is type(self._rule)._function:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            self._note(out, given.arguments)
        elif any(x.requires_grad for x in tensors(out)):
            self._watcher.refuse(0, reasons.with_detail(reasons.OWN_FORWARD, "it uses its table in other ways"))
        return out

    def _note(self, out: Tensor, given: dict[str, Any]) -> None:
        self.found = True
        rows, padding_idx = len(given["weight"]), given["padding_idx"]
        if padding_idx is not None and padding_idx < 0:
            given["padding_idx"] = rows + padding_idx
        as_module = SimpleNamespace(num_embeddings=rows, **given)
        if given.get("mode") == "max":
            self._watcher.refuse(0, reasons.with_detail(reasons.OWN_FORWARD, "mode 'max'"))
        elif self._watcher.recording(0):
            self._watcher.record(0, out, self._rule.inputs(None, (), given), partial(self._rule.factors, as_module))
        else:
            self._watcher.note_samples(0, out)


@register_layer(nn.Embedding)
class EmbeddingRule(_TableRule):
    """Supports ``padding_idx``, ``scale_grad_by_freq`` and ``sparse``.

    An index of shape [1, length], as of positions, is the same for all samples. If its vectors are added to those of
    the batch, a refresh step expands them to [samples, length, dim] first, so that the gradient has samples. Vectors
    that are used in another way, and an index without a batch dimension, such as ``arange(length)``, get mini-batch
    curvature.

    Examples:
        >>> row = ngplus.NGPlus(nn.Embedding(1000, 16)).plan()[0]
        >>> row.shape, row.side
        ((1000, 16), 'right')
    """

    _function = F.embedding

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight",), ("rows",))]

    def adapt(self, module: Any, inputs: Inputs, output: Any, batch: Batch) -> Any:
        (index,) = inputs
        assert index is not None
        shared = batch.dim == 0 and index.dim() > 1 and len(index) == 1 and output.shape[:-1] == index.shape
        return ForAllSamples.of(output, batch.size) if shared and (batch.size or 0) > 1 else output  # type: ignore[arg-type]

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (index,) = inputs
        assert index is not None
        weight = _entry_weights(module, index, grad.dtype)
        if weight is not None:
            grad = grad * weight[..., None]
        index = index.expand(grad.shape[:-1]).long()
        if batch.dim == 0 and batch.size and (index.dim() == 0 or len(index) not in {batch.size, *batch.ragged}):
            raise NotPerSample(reasons.SHARED_INDEX)
        return Lookup(batch.fold(index, 0), batch.fold(grad), module.num_embeddings)


# Functions that broadcast a first dimension of 1.
_ELEMENTWISE = {
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
}


class ForAllSamples(Tensor):
    """A tensor [1, ...] that is the same for all samples.

    Elementwise functions with a batch, and ``expand``, use ``by_sample``, [samples, ...], whose gradient has samples.
    Other functions use ``plain``, and ``on_other_use`` is called.
    """

    plain: Tensor
    by_sample: Tensor
    version: object  # changes if the tensor is written to
    on_other_use: Callable[[], None] | None

    @classmethod
    def of(cls, plain: Tensor, samples: int) -> ForAllSamples:
        shared = plain.as_subclass(cls)
        shared.plain, shared.by_sample = plain, plain.expand(samples, *plain.shape[1:])
        shared.version, shared.on_other_use = tensor_version(plain), None
        return shared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        shared = [x for x in leaves if isinstance(x, cls)]
        others = {x.shape for x in leaves if isinstance(x, Tensor) and not isinstance(x, cls)}
        name = getattr(func, "__name__", "")
        unchanged = all(x.version == tensor_version(x.plain) for x in shared)
        broadcast = unchanged and name in _ELEMENTWISE and all(x.by_sample.shape in others for x in shared)
        leaves = [x if not isinstance(x, cls) else x.by_sample if broadcast else x.plain for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        out = func(*args, **kwargs)
        if broadcast:
            return out
        if unchanged and name == "expand" and out.shape == shared[0].by_sample.shape:
            return shared[0].by_sample
        if unchanged and len(shared) == 1 and out is shared[0].plain:  # as of .to(device) on the same device
            return shared[0]
        if out is None or any(isinstance(x, Tensor) for x in pytree.tree_leaves(out)):  # not only a shape or dtype
            for x in shared:
                if x.on_other_use is not None:
                    x.on_other_use()
        return out


def _entry_weights(module: Any, index: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns what torch multiplies each entry's gradient by: 0 for padding, 1 / frequency; None for 1."""
    weight = None if module.padding_idx is None else (index != module.padding_idx).to(dtype)
    if module.scale_grad_by_freq:
        _, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
        frequency = counts[place].to(dtype)
        weight = frequency.reciprocal() if weight is None else weight / frequency
    return weight


@register_layer(nn.EmbeddingBag)
class EmbeddingBagRule(_TableRule):
    """Supports the modes sum and mean, ``offsets``, ``per_sample_weights``, ``padding_idx`` and ``sparse``. Several
    bags of one sample, one after the other, are joined. The mode max gets mini-batch curvature.

    Examples:
        >>> row = ngplus.NGPlus(nn.EmbeddingBag(1000, 16, mode="sum", sparse=True)).plan()[0]
        >>> row.shape, row.source
        ((1000, 16), 'sample')
    """

    _function = F.embedding_bag

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [] if module.mode == "max" else [MatrixSpec(("weight",), ("rows",))]

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return tuple(given.get(name) for name in names)

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        index, offsets, weights = inputs
        assert index is not None
        bags = len(grad)
        if offsets is None:
            bag = torch.arange(bags, device=index.device)[:, None].expand_as(index).flatten()
        else:
            starts = offsets[:-1] if module.include_last_offset else offsets
            entries = torch.arange(index.numel(), device=index.device)
            bag = torch.searchsorted(starts.long().contiguous(), entries, right=True) - 1
        index = index.flatten().long()
        given = _entry_weights(module, index, grad.dtype)
        weight = torch.ones_like(index, dtype=grad.dtype) if given is None else given
        if module.mode == "mean":
            entry = torch.ones_like(weight) if module.padding_idx is None else (index != module.padding_idx).to(weight)
            count = weight.new_zeros(bags).index_add_(0, bag, entry)
            weight = weight / count.clamp_min(1)[bag]
        if weights is not None:
            weight = weight * weights.detach().flatten()
        factors = Bags(index, bag, weight, grad, module.num_embeddings)
        if batch.count(bags) == bags:
            return factors
        lookup = as_lookup(factors)  # several bags a sample: their entries are its positions
        index, values = batch.by_sample(lookup.index).flatten(1), batch.by_sample(lookup.values).flatten(1, 2)
        return Lookup(index, values, module.num_embeddings)
