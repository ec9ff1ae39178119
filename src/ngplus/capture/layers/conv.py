"""Rules of convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, LayerRule, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.fisher.factors import Factors, Outer

# Multiplications a sample above which one call of torch's own convolution for each sample is faster than unfolding:
MIN_WORK_PER_SAMPLE = 2**20


class Patches:
    """The unfolded input of a convolution, [groups, samples, positions, in/groups * kernel].

    Patches are made for a few samples at a time: those of a whole batch take prod(kernel) times the input's memory.
    ``padded`` is [samples * images, channels, *size], with one image a sample unless samples were flattened.
    """

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
        self._x = padded.unflatten(0, (samples, -1)).unflatten(2, (groups, -1))  # [samples, images, groups, in, *size]
        self._kernel, self._stride, self._dilation, self._flip = tuple(kernel), tuple(stride), tuple(dilation), flip
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        self._out = tuple((n - r - 1) // s + 1 for n, r, s in zip(padded.shape[2:], spans, stride, strict=True))
        images, inputs = self._x.shape[1], self._x.shape[3]
        self.shape: tuple[int, ...] = (groups, samples, images * _prod(self._out), inputs * _prod(kernel))

    def take(self, samples: Tensor | slice) -> Tensor:
        """Returns the patches of these samples, copied kernel offset by kernel offset."""
        x = self._x[samples]
        x = x.permute(2, 0, 3, 1, *range(4, x.dim()))  # [groups, samples, in/groups, images, *size]
        out = x.new_empty(*x.shape[:3], _prod(self._kernel), x.shape[3], *self._out)
        offsets = itertools.product(*(range(k) for k in self._kernel))
        for i, offset in enumerate(reversed(list(offsets)) if self._flip else offsets):
            steps = zip(offset, self._dilation, self._stride, self._out, strict=True)
            every: tuple[Any, ...] = (..., *(slice(o * d, o * d + s * (m - 1) + 1, s) for o, d, s, m in steps))
            out[:, :, :, i] = x[every]
        return out.flatten(2, 3).flatten(3).mT

    def columns(self, cols: slice) -> Tensor:
        """Returns these columns of the patches of all samples. They are those of whole channels."""
        part, kernel = copy.copy(self), _prod(self._kernel)
        part._x = self._x[:, :, :, cols.start // kernel : cols.stop // kernel]
        return part.take(slice(None))

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` a sample; adding to a Gram matrix takes the time of about eight of them."""
        pixels, inputs = _prod(self._x.shape[4:]), self._x.shape[3]
        if not self._by_pixels:
            return float(self.shape[2] ** 2 * self.shape[3])
        return float(pixels**2 * (inputs + 8 * _prod(self._kernel)))

    @property
    def _by_pixels(self) -> bool:
        return _prod(self._kernel) > 1 and _prod(self._stride) == 1 and self._x.shape[1] == 1

    def gram(self, samples: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Returns the inner products of the patches of each sample, [groups, samples, positions, positions].

        They are sums of inner products of pixels over the kernel offsets: K(p, q) = sum_o k(p + o, q + o).
        """
        if not self._by_pixels:
            patches = self.take(samples).to(dtype)
            return patches @ patches.mT
        x = self._x[samples][:, 0].transpose(0, 1).to(dtype)  # [groups, samples, in, *size]
        steps = [_prod(x.shape[i + 1 :]) for i in range(3, x.dim())]  # strides of the flat image
        starts = [
            sum(o * d * step for o, d, step in zip(offset, self._dilation, steps, strict=True))
            for offset in itertools.product(*(range(k) for k in self._kernel))
        ]
        flat = x.flatten(3)
        pixels = flat.mT @ flat
        length = flat.shape[-1] - starts[-1]
        # On the flat image an offset is the same shift for all pairs of pixels. Pairs that are not positions of the
        # output, where a patch would wrap around, are removed by the strided view.
        wide = pixels[..., :length, :length].clone(memory_format=torch.contiguous_format)
        for start in starts[1:]:
            wide += pixels[..., start : start + length, start : start + length]
        strides = [step * length for step in steps]
        valid = wide.as_strided((*x.shape[:2], *self._out, *self._out), (*wide.stride()[:2], *strides, *steps))
        return valid.reshape(*x.shape[:2], self.shape[2], self.shape[2])

    def outer(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        """Returns all G_i = sum_p l_ip [patch_ip; 1]^T below each other, [groups, samples * m, n]; for the left side
        G_i^T, [groups, samples * n, m]. Without ``ones`` the last of the n columns is absent."""
        if self._uses_torch(left.shape[-1], left.dtype):
            return self._outer_by_torch(samples, left, side, ones)
        patches = self.take(samples).to(left.dtype)
        if side == "left":
            tall = patches.mT @ left
            tall = torch.cat((tall, left.sum(-2, keepdim=True)), dim=-2) if ones else tall
        else:
            tall = left.mT @ patches
            tall = torch.cat((tall, left.sum(-2)[..., None]), dim=-1) if ones else tall
        return tall.flatten(1, 2)

    def outer_memory(self, m: int) -> int:
        """Numbers a sample that ``outer`` needs in addition to its result, for m rows."""
        return 0 if self._uses_torch(m) else int(self.shape[0] * self.shape[2] * self.shape[3])

    def _uses_torch(self, m: int, dtype: torch.dtype = torch.float32) -> bool:
        """Is one call of torch's weight gradient for each sample the fastest?"""
        if self._x.device.type != "cpu" or torch.float64 in (dtype, self._x.dtype):
            return False
        groups, _, positions, cols = self.shape
        enough = groups * positions * cols * m >= MIN_WORK_PER_SAMPLE
        return enough and _prod(self._kernel) > 1 and torch.backends.mkldnn.is_available()

    def _outer_by_torch(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        x, n = self._x[samples], len(self._kernel)
        count, images, groups, inputs = x.shape[:4]
        m, cols = left.shape[-1], self.shape[-1]
        shape = (groups, m, count, cols + ones) if side == "left" else (groups, count, m, cols + ones)
        out = left.new_empty(shape)
        each = out.transpose(1, 2) if side == "left" else out  # [groups, samples, m, n]
        x = x.flatten(2, 3)
        g = left.unflatten(2, (images, -1)).permute(1, 2, 0, 4, 3).reshape(count, images, groups * m, *self._out)
        weight = left.new_empty(groups * m, inputs, *self._kernel)  # only its shape is used
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


class _ConvolutionRule(LayerRule):
    """A convolution: G_i = sum over output positions p of g_ip [patch_ip; 1]^T, for each group."""

    bias_needs_input = False

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        """The patches of x, [samples * images, channels, *size], for outputs of spatial size ``out``."""
        raise NotImplementedError

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        dims = len(module.kernel_size) + 2
        grad = batch.by_sample(grad if grad.dim() == dims else grad[None])  # [samples, images, channels, *out]
        g = grad.unflatten(2, (module.groups, -1)).flatten(4)  # [samples, images, groups, m, positions]
        left = g.permute(2, 0, 1, 4, 3).flatten(2, 3)
        bias = len(active) > 1 and active[1]
        if x is None or not active[0]:
            return Outer(left, left[..., :0], ones=bias)
        x = batch.by_sample(x if x.dim() == dims else x[None]).flatten(0, 1)
        return Outer(left, self._patches(module, x, grad.shape[3:], len(grad)), ones=bias)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(_ConvolutionRule):
    """Any stride, padding, padding mode, dilation and groups; each group is a matrix (out/groups, in/groups * kernel).

    Examples:
        >>> row = ngplus.NGPlus(nn.Conv2d(4, 6, 3, groups=2)).plan()[0]
        >>> row.groups, row.shape  # the bias is the last of 2 * 9 + 1 columns
        (2, (3, 19))
    """

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("rows", "column"), module.groups)]

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        padding = module._reversed_padding_repeated_twice
        if any(padding):
            x = F.pad(x, padding, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
        return Patches(x, module.kernel_size, module.stride, module.dilation, module.groups, samples)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(_ConvolutionRule):
    """A convolution with stride 1 and the kernel reversed, on the input with stride - 1 zeros between its entries.

    Examples:
        >>> ngplus.NGPlus(nn.ConvTranspose2d(4, 6, 3)).plan()[0].shape
        (6, 37)
    """

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("transposed", "column"), module.groups)]

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        sizes = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *sizes)
        every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
        spread[every] = x
        # Output position q sees input position q + before - kernel offset; the other end follows from the output size.
        padding: list[int] = []
        for dim in reversed(range(len(kernel))):
            reach = dilation[dim] * (kernel[dim] - 1)
            before = reach - int(module.padding[dim])
            padding += [before, out[dim] + reach - sizes[dim] - before]
        return Patches(F.pad(spread, padding), kernel, (1,) * len(kernel), dilation, module.groups, samples, flip=True)


def _prod(values: Sequence[int]) -> int:
    return int(torch.Size(values).numel())
