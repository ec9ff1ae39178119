"""Rules of convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, register_layer
from ngplus.capture.layers.computed import Functions, WeightRule, with_sources
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.layers.parts import by_parts
from ngplus.fisher.factors import Factors, Outer

# Multiplications a sample above which one call of torch's own convolution for each sample is faster than unfolding:
MIN_WORK_PER_SAMPLE = 2**20


class Patches:
    """The unfolded input of a convolution, [groups, samples, positions, in/groups * kernel].

    Patches are made for a few samples at a time: those of a whole batch take prod(kernel) times the input's memory.
    ``x`` is [samples * images, channels, *size], with one image a sample unless samples were flattened. ``pad`` pads
    such a tensor, with the images of some samples.
    """

    def __init__(
        self,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        samples: int,
        flip: bool = False,
        pad: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._x, self._groups, self._pad = x.unflatten(0, (samples, -1)), groups, pad
        self._size = tuple(x[:1].shape[2:] if pad is None else pad(x[:1]).shape[2:])  # of a padded image
        self._kernel, self._stride, self._dilation, self._flip = tuple(kernel), tuple(stride), tuple(dilation), flip
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        self._out = tuple((n - r - 1) // s + 1 for n, r, s in zip(self._size, spans, stride, strict=True))
        images, inputs = self._x.shape[1], self._x.shape[2] // groups
        self.shape: tuple[int, ...] = (groups, samples, images * _prod(self._out), inputs * _prod(kernel))

    def _padded(self, samples: Tensor | slice) -> Tensor:
        """Returns the padded images of these samples, [samples, images, groups, in, *size]."""
        x = self._x[samples]
        x = x if self._pad is None else self._pad(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x.unflatten(2, (self._groups, -1))

    def take(self, samples: Tensor | slice) -> Tensor:
        """Returns the patches of these samples, copied kernel offset by kernel offset."""
        return self._patches(self._padded(samples), slice(None))

    def _patches(self, x: Tensor, which: slice) -> Tensor:
        """Returns patches of padded images, at some of the offsets of the kernel."""
        x = x.permute(2, 0, 3, 1, *range(4, x.dim()))  # [groups, samples, in/groups, images, *size]
        offsets = list(itertools.product(*(range(k) for k in self._kernel)))
        offsets = (offsets[::-1] if self._flip else offsets)[which]
        out = x.new_empty(*x.shape[:3], len(offsets), x.shape[3], *self._out)
        for i, offset in enumerate(offsets):
            steps = zip(offset, self._dilation, self._stride, self._out, strict=True)
            every: tuple[Any, ...] = (..., *(slice(o * d, o * d + s * (m - 1) + 1, s) for o, d, s, m in steps))
            out[:, :, :, i] = x[every]
        return out.flatten(2, 3).flatten(3).mT

    def columns(self, cols: slice, samples: slice) -> Tensor:
        """Returns these columns of the patches: those of whole channels, or a part of one's. Only kernels of one number
        have columns with a step."""
        part, kernel = copy.copy(self), _prod(self._kernel)
        first, last = cols.start // kernel, (cols.stop - 1) // kernel
        channels = slice(first, last + 1, cols.step if kernel == 1 else None)
        part._x = self._x[samples].unflatten(2, (self._groups, -1))[:, :, :, channels].flatten(2, 3)
        start = cols.start % kernel
        which = slice(start, start + cols.stop - cols.start) if first == last else slice(None)
        return part._patches(part._padded(slice(None)), which)

    def tensors(self) -> Iterator[Tensor]:
        yield self._x

    @property
    def gram_cost(self) -> float:
        """Multiplications of ``gram`` a sample; adding to a Gram matrix takes the time of about eight of them."""
        pixels, inputs = _prod(self._size), self._x.shape[2] // self._groups
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
        x = self._padded(samples)[:, 0].transpose(0, 1).to(dtype)  # [groups, samples, in, *size]
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
        groups, _, positions, cols = self.shape
        patches = 0 if self._uses_torch(m) else groups * positions * cols
        return int(self._pixels + groups * positions * m + patches)

    @property
    def _pixels(self) -> int:
        """The numbers of a sample's padded images."""
        return self._x.shape[1] * self._x.shape[2] * _prod(self._size)

    @property
    def gram_memory(self) -> int:
        """Numbers a sample that ``gram`` needs in addition to its result."""
        groups, _, positions, cols = self.shape
        inner = 2 * _prod(self._size) ** 2 if self._by_pixels else 2 * positions * cols
        return int(2 * self._pixels + groups * inner)

    def _uses_torch(self, m: int, dtype: torch.dtype = torch.float32) -> bool:
        """Returns True if one call of torch's weight gradient for each sample is the fastest."""
        if self._x.device.type != "cpu" or torch.float64 in (dtype, self._x.dtype):
            return False
        groups, _, positions, cols = self.shape
        enough = groups * positions * cols * m >= MIN_WORK_PER_SAMPLE
        return enough and _prod(self._kernel) > 1 and torch.backends.mkldnn.is_available()

    def _outer_by_torch(self, samples: Tensor | slice, left: Tensor, side: str, ones: bool) -> Tensor:
        x, n = self._padded(samples), len(self._kernel)
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


