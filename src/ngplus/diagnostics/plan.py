"""The plan: what is done with each parameter, and what it costs.

A multiplication and an addition are two FLOPs. With d the size of L or R, in blocks of p, D the other dimension and r
the rank of U:

================ ======================================== =====================================================
                 a step                                   a refresh, beside the products
================ ======================================== =====================================================
dense            2 d p D                                  d p^2 (Cholesky and inverse)
woodbury         4 d r D + 2 r^2 D                        2 d r^2 + r^3
sketched         2 d r D + 2 r q D, q the sketch size     4 r^2 q + r^3; neither counts the sketch itself
================ ======================================== =====================================================

Those of NGAdam are in :mod:`ngplus.optimizers.ngadam`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from ngplus.capture.accumulator import keeps_low_rank, subsample_size
from ngplus.capture.matrices import ParameterMatrix
from ngplus.diagnostics.rank_costs import Load, load_of
from ngplus.diagnostics.tables import plan_table
from ngplus.distributed.collectives import Distributor, Traffic
from ngplus.fisher.blocks import BlockPartition
from ngplus.fisher.factors import outer_costs
from ngplus.fisher.sketch import SketchSpec
from ngplus.preconditioners.ngplus_curvature import read
from ngplus.utils.warnings import no_such_name

COSTS = ("step_flops", "refresh_flops", "inverse_flops", "wire_bytes", "inverse_bytes", "step_bytes")


@dataclass(frozen=True)
class PlanRow:
    """A row of a plan: one matrix, its parameters, curvature and costs.

    Attributes:
        name: the name of its first parameter.
        parameters: the names of all its parameters.
        shape: (m, n).
        groups: the number of groups of a grouped convolution, each a matrix of that shape.
        source: where the curvature comes from: "sample", "vmap", "batch", or "none" (also if the matrix is frozen).
        side: "left" or "right"; for NGAdam "both", or "none" for vectors; for SENG "vec".
        solver: "dense", "woodbury" or "sketched"; for NGAdam "root" or "none"; for KFAC "kronecker".
        blocks: the number of blocks of L and R, over all groups and both sides.
        form: how the products are computed: "rank-one", "gram", "explicit", "mini-batch", "root" if U is stored, or ""
            if not known yet; for KFAC its ``approx``, for SENG the form of its factors.
        state_bytes: bytes of the curvature and Adam's moments, without the momentum buffer.
        step_flops: FLOPs of every step.
        refresh_flops: FLOPs of a refresh.
        note: why the source is "batch", or "frozen".
        wire_bytes: bytes that a refresh reduces over ranks: the lower triangle.
        inverse_bytes: bytes that the owner broadcasts at a refresh.
        step_bytes: bytes of gradients and directions that ranks communicate in every step.
        owner: the rank that owns the matrix, in its group of ranks; None in a single process.
        inverse_flops: the part of ``refresh_flops`` that only the owner computes.
        sparse: whether the gradients may be sparse. Then every rank applies the inverse to its rows.
        parameter_bytes: bytes of the parameters.
        refresh_bytes: bytes of temporary tensors in the last refresh, estimated; 0 for mini-batch curvature.
        seen: the samples of the last refresh, of all micro-batches and ranks, and the largest number of positions of a
            sample (1 for layers that sum them, such as norm layers); None before it, or without per-sample curvature.
        frozen: whether no parameter requires or has a gradient. Existing state stays.

    Examples:
        >>> row = ngplus.NGPlus(nn.Conv2d(3, 8, 3)).plan(batch_size=4)[0]
        >>> row.parameters, row.shape, row.side
        (('weight', 'bias'), (8, 28), 'right')
    """

    name: str
    parameters: tuple[str, ...]
    shape: tuple[int, int]
    groups: int
    source: str
    side: str
    solver: str
    blocks: int
    form: str
    state_bytes: int
    step_flops: int
    refresh_flops: int
    note: str
    wire_bytes: int = 0
    inverse_bytes: int = 0
    step_bytes: int = 0
    owner: int | None = None
    inverse_flops: int = 0
    sparse: bool = False
    parameter_bytes: int = 0
    refresh_bytes: int = 0
    frozen: bool = False
    seen: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan(Sequence[PlanRow]):
    """A sequence of rows, one for each matrix, in the order of the parameters; ``print(plan)`` shows a table.

    Attributes:
        rows: the rows.
        verbose: print all columns and whole names, not 80 columns.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> plan = ngplus.NGPlus(model).plan(batch_size=16)
        >>> [row.name for row in plan]
        ['0.weight', '2.weight']
        >>> plan["2.bias"].shape
        (2, 9)
        >>> plan.state_bytes == sum(row.state_bytes for row in plan)
        True
    """

    rows: tuple[PlanRow, ...]
    verbose: bool = False

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            for row in self.rows:
                if index in row.parameters:
                    return row
            raise KeyError(no_such_name(index, [name for row in self.rows for name in row.parameters], "this plan"))
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as plain dicts, for JSON or a data frame."""
        return [asdict(row) for row in self.rows]

    @property
    def state_bytes(self) -> int:
        """Bytes of the curvature and Adam's moments of all matrices."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def step_flops(self) -> int:
        """FLOPs of every step."""
        return sum(row.step_flops for row in self.rows)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a refresh reduces over several ranks: the lower triangles of all matrices."""
        return sum(row.wire_bytes for row in self.rows)

    @property
    def refresh_flops(self) -> int:
        """FLOPs of a refresh, one in ``update_every`` steps."""
        return sum(row.refresh_flops for row in self.rows)

    @property
    def inverse_bytes(self) -> int:
        """Bytes of the inverses that owners broadcast at a refresh."""
        return sum(row.inverse_bytes for row in self.rows)

    @property
    def step_bytes(self) -> int:
        """Bytes of gradients and directions that all ranks together communicate in every step."""
        return sum(row.step_bytes for row in self.rows)

    def on_ranks(self, ranks: int, distribution: str = "communication") -> Load:
        """Returns the costs on several ranks, by the cost model. The plan's batch is that of one rank.

        Args:
            ranks (int): the number of ranks.
            distribution (str): as in :class:`ngplus.NGPlus` for replicated parameters, or ``"sharded"`` for FSDP2
                (default: ``"communication"``).
        """
        return load_of(self.rows, ranks, distribution)

    def __str__(self) -> str:
        return plan_table(self)


