"""The cost model for a given number of ranks: what a plan costs the busiest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ngplus.distributed.collectives import DISTRIBUTIONS, assign
from ngplus.utils.validation import choice, whole

if TYPE_CHECKING:
    from ngplus.diagnostics.plan import PlanRow

KNOWN = (*DISTRIBUTIONS, "sharded")


@dataclass(frozen=True)
class Load:
    """What a plan costs the busiest of several ranks.

    Attributes:
        ranks: the number of ranks.
        distribution: "communication", "memory" or "sharded" (FSDP2).
        state_bytes: bytes of the curvature and Adam's moments.
        parameter_bytes: bytes of the parameters on this rank.
        sum_bytes: bytes of temporary memory at a refresh, for the sums of all matrices over the rank's samples.
        step_flops: FLOPs of every step.
        refresh_flops: FLOPs of a refresh: the products of the rank's samples, and the inverses that it owns.
        step_bytes: bytes sent (FSDP2) or received in every step, besides the all-reduce of the gradients.
        refresh_bytes: bytes of the triangles that are reduced and the inverses that are broadcast at a refresh.

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
    """The load of the busiest rank, with matrices assigned as :class:`ngplus.NGPlus` assigns them.

    A frozen matrix has no cost here; NGPlus assigns it like any other.
    """
    choice("distribution", distribution, KNOWN)
    whole("ranks", ranks)
    # Only the owner has the curvature of a remote matrix. With sparse gradients every rank applies the inverse.
    remote = {row for row in rows if distribution != "communication" and not row.sparse}
    local = set(rows) - remote
    owners = assign([_cost_of(row, row in remote) for row in rows], ranks)
    on_all = {row for row in local if row.solver == "root"}  # NGAdam: every rank computes the roots

    def busiest(among: Set[PlanRow], cost: Callable[[PlanRow], int]) -> int:
        """The largest sum over the rows that one rank owns."""
        loads = [0] * ranks
        for row, owner in zip(rows, owners, strict=True):
            if row in among:
                loads[owner] += cost(row)
        return max(loads)

    def on_one_rank(cost: Callable[[PlanRow], int]) -> int:
        """Local matrices are on every rank, remote ones on their owners."""
        return sum(map(cost, local)) + busiest(remote, cost)

    def direction(row: PlanRow) -> int:
        return 0 if row.frozen else row.parameter_bytes

    directions, parameters = sum(map(direction, remote)), sum(row.parameter_bytes for row in rows)
    if distribution == "sharded":  # sent: a shard of each gradient, and the owned directions
        directions, parameters = directions // ranks + busiest(remote, direction), parameters // ranks
    return Load(
        ranks=ranks,
        distribution=distribution,
        state_bytes=on_one_rank(lambda row: row.state_bytes),
        parameter_bytes=parameters,
        sum_bytes=sum(2 * row.wire_bytes for row in rows),
        step_flops=on_one_rank(lambda row: row.step_flops),
        refresh_flops=sum(row.refresh_flops - row.inverse_flops for row in rows)
        + sum(row.inverse_flops for row in on_all)
        + busiest(set(rows) - on_all, lambda row: row.inverse_flops),
        step_bytes=directions,
        refresh_bytes=sum(row.wire_bytes for row in rows) + sum(row.wire_bytes for row in local),
    )


def _cost_of(row: PlanRow, steps: bool) -> float:
    """The cost by :func:`ngplus.distributed.collectives.cost_of`, from a row of the plan."""
    elementwise = 0 if row.frozen else row.groups * row.shape[0] * row.shape[1]
    return float(row.inverse_flops + (row.step_flops + elementwise if steps else 0))
