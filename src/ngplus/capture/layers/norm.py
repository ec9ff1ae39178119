"""Rules of norm layers: scale and shift form a matrix of two columns, (features, 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, register_layer
from ngplus.capture.layers.computed import Functions, WeightRule
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.fisher.factors import Factors, Rows

TEMPORARY = 8  # tensors as large as the gradient that a part takes at most


class NormRule(WeightRule):
    r"""$y = \gamma \odot \hat x + \beta$: $G_i = [\sum_p g_{ip} \odot \hat x_{ip}, \sum_p g_{ip}]$.

    A subclass implements ``normalized`` and ``by_feature``.

    Examples:
        >>> class Centred(nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(features))
        ...         self.bias = nn.Parameter(torch.zeros(features))
        ...     def forward(self, x):
        ...         return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias
        >>> @ngplus.register_layer(Centred)
        ... class CentredRule(ngplus.layers.NormRule):
        ...     def normalized(self, module, x):
        ...         return x - x.mean(-1, keepdim=True)
        ...     def by_feature(self, module, x, batch):
        ...         return batch.fold(x)
        >>> ngplus.NGPlus(Centred(5)).plan()[0].shape
        (5, 2)
    """

    bias_needs_input = False
    linear = False
    #: ``normalized`` treats each index along the batch dimension by itself, so that it can be called for some of them.
    by_entry = False

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("column", "column"))]

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """The input as the layer normalizes it, before scale and shift."""
        raise NotImplementedError

    def by_feature(self, module: Any, x: Tensor, batch: Batch) -> Tensor:
        """Reshapes x to [samples, positions, features]; each index along the batch dimension is one sample."""
        raise NotImplementedError

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        parts = self._parts(module, grad, batch)
        if len(parts) == 1:
            return Rows(batch.sums(self._entries(module, x, grad, active, Batch(batch.dim)))[None])
        length = grad.shape[batch.dim or 0]
        owners, values = batch.owners(length), None
        for part in parts:
            own = self._entries(module, None if x is None else x[part], grad[part], active, Batch(batch.dim))
            values = own.new_zeros(batch.count(length), *own.shape[1:]) if values is None else values
            if owners is None:
                values[part[-1]] = own
            else:
                values.index_add_(0, owners[part[-1]].to(own.device), own)
        assert values is not None
        return Rows(values[None])

    def _entries(self, module: Any, x: Tensor | None, grad: Tensor, active: Active, batch: Batch) -> Tensor:
        """The gradients of all entries along the batch dimension, [entries, features, columns]."""
        columns = []
        if active[0] and x is not None:
            x = x.to(torch.promote_types(x.dtype, grad.dtype))
            columns.append(grad * self.normalized(module, x).to(grad.dtype))
        if len(active) > 1 and active[1]:
            columns.append(grad)
        return torch.stack([self.by_feature(module, column, batch).sum(1) for column in columns], dim=-1)

    def _parts(self, module: Any, grad: Tensor, batch: Batch) -> list[tuple[slice, ...]]:
        """Indices of parts along the batch dimension, whose temporary tensors have about ``batch.part_bytes``."""
        dim = batch.dim
        if not self.by_entry or dim is None or dim >= grad.dim() - self._features(module):
            batch.check_bytes(TEMPORARY * grad.nbytes)
            return [(slice(None),)]
        length = grad.shape[dim]
        rest = batch.without(2 * batch.count(length) * self._number_of_features(module, grad) * grad.element_size())
        each = TEMPORARY * grad.nbytes // max(1, length)
        rest.check_bytes(each)
        step = max(1, rest.part_bytes // max(1, each))
        return [(slice(None),) * dim + (slice(i, i + step),) for i in range(0, max(1, length), step)]

    def _features(self, module: Any) -> int:
        """The number of trailing dimensions that have features."""
        return 1

    def _number_of_features(self, module: Any, grad: Tensor) -> int:
        return grad.shape[1]


@register_layer(nn.LayerNorm)
class LayerNormRule(NormRule):
    """Scale and shift of all normalized entries: (features, 2).

    Examples:
        >>> ngplus.NGPlus(nn.LayerNorm(8)).plan()[0].shape
        (8, 2)
    """

    by_entry = True
    functions: ClassVar[Functions] = {F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps")}

    def options(self, given: Mapping[str, Any]) -> Any:
        shape = given["normalized_shape"]
        return SimpleNamespace(normalized_shape=tuple(shape), eps=given.get("eps", 1e-5))

    def _features(self, module: Any) -> int:
        return len(module.normalized_shape)

    def _number_of_features(self, module: Any, grad: Tensor) -> int:
        return prod(module.normalized_shape)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)

    def by_feature(self, module: Any, x: Tensor, batch: Batch) -> Tensor:
        return batch.fold(x.flatten(x.dim() - len(module.normalized_shape)))


@register_layer(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """A scale and no shift: (features, 1).

    Examples:
        >>> ngplus.NGPlus(nn.RMSNorm(8)).plan()[0].shape
        (8, 1)
    """

    functions: ClassVar[Functions] = {F.rms_norm: ("input", "normalized_shape", "weight", "eps")}

    def options(self, given: Mapping[str, Any]) -> Any:
        return SimpleNamespace(normalized_shape=tuple(given["normalized_shape"]), eps=given.get("eps"))

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight",), ("column",))]

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.rms_norm(x, list(module.normalized_shape), eps=module.eps)


class _ChannelNormRule(NormRule):
    """Norm layers on [samples, channels, ...], whose features are the channels."""

    def by_feature(self, module: Any, x: Tensor, batch: Batch) -> Tensor:
        return batch.fold(x.movedim(1, -1))

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        return super().factors(module, inputs, grad, active, replace(batch, dim=None if batch.dim is None else 0))


@register_layer(nn.GroupNorm)
class GroupNormRule(_ChannelNormRule):
    """Scale and shift of the channels: (channels, 2).

    Examples:
        >>> ngplus.NGPlus(nn.GroupNorm(2, 6)).plan()[0].shape
        (6, 2)
    """

    by_entry = True
    functions: ClassVar[Functions] = {F.group_norm: ("input", "num_groups", "weight", "bias", "eps")}

    def options(self, given: Mapping[str, Any]) -> Any:
        return SimpleNamespace(num_groups=given["num_groups"], eps=given.get("eps", 1e-5))

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(_ChannelNormRule):
    r"""Scale and shift of the channels: (channels, 2). $G_i$ is sample i's term of the gradient of the batch loss.

    The batch statistics depend on all samples, so $G_i$ is not the gradient of the loss of sample i alone. The
    normalized input is not stored: $\sum_p g (x - \mu) / \sigma = (\sum_p g x - \mu \sum_p g) / \sigma$.

    Examples:
        >>> ngplus.NGPlus(nn.BatchNorm2d(6)).plan()[0].shape
        (6, 2)
    """

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        channels = grad.shape[1]
        each = (TEMPORARY if grad.dim() > 2 else 2 * TEMPORARY) * grad.nbytes // channels
        samples = batch.count(len(grad))
        rest = batch.without(samples * channels * sum(active) * grad.element_size())
        rest.check_bytes(each)
        step = max(1, rest.part_bytes // max(1, each))
        values: Tensor | None = None
        for start in range(0, channels, step):
            part = slice(start, start + step)
            found = batch.sums(self._columns(module, None if x is None else x[:, part], grad[:, part], active, part))
            if step >= channels:
                return Rows(found[None])
            values = found.new_empty(samples, channels, found.shape[-1]) if values is None else values
            values[:, part] = found
        assert values is not None
        return Rows(values[None])

    def _columns(self, module: Any, x: Tensor | None, grad: Tensor, active: Active, part: slice) -> Tensor:
        """The gradients of some channels for all entries along the batch dimension, [entries, channels, columns]."""
        grad = _channels_and_positions(grad)
        shift = grad.sum(-1)
        columns = []
        if active[0] and x is not None:
            x = _channels_and_positions(x.to(grad.dtype))
            if module.training or module.running_mean is None:
                # Torch's own function, so that mean and 1 / std are those of the forward pass.
                weight, bias = (None if p is None else p[part] for p in (module.weight, module.bias))
                _, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, module.eps)
            else:
                mean, scale = module.running_mean[part], (module.running_var[part] + module.eps).rsqrt()
            product = torch.linalg.vecdot(grad, x)
            columns.append(((product - mean * shift) * scale).to(grad.dtype))  # 16-bit x has 32-bit statistics
        if active[-1]:
            columns.append(shift)
        return torch.stack(columns, dim=-1)


def _channels_and_positions(x: Tensor) -> Tensor:
    """Reshapes x to [batch, channels, positions]."""
    return x.flatten(2) if x.dim() > 2 else x[..., None]


@register_layer(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(_ChannelNormRule):
    """Scale and shift of the channels, if the layer is affine: (channels, 2).

    Examples:
        >>> ngplus.NGPlus(nn.InstanceNorm2d(6, affine=True)).plan()[0].shape
        (6, 2)
    """

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        if grad.dim() == module._get_no_batch_dim():
            grad, inputs = grad[None], tuple(None if x is None else x[None] for x in inputs)
        return super().factors(module, inputs, grad, active, batch)

    by_entry = True

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if module.training or module.running_mean is None:
            return F.instance_norm(x, eps=module.eps)
        return F.instance_norm(x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps)
