"""The samples of a batch: their dimension in the model's inputs, their number, and the samples of one layer's call.

:func:`sample_dims` and :class:`SampleCount` read ``batch_dim`` and the inputs. :mod:`ngplus.capture.sample_tracker`
follows the samples to each layer. :class:`Batch` splits a layer's input or gradient by samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.sample_axis import tensors
from ngplus.capture.sample_index import Ragged
from ngplus.fisher.factors.base import Samples
from ngplus.fisher.products import CHUNK_BYTES, REFRESH_MEMORY

MAX_CANDIDATES = 4  # numbers of samples that are tried until the output of the model is known
BatchDims = int | None | Mapping[str, int | None]


def sample_dims(model: nn.Module, batch_dim: BatchDims) -> dict[nn.Module, int | None]:
    """Returns the dimension of the samples for each module in which it is not 0; None for a module without samples.

    Args:
        model: the model.
        batch_dim: one dimension for the whole model, or a mapping from module names, each of which holds for the module
            and all modules below it.
    """
    by_name = dict(batch_dim) if isinstance(batch_dim, Mapping) else {"": batch_dim}
    for name, dim in by_name.items():
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise ValueError(f"Invalid batch_dim{f' of {name!r}' if name else ''}: {dim!r} (a dimension, or None)")
    dims: dict[nn.Module, int | None] = {}
    for module in model.modules():
        if _is_time_major(module):
            dims.update(dict.fromkeys(module.modules(), 1))
    modules = dict(model.named_modules())
    for name, dim in by_name.items():
        if name not in modules:
            raise ValueError(f"Invalid batch_dim: the model has no module {name!r} (see model.named_modules())")
        if name or dim != 0:  # 0 for the whole model is the default, which does not override time-major modules
            dims.update(dict.fromkeys(modules[name].modules(), dim))
    return dims


def modules_with_given_dim(model: nn.Module, batch_dim: BatchDims) -> set[nn.Module]:
    """Returns the modules for which ``batch_dim`` gives a dimension by name, and those below them."""
    names = [name for name in batch_dim if name] if isinstance(batch_dim, Mapping) else []
    return {module for name in names for module in model.get_submodule(name).modules()}


def _is_time_major(module: nn.Module) -> bool:
    """Returns True for a torch module that takes [length, batch, features]."""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return any(_is_time_major(layer) for layer in module.layers)
    return isinstance(module, nn.Transformer | nn.MultiheadAttention | nn.RNNBase) and not module.batch_first


class SampleCount:
    """Finds the number of samples of one call of the model from the sizes of dimension ``dim`` of its tensors."""

    def __init__(self, inputs: Any, dim: int | None) -> None:
        self._dim = dim
        self._inputs_have_dimensions = _has_dimensions(inputs)
        sizes = list(self._sizes(inputs))
        self._input_sizes = Counter(size for size, _ in sizes)
        integers = [x for x in tensors(inputs) if x.dim() == 1 and not x.is_floating_point()]
        self._offsets = [len(x) - 1 for x in integers if len(x) > 1]  # if the last one is the end, as of bags
        sizes_and_offsets = [size for size, _ in self._input_sizes.most_common()] + self._offsets
        self.candidates = [size for size in dict.fromkeys(sizes_and_offsets) if size][:MAX_CANDIDATES]
        #: By the inputs alone: the most common size, and of several that of the tensor with the most dimensions.
        self.from_inputs = max(sizes, key=lambda s: (self._input_sizes[s[0]], s[1]))[0] if sizes else None

    def with_output(self, output: Any) -> int | None:
        """Returns the number by inputs and output together; None if it is not certain.

        Inputs of one size have the samples, whatever the output is. Of several sizes it is the one that the output has,
        too; a size of 1 is that of an input that all samples share, if there is another.
        """
        if len(self._input_sizes) == 1:
            return self.from_inputs
        output_sizes = {size for size, _ in self._sizes(output)}
        none = not self._input_sizes and not output_sizes
        if none and self._dim and self._inputs_have_dimensions and _has_dimensions(output):
            raise ValueError(
                f"Invalid batch_dim: {self._dim} (counted from 0). No input or output of the model has more than "
                f"{self._dim} dimensions"
            )
        found = output_sizes.intersection(self._input_sizes) or output_sizes.intersection(self._offsets)
        found = found - {1} or found
        return found.pop() if len(found) == 1 else None

    def _sizes(self, tree: Any) -> Iterator[tuple[int, int]]:
        """The size of the dimension, and the number of dimensions, of each tensor."""
        for x in tensors(tree):
            if self._dim is not None and x.dim() > self._dim and not (x.is_nested and self._dim):  # only 0 has a size
                yield x.size(self._dim), x.dim()


def _has_dimensions(tree: Any) -> bool:
    return any(x.dim() > 0 and not x.is_nested for x in tensors(tree))


class NotPerSample(Exception):
    """Raised by a rule for a call without per-sample gradients. The matrix then uses mini-batch curvature.

    Examples:
        >>> class Picky(ngplus.layers.LinearRule):
        ...     def factors(self, module, inputs, grad, active, batch):
        ...         if grad.dim() > 2:
        ...             raise ngplus.layers.NotPerSample("sequences are not supported")
        ...         return super().factors(module, inputs, grad, active, batch)
    """


def too_large(number: int, memory: int) -> str:
    """The reason of a matrix for which a refresh would take more bytes than it may."""
    return reasons.with_detail(reasons.TOO_LARGE, f"{number:,} bytes, refresh_memory is {memory:,}")


def check_bytes(number: int, memory: int) -> None:
    """Raises NotPerSample with that reason."""
    if number > memory:
        raise NotPerSample(too_large(number, memory))


@dataclass(frozen=True)
class Batch:
    """The samples of one forward call of a layer.

    Attributes:
        dim: the dimension of the samples; None for a layer without samples.
        size: the number of samples that the model was called with, if known.
        ragged: the indices that ``sample_index`` returned, by their length.
        outer: how often the samples repeat along the dimension, as after [positions, samples] was flattened.
        memory: bytes that a refresh may take for a matrix, beyond the layer's own inputs and gradients.
        taken: those that are taken already.

    Examples:
        >>> batch = ngplus.layers.Batch(dim=1)
        >>> tuple(batch.fold(torch.zeros(7, 4, 5)).shape)  # time first: 4 samples of 7 positions with 5 features
        (4, 7, 5)
    """

    dim: int | None = 0
    size: int | None = None
    ragged: Mapping[int, Ragged] = field(default_factory=dict, repr=False, compare=False)
    outer: int = 1
    memory: int = field(default=REFRESH_MEMORY, repr=False, compare=False)
    taken: int = field(default=0, repr=False, compare=False)

    @property
    def part_bytes(self) -> int:
        """Bytes that a rule takes at a time."""
        return min(self.memory - self.taken, CHUNK_BYTES)

    def count(self, length: int) -> int:
        """Returns the number of samples in a dimension of this length."""
        if self.dim is None:
            return 1
        if self.ragged and length not in self.ragged:
            raise NotPerSample(reasons.with_detail(reasons.NO_SAMPLE_INDEX, f"a batch dimension of {length}"))
        if self.ragged:
            return self.ragged[length].samples
        if self.size and length % self.size == 0:
            return self.size
        return length

    def by_sample(self, x: Tensor) -> Tensor:
        """Splits dimension 0 of x by samples: [samples, longest, ...], with zeros for samples that have fewer entries.

        Examples:
            >>> tuple(ngplus.layers.Batch(size=4).by_sample(torch.zeros(12, 5)).shape)
            (4, 3, 5)
        """
        ragged = self._ragged_of(len(x))
        if ragged is not None:
            return ragged.pad(x)
        if self.outer > 1:
            return x.unflatten(0, (self.outer, self.count(len(x)), -1)).movedim(1, 0).flatten(1, 2)
        return x.unflatten(0, (self.count(len(x)), -1))

    def sizes(self, length: int) -> list[int] | None:
        """Returns the number of entries of each sample in a dimension of this length, if :meth:`by_sample` pads them;
        None if all have as many."""
        ragged = self._ragged_of(length)
        return ragged.sizes if ragged is not None and ragged.uneven else None

    def without(self, number: int) -> Batch:
        """Returns the same batch with more bytes ``taken``, those of a rule's result."""
        self.check_bytes(number)
        return replace(self, taken=self.taken + number)

    def check_bytes(self, number: int) -> None:
        """Raises NotPerSample if a rule would take more than ``memory``."""
        check_bytes(self.taken + number, self.memory)

    def copies(self, length: int) -> bool:
        """Returns True if ``by_sample`` copies a tensor of this length."""
        ragged = self._ragged_of(length)
        return self.outer > 1 if ragged is None else ragged.shuffled or ragged.uneven

    def longest(self, length: int) -> tuple[int, int]:
        """Returns the sample with the most entries, and their number."""
        ragged = self._ragged_of(length)
        if ragged is None:
            return 0, length // self.count(length)
        return ragged.sizes.index(max(ragged.sizes)), ragged.longest

    def part(self, length: int, samples: Samples) -> tuple[Tensor | slice, Batch]:
        """Returns the entries of some samples in a dimension of this length, and their batch."""
        ragged = self._ragged_of(length)
        if ragged is not None:
            entries, own = ragged.part(samples)
            return entries, replace(self, size=own.samples, ragged={len(own.index): own})
        count = self.count(length)
        if self.outer == 1 and isinstance(samples, slice):
            start, stop, _ = samples.indices(count)
            each = length // count
            return slice(start * each, stop * each), replace(self, size=stop - start)
        numbers = torch.arange(length).view(self.outer, count, -1)[:, samples].movedim(1, 0)
        return numbers.flatten(), replace(self, size=len(numbers), outer=1)

    def owners(self, length: int) -> Tensor | None:
        """Returns the sample of each entry in a dimension of this length; None if each entry is a sample of its own."""
        ragged, count = self._ragged_of(length), self.count(length)
        if ragged is not None:
            ragged.used = True
            return ragged.index
        each = torch.arange(count).repeat_interleave(length // (count * self.outer))
        return None if count == length else each.repeat(self.outer)

    def sums(self, x: Tensor) -> Tensor:
        """Sums dimension 0 of x over the entries of each sample: [samples, ...].

        Examples:
            >>> tuple(ngplus.layers.Batch(size=4).sums(torch.zeros(12, 5)).shape)
            (4, 5)
        """
        ragged = self._ragged_of(len(x))
        return self.by_sample(x).sum(1) if ragged is None else ragged.sums(x)

    def fold(self, x: Tensor, features: int = 1) -> Tensor:
        """Reshapes x, with ``features`` trailing feature dimensions, to [samples, positions, *features]."""
        tail = x.shape[x.dim() - features :]
        if self.dim is None or x.dim() == features:
            return x.reshape(1, -1, *tail)
        x = self.by_sample(self.first(x, features))
        return x.reshape(len(x), -1, *tail)

    def first(self, x: Tensor, features: int = 1) -> Tensor:
        """Moves the dimension of the samples to the front."""
        if self.dim is not None and 0 < self.dim < x.dim() - features:
            return x.movedim(self.dim, 0)
        return x  # too few dimensions, as a last hidden state: the samples are in front already

    @property
    def in_front(self) -> Batch:
        """The batch of tensors from ``first``."""
        return replace(self, dim=self.dim and 0)

    def ragged_of(self, x: Tensor) -> Ragged | None:
        """Returns the index of ``sample_index`` for x, which has one feature dimension; None if there is none."""
        return None if x.dim() == 1 else self._ragged_of(len(self.first(x)))

    def _ragged_of(self, length: int) -> Ragged | None:
        return None if self.dim is None else self.ragged.get(length)
