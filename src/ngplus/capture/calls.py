"""Calls of the model, the uses of matrices in them, and where in a tensor the samples are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.capture.layers import Batch
from ngplus.capture.layers.base import NotPerSample, has_own_forward
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.samples import Ragged, ragged_rows
from ngplus.fisher.factors import Factors, Segments, widen
from ngplus.utils.dtensor import local, many_ranks, whole

Build = Callable[[tuple[Tensor | None, ...], Tensor, tuple[bool, ...], Batch], Factors]
BatchDims = int | None | Mapping[str, int | None]
SampleIndex = Callable[..., Tensor | Sequence[Tensor] | None]  # of the model's inputs


class Saved(torch.autograd.Function):
    """A node beside the graph whose saved tensors are the layer's inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this node holds saved tensors; nothing flows through it")


class ForwardCall:
    """A call of the model: how many samples it had, and which uses of each matrix are still to come."""

    def __init__(self) -> None:
        self.batch_size: int | None = None
        self.expected: int | None = None  # the same, by its inputs alone
        self.rows: Mapping[int, Ragged] = {}  # which are of which sample, where the user has told
        self.waiting: Counter[int] = Counter()  # recorded, gradient not here yet
        self.hidden: Counter[int] = Counter()  # made under no_grad: reentrant checkpointing makes them again
        self.retained = False
        self.partner: ForwardCall | None = None  # a call that took part in the same backward pass

    def unfinished(self, matrix: ParameterMatrix) -> bool:
        return self.waiting[id(matrix)] + self.hidden[id(matrix)] > 0

    @property
    def first(self) -> ForwardCall:
        return self if self.partner is None else self.partner.first


class PendingGradient:
    """One use in one call, waiting for its gradient. ``held`` is what :class:`Saved` gave: older torch frees the node's
    tensors without it."""

    def __init__(
        self,
        use: Use,
        call: ForwardCall,
        build: Build,
        held: Any,
        shape: torch.Size,
        dim: int | None,
    ) -> None:
        self.use, self.call, self.build, self.held, self.shape, self.dim = use, call, build, held, shape, dim
        self.grad: Tensor | None = None

    def forget(self) -> None:
        """Its gradient is thrown away, and may come again, since its graph was retained."""
        self.grad = None
        self.call.waiting[id(self.use.matrix)] += 1

    def factors(self) -> Factors | None:
        assert self.grad is not None
        matrix, batch = self.use.matrix, Batch(self.dim, self.call.batch_size, self.call.rows)
        if self.grad.numel() == 0:
            if batch.size == 0 and not many_ranks():  # one of several ranks may have got no samples
                raise ValueError(f"The batch that reached {matrix.name!r} has no samples: leave empty batches out")
            told = self.call.rows.get(0)
            if told is None or matrix.groups > 1 or not matrix.counted:
                return None  # a layer that got none of the samples, such as an expert without tokens
            left, right = (local(self.grad).new_zeros(0, size) for size in (matrix.layout.rows, matrix.layout.cols))
            return Segments(left, right, told.sizes)
        if self.held is None:
            raise NotPerSample("its gradient came twice, of a graph that was not retained")
        try:
            saved = self.held.grad_fn.saved_tensors  # may run a checkpointed forward again, hooks and all
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NotPerSample("the input of its module was changed in place") from error
        # Tensor parallelism: inputs and gradients come in parts, by features. All ranks put them together.
        saved, grad = tuple(None if x is None else whole(x) for x in saved), whole(self.grad.reshape(self.shape))
        if not matrix.counted:
            for ragged in self.call.rows.values():
                ragged.used = True  # on another rank
            return None
        try:
            built = self.build(saved, grad, self.use.active, batch)
            found, wanted = (built.rows, built.cols), (matrix.layout.rows, len(self.use.columns))
            if found != wanted:
                raise ValueError(f"The rule of {type(self.use.module).__name__} gave factors of {found} for {wanted}")
            if has_own_forward(self.use.module):
                built.total(matrix.dtype)  # do the parts fit together?
        except (NotPerSample, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not has_own_forward(self.use.module):
                raise
            raise NotPerSample(
                f"its module has a forward of its own, which no rule fits: {_first_line(error)}"
            ) from error
        return widen(built, self.use.columns, matrix.layout.cols)


KEPT = 64  # of what was told, until a step asks whether it was of use


class SampleIndexReader:
    """Which rows are of which sample, as ``sample_index`` tells for each call, and whether any layer has such rows."""

    def __init__(self, sample_index: SampleIndex | None) -> None:
        self._sample_index = sample_index
        self._told: list[Ragged] = []  # not yet by the last complaint
        self._part = ""  # the class of a model of which a part was called by itself
        self._resolve_defaults = sample_index is None  # the user has been told, or need not be

    @torch.no_grad()
    def of(self, args: Any, kwargs: Any) -> dict[int, Ragged]:
        """In a call of the model with these inputs."""
        rows = {} if self._sample_index is None else ragged_rows(self._sample_index(*args, **kwargs))
        told = [ragged for length, ragged in rows.items() if length not in (0, ragged.samples)]  # not one row each
        self._told = [*self._told, *told][-KEPT:]
        return rows

    def note_part(self, model: nn.Module | None) -> None:
        """A part of the model was called by itself, with inputs of its own."""
        self._part = type(model).__name__

    def complaint(self) -> str:
        """Before a step: what the user is to be told, once, where no layer had as many rows; "" for nothing."""
        told, part, self._told, self._part = self._told, self._part, [], ""
        resolve_defaults = self._resolve_defaults or any(ragged.used for ragged in told)
        self._resolve_defaults = resolve_defaults or bool(told or part)
        if resolve_defaults:
            return ""
        if told:
            found = " and of ".join(str(length) for length in sorted({len(ragged.index) for ragged in told}))
            return (
                f"sample_index tells of {found} rows, and no layer had as many in its batch dimension (batch_dim= says "
                "which one that is): each row that they had is taken for a sample"
            )
        if part:
            return (
                f"sample_index is called with the inputs of the model, and a part of {part} was called by itself: each "
                "of its rows is taken for a sample"
            )
        return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def batch_dims(model: nn.Module, batch_dim: BatchDims) -> dict[nn.Module, int | None]:
    """The batch dimension of each module: 0, but 1 inside torch's Transformers with batch_first=False.

    A number is for the whole model; a mapping gives module names, each for the module and all below it, and None for
    a module that has no batch dimension.
    """
    by_name = dict(batch_dim) if isinstance(batch_dim, Mapping) else {"": batch_dim}
    for name, dim in by_name.items():
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise ValueError(f"Invalid batch_dim{f' of {name!r}' if name else ''}: {dim!r} (a dimension, or None)")
    dims: dict[nn.Module, int | None] = {}
    for module in model.modules():
        if _batch_second(module):
            dims.update(dict.fromkeys(module.modules(), 1))
    modules = dict(model.named_modules())
    for name, dim in by_name.items():
        if name not in modules:
            raise ValueError(f"Invalid batch_dim: the model has no module {name!r} (see model.named_modules())")
        if name or dim != 0:  # 0 for the whole model is the default, which leaves the Transformers their own
            dims.update(dict.fromkeys(modules[name].modules(), dim))
    return dims


def _batch_second(module: nn.Module) -> bool:
    """Does this container of torch's take [length, batch, features]?"""
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return not module.self_attn.batch_first
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return any(_batch_second(layer) for layer in module.layers)
    return isinstance(module, nn.Transformer | nn.MultiheadAttention) and not module.batch_first
