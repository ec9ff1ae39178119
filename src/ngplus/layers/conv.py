"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ngplus.factors import Factors, Outer
from ngplus.layers.matrix import MatrixSpec
from ngplus.layers.rule import Batch, LayerRule, register_layer


class Patches:
    """The unfolded input of a convolution, [groups, samples, positions, in/groups * kernel], made for few samples at a
    time: written out for a whole batch it would be kernel times the size of the input."""

    def __init__(
        self,
        padded: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        samples: int,
        flip: bool = False,
    ) -> None:
        windows = padded
        for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
            windows = windows.unfold(2 + dim, d * (k - 1) + 1, s)[..., ::d]
        spatial = len(kernel)
        if flip:
            windows = windows.flip(tuple(range(2 + spatial, 2 + 2 * spatial)))
        # [batch, groups, in/groups, *out, *kernel], a view until samples are taken
        self._windows = windows.unflatten(0, (samples, -1)).unflatten(2, (groups, -1))
        self._spatial = spatial
        positions = len(padded) // samples * windows.shape[2 : 2 + spatial].numel()
        cols = windows.shape[1] // groups * _prod(kernel)
        self.shape: tuple[int, ...] = (groups, samples, positions, cols)

    def take(self, samples: Tensor | slice) -> Tensor:
        w, n = self._windows[samples], self._spatial
        # [samples, rows, groups, in/groups, *out, *kernel] to [groups, samples, rows, *out, in/groups, *kernel]
        order = (2, 0, 1, *range(4, 4 + n), 3, *range(4 + n, 4 + 2 * n))
        return w.permute(order).reshape(self.shape[0], len(w), self.shape[2], self.shape[3])


def conv_factors(patches: Patches | None, grad: Tensor, active: tuple[bool, ...], groups: int, samples: int) -> Outer:
    """G_i = sum over output positions of g_ip [patch_ip; 1]^T, a group at a time."""
    g = grad.unflatten(0, (samples, -1)).unflatten(2, (groups, -1)).flatten(4)  # [samples, rows, groups, m, positions]
    left = g.permute(2, 0, 1, 4, 3).flatten(2, 3)
    bias = len(active) > 1 and active[1]
    if patches is not None and active[0]:
        return Outer(left, patches, ones=bias)
    return Outer(left, left[..., :0], ones=bias)


def _batched(x: Tensor, spatial: int) -> Tensor:
    return x if x.dim() == spatial + 2 else x[None]


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(LayerRule):
    """Any stride, padding, padding mode, dilation, groups; a group is a matrix (out/groups, in/groups * kernel)."""

    bias_needs_input = False

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, _ConvNd)
        return [MatrixSpec(("weight", "bias"), ("rows", "column"), module.groups)]

    def factors(
        self,
        module: nn.Module,
        inputs: tuple[Tensor | None, ...],
        grad: Tensor,
        active: tuple[bool, ...],
        batch: Batch,
    ) -> Factors:
        assert isinstance(module, _ConvNd)
        spatial = len(module.kernel_size)
        (x,) = inputs
        grad = _batched(grad, spatial)
        samples = batch.count(len(grad)) if batch.dim is not None else 1
        if x is None:
            return conv_factors(None, grad, active, module.groups, samples)
        x = _batched(x, spatial)
        padding = module._reversed_padding_repeated_twice
        if any(padding):
            x = F.pad(x, padding) if module.padding_mode == "zeros" else F.pad(x, padding, mode=module.padding_mode)
        patches = Patches(x, module.kernel_size, module.stride, module.dilation, module.groups, samples)
        return conv_factors(patches, grad, active, module.groups, samples)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(LayerRule):
    """A transposed convolution is a plain one, stride 1 and kernel reversed, on its input with zeros set in between."""

    bias_needs_input = False

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, _ConvNd)
        return [MatrixSpec(("weight", "bias"), ("turned", "column"), module.groups)]

    def factors(
        self,
        module: nn.Module,
        inputs: tuple[Tensor | None, ...],
        grad: Tensor,
        active: tuple[bool, ...],
        batch: Batch,
    ) -> Factors:
        assert isinstance(module, _ConvTransposeNd)
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        spatial = len(kernel)
        (x,) = inputs
        grad = _batched(grad, spatial)
        samples = batch.count(len(grad)) if batch.dim is not None else 1
        if x is None:
            return conv_factors(None, grad, active, module.groups, samples)
        x = _batched(x, spatial)
        sizes = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
        spread[every] = x
        # Output position q sees input position q + before - kernel offset; the far side follows from the output's size.
        padding: list[int] = []
        for dim in reversed(range(spatial)):
            reach = dilation[dim] * (kernel[dim] - 1)
            before = reach - _as_int(module.padding, dim)
            padding += [before, grad.shape[2 + dim] + reach - sizes[dim] - before]
        patches = Patches(F.pad(spread, padding), kernel, (1,) * spatial, dilation, module.groups, samples, flip=True)
        return conv_factors(patches, grad, active, module.groups, samples)


def _as_int(padding: Any, dim: int) -> int:
    return int(padding[dim])


def _prod(values: Sequence[int]) -> int:
    return int(torch.Size(values).numel())
