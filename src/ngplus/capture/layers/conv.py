"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ngplus.capture.layers.base import Active, Inputs, LayerRule, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors, Outer

FEW_CHANNELS = 8  # below this, unfolding is cheaper than a product for each place of the kernel
# Multiplications a sample from which torch's own convolutions, a call for each sample, are faster than either:
ONE_BY_ONE = {"many channels": 2**24, "few channels": 2**18}


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
        if _prod(kernel) == 1 and _prod(stride) > 1:  # what a stride leaves out, nothing sees
            every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
            padded = padded[every]
            stride = (1,) * len(stride)
        self._x = padded.unflatten(0, (samples, -1)).unflatten(2, (groups, -1))  # [samples, rows, groups, in, *size]
        self._kernel, self._stride, self._dilation, self._flip = tuple(kernel), tuple(stride), tuple(dilation), flip
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        self._out = tuple((n - r - 1) // s + 1 for n, r, s in zip(padded.shape[2:], spans, stride, strict=True))
        rows, inputs = self._x.shape[1], self._x.shape[3]
        self.shape: tuple[int, ...] = (groups, samples, rows * _prod(self._out), inputs * _prod(kernel))

    def take(self, samples: Tensor | slice) -> Tensor:
        x, n = self._x[samples], len(self._kernel)
        if _prod(self._kernel) == 1:  # the pixels as they are
            return x.permute(2, 0, 1, *range(4, 4 + n), 3).reshape(self.shape[0], len(x), *self.shape[2:])
        if x.shape[3] < FEW_CHANNELS:
            return self._take_places(x)
        # With the channels last, patches are long runs of memory: two copies then take a third of the time of one.
        x = x.permute(0, 1, 2, *range(4, 4 + n), 3).contiguous()
        for dim, (k, s, d) in enumerate(zip(self._kernel, self._stride, self._dilation, strict=True)):
            x = x.unfold(3 + dim, d * (k - 1) + 1, s)[..., ::d]
        if self._flip:
            x = x.flip(tuple(range(4 + n, 4 + 2 * n)))
        # [samples, rows, groups, *out, in/groups, *kernel] to [groups, samples, rows, *out, *kernel, in/groups]
        x = x.permute(2, 0, 1, *range(3, 3 + n), *range(4 + n, 4 + 2 * n), 3 + n)
        return x.reshape(*x.shape[:2], self.shape[2], _prod(self._kernel), x.shape[-1]).mT.flatten(3)

    def _take_places(self, x: Tensor) -> Tensor:
        """The same of few channels, place by place of the kernel: a view that lies across the order of its numbers."""
        x = x.permute(2, 0, 3, 1, *range(4, x.dim()))  # [groups, samples, in/groups, rows, *size]
        out = x.new_empty(*x.shape[:3], _prod(self._kernel), x.shape[3], *self._out)
        places = itertools.product(*(range(k) for k in self._kernel))
        for i, place in enumerate(reversed(list(places)) if self._flip else places):
            for_each = zip(place, self._dilation, self._stride, self._out, strict=True)
            every: tuple[Any, ...] = (..., *(slice(o * d, o * d + s * (m - 1) + 1, s) for o, d, s, m in for_each))
            out[:, :, :, i] = x[every]
        return out.flatten(2, 3).flatten(3).mT

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` a sample; an addition to a Gram matrix takes the time of about eight of them."""
        pixels, places, inputs = _prod(self._x.shape[4:]), _prod(self._kernel), self._x.shape[3]
        if not self._by_pixels:
            return float(self.shape[2] ** 2 * self.shape[3])
        return float(pixels**2 * (inputs + 8 * places))

    @property
    def _by_pixels(self) -> bool:
        return _prod(self._kernel) > 1 and _prod(self._stride) == 1 and self._x.shape[1] == 1

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """The inner products of the patches of each sample, [groups, samples, positions, positions].

        A patch is the pixels around a position, so these are sums of the pixels' own inner products, over the places of
        the kernel: K(p, q) = sum_o k(p + o, q + o).
        """
        if not self._by_pixels:
            patches = self.take(samples).to(dtype)
            return patches @ patches.mT
        x = self._x[samples][:, 0].transpose(0, 1).to(dtype)  # [groups, samples, in, *size]
        steps = [_prod(x.shape[i + 1 :]) for i in range(3, x.dim())]  # of the flat image
        starts = [
            sum(o * d * step for o, d, step in zip(place, self._dilation, steps, strict=True))
            for place in itertools.product(*(range(k) for k in self._kernel))
        ]
        flat = x.flatten(3)
        pixels = flat.mT @ flat
        length = flat.shape[-1] - starts[-1]
        # On the flat image an offset is one shift, for all pairs of pixels alike; those that are no positions of the
        # output, such as where a row of the image ends, are left out afterwards.
        wide = pixels[..., :length, :length].clone(memory_format=torch.contiguous_format)
        for start in starts[1:]:
            wide += pixels[..., start : start + length, start : start + length]
        strides = [step * length for step in steps]
        valid = wide.as_strided((*x.shape[:2], *self._out, *self._out), (*wide.stride()[:2], *strides, *steps))
        return valid.reshape(*x.shape[:2], self.shape[2], self.shape[2])

    def outer(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        """G_i = sum_p l_ip [patch_ip; 1]^T one under the other, [groups, samples * m, n], or for the left side G_i^T,
        [groups, samples * n, m]; with ``ones`` there is one more of the n columns."""
        if self._each_by_torch(left.shape[-1], left.dtype):
            return self._one_by_one(samples, left, side, ones)
        if self._x.shape[3] < FEW_CHANNELS or _prod(self._kernel) == 1:
            patches = self.take(samples).to(left.dtype)
            tall = patches.mT @ left if side == "left" else left.mT @ patches
        else:
            tall = self._by_places(samples, left)
            tall = tall if side == "left" else tall.mT
        if ones and side == "left":
            tall = torch.cat((tall, left.sum(-2, keepdim=True)), dim=-2)
        elif ones:
            tall = torch.cat((tall, left.sum(-2)[..., None]), dim=-1)
        return tall.flatten(1, 2)

    def outer_memory(self, m: int) -> int:
        """Numbers a sample that ``outer`` needs beside its result, for m rows."""
        if self._each_by_torch(m):
            return 0
        if self._x.shape[3] < FEW_CHANNELS:
            return int(self.shape[0] * self.shape[2] * self.shape[3])
        return int(self._x[0].numel() + self.shape[0] * self.shape[2] * m)  # copies of input and gradient

    def _each_by_torch(self, m: int, dtype: torch.dtype = torch.float32) -> bool:
        """Is torch's own weight gradient of one sample after the other the fastest? Where a sample is work enough."""
        if self._x.device.type != "cpu" or torch.float64 in (dtype, self._x.dtype):
            return False
        if not torch.backends.mkldnn.is_available():
            return False
        groups, _, positions, cols = self.shape
        least = ONE_BY_ONE["few channels" if self._x.shape[3] < FEW_CHANNELS else "many channels"]
        return _prod(self._kernel) > 1 and groups * positions * cols * m >= least

    def _one_by_one(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        """``outer`` from torch's own convolutions, written where it is wanted."""
        x, n = self._x[samples], len(self._kernel)
        count, rows, groups, inputs = x.shape[:4]
        m, cols = left.shape[-1], self.shape[-1]
        shape = (groups, m, count, cols + ones) if side == "left" else (groups, count, m, cols + ones)
        out = left.new_empty(shape)
        each = out.transpose(1, 2) if side == "left" else out  # [groups, samples, m, n]
        x = x.flatten(2, 3)
        g = left.unflatten(2, (rows, -1)).permute(1, 2, 0, 4, 3).reshape(count, rows, groups * m, *self._out)
        weight = left.new_empty(groups * m, inputs, *self._kernel)  # of which only the shape matters
        none = (0,) * n
        geometry = (self._stride, none, self._dilation, False, none, groups)
        for i in range(count):
            image = x[i].to(left.dtype)
            own = torch.ops.aten.convolution_backward(g[i], image, weight, None, *geometry, (False, True, False))[1]
            own = own.flip(tuple(range(2, 2 + n))) if self._flip else own
            each[:, i, :, :cols] = own.reshape(groups, m, cols)
        if ones:
            each[..., cols] = left.sum(-2)
        return out.flatten(2).mT if side == "left" else out.flatten(1, 2)

    def _by_places(self, samples: Tensor | slice, left: Tensor) -> Tensor:
        """sum_p patch_ip l_ip^T, [groups, samples, in/groups * kernel, m], without unfolding: a product for each place
        of the kernel.

        The gradients are set into rows as long as those of the input's grid; then the patches' entries at one place of
        the kernel are one slice of the flat input, and a product of two views. A stride cuts the input into phases.
        """
        x, n = self._x[samples], len(self._kernel)
        count, rows, groups, inputs = x.shape[:4]
        x = x.flatten(0, 2)  # [samples * rows * groups, in/groups, *size]
        grid = [-(-size // s) for size, s in zip(x.shape[2:], self._stride, strict=True)]
        steps = [_prod(grid[i + 1 :]) for i in range(n)]  # of the flat grid
        shifts = [d * (k - 1) // s for d, k, s in zip(self._dilation, self._kernel, self._stride, strict=True)]
        length = self._out[0] * steps[0]
        reach = sum(shift * step for shift, step in zip(shifts, steps, strict=True)) + length
        flat = self._phases(x, grid, max(0, reach - _prod(grid)))
        # [groups, samples, positions, m] to [samples * rows * groups, m, *out], set into the grid
        m = left.shape[-1]
        g = left.unflatten(2, (rows, -1)).permute(1, 2, 0, 4, 3).reshape(count * rows * groups, m, *self._out)
        widen: list[int] = []
        for i in reversed(range(1, n)):
            widen += [0, grid[i] - self._out[i]]
        g = (F.pad(g, widen) if any(widen) else g).flatten(2).mT
        places = list(itertools.product(*(range(k) for k in self._kernel)))
        out = x.new_empty(len(places), len(g), inputs, m, dtype=g.dtype)
        for i, place in enumerate(places):
            offsets = [p * d for p, d in zip(place, self._dilation, strict=True)]
            phase = [o % s for o, s in zip(offsets, self._stride, strict=True)]
            start = sum(o // s * step for o, s, step in zip(offsets, self._stride, steps, strict=True))
            torch.bmm(flat[tuple(phase)][..., start : start + length].to(g.dtype), g, out=out[i])
        if self._flip:
            out = out.flip(0)
        # [kernel, samples, rows, groups, in, m] to [groups, samples, in * kernel, m]
        out = out.unflatten(1, (count, rows, groups)).sum(2) if rows > 1 else out.unflatten(1, (count, groups))
        return out.permute(2, 1, 3, 0, 4).flatten(2, 3)

    def _phases(self, x: Tensor, grid: Sequence[int], extra: int) -> Tensor:
        """[*stride, batch, in, flat grid]: the input at every stride-th place, from each start."""
        missing = [length * s - size for length, s, size in zip(grid, self._stride, x.shape[2:], strict=True)]
        if any(missing):
            x = F.pad(x, [p for m in reversed(missing) for p in (0, m)])
        n = len(grid)
        for i in range(n):
            x = x.unflatten(2 + 2 * i, (grid[i], self._stride[i]))
        order = (*range(3, 3 + 2 * n, 2), 0, 1, *range(2, 2 + 2 * n, 2))
        flat = x.permute(order).flatten(2 + n)
        return F.pad(flat, (0, extra)) if extra else flat


def conv_factors(patches: Patches | None, grad: Tensor, active: Active, groups: int, samples: int) -> Outer:
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
    """Any stride, padding, padding mode, dilation, groups; a group is a matrix (out/groups, in/groups * kernel).

    Examples:
        >>> row = ngplus.NGPlus(nn.Conv2d(4, 6, 3, groups=2)).plan()[0]
        >>> row.groups, row.shape  # the bias is the last of 2 * 9 + 1 columns
        (2, (3, 19))
    """

    bias_needs_input = False

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, _ConvNd)
        return [MatrixSpec(("weight", "bias"), ("rows", "column"), module.groups)]

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        assert isinstance(module, _ConvNd)
        spatial = len(module.kernel_size)
        (x,) = inputs
        grad = batch.by_sample(_batched(grad, spatial))
        samples, grad = len(grad), grad.flatten(0, 1)
        if x is None:
            return conv_factors(None, grad, active, module.groups, samples)
        x = batch.by_sample(_batched(x, spatial)).flatten(0, 1)
        padding = module._reversed_padding_repeated_twice
        if any(padding):
            x = F.pad(x, padding) if module.padding_mode == "zeros" else F.pad(x, padding, mode=module.padding_mode)
        patches = Patches(x, module.kernel_size, module.stride, module.dilation, module.groups, samples)
        return conv_factors(patches, grad, active, module.groups, samples)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(LayerRule):
    """A transposed convolution is a plain one, stride 1 and kernel reversed, on its input with zeros set in between.

    Examples:
        >>> ngplus.NGPlus(nn.ConvTranspose2d(4, 6, 3)).plan()[0].shape
        (6, 37)
    """

    bias_needs_input = False

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        assert isinstance(module, _ConvNd)
        return [MatrixSpec(("weight", "bias"), ("transposed", "column"), module.groups)]

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        assert isinstance(module, _ConvTransposeNd)
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        spatial = len(kernel)
        (x,) = inputs
        grad = batch.by_sample(_batched(grad, spatial))
        samples, grad = len(grad), grad.flatten(0, 1)
        if x is None:
            return conv_factors(None, grad, active, module.groups, samples)
        x = batch.by_sample(_batched(x, spatial)).flatten(0, 1)
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
