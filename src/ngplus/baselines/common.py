"""What the rivals share beside the frame of :mod:`ngplus.optimizers.base`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.samples import BatchDims
from ngplus.diagnostics.plan import Plan, PlanRow, unless_frozen
from ngplus.optimizers.base import BaseOptimizer
from ngplus.optimizers.options import check_momentum
from ngplus.utils.dtensor import many_ranks
from ngplus.utils.typing import Group, State
from ngplus.utils.validation import number


class Batches(Accumulator):
    """What a refresh has gathered: the rival's own, and the counts that NG+ keeps as well."""

    def scale(self, group: Group, grad_scale: Tensor | float) -> Tensor | float:
        """What makes a captured gradient that of a sample's own loss: see ``curvature.per_sample``."""
        return (self.samples if group["loss_reduction"] == "mean" else 1) / grad_scale


class Rival(BaseOptimizer):
    """The base of KFAC and SENG: one process, and a plan row from each."""

    def __init__(
        self, params: nn.Module | ParamsT, model: nn.Module | None, batch_dim: BatchDims, defaults: dict[str, Any]
    ) -> None:
        if many_ranks():
            raise RuntimeError(
                f"{type(self).__name__} is for one process: its curvature does not cross ranks, that of NGPlus does"
            )
        super().__init__(params, model, batch_dim, defaults)

    def _check(self, group: Mapping[str, Any]) -> None:
        check_momentum(group)
        number("damping", group["damping"])

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> PlanRow:
        raise NotImplementedError

    def plan(self, batch_size: int | None = None, positions: int = 1) -> Plan:
        """What each parameter gets and costs; before the first refresh, for that many samples and positions."""
        rows = []
        for matrix in self._matrices:
            seen, state = matrix.seen or (batch_size or 0, positions), self.state.get(matrix.params[0], {})
            rows.append(unless_frozen(self._row(matrix, self._group(matrix), state, *seen), matrix, state))
        return Plan(tuple(rows))
