"""The interface of a preconditioner, the part of :class:`ngplus.optimizers.base.BaseOptimizer` that differs between
methods. A new one implements ``fits``, ``refresh`` and ``precondition``; its optimizer returns it in
``_preconditioner``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.matrices import ParameterMatrix
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import Group, State

Direction = tuple[Tensor, Tensor | None]  # D and, of a sparse gradient, the indices of its rows


class MatrixPreconditioner:
    """The preconditioner of a matrix by the options of its group. Its tensors are in ``state``, a plain dict."""

    def __init__(self, matrix: ParameterMatrix, group: Group, state: State) -> None:
        self.matrix, self.group, self.state = matrix, group, state

    def fits(self) -> bool:
        """Returns True if the state has all tensors, of the present size, dtype and device of the matrix."""
        raise NotImplementedError

    def update(self, update: MatrixUpdate) -> None:
        """Called in every step, before a refresh: updates moving averages of gradients."""

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        """Called every T steps: writes new curvature to new tensors of the state, from the captured sums ``gathered``,
        or from the mini-batch gradient where there are none.

        Curvature that is not finite is noted in ``status`` as "dropped". Where the host can see that, the state stays
        as it is; elsewhere zeros replace the curvature, and the optimizer restores the last good state.
        """
        raise NotImplementedError

    def precondition(self, update: MatrixUpdate) -> Direction:
        """The preconditioned gradient [groups, m, n]; of a sparse one, the rows touched and their indices."""
        raise NotImplementedError

    def initialised(self) -> None:
        """Called after a step that only initialises the state."""


class MatrixUpdate:
    """One matrix in one step, with its gradient G [groups, m, n]. Of a sparse one, ``gradient`` holds the rows that are
    not zero, [1, r, n], and ``rows`` their indices."""

    def __init__(self, preconditioner: MatrixPreconditioner, gradient: Tensor, rows: Tensor | None = None) -> None:
        self.preconditioner, self.gradient, self.rows = preconditioner, gradient, rows
        self.matrix, self.group, self.state = preconditioner.matrix, preconditioner.group, preconditioner.state

    def stacks(self) -> list[Tensor]:
        """The gradient in the blocks of its matrix, [groups * blocks, p, D], with the curved dimension p first."""
        side = self.matrix.side(self.group["side"])
        return self.matrix.partition_of(self.group).split(self.gradient if side == "left" else self.gradient.mT)

    def merged(self, stacks: Sequence[Tensor]) -> Tensor:
        """The inverse of ``stacks``: [groups, m, n]."""
        whole = self.matrix.partition_of(self.group).merge(stacks)
        return whole if self.matrix.side(self.group["side"]) == "left" else whole.mT
