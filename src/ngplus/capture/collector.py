"""Accumulates what the recorder captures between two steps, and checks that no part of a gradient was missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.recorder import Recorder
from ngplus.capture.sample_index import SampleIndex
from ngplus.fisher.factors import Bags, Factors, Lookup
from ngplus.utils.dtensor import holds_gradients, is_dtensor, local, many_ranks
from ngplus.utils.typing import Group
from ngplus.utils.warnings import warn
from ngplus.utils.weak import weak_method

MAX_CHECKED_ROWS = 1_000_000  # larger embedding tables are not checked for uses that were not captured


def seed_of(group: Group) -> int:
    """Returns the seed of a step's sub-sample and sketches, the same on every rank."""
    return (int(group.get("seed", 0)) * 1_000_003 + int(group["step"])) % 2**63


class Collector:
    """The accumulators of all matrices since the last step.

    Args:
        matrices: the matrices of the optimizer.
        groups: the options of each parameter.
        accumulator_type: what accumulates the factors of a matrix.
        on_forward: a bound method, called before each training call of the model, with True if a matrix has changed.
    """

    def __init__(
        self,
        matrices: list[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        accumulator_type: type[Accumulator],
        on_forward: Callable[[bool], None],
    ) -> None:
        self._matrices, self._groups, self._accumulator_type = matrices, groups, accumulator_type
        self._on_forward = weak_method(on_forward)
        self._accumulators: dict[int, Accumulator] = {}  # by id of the matrix, as the two below
        self._before: dict[int, list[_GradSnapshot]] = {}  # .grad before the current backward pass, to check coverage
        self._after: dict[int, list[_GradSnapshot]] = {}  # .grad after the last one, to see whether it is zeroed
        self._recorder: Recorder | None = None
        self.wrapper: nn.Module | None = None  # a DistributedDataParallel that has called the model

    def watch(
        self,
        model: nn.Module,
        uses: list[Use],
        batch_dim: BatchDims,
        sample_index: SampleIndex | None,
        compiled: nn.Module | None,
    ) -> None:
        """Installs the hooks. They reference this object weakly, and are removed with the optimizer."""
        self._recorder = Recorder(
            model,
            uses,
            sink=weak_method(self._accumulate),
            batch_dim=batch_dim,
            on_forward=weak_method(self._before_forward),
            on_backward=weak_method(self._after_backward),
            on_gradients=weak_method(self._before_gradients),
            sample_index=sample_index,
        )
        if compiled is not None:
            self._recorder.compiled_calls.add_wrapper(compiled)

    def remove(self) -> None:
        """Removes the hooks."""
        if self._recorder is not None:
            self._recorder.remove()

    @property
    def forward_seen(self) -> bool:
        """Has the model been called, with gradients, since the last step?"""
        return self._recorder is not None and self._recorder.forward_seen

    def finish(self) -> None:
        """Accumulates all that has arrived. Call this at the beginning of the step."""
        if self._recorder is not None:
            self._recorder.flush()
            if complaint := self._recorder.complaint():
                warn(complaint)

    def of(self, matrix: ParameterMatrix) -> Accumulator:
        """Returns the accumulator of a matrix, a new one if it has none."""
        return self._accumulators.setdefault(id(matrix), self._accumulator_type())

    def take(self, matrix: ParameterMatrix) -> Accumulator | None:
        """Removes and returns the accumulator of a matrix."""
        return self._accumulators.pop(id(matrix), None)

    def note_armed(self) -> None:
        """Call this after matrices have been armed for the next step."""
        if self._recorder is not None:
            self._recorder.note_armed()
            self._recorder.find_compiled_modules()

    def drop(self) -> None:
        """Drops what was accumulated, as when gradients are set to zero."""
        self._accumulators.clear()
        self._before.clear()
        self._after.clear()
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder.find_compiled_modules()

    def forget(self) -> None:
        """Resets everything after a step."""
        self.drop()
        if self._recorder is not None:
            self._recorder.forward_seen = False

    def _accumulate(self, matrix: ParameterMatrix, factors: Factors) -> None:
        group = self._groups[matrix.params[0]]
        small = not isinstance(factors, Lookup | Bags) or factors.rows <= MAX_CHECKED_ROWS
        self.of(matrix).take_in(matrix, factors, group, seed_of(group), check=small and id(matrix) in self._before)

    def _before_forward(self, changed: list[ParameterMatrix]) -> None:
        self._on_forward(bool(changed))
        for matrix in changed:
            self._before.pop(id(matrix), None)
            if self.take(matrix) is not None:  # frozen or cast between two micro-batches
                matrix.armed = False  # the samples of one micro-batch would not be those of the gradient
        if self.wrapper is None:
            self.wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        for matrix in self._matrices if self._accumulators else ():
            # FSDP2 has the gradients of accumulated micro-batches elsewhere.
            dropped = all(p.grad is None for p in matrix.params) and not any(map(holds_gradients, matrix.managed))
            if dropped:
                self.take(matrix)
        self._drop_zeroed()

    def _drop_zeroed(self) -> None:
        """Drops the samples of gradients that were zeroed since their backward pass, as by ``model.zero_grad()``.

        Entries are read, which waits for the device, only if a gradient was changed.
        """
        for matrix in self._matrices if self._after else ():
            snapshots = zip(matrix.params, self._after.get(id(matrix), []), strict=False)
            changed = any(snapshot.grad is not None and snapshot.changed(p.grad) for p, snapshot in snapshots)
            if changed and all(_is_zero(p.grad) for p in matrix.params):
                del self._after[id(matrix)]
                self.take(matrix)
                if self._recorder is not None:
                    self._recorder.discard(matrix)

    def _before_gradients(self) -> None:
        self._drop_zeroed()  # parts of the model may be called directly, without _before_forward
        for matrix in () if many_ranks() else self._matrices:
            large_table = matrix.lookup == "only" and matrix.layout.rows > MAX_CHECKED_ROWS
            if not matrix.armed or (matrix.checked and not matrix.own_forward) or large_table:
                continue
            if matrix.managed and id(matrix) in self._before:
                continue
            self._before[id(matrix)] = [_GradSnapshot(p.grad) for p in matrix.active_params]
            if id(matrix) in self._accumulators:
                self._accumulators[id(matrix)].gradient = None  # left by a pass that failed

    def _after_backward(self) -> None:
        self._check_coverage()
        retained = set() if self._recorder is None else self._recorder.retained()
        for matrix in self._matrices if self._accumulators or retained else ():
            if (id(matrix) in self._accumulators or id(matrix) in retained) and not matrix.managed:
                self._after[id(matrix)] = [_GradSnapshot(p.grad, copy=False) for p in matrix.params]

    def _check_coverage(self) -> None:
        """Checks, after the backward pass of a first refresh, that the captured G_i sum to the gradients.

        A difference comes from a use outside of the watched modules, such as ``F.linear(x, embedding.weight)`` or a
        penalty on the weights. A pass that adds to no .grad, as that of ``torch.autograd.grad``, is not checked.
        """
        for matrix in self._matrices if self._before else ():
            accumulator = self._accumulators.get(id(matrix))
            snapshots = self._before.get(id(matrix), [])
            added = [before.added(p.grad) for p, before in zip(matrix.active_params, snapshots, strict=False)]
            nothing_added = all(grad is None for grad in added)
            if matrix.managed and nothing_added:
                continue  # FSDP2 adds the gradients of all micro-batches in the last one
            self._before.pop(id(matrix), None)
            if accumulator is None or accumulator.gradient is None:
                continue
            captured, accumulator.gradient = matrix.layout.split(accumulator.gradient), None
            # The total is empty if the option was changed during the pass.
            if matrix.falls_back or accumulator.product_sum == [] or nothing_added:
                continue
            # A forward that does not use the bias adds to the weight alone.
            pairs = [(grad, part) for grad, part in zip(added, captured, strict=True) if grad is not None]
            missed = [torch.linalg.vector_norm(grad.to(part) - part) for grad, part in pairs]
            tolerance = (5e-2 if accumulator.half_precision else 1e-3) * accumulator.length()
            tolerance = tolerance + sum(before.rounding() for before in snapshots)
            matrix.checked = all(grad is not None for grad in added)
            if bool(torch.linalg.vector_norm(torch.stack(missed)) > tolerance):
                matrix.fall_back_at_step(matrix.uncovered)


class _GradSnapshot:
    """A .grad at one moment, to find later what was added to it."""

    def __init__(self, grad: Tensor | None, copy: bool = True) -> None:
        self.grad, self._version = grad, None if grad is None else grad._version
        self._entries = grad.clone() if copy and grad is not None else None

    def changed(self, grad: Tensor | None) -> bool:
        """Is ``grad`` another tensor, or has it been written to?"""
        return grad is not self.grad or (grad is not None and grad._version != self._version)

    def added(self, grad: Tensor | None) -> Tensor | None:
        """Returns what was added since, on this rank; None if nothing was."""
        if grad is None or not self.changed(grad):
            return None
        found = local(grad).to_dense()
        return found if self._entries is None else found - local(self._entries).to_dense()

    def rounding(self) -> Tensor | float:
        """Bounds the rounding error of ``added``."""
        if self._entries is None:
            return 0.0
        return 4 * torch.finfo(self._entries.dtype).eps * torch.linalg.vector_norm(local(self._entries).to_dense())


def _is_zero(grad: Tensor | None) -> bool:
    """Is it zero or None? False for a sharded gradient, of which a rank has a shard only."""
    if grad is None:
        return True
    return not is_dtensor(grad) and not bool((grad._values() if grad.is_sparse else grad).any())
