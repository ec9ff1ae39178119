"""The cost model past the ranks at hand: what a plan costs each of 8, 64 or 512 ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ngplus.distributed.collectives import DISTRIBUTIONS, assign
from ngplus.utils.validation import choice, whole

if TYPE_CHECKING:
    from ngplus.diagnostics.plan import PlanRow

KNOWN = (*DISTRIBUTIONS, "sharded")


@dataclass(frozen=True)
class Load:
    """What a plan costs one of many ranks, the busiest one.

    Attributes:
        ranks: how many there are.
        distribution: "communication", "memory" or "sharded" (FSDP2).
        state_bytes: kept for the curvature and Adam's moments.
        parameter_bytes: of the parameters that it holds.
        sum_bytes: that a refresh holds for a while, the sums of all matrices over the rank's own samples.
        step_flops: of every step.
        refresh_flops: of a refresh: the products of the rank's own samples, and the inverses that it owns.
        step_bytes: that it sends (FSDP2) or receives in every step, beside the gradients' own average.
        refresh_bytes: the triangles that it adds up, and the inverses that are sent.

    Examples:
        >>> load = ngplus.NGPlus(nn.Linear(8, 4)).plan(batch_size=4).on_ranks(2, "memory")
        >>> load.ranks, load.step_bytes == 4 * (8 * 4 + 4)
        (2, True)
    """

    ranks: int
    distribution: str
    state_bytes: int
    parameter_bytes: int
    sum_bytes: int
    step_flops: int
    refresh_flops: int
    step_bytes: int
    refresh_bytes: int


def load_of(rows: Sequence[PlanRow], ranks: int, distribution: str) -> Load:
    """The load of the busiest of so many ranks, with matrices assigned as :class:`ngplus.NGPlus` assigns them where
    none is frozen: those that are count for nothing here, and like any other there."""
    choice("distribution", distribution, KNOWN)
    whole("ranks", ranks)
    sharded = distribution == "sharded"
    # Where rows are sparse, every rank applies the inverse to those that it has touched.
    away = [distribution != "communication" and not row.sparse for row in rows]
    by_all = {row.name for row, gone in zip(rows, away, strict=True) if row.solver == "root" and not gone}  # NGAdam's
    owners = assign([_cost_of(row, gone) for row, gone in zip(rows, away, strict=True)], ranks)

    def total(cost: Callable[[PlanRow], int], gone: bool) -> int:
        return sum(cost(row) for row, other in zip(rows, away, strict=True) if other is gone)

    def busiest(cost: Callable[[PlanRow], int], gone: bool | None) -> int:
        loads = [0] * ranks
        for row, owner, other in zip(rows, owners, away, strict=True):
            if gone is None or other is gone:
                loads[owner] += cost(row)
        return max(loads)

    def held(cost: Callable[[PlanRow], int]) -> int:
        """By each rank, or by the owner alone."""
        return total(cost, gone=False) + busiest(cost, gone=True)

    def direction(row: PlanRow) -> int:
        return 0 if row.frozen else row.parameter_bytes

    directions = total(direction, gone=True)
    if sharded:  # a part of each gradient goes out, and the whole of each direction that is the rank's own
        directions = directions // ranks + busiest(direction, gone=True)
    parameters = sum(row.parameter_bytes for row in rows)
    return Load(
        ranks=ranks,
        distribution=distribution,
        state_bytes=held(lambda row: row.state_bytes),
        parameter_bytes=parameters // ranks if sharded else parameters,
        sum_bytes=sum(2 * row.wire_bytes for row in rows),
        step_flops=held(lambda row: row.step_flops),
        refresh_flops=sum(row.refresh_flops - row.inverse_flops for row in rows)
        + sum(row.inverse_flops for row in rows if row.name in by_all)
        + busiest(lambda row: 0 if row.name in by_all else row.inverse_flops, gone=None),
        step_bytes=directions,
        refresh_bytes=sum(row.wire_bytes for row in rows) + total(lambda row: row.wire_bytes, gone=False),
    )


def _cost_of(row: PlanRow, steps: bool) -> float:
    """What :func:`ngplus.distributed.collectives.cost_of` counts."""
    elementwise = 0 if row.frozen else row.groups * row.shape[0] * row.shape[1]
    return float(row.inverse_flops + (row.step_flops + elementwise if steps else 0))
