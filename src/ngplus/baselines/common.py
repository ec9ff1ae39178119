"""What KFAC and SENG have in common besides :mod:`ngplus.optimizers.base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.sample_index import SampleIndex
from ngplus.diagnostics.plan import Plan, PlanRow, seen_by, unless_frozen
from ngplus.optimizers.base import BaseOptimizer
from ngplus.optimizers.options import check_momentum
from ngplus.utils.dtensor import many_ranks
from ngplus.utils.typing import Group, State
from ngplus.utils.validation import number


class BaselineAccumulator(Accumulator):
    """The base class of the accumulators of KFAC and SENG."""

    def scale(self, group: Group, grad_scale: Tensor | float) -> Tensor | float:
        """The factor from a captured gradient to that of the per-sample loss: see ``curvature.per_sample``."""
        return (self.samples if group["loss_reduction"] == "mean" else 1) / grad_scale


class BaselineOptimizer(BaseOptimizer):
    """The base class of KFAC and SENG, which run in one process."""

    def __init__(
        self,
        params: nn.Module | ParamsT,
        model: nn.Module | None,
        batch_dim: BatchDims,
        sample_index: SampleIndex | None,
        defaults: dict[str, Any],
    ) -> None:
        if many_ranks():
            raise RuntimeError(
                f"{type(self).__name__} runs in one process only; NGPlus and NGAdam run on several ranks"
            )
        super().__init__(params, model, batch_dim, defaults, sample_index=sample_index)

    def _check(self, group: Mapping[str, Any]) -> None:
        check_momentum(group)
        number("damping", group["damping"])

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> dict[str, Any]:
        """The fields of a plan row that differ between KFAC and SENG."""
        raise NotImplementedError

    def plan(self, batch_size: int | None = None, positions: int = 1, *, verbose: bool = False) -> Plan:
        """Returns the shape, curvature and costs of each parameter, before the first refresh for this batch size."""
        rows = []
        for matrix in self._matrices:
            seen, state = matrix.seen or (batch_size or 0, positions), self.state.get(matrix.params[0], {})
            row = PlanRow(
                name=matrix.name,
                parameters=tuple(matrix.names),
                shape=(matrix.layout.rows, matrix.layout.cols),
                groups=matrix.groups,
                source=matrix.refreshed_from,
                note=matrix.note,
                seen=seen_by(matrix, matrix.refreshed_from),
                **self._row(matrix, self._group(matrix), state, *seen),
            )
            rows.append(unless_frozen(row, matrix, state))
        return Plan(tuple(rows), verbose)
