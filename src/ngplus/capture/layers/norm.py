"""Norm layers: scale and shift are a matrix of two columns, (features, 2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ngplus.capture.layers.base import Active, Inputs, LayerRule, is_made_by, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors, Rows, wide


class NormRule(LayerRule):
    """y = scale * normalized + shift: G_i = [sum_p g_ip * normalized_ip, sum_p g_ip].

    A norm layer of your own gives ``normalized`` and ``by_feature``:

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

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("column", "column"))]

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        """The input as the layer normalizes it, before scale and shift."""
        raise NotImplementedError

    def by_feature(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        """[samples, positions, features], where each row of the batch dimension is a sample."""
        raise NotImplementedError

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        columns = []
        if active[0] and x is not None:
            columns.append(self._sums(module, grad * self.normalized(module, x).to(grad.dtype), batch))
        if len(active) > 1 and active[1]:
            columns.append(self._sums(module, grad, batch))
        return Rows(torch.stack(columns, dim=-1)[None])

    def _sums(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        """[samples, features]: over the positions of each row, and then over the rows of each sample."""
        return batch.sums(self.by_feature(module, x, Batch(batch.dim)).sum(1))


@register_layer(nn.LayerNorm)
class LayerNormRule(NormRule):
    """The features are all that is normalized over: (features, 2).

    Examples:
        >>> ngplus.NGPlus(nn.LayerNorm(8)).plan()[0].shape
        (8, 2)
    """

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.LayerNorm)
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)

    def by_feature(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        return batch.fold(x.flatten(x.dim() - len(module.normalized_shape)))


@register_layer(nn.RMSNorm)
class RMSNormRule(LayerNormRule):
    """A scale and no shift: (features, 1).

    Examples:
        >>> ngplus.NGPlus(nn.RMSNorm(8)).plan()[0].shape
        (8, 1)
    """

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight",), ("column",))]

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.RMSNorm)
        return F.rms_norm(x, list(module.normalized_shape), eps=module.eps)


class _ChannelNormRule(NormRule):
    """Norm layers whose features are the channels, dimension 1 of a batch whose samples are dimension 0."""

    def by_feature(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        return batch.fold(x.movedim(1, -1))

    def _sums(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        return super()._sums(module, x, replace(batch, dim=None if batch.dim is None else 0))


@register_layer(nn.GroupNorm)
class GroupNormRule(_ChannelNormRule):
    """Scale and shift of the channels: (channels, 2).

    Examples:
        >>> ngplus.NGPlus(nn.GroupNorm(2, 6)).plan()[0].shape
        (6, 2)
    """

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.GroupNorm)
        return F.group_norm(x, module.num_groups, eps=module.eps)


@register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(_ChannelNormRule):
    """Each sample's share of the gradient; the statistics tie the samples together, as they do in the loss.

    The normalized input is never written out: sum_p g (x - mean) / std = (sum_p g x - mean sum_p g) / std.

    Examples:
        >>> ngplus.NGPlus(nn.BatchNorm2d(6)).plan()[0].shape
        (6, 2)
    """

    def kept(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Inputs:
        """The input, and its mean and 1 / standard deviation where torch keeps them for its own backward pass."""
        assert isinstance(module, _BatchNorm)
        (x,) = inputs
        if x is None or not module.training or _saved_elsewhere():
            return inputs
        own = type(module).forward is _BatchNorm.forward and "forward" not in module.__dict__
        own = own and type(self).factors is BatchNormRule.factors  # a rule of one's own may expect the input alone
        if not own or not is_made_by("NativeBatchNormBackward0", output, x, (module.weight, module.bias)):
            return inputs
        node: Any = output.grad_fn
        return x, node._saved_result1, node._saved_result2

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        assert isinstance(module, _BatchNorm)
        x, *known = inputs
        shift = grad.flatten(2).sum(-1) if grad.dim() > 2 else grad
        columns = []
        if active[0] and x is not None:
            x = x.to(grad.dtype)
            rows, grads = (x.flatten(2), grad.flatten(2)) if x.dim() > 2 else (x[..., None], grad[..., None])
            if known:
                mean, scale = known
            elif module.training or module.running_mean is None:
                mean, var = _mean_and_variance(rows)
                scale = (var + module.eps).rsqrt()
            else:
                assert module.running_var is not None
                mean, scale = module.running_mean, (module.running_var + module.eps).rsqrt()
            assert mean is not None
            assert scale is not None
            product = _inner_products(grads, rows)
            columns.append(((product - mean * shift) * scale).to(grad.dtype))  # the statistics of 16 bits have 32
        if active[-1]:
            columns.append(shift)
        return Rows(batch.sums(torch.stack(columns, dim=-1))[None])


def _saved_elsewhere() -> bool:
    """Do saved tensors go through hooks, as with checkpoints? To ask for one would then run a part of the model. Torch
    2.6 does not tell: there it is taken that they do."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def _inner_products(x: Tensor, y: Tensor) -> Tensor:
    """sum_p x y of each sample and channel, [batch, channels], of two tensors [batch, channels, positions].

    On a CPU torch.linalg.vecdot writes the product out; matrix products of four samples with each other, of which the
    diagonal is taken, do four times the arithmetic in a quarter of the time.
    """
    if x.device.type != "cpu" or x.shape[-1] < 128:
        return torch.linalg.vecdot(x, y)
    pieces = zip(x.transpose(0, 1).split(4, dim=1), y.transpose(0, 1).split(4, dim=1), strict=True)
    return torch.cat([torch.bmm(a, b.mT).diagonal(dim1=1, dim2=2) for a, b in pieces], dim=1).mT


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of [batch, channels, positions]: rows are summed fast, their sums added up in float64. On a CPU
    torch.var_mean over all but the channels takes 20 times as long."""
    count = x.shape[0] * x.shape[2]
    mean = (x.sum(-1).to(wide(x)).sum(0) / count).to(x.dtype)
    lengths = torch.linalg.vector_norm(x - mean[:, None], dim=-1)
    return mean, lengths.to(wide(x)).square().sum(0) / count


@register_layer(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(_ChannelNormRule):
    """Scale and shift of the channels, where the layer has them: (channels, 2).

    Examples:
        >>> ngplus.NGPlus(nn.InstanceNorm2d(6, affine=True)).plan()[0].shape
        (6, 2)
    """

    def normalized(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, _InstanceNorm)
        if module.training or module.running_mean is None:
            if x.dim() == module._get_no_batch_dim():
                return F.instance_norm(x[None], eps=module.eps)[0]
            return F.instance_norm(x, eps=module.eps)
        shape = (-1, *[1] * (x.dim() - 2)) if x.dim() > module._get_no_batch_dim() else (-1, *[1] * (x.dim() - 1))
        assert module.running_var is not None
        scale = (module.running_var + module.eps).rsqrt().view(shape)
        return (x - module.running_mean.view(shape)) * scale

    def by_feature(self, module: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        assert isinstance(module, _InstanceNorm)
        if x.dim() == module._get_no_batch_dim():
            x = x[None]
        return super().by_feature(module, x, batch)
