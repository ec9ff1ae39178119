"""Embedding and EmbeddingBag: the matrix is (rows, dim), its left factor a choice of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ngplus.capture.layers.base import Active, Inputs, LayerRule, NotPerSample, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Bags, Factors, Lookup, as_lookup, tensor_version


@register_layer(nn.Embedding)
class EmbeddingRule(LayerRule):
    """``padding_idx``, ``scale_grad_by_freq`` and ``sparse`` as in torch.

    Positions that are looked up once for the whole batch, with an index of shape [1, length], have no samples of their
    own. Where their vectors are added to those of the batch, on a refresh step it is to each sample by itself, so that
    the gradient comes sample by sample. An index whose first dimension is neither, such as ``arange(length)``, and
    vectors that are used in any other way get mini-batch curvature.

    Examples:
        >>> row = ngplus.NGPlus(nn.Embedding(1000, 16)).plan()[0]
        >>> row.shape, row.side
        ((1000, 16), 'right')
    """

    looks_up = True

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight",), ("rows",))]

    def adapt(self, module: nn.Module, inputs: Inputs, output: Any, batch: Batch) -> Any:
        (index,) = inputs
        assert index is not None
        shared = batch.dim == 0 and index.dim() > 1 and len(index) == 1 and output.shape[:-1] == index.shape
        return ForAllSamples.of(output, batch.size) if shared and (batch.size or 0) > 1 else output  # type: ignore[arg-type]

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        assert isinstance(module, nn.Embedding)
        (index,) = inputs
        assert index is not None
        weight = _entry_weights(module, index, grad.dtype)
        if weight is not None:
            grad = grad * weight[..., None]
        index = index.expand(grad.shape[:-1]).long()
        if batch.dim == 0 and batch.size and (index.dim() == 0 or len(index) not in {batch.size, *batch.rows}):
            raise NotPerSample("its index has no batch dimension")
        return Lookup(batch.fold(index, 0), batch.fold(grad), module.num_embeddings)


# Functions that take a tensor with a first dimension of 1 as if it were repeated for each sample.
_ELEMENTWISE = {
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
}


class ForAllSamples(Tensor):
    """A tensor [1, ...] that is the same for all samples. In sums with a batch, and where it is expanded to one,
    ``by_sample`` stands for it, [samples, ...], whose gradient tells the samples apart. Everywhere else it is what it
    was, and ``on_other_use`` is called."""

    whole: Tensor
    by_sample: Tensor
    made: object  # what tells that nobody has written to it since
    on_other_use: Callable[[], None] | None

    @classmethod
    def of(cls, whole: Tensor, samples: int) -> ForAllSamples:
        shared = whole.as_subclass(cls)
        shared.whole, shared.by_sample = whole, whole.expand(samples, *whole.shape[1:])
        shared.made, shared.on_other_use = tensor_version(whole), None
        return shared

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        shared = [x for x in leaves if isinstance(x, cls)]
        batches = {x.shape for x in leaves if isinstance(x, Tensor) and not isinstance(x, cls)}
        name = getattr(func, "__name__", "")
        whole = all(x.made == tensor_version(x.whole) for x in shared)
        summed = whole and name in _ELEMENTWISE and all(x.by_sample.shape in batches for x in shared)
        plain = [x if not isinstance(x, cls) else x.by_sample if summed else x.whole for x in leaves]
        given, named = pytree.tree_unflatten(plain, tree)
        out = func(*given, **named)
        if summed:
            return out
        if whole and name == "expand" and out.shape == shared[0].by_sample.shape:
            return shared[0].by_sample
        if whole and len(shared) == 1 and out is shared[0].whole:  # as of .to(device) on that device
            return shared[0]
        if out is None or any(isinstance(x, Tensor) for x in pytree.tree_leaves(out)):  # no mere look at its shape
            for x in shared:
                if x.on_other_use is not None:
                    x.on_other_use()
        return out


def _entry_weights(module: nn.Embedding | nn.EmbeddingBag, index: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What torch multiplies each entry's gradient by: 0 for padding, 1 / frequency where the user asks for it."""
    weight = None if module.padding_idx is None else (index != module.padding_idx).to(dtype)
    if module.scale_grad_by_freq:
        _, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
        frequency = counts[place].to(dtype)
        weight = frequency.reciprocal() if weight is None else weight / frequency
    return weight


@register_layer(nn.EmbeddingBag)
class EmbeddingBagRule(LayerRule):
    """Modes sum and mean, bags as rows or by offsets, ``per_sample_weights``, ``padding_idx``, sparse gradients.
    Several bags a sample, in sample-major order, are folded into it.

    The mode max has no factors; it is refused here, and capture falls back to mini-batch curvature.

    Examples:
        >>> row = ngplus.NGPlus(nn.EmbeddingBag(1000, 16, mode="sum", sparse=True)).plan()[0]
        >>> row.shape, row.source
        ((1000, 16), 'sample')
    """

    looks_up = True

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, nn.EmbeddingBag)
        return [] if module.mode == "max" else [MatrixSpec(("weight",), ("rows",))]

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return tuple(given.get(name) for name in names)

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        assert isinstance(module, nn.EmbeddingBag)
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
        each = Bags(index, bag, weight, grad, module.num_embeddings)
        if batch.count(bags) == bags:
            return each
        apart = as_lookup(each)  # several bags a sample: their entries are its positions
        index, values = batch.by_sample(apart.index).flatten(1), batch.by_sample(apart.values).flatten(1, 2)
        return Lookup(index, values, module.num_embeddings)
