"""The preconditioner of NGPlus: (lambda I + L)^-1 G or G (lambda I + R)^-1."""

from __future__ import annotations

from torch import Tensor

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.collector import seed_of
from ngplus.capture.loss_scale import captured_scale
from ngplus.capture.matrices import ParameterMatrix
from ngplus.distributed.collectives import Distributor
from ngplus.preconditioners import ngplus_curvature as curvatures
from ngplus.preconditioners.base import Direction, MatrixPreconditioner, MatrixUpdate
from ngplus.preconditioners.grafting import graft_length, with_length
from ngplus.preconditioners.ngplus_curvature import CurvatureEstimate, StateEntries
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.typing import Group, State


class InversePreconditioner(MatrixPreconditioner):
    """The inverse of lambda I + L or lambda I + R: dense, by Woodbury's identity, or by sketched least squares."""

    def __init__(
        self, matrix: ParameterMatrix, group: Group, state: State, distributor: Distributor | None = None
    ) -> None:
        super().__init__(matrix, group, state)
        self._distributor = distributor

    def fits(self) -> bool:
        inverse = curvatures.read(self.state, "inverse")
        held = curvatures.read(self.state, "factor") if inverse is None else inverse
        return (
            held is not None
            and [x.shape[:2] for x in held] == self.matrix.partition_of(self.group).shapes
            and held[0].dtype == self.matrix.dtype
            and held[0].device == self.matrix.params[0].device
        )

    def update(self, update: MatrixUpdate) -> None:
        """Ltilde_k of ``curvature="batch"``."""
        if self.group["curvature"] == "batch":
            estimate = curvatures.mini_batch(self.matrix, update.gradient, self.group, seed_of(self.group))
            curvatures.accumulate_batches(self.state, estimate, self.matrix.side(self.group["side"]), self.group)

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        estimate = self.estimate(update.gradient, gathered, status)
        if estimate is not None:
            self.install(curvatures.invert(estimate, self.group, seed_of(self.group), status))

    def estimate(
        self, gradient: Tensor | None, gathered: Accumulator | None, status: RefreshStatus
    ) -> CurvatureEstimate | None:
        """The curvature to be inverted, from ``gathered`` or else from the gradient; None where it is not
        finite and the last one stays in use."""
        matrix, group, state = self.matrix, self.group, self.state
        if group["curvature"] == "batch":
            return curvatures.accumulated(state, group)
        if gathered is None:
            assert gradient is not None
            estimate = curvatures.mini_batch(matrix, gradient, group, seed_of(group))
            if self._distributor is not None:  # as from samples, where ranks add up L: a checkpoint has one form
                estimate = CurvatureEstimate(estimate.dense(), None, estimate.gradients)
        else:
            estimate = curvatures.per_sample(gathered, group, matrix.partition_of(group), captured_scale())
        bad = ~estimate.finite()
        dropped = status.read_flag(bad)
        if dropped is not False:
            status.add("dropped", bad)
            if dropped and self.fits():
                return None
            estimate = estimate.zero_where(bad)
            if dropped:
                return estimate
        if group["curvature"] == "momentum":
            return curvatures.average(state, estimate, matrix.side(group["side"]), group)
        matrix.estimate = estimate
        return estimate

    def install(self, new: StateEntries) -> None:
        """Writes the result of a refresh to the state, and drops entries of options that have changed."""
        if self.group["curvature"] == "sample":
            curvatures.clear(self.state, "curvature")
            self.state.pop("curvature_side", None)
        curvatures.install(self.state, new)

    def precondition(self, update: MatrixUpdate) -> Direction:
        stacks = curvatures.apply(self.state, update.stacks(), self.group)
        return self._grafted(update, update.merged(stacks)), update.rows

    def _grafted(self, update: MatrixUpdate, direction: Tensor) -> Tensor:
        """The direction with the step length of ``graft``."""
        if self.group["graft"] is None:
            return direction
        return with_length(direction, graft_length(self.state, update.gradient, self.group, update.rows is not None))

    def initialised(self) -> None:
        curvatures.add_placeholders(self.state, self.group)
