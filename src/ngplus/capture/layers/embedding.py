"""Rules of Embedding and EmbeddingBag, whose matrix is (num_embeddings, embedding_dim)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ngplus.capture import reasons
from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, NotPerSample, register_layer
from ngplus.capture.layers.computed import Functions, WeightRule, with_sources
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.layers.parts import by_parts
from ngplus.capture.sample_index import Ragged
from ngplus.fisher.factors import Bags, Factors, Lookup, as_lookup, tensor_version


@register_layer(nn.Embedding)
class EmbeddingRule(WeightRule):
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

    looks_up = True
    functions: ClassVar[Functions] = {
        F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    }

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return with_sources(module, MatrixSpec(("weight",), ("rows",)))

    def options(self, given: Mapping[str, Any]) -> Any:
        return _table_options(given)

    def adapt(self, module: Any, inputs: Inputs, output: Any, batch: Batch) -> Any:
        index = inputs[0]
        assert index is not None
        shared = batch.dim == 0 and index.dim() > 1 and len(index) == 1 and output.shape[:-1] == index.shape
        return ForAllSamples.of(output, batch.size) if shared and (batch.size or 0) > 1 else output  # type: ignore[arg-type]

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (index,) = inputs
        assert index is not None
        weight = _entry_weights(module, index, grad.dtype)
        index = index.expand(grad.shape[:-1]).long()
        if batch.dim == 0 and batch.size and (index.dim() == 0 or len(index) not in {batch.size, *batch.ragged}):
            raise NotPerSample(reasons.SHARED_INDEX)

        def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
            index, values, *weight = tensors
            if weight:
                values = values * weight[0][..., None]
            return Lookup(batch.fold(index, 0), batch.fold(values), module.num_embeddings)

        given = [index, grad] if weight is None else [index, grad, weight.expand_as(index)]
        if index.dim() == 0:
            return build(given, batch)
        front = [batch.first(tensor, tensor.dim() - index.dim()) for tensor in given]
        return by_parts(build, front, batch.in_front, copies=weight is not None)


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


def _table_options(given: Mapping[str, Any], **more: Any) -> SimpleNamespace:
    """Returns the arguments of F.embedding or F.embedding_bag under the names of a module's attributes."""
    rows, padding = len(given["weight"]), given.get("padding_idx")
    return SimpleNamespace(
        num_embeddings=rows,
        padding_idx=None if padding is None else padding % rows,
        scale_grad_by_freq=given.get("scale_grad_by_freq", False),
        **more,
    )


def _entry_weights(module: Any, index: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns what torch multiplies each entry's gradient by: 0 for padding, 1 / frequency; None for 1."""
    weight = None if module.padding_idx is None else (index != module.padding_idx).to(dtype)
    if module.scale_grad_by_freq:
        _, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
        frequency = counts[place].to(dtype)
        weight = frequency.reciprocal() if weight is None else weight / frequency
    return weight


@register_layer(nn.EmbeddingBag)
class EmbeddingBagRule(WeightRule):
    """Supports the modes sum and mean, ``offsets``, ``per_sample_weights``, ``padding_idx`` and ``sparse``. Several
    bags of one sample, one after the other, are joined. The mode max gets mini-batch curvature.

    Examples:
        >>> row = ngplus.NGPlus(nn.EmbeddingBag(1000, 16, mode="sum", sparse=True)).plan()[0]
        >>> row.shape, row.source
        ((1000, 16), 'sample')
    """

    looks_up = True
    functions: ClassVar[Functions] = {
        F.embedding_bag: (
            "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
            "per_sample_weights", "include_last_offset", "padding_idx",
        )
    }  # fmt: skip

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [] if module.mode == "max" else with_sources(module, MatrixSpec(("weight",), ("rows",)))

    def options(self, given: Mapping[str, Any]) -> Any:
        return _table_options(
            given,
            mode=given.get("mode", "mean"),
            include_last_offset=given.get("include_last_offset", False),
            offsets=given.get("offsets"),
            per_sample_weights=given.get("per_sample_weights"),
        )

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
        names = ("input", "offsets", "per_sample_weights")
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return tuple(given.get(name) for name in names)

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        if len(inputs) == 1:  # of a call of F.embedding_bag
            index, offsets, weights = inputs[0], module.offsets, module.per_sample_weights
        else:
            index, offsets, weights = inputs
        assert index is not None
        if module.mode == "max":
            raise NotPerSample(reasons.with_detail(reasons.OWN_FORWARD, "mode 'max'"))
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
        by_bag = Ragged(bag, bags)

        def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
            """Several bags a sample: their entries are its positions."""
            grads, numbers = tensors[0], tensors[1][:, 0]
            own, bags = by_bag.part(numbers)
            lookup = as_lookup(Bags(index[own], bags.index, weight[own], grads, module.num_embeddings))
            index_of, values = batch.by_sample(lookup.index), batch.by_sample(lookup.values)
            return Lookup(index_of.flatten(1), values.flatten(1, 2), module.num_embeddings)

        # Expanded to the size of the values, for the bytes that it copies.
        numbers = torch.arange(bags, device=index.device)[:, None].expand(bags, by_bag.longest * grad.shape[1])
        return by_parts(build, (grad, numbers), batch.in_front, copies=True)
