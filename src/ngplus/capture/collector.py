"""Accumulates what the recorder captures between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.coverage import Coverage
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.recorder import Recorder
from ngplus.capture.sample_index import SampleIndex
from ngplus.fisher.factors import Factors
from ngplus.utils.dtensor import holds_gradients, is_dtensor
from ngplus.utils.typing import Group
from ngplus.utils.warnings import warn
from ngplus.utils.weak import weak_method

GradVersion = tuple[Tensor | None, int]  # a .grad, and how often it has been written to


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
        self._accumulators: dict[int, Accumulator] = {}  # by id of the matrix
        self._after: dict[int, list[GradVersion]] = {}  # after the last backward pass, to see whether .grad is zeroed
        self._pass_began = False  # and has not ended yet
        self._unused: set[int] = set()  # ids of matrices whose gradients by autograd.grad were not used so far
        self._coverage = Coverage(matrices, weak_method(self._enter_backward))
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
            on_record=self._coverage.watch_managed,
            sample_index=sample_index,
        )
        if compiled is not None:
            self._recorder.compiled_calls.add_wrapper(compiled)

    def remove(self) -> None:
        """Removes the hooks."""
        self._coverage.remove()
        if self._recorder is not None:
            self._recorder.remove()

    @property
    def watches(self) -> bool:
        """Returns True if there are hooks in the model."""
        return self._recorder is not None

    @property
    def forward_seen(self) -> bool:
        """Returns True if the model was called with gradients since the last step."""
        return self._recorder is not None and self._recorder.forward_seen

    def finish(self) -> None:
        """Accumulates all that has arrived. Call this at the beginning of the step."""
        if self._recorder is not None:
            self._drop_returned(last=True)
            self._recorder.flush()
            self._coverage.conclude(self._accumulators)
            for matrix in self._matrices:
                matrix.apply_fallback()
            if complaint := self._recorder.complaint():
                warn(complaint)

    def of(self, matrix: ParameterMatrix) -> Accumulator:
        """Returns the accumulator of a matrix, a new one if it has none."""
        return self._accumulators.setdefault(id(matrix), self._accumulator_type())

    def take(self, matrix: ParameterMatrix) -> Accumulator | None:
        """Removes and returns the accumulator of a matrix."""
        self._coverage.reset(matrix)
        return self._accumulators.pop(id(matrix), None)

    def note_armed(self) -> None:
        """Call this after matrices have been armed for the next step."""
        if self._recorder is not None:
            self._recorder.note_armed()
            self._coverage.watch()
            self._recorder.find_compiled_modules()

    def drop(self) -> None:
        """Drops what was accumulated, as when gradients are set to zero."""
        self._accumulators.clear()
        self._after.clear()
        self._unused.clear()
        self._coverage.reset()
        if self._recorder is not None:
            self._recorder.discard()
            self._recorder.returned.clear()
            self._recorder.find_compiled_modules()

    def forget(self) -> None:
        """Resets everything after a step."""
        self.drop()
        if self._recorder is not None:
            self._recorder.forward_seen = False

    def _accumulate(self, matrix: ParameterMatrix, factors: Factors) -> None:
        group = self._groups[matrix.params[0]]
        self.of(matrix).take_in(matrix, factors, group, seed_of(group))
        if not matrix.falls_back:
            self._coverage.subtract(matrix, factors)

    def _enter_backward(self) -> None:
        if self._recorder is not None:
            self._recorder.enter_backward()

    def _has_part(self, matrix: ParameterMatrix) -> bool:
        """Returns True if a backward pass since the last step has reached this matrix."""
        return id(matrix) in self._accumulators or self._coverage.has(matrix)

    def _before_forward(self, changed: list[ParameterMatrix]) -> None:
        self._on_forward(bool(changed))
        for matrix in changed:
            if self.take(matrix) is not None:  # frozen or cast between two micro-batches
                matrix.armed = False  # the samples of one micro-batch would not be those of the gradient
        if self.wrapper is None:
            self.wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        for matrix in filter(self._has_part, self._matrices):
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
            before = zip(matrix.params, self._after.get(id(matrix), []), strict=False)
            changed = any(grad is not None and (p.grad is not grad or grad._version != v) for p, (grad, v) in before)
            if changed and all(_is_zero(p.grad) for p in matrix.params):
                del self._after[id(matrix)]
                self.take(matrix)
                if self._recorder is not None:
                    self._recorder.discard(matrix)

    def _drop_returned(self, last: bool = False) -> None:
        """Drops what a pass of ``autograd.grad`` captured, unless its gradients were written to .grad since. Where
        these may be those of several passes, the matrix falls back."""
        if self._recorder is None or not self._recorder.returned:
            return
        for key, matrix in self._recorder.returned.items():
            after = self._after.get(key)
            pairs = [] if after is None else zip(matrix.params, after, strict=True)
            used = any(p.grad is not grad or (grad is not None and grad._version != v) for p, (grad, v) in pairs)
            if used and not (last and key in self._unused):
                continue
            if used or after is None or not all(_is_zero(p.grad) for p in matrix.params):
                matrix.fall_back_at_step(reasons.RETURNED)
            self._unused.add(key)
            self.take(matrix)
            self._recorder.discard(matrix)
        self._recorder.returned.clear()

    def _before_gradients(self) -> None:
        self._drop_returned()
        self._drop_zeroed()  # parts of the model may be called directly, without _before_forward
        if self._pass_began:  # the last pass has failed, and a part of its gradients is in .grad
            self._coverage.pause()
        self._pass_began = True

    def _after_backward(self) -> None:
        self._pass_began = False
        retained = set() if self._recorder is None else self._recorder.retained()
        for matrix in self._matrices:
            if (id(matrix) in retained or self._has_part(matrix)) and not matrix.managed:
                self._after[id(matrix)] = [(p.grad, 0 if p.grad is None else p.grad._version) for p in matrix.params]


def _is_zero(grad: Tensor | None) -> bool:
    """Returns True if it is zero or None; False for a sharded gradient, of which a rank has a shard only."""
    if grad is None:
        return True
    return not is_dtensor(grad) and not bool((grad._values() if grad.is_sparse else grad).any())
