"""An optimizer whose curvature comes from the capture: the frame that NG+ and its rivals share.

``step`` reads like Algorithm 1 of the paper: take the gradients, refresh the curvature where it is due, turn
gradients into directions, update the parameters, arm the capture for the next refresh. A method says what it gathers,
how a refresh turns that into state, and how state turns a gradient into a direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ngplus.capture.collector import Collector
from ngplus.capture.layers.base import no_mixed_precision
from ngplus.capture.matrices import ParameterMatrix
from ngplus.diagnostics.health import FETCH_EVERY, Health
from ngplus.distributed.collectives import Distributor, reduce_curvature
from ngplus.fisher.inverses import Product
from ngplus.optimizers.binding import MatrixOptimizer
from ngplus.optimizers.gradients import agree, gradient_norms, gradient_parts
from ngplus.optimizers.update import UpdateRule, sgd_steps, update_parameters, worked_out
from ngplus.preconditioners.base import Direction, MatrixUpdate
from ngplus.utils.dtensor import like
from ngplus.utils.finite import RefreshStatus, keep_last_good, norms_of, read_if_on_host, zero_where
from ngplus.utils.typing import State
from ngplus.utils.warnings import warn

Directions = dict[nn.Parameter, Tensor | Product]  # of all parameters of a step


class BaseOptimizer(MatrixOptimizer):
    """The step. A method gives the preconditioner of a matrix (``_preconditioner``) and the rule of the update."""

    _update_rule: UpdateRule = staticmethod(sgd_steps)
    _initialising = False
    _skip: Tensor | None = None  # on an accelerator: is this step to change nothing?

    # ---------------------------------------------------------------------------------------------- of each method

    def _begin(self) -> None:
        """What a method does at the beginning of a step, on every rank."""

    def _share(
        self, distributor: Distributor, estimate: list[ParameterMatrix], collector: Collector, due: set[int]
    ) -> None:
        """Refreshes the matrices whose curvature every rank of a team keeps; they are due no more."""

    # ---------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single optimization step.

        Args:
            closure (callable): reevaluates the model and returns the loss (default: None).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with no_mixed_precision(next(iter(self._names)).device):
            directions = self._directions()  # D_k
            if directions is not None:
                for group in self.param_groups:  # W_(k+1) = W_k - lr D_k
                    params, left_out = update_parameters(group, directions, self.state, self._update_rule, self._skip)
                    self._faults.note("steps", [self._names[p] for p in params], left_out)
                self._advance()  # k <- k + 1
            self._faults.emit_warnings()
        return loss

    def _directions(self) -> Directions | None:
        """The direction of every parameter that has a gradient; None where the step is skipped."""
        collector = self._prepare()
        due = {id(m) for m in self._matrices if self._due(m)}  # k mod T == 0
        for distributor in self._distributors:  # L_k or R_k over all ranks
            asked = [m for m in distributor.matrices if id(m) in due and self._captures(self._group(m))]
            self._share(distributor, reduce_curvature(distributor, collector, asked, self._of_param), collector, due)
        present = self._with_finite_gradients(collector)
        if present is None:
            return None
        updates = self._updates(present, due)  # G_k of every matrix
        for update in updates:
            update.preconditioner.update(update)
        self._refresh([update for update in updates if id(update.matrix) in due], collector)
        directions: Directions = {}
        for update in updates:
            direction = update.preconditioner.precondition(update)
            directions.update(by_parameter(update, *self._fit_to_share(update, *direction)))
            if self._initialising:
                update.preconditioner.initialised()
        self._scatter(present, directions)
        return {param: direction for param, direction in directions.items() if param.grad is not None}

    @torch.no_grad()
    def _replace_gradients(self) -> None:
        """Each .grad becomes its direction: for another optimizer's step. Zeros where there is no finite one."""
        with no_mixed_precision(next(iter(self._names)).device):
            directions = self._directions()
        if directions is None:
            if self._skip is not None:
                for param in self._names:
                    param.grad = None if param.grad is None else torch.zeros_like(param.grad)
        elif directions:
            params, made = list(directions), [worked_out(p, d) for p, d in directions.items()]
            parts = [d.values() if d.is_sparse else d for d in made]
            bad = ~norms_of(parts).isfinite()
            zero_where(bad if self._skip is None else bad | self._skip.to(bad.device), parts)
            self._faults.note("steps", [self._names[p] for p in params], bad)
            for param, direction in zip(params, made, strict=True):
                param.grad = like(param, direction)
            self._advance()
        self._faults.emit_warnings()

    # ---------------------------------------------------------------------------------------------- its parts

    def _prepare(self) -> Collector:
        """Checks what may have changed since the last step, and ends the collection."""
        for group in self.param_groups:
            self._check(group)
        changed = [matrix for matrix in self._matrices if matrix.update_layout()]  # frozen or cast since the pass
        self._begin()
        collector = self._collector
        assert collector is not None
        self._skip = None
        collector.finish()
        for matrix in changed:
            collector.take(matrix)  # of the parameters that it had before
        self._find_replicas()
        return collector

    def _with_finite_gradients(self, collector: Collector) -> list[ParameterMatrix] | None:
        """The matrices of this step; None where it is skipped, as a gradient is not finite or there is none."""
        present, names, norms = self._with_gradients()
        if not present:
            if collector.forward_seen:
                raise RuntimeError(
                    "No parameter has a gradient, though the model has been called: the loss does not reach any "
                    "parameter of this optimizer, or backward() was not called since zero_grad()"
                )
            return None
        self._faults.steps += 1
        self._skip = self._unfit(names, ~norms.isfinite())
        if self._skip is not None and read_if_on_host(self._skip):
            collector.forget()  # the step is left out as if there had been none
            return None
        # Distributed checkpoints make a step with lr = 0 and zero gradients, only to have the state initialised.
        self._initialising = all(is_zero(g["lr"]) for g in self.param_groups) and not bool(norms.any())
        return present

    def _refresh(self, updates: Sequence[MatrixUpdate], collector: Collector) -> None:
        """The refreshes of the matrices that are due, from what was gathered for them."""
        if not updates:
            return
        self._faults.fetch()
        uncovered: list[ParameterMatrix] = []
        for update in updates:
            matrix, captures = update.matrix, self._captures(update.group)
            gathered = collector.take(matrix)
            matrix.missed = gathered is None and captures and not self._initialising
            if captures and (matrix.source == "batch" or gathered is None):
                uncovered.append(matrix)
                gathered = None
            held, status = dict(update.state), RefreshStatus(climb=self._faults.needs_help(matrix.name))
            update.preconditioner.refresh(update, gathered, status)
            self._conclude(update, held, status)
        self._faults.fetch()
        self._warn_uncovered(uncovered)

    def _scatter(self, present: Sequence[ParameterMatrix], directions: Directions) -> None:
        """The directions that owners have found, on all ranks."""
        for distributor in self._distributors:
            away = [m for m in present if self._distributor(m) is distributor and distributor.is_remote(m)]
            owned = {p: worked_out(p, directions[p]) for m in away for p in m.active_params if p in directions}
            directions.update(distributor.scatter_directions(away, owned) if away else {})

    def _unfit(self, names: list[str], bad: Tensor) -> Tensor | None:
        """Counts the gradients that are not finite; one flag for the step, None where the host sees that all is well.

        Averaged gradients are the same on all ranks, and of sharded ones the ranks have agreed: all decide alike.
        """
        seen = read_if_on_host(bad)
        if seen is not None and not any(seen):
            return None
        self._faults.note("gradients", names, bad)
        self._faults.note("skipped", ("",), bad.any()[None])
        return bad.any()

    def _with_gradients(self) -> tuple[list[ParameterMatrix], list[str], Tensor]:
        """The matrices of this step, and the names and norms of the gradients. A team that exchanges gradients or
        directions in every step agrees on them first."""
        busy = [
            distributor for distributor in self._distributors if any(map(distributor.is_remote, distributor.matrices))
        ]
        agreed = [agree(distributor) for distributor in busy]
        apart = {id(m) for distributor in busy for m in distributor.matrices}
        present = [m for m in self._matrices if id(m) not in apart and any(p.grad is not None for p in m.params)]
        names, norms = gradient_norms(present)
        for matrices, more_names, more_norms in agreed:
            present, names = present + matrices, names + more_names
            norms = torch.cat([norms.to(more_norms), more_norms])
        return present, names, norms

    def _updates(self, present: Sequence[ParameterMatrix], due: set[int]) -> list[MatrixUpdate]:
        """The parts of this step that are done on this rank. A matrix's curvature is in its first parameter's state."""
        updates = []
        given: dict[int, list[Tensor]] = {}
        for distributor in self._distributors:
            given.update(distributor.gather([m for m in present if self._distributor(m) is distributor]))
        if len(self.state) != len(self._names):  # distributed checkpoints want an entry for every parameter
            for param in (param for matrix in present for param in matrix.params):
                self.state.setdefault(param, {})
        for matrix in present:
            group, state, its_team = self._group(matrix), self.state[matrix.params[0]], self._distributor(matrix)
            if id(matrix) in due:
                state["refreshed"] = self._measures(matrix)
            if its_team is not None and not its_team.has_curvature(matrix):
                continue
            parts, rows = gradient_parts(matrix, group, given.get(id(matrix)))
            if self._skip is not None:  # the device knows whether: moving averages take in zeros, parameters nothing
                parts = [part.masked_fill(self._skip.to(part.device), 0) for part in parts]
            updates.append(MatrixUpdate(self._preconditioner(matrix, group, state), parts, rows))
        return updates

    def _fit_to_share(self, update: MatrixUpdate, direction: Tensor | list[Product], rows: Tensor | None) -> Direction:
        """A direction that is handed out in parts: the owner decides for all ranks whether it is finite."""
        distributor = self._distributor(update.matrix)
        if distributor is not None and distributor.is_remote(update.matrix):
            assert isinstance(direction, Tensor)
            bad = ~norms_of([direction]).isfinite()
            self._faults.note("steps", (update.matrix.name,), bad)
            direction = direction.masked_fill(bad, 0)
        return direction, rows

    def _conclude(self, update: MatrixUpdate, held: State, status: RefreshStatus) -> None:
        """After a refresh has brought new state: the last good one again where it failed, and the ledger."""
        if status.unsolved is not None:
            keep_last_good(update.state, held, status.unsolved)
        for kind, flag in (("dropped", status.dropped), ("retried", status.retried), ("plain", status.plain)):
            if flag is not None:  # in a step that is skipped anyway, the gradients are the fault
                fault = flag if self._skip is None else flag & ~self._skip.to(flag.device)
                self._faults.note(kind, (update.matrix.name,), fault[None])

    def _advance(self) -> None:
        """k <- k + 1, and the capture armed for the matrices that are due in the next step."""
        for group in self.param_groups:
            if not self._initialising:
                group["step"] += 1
        if self._collector is not None:
            self._collector.forget()
        self._arm()
        if self._faults.steps % FETCH_EVERY == 0:
            self._faults.fetch()

    def health(self) -> Health:
        """What went wrong and was put right since the optimizer was made: steps skipped, refreshes dropped, layers.

        Examples:
            >>> ngplus.NGPlus(nn.Linear(3, 2)).health().good
            True
        """
        return self._faults.health()

    def _warn_uncovered(self, uncovered: list[ParameterMatrix]) -> None:
        """One warning, until the parameters are others, with the names of all that has no per-sample curvature."""
        if self._warned or self._initialising or not uncovered:
            return
        self._warned = True
        shown = [f"{', '.join(m.names)} ({m.note})" for m in uncovered[:20]]
        more = f" and {len(uncovered) - 20} more" if len(uncovered) > 20 else ""
        warn(
            f"No per-sample curvature for {'; '.join(shown)}{more}. "
            "Mini-batch curvature is used for them; plan() lists all, and the documentation's page on trouble-shooting "
            "says what to do about each reason"
        )


def is_zero(lr: float | Tensor) -> bool:
    """Of a learning rate; one on an accelerator is not looked at."""
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.is_cpu else False


def by_parameter(
    update: MatrixUpdate, direction: Tensor | list[Product], rows: Tensor | None
) -> Mapping[nn.Parameter, Tensor | Product]:
    """A matrix's direction as those of its parameters."""
    if isinstance(direction, list):
        return dict(zip(update.matrix.active_params, direction, strict=True))
    if rows is not None:
        first = update.matrix.params[0]
        values = direction[0].to(first.dtype).contiguous()
        return {first: torch.sparse_coo_tensor(rows, values, first.shape, is_coalesced=True, check_invariants=False)}
    parts = zip(update.matrix.active_params, update.matrix.layout.split(direction), strict=True)
    return {param: part.to(param.dtype) for param, part in parts}
