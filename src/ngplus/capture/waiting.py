"""What has arrived in backward and waits: factors for the other uses of their matrix, gradients of retained graphs.

What waits for all matrices counts together against ``refresh_memory``. Above it the matrix with the most bytes falls
back, and what it keeps is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ngplus.capture import reasons
from ngplus.capture.batch import too_large
from ngplus.capture.calls import ForwardCall, PendingGradient
from ngplus.capture.layers.base import NotPerSample
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher.factors import Factors, join
from ngplus.utils.memory import HeldStorages, Storages, storages
from ngplus.utils.precision import full_precision

Sink = Callable[[ParameterMatrix, Factors], None]


class Waiting:
    """Keeps the factors of a matrix's uses until all have arrived, joins them, and passes them on.

    Args:
        matrices: those of the recorder.
        sink: called under no_grad with each matrix and its joined factors.
    """

    def __init__(self, matrices: Iterable[ParameterMatrix], sink: Sink) -> None:
        self._matrices, self._sink = {id(matrix): matrix for matrix in matrices}, sink
        self._factors: dict[int, list[tuple[ForwardCall, Factors, Storages]]] = {}  # by id of the matrix
        self._retained: dict[int, list[PendingGradient]] = {}  # arrived in passes that retained their graph
        self._held = HeldStorages()
        for matrix in self._matrices.values():
            matrix.held = self._held

    def update_limit(self) -> None:
        """Call this after ``refresh_memory`` of a matrix may have changed."""
        self._held.limit = max((matrix.refresh_memory for matrix in self._matrices.values()), default=0)

    def retained(self) -> set[int]:
        """The ids of the matrices with gradients of retained graphs."""
        return set(self._retained)

    def retain(self, pending: PendingGradient, grad: Tensor) -> None:
        """Adds a gradient up with those of other passes through its retained graph."""
        matrix, before = pending.use.matrix, pending.grad
        if matrix.falls_back:
            if before is None:
                pending.reset()
            self._drop_factors(matrix)
            return
        pending.grad = grad if before is None else before + grad
        if before is None:
            self._retained.setdefault(id(matrix), []).append(pending)
            self._hold(matrix, pending.storages)
        else:
            self._recount(matrix)

    def add(self, pending: PendingGradient, last: bool) -> None:
        """Builds the factors of a use whose gradient has arrived. The last one of a matrix passes all of them on."""
        self._build(pending, last)
        if last:
            self.flush(pending.use.matrix)

    def flush(self, matrix: ParameterMatrix) -> None:
        """Joins the factors of a matrix, and passes them on."""
        by_call: dict[ForwardCall, list[Factors]] = {}
        for call, factors, _ in self._factors.pop(id(matrix), []):
            by_call.setdefault(call.first, []).append(factors)
        with torch.no_grad(), full_precision(matrix.params[0].device):
            for uses in by_call.values():
                for factors in join(uses):
                    if len(uses) > 1:
                        self._held.add(id(matrix), storages(factors.tensors()))  # copies of theirs
                    self._sink(matrix, factors)
                    matrix.not_captured = reasons.ZEROED  # if it is dropped until the step
        self._recount(matrix)

    def flush_all(self, retained: bool = False) -> None:
        """Does so for all matrices, matrix by matrix; also for those with ``retained`` gradients."""
        for key in [key for key in self._matrices if key in self._retained] if retained and self._retained else ():
            for pending in self._retained.pop(key):
                self._build(pending, last=False)
            self.flush(self._matrices[key])
        for key in list(self._factors):
            self.flush(self._matrices[key])

    def discard_factors(self) -> None:
        """Drops the factors of a pass that failed."""
        for matrix in [self._matrices[key] for key in self._factors]:
            self._drop_factors(matrix)

    def discard(self, matrix: ParameterMatrix | None = None) -> None:
        """Drops what waits, for one matrix or all. Gradients of past forward calls may still arrive."""
        for key in [key for key in self._retained if matrix is None or key == id(matrix)]:
            for pending in self._retained.pop(key):
                pending.reset()
            self._recount(self._matrices[key])
        if matrix is None:
            self.discard_factors()

    def _build(self, pending: PendingGradient, last: bool) -> None:
        matrix, call = pending.use.matrix, pending.call
        assert pending.grad is not None
        factors = None
        try:
            with torch.no_grad(), full_precision(pending.grad.device):
                factors = None if matrix.falls_back else pending.factors()
        except NotPerSample as reason:
            matrix.fall_back_at_step(str(reason))
        finally:
            given, pending.grad = pending.storages, None
            if not call.retained:
                pending.release_inputs()
        if matrix.reason:
            self._drop_factors(matrix)
        if factors is None or matrix.falls_back:
            return
        found = storages(factors.tensors())
        if last:  # a pass without a refresh has its input and gradient, too
            found = {key: number for key, number in found.items() if key not in given}
        self._factors.setdefault(id(matrix), []).append((call, factors, found))
        self._hold(matrix, found)

    def _hold(self, matrix: ParameterMatrix, found: Storages) -> None:
        """Counts what waits. Matrices fall back until it is within the bound."""
        self._held.add(id(matrix), found)
        while matrix.bytes_taken > matrix.refresh_memory:
            others = self._matrices if self._held.of(id(matrix)) <= matrix.refresh_memory else [id(matrix)]
            worst = self._matrices[max(others, key=self._held.of)]
            worst.fall_back_at_step(too_large(matrix.bytes_taken, matrix.refresh_memory))
            self._drop_factors(worst)
            if self._held.of(id(worst)):  # ranks that capture together agree on the fallback at the step
                return

    def _drop_factors(self, matrix: ParameterMatrix) -> None:
        """Drops the factors of a matrix, and its retained gradients if it falls back."""
        self._factors.pop(id(matrix), None)
        for pending in self._retained.pop(id(matrix), []) if matrix.falls_back else ():
            pending.reset()
            pending.release_inputs()
        self._recount(matrix)

    def _recount(self, matrix: ParameterMatrix) -> None:
        self._held.release(id(matrix))
        for pending in self._retained.get(id(matrix), []):
            self._held.add(id(matrix), pending.storages)
        for _, _, found in self._factors.get(id(matrix), []):
            self._held.add(id(matrix), found)