Entry = tuple[ParameterMatrix, dict[str, Any], dict[str, Any], Distributor | None]


def plan_of(
    entries: Sequence[Entry], batch_size: int | None, positions: int | Mapping[str, int], verbose: bool = False
) -> Plan:
    """The plan of matrices with their groups, states and distributors."""
    names = [matrix.name for matrix, *_ in entries]
    for name in positions if isinstance(positions, Mapping) else ():
        if name not in names:
            raise KeyError(no_such_name(name, names, "this plan, for which positions has a number"))
    rows = [unless_frozen(_row(*entry, batch_size, positions), entry[0], entry[2]) for entry in entries]
    return Plan(tuple(rows), verbose)


def unless_frozen(row: PlanRow, matrix: ParameterMatrix, state: Mapping[str, Any]) -> PlanRow:
    """The row; for a frozen matrix, one without costs and with its existing state."""
    if any(param.requires_grad or param.grad is not None for param in matrix.params):
        return row
    changes: dict[str, Any] = {**dict.fromkeys(("source", "side", "solver"), "none"), **dict.fromkeys(COSTS, 0)}
    return replace(row, **changes, form="", state_bytes=state_bytes(state), note="frozen", frozen=True, seen=None)


def _row(
    matrix: ParameterMatrix,
    group: dict[str, Any],
    state: dict[str, Any],
    distributor: Distributor | None,
    batch_size: int | None,
    positions: int | Mapping[str, int],
) -> PlanRow:
    if isinstance(positions, Mapping):
        positions = positions.get(matrix.name, 1)
    rows, cols = matrix.layout.rows, matrix.layout.cols
    side = matrix.side(group["side"])
    other = cols if side == "left" else rows
    partition = matrix.partition_of(group)
    source = "batch" if group["curvature"] == "batch" else matrix.refreshed_from
    samples, kappa = matrix.seen or (batch_size or 0, positions)
    if matrix.seen is not None:
        samples //= matrix.ranks  # those of this rank
    width = 8 if matrix.params[0].element_size() == 8 else 4
    rank = samples * min(kappa, other)
    touched = min(other, samples * kappa) if matrix.sparse and side == "right" and samples else other
    solver = group["solver"]
    if distributor is not None and source != "batch":
        solver = "dense"  # ranks reduce L
    elif solver == "auto":
        known = read(state, "factor") is not None or (read(state, "inverse") is None and rank > 0)
        low = known and source != "batch" and keeps_low_rank(group, rank, partition.size)
        solver = "woodbury" if low else "dense"
    step, inverse, elements = _solver_costs(solver, group, partition, rank, other, touched)
    refresh = inverse
    if group["curvature"] != "sample":
        elements += partition.elements
    if group["graft"] == "adam" and not matrix.sparse:
        elements += 2 * matrix.groups * rows * cols  # Adam's moments, for grafting
    form = matrix.form or ""
    spec = SketchSpec.parse(group["sketch"]) if solver != "sketched" else None
    short = other if spec is None else min(other, spec.size)
    if touched < other:
        short = min(short, kappa)  # the products of an embedding read only the rows that are used
    if source == "batch":
        form = "mini-batch"
        products = 2 * partition.elements * short
        if group["curvature"] == "batch":
            step += products
        else:
            refresh += products
    elif samples:
        used = subsample_size(samples, group["samples"])
        costs = outer_costs(kappa, partition.d, short, partition.size)  # those of dense factors, for all factors
        form = form or min(costs, key=lambda name: costs[name])
        refresh += int(2 * used * matrix.groups * costs.get(form, min(costs.values())))
    traffic = Traffic(partition.triangle, 0, 0) if distributor is None else distributor.traffic(matrix, group)
    return PlanRow(
        name=matrix.name,
        parameters=tuple(matrix.names),
        shape=(rows, cols),
        groups=matrix.groups,
        source=source,
        side=side,
        solver=solver,
        blocks=partition.count,
        form=form,
        state_bytes=state_bytes(state) or elements * width,
        step_flops=step,
        refresh_flops=refresh,
        note=matrix.note,
        wire_bytes=0 if source == "batch" else traffic.average * width,
        inverse_bytes=0 if source == "batch" else traffic.inverse * width,
        step_bytes=traffic.step * width,
        owner=None if distributor is None else distributor.owners[id(matrix)],
        inverse_flops=inverse,
        sparse=matrix.sparse,
        parameter_bytes=sum(p.numel() * p.element_size() for p in matrix.params),
        refresh_bytes=0 if source == "batch" else matrix.refresh_bytes,
        seen=seen_by(matrix, source),
    )