class _ConvolutionRule(WeightRule):
    r"""A convolution: $G_i = \sum_p g_{ip} [\text{patch}_{ip}; 1]^\top$ over output positions $p$, for each group."""

    bias_needs_input = False
    product = True

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        """The patches of x, [samples * images, channels, *size], for outputs of spatial size ``out``."""
        raise NotImplementedError

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        dims = len(module.kernel_size) + 2
        given = [tensor if tensor.dim() == dims else tensor[None] for tensor in (grad, x) if tensor is not None]
        bias = len(active) > 1 and active[1]

        def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
            counts = batch.sizes(len(tensors[0]))
            grad = batch.by_sample(tensors[0])  # [samples, images, channels, *out]
            g = grad.unflatten(2, (module.groups, -1)).flatten(4)  # [samples, images, groups, m, positions]
            left = g.permute(2, 0, 1, 4, 3).flatten(2, 3)
            sizes = [k * g.shape[-1] for k in counts] if counts else None
            if len(tensors) == 1:
                return Outer(left, left[..., :0], bias, sizes)
            images = batch.by_sample(tensors[1]).flatten(0, 1)
            return Outer(left, self._patches(module, images, grad.shape[3:], len(grad)), bias, sizes)

        several = batch.count(len(given[0])) < len(given[0])  # images of a sample, which are copied
        return by_parts(build, given if active[0] else given[:1], batch, several)


@register_layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(_ConvolutionRule):
    """Any stride, padding, padding mode, dilation and groups; each group is a matrix
    `(out/groups, in/groups * kernel)`.

    Examples:
        >>> row = ngplus.NGPlus(nn.Conv2d(4, 6, 3, groups=2)).plan()[0]
        >>> row.groups, row.shape  # the bias is the last of 2 * 9 + 1 columns
        (2, (3, 19))
    """

    functions: ClassVar[Functions] = dict.fromkeys(
        (F.conv1d, F.conv2d, F.conv3d), ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    )

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return with_sources(module, MatrixSpec(("weight", "bias"), ("rows", "column"), module.groups))

    def options(self, given: Mapping[str, Any]) -> Any:
        options = _geometry(given)
        padding = options.padding
        if padding == "same":
            spans = [d * (k - 1) for d, k in zip(options.dilation, options.kernel_size, strict=True)]
            both = [side for span in reversed(spans) for side in (span // 2, span - span // 2)]
        else:
            each = (0,) * len(options.kernel_size) if padding == "valid" else padding
            both = [pad for pad in reversed(each) for _ in range(2)]
        options._reversed_padding_repeated_twice, options.padding_mode = both, "zeros"
        return options

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        padding = module._reversed_padding_repeated_twice
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode

        def pad(x: Tensor) -> Tensor:
            return F.pad(x, padding, mode=mode) if any(padding) else x

        return Patches(x, module.kernel_size, module.stride, module.dilation, module.groups, samples, pad=pad)


@register_layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(_ConvolutionRule):
    """A convolution with stride 1 and the kernel reversed, on the input with stride - 1 zeros between its entries.

    Examples:
        >>> ngplus.NGPlus(nn.ConvTranspose2d(4, 6, 3)).plan()[0].shape
        (6, 37)
    """

    functions: ClassVar[Functions] = dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    )

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return with_sources(module, MatrixSpec(("weight", "bias"), ("transposed", "column"), module.groups))

    def options(self, given: Mapping[str, Any]) -> Any:
        return _geometry(given)

    def _patches(self, module: Any, x: Tensor, out: Sequence[int], samples: int) -> Patches:
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        sizes = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
        # Output position q sees input position q + before - kernel offset; the other end follows from the output size.
        padding: list[int] = []
        for dim in reversed(range(len(kernel))):
            reach = dilation[dim] * (kernel[dim] - 1)
            before = reach - int(module.padding[dim])
            padding += [before, out[dim] + reach - sizes[dim] - before]

        def pad(x: Tensor) -> Tensor:
            spread = x.new_zeros(*x.shape[:2], *sizes)
            every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
            spread[every] = x
            return F.pad(spread, padding)

        return Patches(x, kernel, (1,) * len(kernel), dilation, module.groups, samples, flip=True, pad=pad)


def _geometry(given: Mapping[str, Any]) -> SimpleNamespace:
    """The attributes of a module for a call of a function with these arguments."""
    kernel = tuple(given["weight"].shape[2:])

    def each(name: str, default: int) -> Any:
        value = given.get(name, default)
        value = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        return (value,) * len(kernel) if isinstance(value, int) else value

    return SimpleNamespace(
        kernel_size=kernel,
        groups=given.get("groups", 1),
        stride=each("stride", 1),
        padding=each("padding", 0),
        dilation=each("dilation", 1),
    )


def _prod(values: Sequence[int]) -> int:
    return int(torch.Size(values).numel())
