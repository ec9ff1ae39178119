"""One forward call of the model, and one use of a matrix in it that waits for its gradient."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.batch import SampleCount
from ngplus.capture.layers import Batch
from ngplus.capture.layers.base import Build, Inputs, NotPerSample, has_own_forward
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.row_tracker import RowTracker, batch_of_rows
from ngplus.capture.sample_index import Ragged
from ngplus.capture.sample_tracker import SampleTracker
from ngplus.fisher.factors import Factors, Segments, widen
from ngplus.utils.dtensor import local, many_ranks, whole
from ngplus.utils.memory import Storages, storages

Batches = Mapping[int | None, Batch | str]  # by the number of samples; the reason where they are not known


class ForwardCall:
    """A call of the model: its number of samples, and the uses of each matrix whose gradients have not arrived."""

    def __init__(self) -> None:
        self.samples: int | None = None
        self.samples_from_inputs: int | None = None  # the same before the output is known
        self.unclear = reasons.SAMPLE_COUNT  # why ``samples`` is None
        self.ragged: Mapping[int, Ragged] = {}  # from the user's sample_index
        self.depth = 1  # of the module whose call this is
        self.trackers: list[SampleTracker] = []  # one for each number of samples that the inputs may have
        self.row_trackers: list[RowTracker] = []  # one for each index of sample_index
        self.no_grad_batches: dict[tuple[int, torch.Size], Batches] = {}  # of those uses, by id and shape of the output
        self.waiting: Counter[int] = Counter()  # uses whose gradients have not arrived, by id of the matrix
        self.no_grad_uses: Counter[int] = Counter()  # uses under no_grad, which reentrant checkpointing runs again
        self.retained = False  # has a backward pass retained the graph?
        self._joined_to: ForwardCall | None = None

    def follow(self, model: nn.Module, inputs: Any, dim: int, sizes: Sequence[int]) -> None:
        """Begins to follow the samples, whose number may be one of ``sizes``, or the rows of ``sample_index``."""
        if self.ragged:
            trackers = [RowTracker(size, inputs, dim) for size in self.ragged if size]
            self.row_trackers = trackers if any(tracker.found for tracker in trackers) else []
        else:
            self.trackers = [SampleTracker(size, inputs, dim) for size in sizes]
        for tracker in (*self.row_trackers, *self.trackers):
            tracker.start(model)

    def end(self) -> None:
        """Ends that."""
        for tracker in reversed((*self.row_trackers, *self.trackers)):
            tracker.stop()

    def count_samples(self, count: SampleCount, output: Any) -> None:
        """Finds the number of samples, once the output is known. It is None where those that were followed through
        the model cannot be the samples of its output."""
        unbatched = any(tracker.unbatched for tracker in self.trackers)
        self.samples = 1 if unbatched else count.with_output(output)
        for tracker in self.trackers:
            if tracker.samples != self.samples:
                continue
            if tracker.across:
                self.unclear = reasons.with_detail(reasons.ACROSS, tracker.across)
            if tracker.across or tracker.crossed or not tracker.may_be_those_of(output):
                self.samples = None

    def note_no_grad(self, use: Use, shape: torch.Size, batches: Batches) -> None:
        """Notes the samples of a use under no_grad. Nothing tells apart two uses with outputs of one shape."""
        before = self.no_grad_batches.setdefault((id(use), shape), batches)
        unlike = {n: reasons.with_detail(reasons.ROWS_UNKNOWN, "after a checkpoint") for n in before}
        self.no_grad_batches[id(use), shape] = before if before == batches else unlike

    def unfinished(self, matrix: ParameterMatrix) -> bool:
        return self.waiting[id(matrix)] + self.no_grad_uses[id(matrix)] > 0

    def batches_of(self, x: Tensor, dim: int | None, given: bool) -> Batches:
        """The samples of x, an output of a module, for each number of samples that the inputs may have.

        ``dim`` is the dimension that ``batch_dim`` says, or the module's type; ``given``: the user named the module.
        """
        if dim is None or given:
            return {n: Batch(dim, n, self.ragged) for n in {None, self.samples, *(t.samples for t in self.trackers)}}
        if self.ragged and self.row_trackers and not (0 in self.ragged and x.numel() == 0):
            return {self.samples: batch_of_rows(x, self.row_trackers, self.samples, self.ragged)}
        if self.ragged:
            if any(x.shape[d] in self.ragged for d in {0, 1, dim} if d < x.dim()):
                return {self.samples: Batch(dim, self.samples, self.ragged)}
            size = f"a batch dimension of {x.shape[dim] if dim < x.dim() else 1}"
            return {self.samples: reasons.with_detail(reasons.NO_SAMPLE_INDEX, size)}
        if self.samples == 0:  # this rank got no samples
            return {0: Batch(dim, 0)}
        if any(tracker.unbatched for tracker in self.trackers):
            return {1: Batch(None, 1)}
        return {tracker.samples: tracker.batch(x) for tracker in self.trackers}

    @property
    def first(self) -> ForwardCall:
        """The first of all calls that took part in the same backward pass: they are taken for the same samples."""
        return self if self._joined_to is None else self._joined_to.first

    def join(self, other: ForwardCall) -> None:
        """Records that both calls took part in the same backward pass."""
        if self.first is not other.first:
            self.first._joined_to = other.first


class BackwardPass:
    """The calls that take part in one backward pass."""

    def __init__(self) -> None:
        self.first_call: ForwardCall | None = None
        self._call_of: dict[int, ForwardCall] = {}  # the first call that used a matrix, by the matrix's id
        self._matrices: dict[int, ParameterMatrix] = {}
        self._samples: set[int | None] = set()

    def add(self, matrix: ParameterMatrix, call: ForwardCall) -> None:
        """Adds a gradient that has arrived. Matrices whose samples are no longer certain fall back at the step."""
        if self.first_call is None:
            self.first_call = call
        else:
            call.join(self.first_call)
        self._matrices[id(matrix)] = matrix
        self._samples.add(call.samples)
        if self._call_of.setdefault(id(matrix), call) is not call:
            matrix.fall_back_at_step(reasons.SEVERAL_CALLS)
        if len(self._samples) > 1:
            for other in self._matrices.values():
                other.fall_back_at_step(reasons.UNEQUAL_CALLS)


def entry_modules(model: nn.Module, watched: set[nn.Module]) -> dict[nn.Module, None]:
    """The model and its children with watched modules, which may be called by themselves."""
    entries = {model: None}
    for child in model.children():
        if any(module in watched for module in child.modules()):
            entries |= (
                entry_modules(child, watched) if isinstance(child, nn.ModuleList | nn.ModuleDict) else {child: None}
            )
    return entries


def calls_in_progress(entries: Container[nn.Module]) -> int:
    """Counts the calls of these modules that this thread is inside of."""
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") in entries:
            found += 1
        frame = frame.f_back
    return found


class PendingGradient:
    """A use of a matrix in a forward call. ``grad`` is the gradient of its output, once that has arrived."""

    def __init__(
        self, use: Use, call: ForwardCall, build: Build, inputs: Inputs, shape: torch.Size, batches: Batches
    ) -> None:
        self.use, self.call, self._build, self._shape, self._batches = use, call, build, shape, batches
        anchor = torch.zeros((), requires_grad=True)
        detached = [None if x is None else x.detach() for x in inputs]
        self._saved: Any = _SavedInputs.apply(anchor, *detached)  # type: ignore[no-untyped-call]
        self._inputs = storages(x for x in detached if x is not None)
        self.grad: Tensor | None = None

    @property
    def storages(self) -> Storages:
        """Those of the inputs and the gradient."""
        return self._inputs if self.grad is None else self._inputs | storages([self.grad])

    def reset(self) -> None:
        """Drops the gradient. It may arrive again, since the graph was retained."""
        self.grad = None
        self.call.waiting[id(self.use.matrix)] += 1

    def release_inputs(self) -> None:
        """Frees the saved inputs. The graph, and this object with it, lives as long as the loss."""
        self._saved = None

    def factors(self) -> Factors | None:
        """Builds the factors; None if this use contributes none."""
        assert self.grad is not None
        matrix, batch = self.use.matrix, self._batch()
        if self.grad.numel() == 0:
            return self._empty_factors(batch)
        if self._saved is None:
            raise NotPerSample(reasons.CAME_TWICE)
        try:
            inputs = self._saved.grad_fn.saved_tensors  # may run a checkpointed forward again, with its hooks
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NotPerSample(reasons.INPUT_CHANGED) from error
        # With tensor parallelism inputs and gradients are sharded by features. All ranks gather them.
        inputs, grad = tuple(None if x is None else whole(x) for x in inputs), whole(self.grad.reshape(self._shape))
        self._inputs = storages(x for x in inputs if x is not None)
        if not matrix.adds_samples:
            for ragged in self.call.ragged.values():
                ragged.used = True  # on another rank
            return None
        return widen(self._checked_factors(inputs, grad, batch), self.use.columns, matrix.layout.cols)

    def _batch(self) -> Batch:
        """The samples of the output. Raises NotPerSample if they are not known."""
        found = self._batches.get(self.call.samples, self.call.unclear)
        if isinstance(found, str):
            raise NotPerSample(found)
        matrix = self.use.matrix
        return replace(found, memory=matrix.refresh_memory, taken=matrix.bytes_taken)

    def _checked_factors(self, inputs: Inputs, grad: Tensor, batch: Batch) -> Factors:
        """Calls the rule. A module with its own forward may not match the rule of its class."""
        matrix, module = self.use.matrix, self.use.module
        try:
            built = self._build(inputs, grad, self.use.active, batch)
            found, wanted = (built.rows, built.cols), (matrix.layout.rows, len(self.use.columns))
            if found != wanted:
                raise ValueError(
                    f"The rule of {type(module).__name__} returned factors of {found} for a matrix of {wanted}"
                )
            if has_own_forward(module):
                built.gradient_sum(matrix.dtype)  # raises if the shapes of the factors do not match
            return built
        except (NotPerSample, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if not has_own_forward(module):
                raise
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotPerSample(reasons.with_detail(reasons.OWN_FORWARD, line)) from error

    def _empty_factors(self, batch: Batch) -> Factors | None:
        """For a layer that got no samples, such as an expert without tokens."""
        matrix = self.use.matrix
        if batch.size == 0 and not many_ranks():  # one of several ranks may have got no samples
            raise ValueError(f"The batch that reached {matrix.name!r} has no samples: leave out empty batches")
        ragged = self.call.ragged.get(0)
        if ragged is None or matrix.groups > 1 or not matrix.adds_samples:
            return None
        assert self.grad is not None
        left, right = (local(self.grad).new_zeros(0, size) for size in (matrix.layout.rows, matrix.layout.cols))
        return Segments(left, right, ragged.sizes)


class _SavedInputs(torch.autograd.Function):
    """An autograd node that saves the layer's inputs, so that checkpointing and saved-tensor hooks treat them as any
    activation. Older versions of torch free them with its output."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("this node only saves tensors, and has no gradient")
