"""The step that all optimizers of ngplus have in common: Algorithm 1 of the paper.

A method defines the preconditioner of a matrix (:mod:`ngplus.preconditioners`), the update rule
(:mod:`ngplus.optimizers.update`) and the steps with a refresh (``_refresh_rule``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ngplus.capture import reasons
from ngplus.capture.collector import Collector
from ngplus.capture.matrices import ParameterMatrix
from ngplus.diagnostics.health import FETCH_EVERY, Health
from ngplus.distributed.collectives import Distributor, reduce_curvature
from ngplus.optimizers.gradient_matrices import agree, gradient_matrix, gradient_norms, refuse_sparse_decay
from ngplus.optimizers.matrix_optimizer import MatrixOptimizer
from ngplus.optimizers.update import UpdateRule, sgd_steps, update_parameters
from ngplus.preconditioners.base import MatrixPreconditioner, MatrixUpdate
from ngplus.utils.dtensor import like, local
from ngplus.utils.finite import RefreshStatus, keep_last_good, norms_of, read_if_on_host, zero_where
from ngplus.utils.precision import full_precision
from ngplus.utils.typing import State
from ngplus.utils.warnings import warn

REASONS_SHOWN = 3  # in a warning, which has a line for each
Directions = dict[nn.Parameter, Tensor]


class BaseOptimizer(MatrixOptimizer):
    """An optimizer with :meth:`step`."""

    _update_rule: UpdateRule = staticmethod(sgd_steps)
    _decoupled_weight_decay = False  # not applied to sparse gradients; with that of SGD they raise an error
    _initialising = False  # this step only initialises the state
    _new_parameters = False  # the groups got other ones since the last step: nothing was captured of them
    _warned_without_gradients = False
    _skip: Tensor | None = None  # a flag on an accelerator: this step changes nothing

    # ---------------------------------------------------------------------------------------------- of each method

    def _begin(self) -> None:
        """Called at the beginning of a step, on every rank."""

    def _refresh_replicated(
        self, distributor: Distributor, matrices: list[ParameterMatrix], collector: Collector, due: set[int]
    ) -> None:
        """Refreshes the matrices whose curvature all ranks have, and removes them from ``due``."""

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
        with full_precision(self._device):
            directions = self._directions()  # -D_k
            if directions is not None:
                updates = []
                for group in self.param_groups:  # W_(k+1) = W_k - lr D_k
                    made = update_parameters(group, directions, self.state, self._update_rule, self._skip)
                    params, lengths, left_out = made
                    self._faults.note("steps", [self._names[p] for p in params], left_out)
                    updates.append((lengths, left_out if self._skip is None else left_out | self._skip))
                self._faults.note_updates(updates)
                self._advance()  # k <- k + 1
            self._faults.emit_warnings()
        return loss

    def _directions(self) -> Directions | None:
        """The direction of every parameter that has a gradient; None where the step is skipped."""
        collector = self._prepare()
        due = {id(m) for m in self._matrices if self._due(m)}  # k mod T == 0
        for distributor in self._distributors:  # sums over the samples S_k, captured during backward, of all ranks
            asked = [m for m in distributor.matrices if id(m) in due and self._captures(self._group(m))]
            summed = reduce_curvature(distributor, collector, asked, self._group_of_param)
            self._refresh_replicated(distributor, summed, collector, due)
        present = self._with_finite_gradients(collector)
        if present is None:
            return None
        updates = self._updates(present, due)  # G_k of every matrix
        for update in updates:
            update.preconditioner.update(update)
        self._refresh([update for update in updates if id(update.matrix) in due], collector)  # L_k or R_k
        directions: Directions = {}
        for update in updates:
            direction, rows = update.preconditioner.precondition(update)
            directions.update(by_parameter(update, self._finite_if_sent(update, direction), rows))
            if self._initialising:
                update.preconditioner.initialised()
        self._scatter(present, directions)
        return {param: direction for param, direction in directions.items() if param.grad is not None}

    @torch.no_grad()
    def _replace_gradients(self) -> None:
        """Replaces each .grad by its direction, for another optimizer's step; by zeros where that is not finite."""
        with full_precision(self._device):
            directions = self._directions()
        if directions is None:
            if self._skip is not None:
                for param in self._names:
                    param.grad = None if param.grad is None else torch.zeros_like(param.grad)
        elif directions:
            params, made = list(directions), list(directions.values())
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
        """Checks the options, follows changes of the parameters since the last step, and ends the capture."""
        for group in self.param_groups:
            self._check(group)
        self._new_parameters = self._follow_groups()
        changed = [matrix for matrix in self._matrices if matrix.update_layout()]  # frozen or cast since the pass
        self._begin()
        collector = self._collector
        assert collector is not None
        self._skip = None
        collector.finish()
        for matrix in changed:
            collector.take(matrix)  # its sums are of the parameters that it had before
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
            self._warn_without_gradients()
            return None
        self._faults.steps += 1
        self._skip = self._flag_non_finite(names, ~norms.isfinite())
        if self._skip is not None and read_if_on_host(self._skip):
            collector.forget()
            self._faults.note_updates([(norms, torch.ones_like(norms, dtype=torch.bool))])
            return None
        # Distributed checkpoints make a step with lr = 0 and zero gradients, only to have the state initialised.
        self._initialising = all(is_zero(g["lr"]) for g in self.param_groups) and not bool(norms.any())
        return present

    def _refresh(self, updates: Sequence[MatrixUpdate], collector: Collector) -> None:
        """Refreshes these matrices from what was captured for them, or from their mini-batch gradients."""
        if not updates:
            return
        self._faults.fetch()
        self._warn_replaced()
        uncovered: list[ParameterMatrix] = []
        for update in updates:
            matrix, captures = update.matrix, self._captures(update.group)
            gathered = collector.take(matrix)
            nothing = gathered is None and captures and not (self._initialising or self._new_parameters)
            matrix.missed = matrix.not_captured or reasons.NOT_CALLED if nothing else ""
            if captures and (matrix.source == "batch" or gathered is None):
                uncovered.append(matrix)
                gathered = None
            if gathered is not None:
                gathered.note_seen(matrix)
            held, status = dict(update.state), RefreshStatus(may_wait=self._faults.needs_help(matrix.name))
            update.preconditioner.refresh(update, gathered, status)
            self._conclude(update.preconditioner, held, status)
        self._faults.fetch()
        self._warn_uncovered(uncovered)

    def _scatter(self, present: Sequence[ParameterMatrix], directions: Directions) -> None:
        """Sends the directions that owners have computed to all ranks."""
        for distributor in self._distributors:
            away = [m for m in present if self._distributor(m) is distributor and distributor.kept_by_owner_only(m)]
            owned = {p: directions[p] for m in away for p in m.active_params if p in directions}
            directions.update(distributor.scatter_directions(away, owned) if away else {})

    def _flag_non_finite(self, names: list[str], bad: Tensor) -> Tensor | None:
        """Counts the gradients that are not finite. Returns one flag for the step; None where the host sees that all
        are finite. All ranks decide the same, since averaged gradients are equal and ranks with shards have agreed."""
        seen = read_if_on_host(bad)
        if seen is not None and not any(seen):
            return None
        self._faults.note("gradients", names, bad)
        self._faults.note("skipped", ("",), bad.any()[None])
        return bad.any()

    def _with_gradients(self) -> tuple[list[ParameterMatrix], list[str], Tensor]:
        """The matrices of this step, and the names and norms of the gradients. Ranks that exchange gradients or
        directions in every step agree on them first."""
        busy = [
            distributor
            for distributor in self._distributors
            if any(map(distributor.kept_by_owner_only, distributor.matrices))
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
        """The matrices whose directions this rank computes. A matrix's curvature is in its first parameter's state."""
        updates = []
        given: dict[int, list[Tensor]] = {}
        for distributor in self._distributors:
            given.update(distributor.gather([m for m in present if self._distributor(m) is distributor]))
        if len(self.state) != len(self._names):  # distributed checkpoints want an entry for every parameter
            for param in (param for matrix in present for param in matrix.params):
                self.state.setdefault(param, {})
        for matrix in present:
            group, state, its_own = self._group(matrix), self.state[matrix.params[0]], self._distributor(matrix)
            if id(matrix) in due and (self._initialising or not self._new_parameters):  # else again in the next step
                state["refreshed"] = self._refresh_key(matrix)
            if its_own is not None and not its_own.has_curvature(matrix):
                continue
            if not self._decoupled_weight_decay:
                refuse_sparse_decay(matrix, group)
            grads: Sequence[Tensor | None] = given.get(id(matrix)) or [p.grad for p in matrix.active_params]
            gradient, rows = gradient_matrix(matrix, group, grads)
            if self._skip is not None:  # moving averages take in zeros
                gradient = gradient.masked_fill(self._skip.to(gradient.device), 0)
            updates.append(MatrixUpdate(self._preconditioner(matrix, group, state), gradient, rows))
        return updates

    def _finite_if_sent(self, update: MatrixUpdate, direction: Tensor) -> Tensor:
        """The direction; zeros if its owner is to send it and it is not finite. The owner decides for all ranks."""
        distributor = self._distributor(update.matrix)
        if distributor is None or not distributor.kept_by_owner_only(update.matrix):
            return direction
        bad = ~norms_of([direction]).isfinite()
        self._faults.note("steps", (update.matrix.name,), bad)
        return direction.masked_fill(bad, 0)

    def _conclude(self, preconditioner: MatrixPreconditioner, held: State, status: RefreshStatus) -> None:
        """Ends a refresh: restores the state before it, ``held``, where it has failed, and counts its faults."""
        if status.unsolved is not None:
            keep_last_good(preconditioner.state, held, status.unsolved)
        for kind, flag in (("dropped", status.dropped), ("retried", status.retried), ("plain", status.plain)):
            if flag is not None:  # in a step that is skipped anyway, the gradients are the fault
                fault = flag if self._skip is None else flag & ~self._skip.to(flag.device)
                self._faults.note(kind, (preconditioner.matrix.name,), fault[None])

    def _advance(self) -> None:
        """k <- k + 1; arms the capture of the matrices that are due in the next step."""
        for group in self.param_groups:
            if not self._initialising:
                group["step"] += 1
        if self._collector is not None:
            self._collector.forget()
        self._arm()
        if self._faults.steps % FETCH_EVERY == 0:
            self._faults.fetch()

    def health(self) -> Health:
        """Returns counts of skipped steps and failed refreshes by layer, since the optimizer was created.

        Examples:
            >>> ngplus.NGPlus(nn.Linear(3, 2)).health().good
            True
        """
        with torch.no_grad():
            return self._faults.health([local(param) for param in self._names])

    def _warn_without_gradients(self) -> None:
        """Warns once of a step without gradients, which changes nothing."""
        if self._warned_without_gradients or not any(param.requires_grad for param in self._names):
            return
        self._warned_without_gradients = True
        names = _some(list(self._names.values()))
        called = (
            "the model of this optimizer was not called, and "
            if self._collector is not None and self._collector.watches
            else ""
        )
        warn(
            f"step() changed nothing, as no parameter of this optimizer ({names}) has a gradient: "
            f"{called}backward() was not called since zero_grad(), or was called for the loss of another model"
        )

    def _warn_replaced(self) -> None:
        """Warns once if the model has other parameters under the names of this optimizer's. It is no error, since the
        optimizer may be meant for the others. FSDP2 replaces the parameters that it manages in every pass."""
        if self._warned_of_replaced or self._model is None:
            return
        now = dict(self._model.named_parameters(remove_duplicate=False))
        present = set(now.values()).union(*(m.params for m in self._matrices if m.managed))
        gone = [name for param, name in self._names.items() if param.requires_grad and param not in present]
        new = {_owner(name) for name, param in now.items() if param.requires_grad and param not in self._names}
        replaced = [name for name in gone if _owner(name) in new]
        if replaced:
            self._warned_of_replaced = True
            warn(
                f"The model's {_some(replaced)} were replaced after the optimizer was created, and the new ones are "
                "not trained: create a new optimizer, or add them with add_param_group()"
            )

    def _warn_uncovered(self, uncovered: list[ParameterMatrix]) -> None:
        """Warns once, until the parameters change, of those without per-sample curvature."""
        if self._warned or self._initialising or self._new_parameters or not uncovered:
            return
        self._warned = True
        by_reason: dict[str, list[ParameterMatrix]] = {}
        for matrix in uncovered:
            by_reason.setdefault(reasons.without_detail(matrix.note), []).append(matrix)
        groups = sorted(by_reason.items(), key=lambda item: len(item[1]), reverse=True)
        shown = groups if len(groups) <= REASONS_SHOWN else groups[: REASONS_SHOWN - 1]
        lines = [f"{_some([m.name for m in group])}: {_common(group, reason)}" for reason, group in shown]
        if rest := groups[len(shown) :]:
            lines.append(f"{sum(len(group) for _, group in rest)} more, for {len(rest)} other reasons")
        warn(
            "No per-sample curvature for " + "\n  and for ".join(lines) + "\nThey have mini-batch curvature. plan() "
            "lists them, and docs/troubleshooting.md explains the reasons"
        )


def _some(names: Sequence[str]) -> str:
    """The first two names, and the number of the others."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _common(group: Sequence[ParameterMatrix], reason: str) -> str:
    """The reason of these matrices, with its detail if all have the same."""
    return group[0].note if len({matrix.note for matrix in group}) == 1 else reason


def _owner(name: str) -> str:
    """The module of a parameter, by its name; that of the weight for those of a parametrization."""
    module, parametrized, _ = name.partition(".parametrizations.")
    return module if parametrized else name.rpartition(".")[0]


def is_zero(lr: float | Tensor) -> bool:
    """Returns True if a learning rate is zero. One on an accelerator is not read."""
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.is_cpu else False


def by_parameter(update: MatrixUpdate, direction: Tensor, rows: Tensor | None) -> Mapping[nn.Parameter, Tensor]:
    """The direction of a matrix as those of its parameters; sparse where ``rows`` are the indices of its rows."""
    if rows is not None:
        first = update.matrix.params[0]
        values = direction[0].to(first.dtype).contiguous()
        return {first: torch.sparse_coo_tensor(rows, values, first.shape, is_coalesced=True, check_invariants=False)}
    parts = zip(update.matrix.active_params, update.matrix.layout.split(direction), strict=True)
    return {param: part.to(param.dtype) for param, part in parts}