def seen_by(matrix: ParameterMatrix, source: str) -> tuple[int, int] | None:
    """Samples and positions of the last refresh, where its curvature is that of samples."""
    if matrix.seen is None or source not in ("sample", "vmap"):
        return None
    return matrix.seen[0], 1 if matrix.summed else matrix.seen[1]


def _solver_costs(
    solver: str, group: dict[str, Any], partition: BlockPartition, rank: int, other: int, touched: int
) -> tuple[int, int, int]:
    """FLOPs of a step, FLOPs of a refresh besides the products, and entries of the state: see the module's docstring.

    ``touched`` are the rows of a sparse gradient, or all of the other dimension.
    """
    if solver == "dense":
        return 2 * partition.elements * touched, partition.cubes, partition.elements
    d, blocks = partition.groups * partition.d, partition.count
    if solver == "woodbury":
        step = 4 * d * rank * other + 2 * blocks * rank * rank * other
        return step, 2 * d * rank * rank + blocks * rank**3, d * rank + blocks * rank * rank
    spec = SketchSpec.parse(group["sketch"])
    q = min(partition.size, 2 * rank) if spec is None else spec.size
    step = 2 * rank * other * (d + blocks * q)
    return step, blocks * (4 * rank * rank * q + rank**3), d * rank + blocks * rank * q


def state_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of a matrix's curvature and Adam's moments."""
    tensors = [value for key, value in state.items() if isinstance(value, Tensor) and key != "momentum_buffer"]
    return sum(value.numel() * value.element_size() for value in tensors)
