"""An optimizer whose curvature comes from the capture: the frame that NG+ and its rivals share.

``step`` reads like Algorithm 1 of the paper: take the gradients, refresh the curvature where k mod T == 0, turn
gradients into directions, update the parameters, arm the capture for the next refresh. A method says what it gathers,
how a refresh turns that into state, and how state turns a gradient into a direction.

On the way from gradient to step: all of it; every other module is called from here.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus import layout, options
from ngplus.calls import BatchDims
from ngplus.curvature import Gathered, Group, State
from ngplus.dtensor import like
from ngplus.faults import Trouble, keep_last_good, look, norms_of, zero_where
from ngplus.gathering import Gathering
from ngplus.gradients import agree, gradient_matrix, gradient_norms
from ngplus.groups import check_parameters, inside, labels, with_names
from ngplus.health import FETCH_EVERY, Health, Ledger
from ngplus.matrices import ParameterMatrix, Use, collect, named
from ngplus.notices import warn
from ngplus.sharding import shards_of
from ngplus.sync import DISTRIBUTIONS, Ranks, Replicas, Team
from ngplus.update import update_parameters


@dataclass(frozen=True)
class Work:
    """One matrix in one step. Of a sparse gradient, ``gradient`` holds the rows touched and ``rows`` their indices."""

    matrix: ParameterMatrix
    group: Group
    state: State
    gradient: Tensor  # [groups, m, n]
    rows: Tensor | None


Direction = tuple[Tensor, Tensor | None]  # and, like a gradient, with the rows that it touches


class CapturedOptimizer(Optimizer):
    """The frame. A method gives ``_refresh``, ``_fits`` and ``_direction``, and what else it does in its own way."""

    _gathers: type[Gathered] = Gathered
    _neutral: Mapping[str, Any] = {}  # values for the options of NG+ that a rival does not have
    _own_keys: tuple[str, ...] = ("momentum_buffer",)  # state that has the parameter's dtype; all else keeps its own
    _initialising = False
    _skip: Tensor | None = None  # on an accelerator: is this step to change nothing?

    def __init__(
        self,
        params: nn.Module | ParamsT,
        model: nn.Module | None,
        batch_dim: BatchDims,
        defaults: dict[str, Any],
        process_group: ProcessGroup | None = None,
        distribution: str = "communication",
    ) -> None:
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"Invalid distribution: {distribution!r} (one of {', '.join(map(repr, DISTRIBUTIONS))})")
        self._distribution = distribution
        defaults = {**defaults, "step": 0, "state_version": layout.VERSION}
        self._check(defaults)
        self._option_names = tuple(defaults)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError(
                    f"{type(self).__name__} got two models, one in place of the parameters and one as model=: give one"
                )
            model = params
            params = list(inside(model).named_parameters())
            if not params:
                raise ValueError(f"The model {type(model).__name__} has no parameters")
        self._ranks = Ranks.of(model, process_group)
        # A compiled model's hooks would be compiled with it: watch the model inside, and run refresh steps eagerly.
        self._model = None if model is None else inside(model)
        self._compiled = model if hasattr(model, "_orig_mod") else None
        self._batch_dim: BatchDims = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self._matrices: list[ParameterMatrix] = []
        self._gathering: Gathering | None = None
        super().__init__(params, defaults)
        self._watch()

    # ---------------------------------------------------------------------------------------------- of each method

    def _captures(self, group: Mapping[str, Any]) -> bool:
        """Does this group's curvature come from captured factors?"""
        return True

    def _observe(self, work: Work) -> None:
        """What a method does in every step, before a refresh."""

    def _refresh(self, work: Work, gathered: Gathered | None, trouble: Trouble) -> None:
        """New curvature in the state, in new tensors; without ``gathered``, from the mini-batch gradient.

        Curvature that is not finite is noted in ``trouble`` as "dropped". Where the host can see that, the state stays
        as it is; elsewhere zeros stand in for it, and the frame keeps the last good state.
        """
        raise NotImplementedError

    def _fits(self, matrix: ParameterMatrix, group: Group, state: State) -> bool:
        """Is there curvature, of the size and precision that the matrix has at present?"""
        raise NotImplementedError

    def _direction(self, work: Work) -> Direction:
        """The preconditioned gradient [groups, m, n]; of a sparse one, the rows touched and their indices."""
        raise NotImplementedError

    def _precondition(self, works: Sequence[Work]) -> list[Direction]:
        """The directions of all matrices of a step; a method may work on many of them together."""
        return [self._direction(work) for work in works]

    def _initialised(self, group: Group, state: State) -> None:
        """After a step that only initialises the state."""

    def _bound(self, uses: list[Use]) -> None:
        """After parameters have been bound to matrices."""

    def _check(self, group: Mapping[str, Any]) -> None:
        """ValueError for the first option that does not make sense."""
        options.check(self._complete(group))

    def _complete(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self._neutral, **group} if self._neutral else group

    # ---------------------------------------------------------------------------------------------- construction

    def _watch(self) -> None:
        """Binds parameters to matrices and installs the capture; again whenever the parameters change."""
        if self._gathering is not None:
            self._gathering.remove()
        self._ledger = self.__dict__.get("_ledger") or Ledger()
        self._warned = False
        in_model = named(self._model.named_parameters(remove_duplicate=False)) if self._model is not None else {}
        names: dict[nn.Parameter, str] = {}
        for g, group in enumerate(self.param_groups):
            given = group.get("param_names") or labels(g, len(group["params"]))
            names.update({p: in_model.get(p, label) for p, label in zip(group["params"], given, strict=True)})
        self._names = names
        self._of_param: dict[nn.Parameter, Group] = {p: group for group in self.param_groups for p in group["params"]}
        # Empty parameters have no matrix and no step.
        self._matrices, uses = collect(self._model, {p: name for p, name in names.items() if p.numel() > 0})
        self._of_matrix = {id(matrix): self._of_param[matrix.params[0]] for matrix in self._matrices}
        # A matrix that has an owner keeps it: its curvature is there.
        old: list[Team] = self.__dict__.get("_teams", [])
        self._owners = {m.params[0]: team.owners[id(m)] for team in old for m in team.matrices}
        self._teams: list[Team] = list(
            shards_of(self._matrices, self._model, self._of_param, self._owners, self._ranks)
        )
        self._team_of = {id(matrix): team for team in self._teams for matrix in team.matrices}
        self._gathering = Gathering(self._matrices, self._of_param, self._gathers)
        self._find_replicas()
        if self._model is not None and any(map(self._captures, self.param_groups)):
            self._gathering.watch(self._model, uses, self._batch_dim, self._compiled)
        self._bound(uses)
        self._arm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; the new parameters' first refresh is at the next step."""
        if isinstance(param_group, dict):
            param_group = {**param_group, "step": 0}
            merged = {**self.defaults, **param_group}
            self._check(merged)
            if self._captures(merged) and self._model is None:
                raise ValueError(
                    f"{type(self).__name__} takes its curvature from the samples that the model sees: give the module "
                    "in place of its parameters, or as model= (NGPlus with curvature='batch' needs none)"
                )
            param_group = with_names(param_group, self.param_groups, self._model)
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            check_parameters(added)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._matrices:
            self._watch()

    def _find_replicas(self) -> None:
        """The team of the plain parameters; the model may be put into a DistributedDataParallel after the optimizer."""
        assert self._gathering is not None
        ranks = self._ranks or self._gathering.ranks
        if ranks is None or any(isinstance(team, Replicas) for team in self._teams):
            return
        plain = [m for m in self._matrices if self._team(m) is None]
        if plain:
            self._teams.append(Replicas(ranks, plain, self._of_param, self._distribution, self._owners))
            self._team_of.update({id(matrix): self._teams[-1] for matrix in plain})

    def _team(self, matrix: ParameterMatrix) -> Team | None:
        """The ranks that share the work on a matrix."""
        return self._team_of.get(id(matrix))

    # ---------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A refresh where k mod T == 0; then W <- W - lr * direction, with momentum and weight decay as in SGD."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        directions = self._directions()
        if directions is not None:
            for group in self.param_groups:
                params, left_out = update_parameters(self._complete(group), directions, self.state, self._skip)
                self._ledger.note("steps", [self._names[p] for p in params], left_out)
            self._advance()
        self._ledger.tell()
        return loss

    @torch.no_grad()
    def _replace_gradients(self) -> None:
        """Each .grad becomes its direction: for another optimizer's step. Zeros where there is no finite one."""
        directions = self._directions()
        if directions is None:
            if self._skip is not None:
                for param in self._names:
                    param.grad = None if param.grad is None else torch.zeros_like(param.grad)
        elif directions:
            params, parts = list(directions), [d.values() if d.is_sparse else d for d in directions.values()]
            bad = ~norms_of(parts).isfinite()
            zero_where(bad, parts)
            self._ledger.note("steps", [self._names[p] for p in params], bad)
            for param, direction in directions.items():
                param.grad = like(param, direction)
            self._advance()
        self._ledger.tell()

    def _directions(self) -> dict[nn.Parameter, Tensor] | None:
        """The direction of every parameter that has a gradient; None where the step is to be skipped."""
        for group in self.param_groups:  # they may have been changed since the last step
            self._check(group)
        gathering = self._gathering
        assert gathering is not None
        self._skip = None
        gathering.finish()
        self._find_replicas()
        due = {id(m) for m in self._matrices if self._due(m)}
        for team in self._teams:
            asked = [m for m in team.matrices if id(m) in due and self._captures(self._group(m))]
            self._share(team, gathering.synchronise(team, asked), gathering, due)
        present, names, norms = self._with_gradients()
        if not present:
            if gathering.forward_seen:
                raise RuntimeError(
                    "No parameter has a gradient, though the model has been called: the loss does not reach any "
                    "parameter of this optimizer, or backward() was not called"
                )
            return None
        self._ledger.steps += 1
        self._skip = self._unfit(names, ~norms.isfinite())
        if self._skip is not None and look(self._skip):
            gathering.forget()  # the step is left out as if there had been none
            return None
        # Distributed checkpoints make a step with lr = 0 and zero gradients, only to have the state initialised.
        self._initialising = all(_is_zero(g["lr"]) for g in self.param_groups) and not bool(norms.any())
        if due:
            self._ledger.fetch()
        works = self._works(present)
        uncovered: list[ParameterMatrix] = []
        for work in works:
            self._observe(work)
            if id(work.matrix) in due:
                self._take_up(work, gathering, uncovered)
        if due:
            self._ledger.fetch()
        directions: dict[nn.Parameter, Tensor] = {}
        for work, direction in zip(works, self._precondition(works), strict=True):
            directions.update(_by_parameter(work, *self._fit_to_share(work, *direction)))
            if self._initialising:
                self._initialised(work.group, work.state)
        for team in self._teams:
            away = [m for m in present if self._team(m) is team and team.is_away(m)]
            directions.update(team.hand_out(away, directions) if away else {})
        self._warn_uncovered(uncovered)
        return {param: direction for param, direction in directions.items() if param.grad is not None}

    def _unfit(self, names: list[str], bad: Tensor) -> Tensor | None:
        """Counts the gradients that are not finite; one flag for the step, None where the host sees that all is well.

        Averaged gradients are the same on all ranks, and of sharded ones the ranks have agreed: all decide alike.
        """
        seen = look(bad)
        if seen is not None and not any(seen):
            return None
        self._ledger.note("gradients", names, bad)
        self._ledger.note("skipped", ("",), bad.any()[None])
        return bad.any()

    def _with_gradients(self) -> tuple[list[ParameterMatrix], list[str], Tensor]:
        """The matrices of this step, and the names and norms of the gradients. A team that exchanges gradients or
        directions in every step agrees on them first."""
        busy = [team for team in self._teams if any(map(team.is_away, team.matrices))]
        agreed = [agree(team) for team in busy]
        apart = {id(m) for team in busy for m in team.matrices}
        present = [m for m in self._matrices if id(m) not in apart and any(p.grad is not None for p in m.params)]
        names, norms = gradient_norms(present)
        for matrices, more_names, more_norms in agreed:
            present, names = present + matrices, names + more_names
            norms = torch.cat([norms.to(more_norms), more_norms])
        return present, names, norms

    def _works(self, present: Sequence[ParameterMatrix]) -> list[Work]:
        """The parts of this step that are done on this rank. A matrix's curvature is in its first parameter's state."""
        works = []
        given: dict[int, list[Tensor]] = {}
        for team in self._teams:
            given.update(team.gather([m for m in present if self._team(m) is team]))
        for matrix in present:
            for param in matrix.params:  # distributed checkpoints want an entry for every parameter
                self.state.setdefault(param, {})
            group, state, its_team = self._group(matrix), self.state[matrix.params[0]], self._team(matrix)
            if self._due(matrix):
                state["refreshed"] = self._measures(matrix)
            if its_team is not None and not its_team.keeps(matrix):
                continue
            gradient, rows = gradient_matrix(matrix, self._complete(group), given.get(id(matrix)))
            if self._skip is not None:  # the device knows whether: moving averages take in zeros, parameters nothing
                gradient = gradient.masked_fill(self._skip.to(gradient.device), 0)
            works.append(Work(matrix, group, state, gradient, rows))
        return works

    def _share(self, team: Team, fresh: list[ParameterMatrix], gathering: Gathering, due: set[int]) -> None:
        """Refreshes the matrices whose curvature every rank of a team keeps; they are due no more."""

    def _fit_to_share(self, work: Work, direction: Tensor, rows: Tensor | None) -> Direction:
        """A direction that is handed out in parts: the owner decides for all ranks whether it is finite."""
        team = self._team(work.matrix)
        if team is not None and team.is_away(work.matrix):
            bad = ~norms_of([direction]).isfinite()
            self._ledger.note("steps", (work.matrix.name,), bad)
            direction = direction.masked_fill(bad, 0)
        return direction, rows

    def _take_up(self, work: Work, gathering: Gathering, uncovered: list[ParameterMatrix]) -> None:
        """The refresh of one matrix, from what was gathered for it."""
        matrix = work.matrix
        gathered = gathering.take(matrix)
        if self._captures(work.group) and (matrix.source == "batch" or gathered is None):
            uncovered.append(matrix)
            gathered = None
        trouble = Trouble(climb=self._ledger.needs_help(matrix.name))
        held = dict(work.state)
        self._refresh(work, gathered, trouble)
        if not trouble.later:
            self._conclude(work, held, trouble)

    def _conclude(self, work: Work, held: State, trouble: Trouble) -> None:
        """After a refresh has brought new state: the last good one again where it failed, and the ledger."""
        if trouble.unsolved is not None:
            keep_last_good(work.state, held, trouble.unsolved)
        for kind, flag in (("dropped", trouble.dropped), ("retried", trouble.retried), ("plain", trouble.plain)):
            if flag is not None:  # in a step that is skipped anyway, the gradients are the fault
                fault = flag if self._skip is None else flag & ~self._skip.to(flag.device)
                self._ledger.note(kind, (work.matrix.name,), fault[None])

    @property
    def _many_ranks(self) -> bool:
        return bool(self._teams)

    def _group(self, matrix: ParameterMatrix) -> Group:
        """A matrix goes by the options of its first parameter's group."""
        return self._of_matrix[id(matrix)]

    def _advance(self) -> None:
        """k <- k + 1, and the capture armed for the matrices that are due in the next step."""
        for group in self.param_groups:
            if not self._initialising:
                group["step"] += 1
        if self._gathering is not None:
            self._gathering.forget()
        self._arm()
        if self._ledger.steps % FETCH_EVERY == 0:
            self._ledger.fetch()

    def health(self) -> Health:
        """What went wrong and was put right since the optimizer was made: steps skipped, refreshes dropped, layers.

        Examples:
            >>> ngplus.NGPlus(nn.Linear(3, 2)).health().good
            True
        """
        return self._ledger.health()

    def _due(self, matrix: ParameterMatrix) -> bool:
        group = self._group(matrix)
        return group["step"] % group["update_every"] == 0 or not self._fitted(matrix)

    def _fitted(self, matrix: ParameterMatrix) -> bool:
        """Is there curvature that fits? Where it is with its owner alone, all ranks go by what they have noted."""
        # .get: a look must not make an entry, since an optimizer with no state is one that has not been initialised
        held, team = self.state.get(matrix.params[0], {}), self._team(matrix)
        if team is not None and team.is_away(matrix):
            return bool(held.get("refreshed") == self._measures(matrix))
        return self._fits(matrix, self._group(matrix), held)

    def _measures(self, matrix: ParameterMatrix) -> int:
        """What the curvature was last made for, as a number: torch's load_state_dict does not take strings."""
        group = self._complete(self._group(matrix))
        cut = matrix.cut_of(group)
        return zlib.crc32(f"{matrix.side(group['side'])} {cut} {matrix.dtype} {group['scaling']}".encode())

    def _arm(self) -> None:
        for matrix in self._matrices:
            matrix.armed = self._captures(self._group(matrix)) and matrix.source != "batch" and self._due(matrix)
        if self._gathering is not None:
            self._gathering.armed()

    def _warn_uncovered(self, uncovered: list[ParameterMatrix]) -> None:
        """One warning in an optimizer's life, with the names of all that has no per-sample curvature."""
        if self._warned or self._initialising or not uncovered:
            return
        self._warned = True
        shown = [
            f"{', '.join(m.names)} ({m.reason or 'no gradient was captured: see train() and the graph of the loss'})"
            for m in uncovered[:20]
        ]
        more = f" and {len(uncovered) - 20} more" if len(uncovered) > 20 else ""
        warn(
            f"No per-sample curvature for {'; '.join(shown)}{more}. "
            "Mini-batch curvature is used for them; plan() lists all"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; what a backward pass without a step has gathered is dropped with its gradients."""
        if self._gathering is not None:
            self._gathering.drop()
        super().zero_grad(set_to_none)

    def _find(self, which: str | nn.Parameter) -> ParameterMatrix:
        for matrix in self._matrices:
            if (which in matrix.names) if isinstance(which, str) else any(which is p for p in matrix.params):
                return matrix
        if not isinstance(which, str):
            raise KeyError(f"A parameter of shape {tuple(which.shape)} is not one of this optimizer's")
        near = difflib.get_close_matches(which, [name for m in self._matrices for name in m.names], 1)
        raise KeyError(f"No parameter {which!r} in this optimizer{f': did you mean {near[0]!r}?' if near else ''}")

    # ---------------------------------------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but curvature keeps its own precision whatever the parameters' dtype.

        What is damaged, of another optimizer or of a later layout raises a ValueError, and nothing is changed.
        """
        seen: list[dict[str, Any]] = []  # what is loaded, after the user's own hooks

        def check(_: Optimizer, given: dict[str, Any]) -> None:
            own = [group["params"] for group in self.param_groups]
            layout.check(given, own, type(self).__name__, lambda group: self._check({**self.defaults, **group}))
            seen.append(given)

        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = [i for group in seen[-1]["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in seen[-1]["state"].get(i, {}).items():
                if isinstance(value, Tensor) and key not in self._own_keys:
                    self.state[param][key] = value.detach().clone().to(param.device)
                elif isinstance(value, dict) and not value:  # a distributed checkpoint's way to say "not there"
                    self.state[param].pop(key, None)
        for group in self.param_groups:
            for key in self._option_names:  # options that are newer than the checkpoint
                group.setdefault(key, self.defaults[key])
        self._of_param.update({param: group for group in self.param_groups for param in group["params"]})
        self._of_matrix = {id(matrix): self._of_param[matrix.params[0]] for matrix in self._matrices}
        for team in self._teams:
            for matrix in filter(team.owns, team.matrices):
                held = self.state.get(matrix.params[0], {})
                if team.is_away(matrix) and "refreshed" in held and not self._fits(matrix, self._group(matrix), held):
                    raise RuntimeError(
                        f"The curvature of {matrix.name!r} is not in the state that was loaded. Where each rank keeps "
                        "its share, save with torch.distributed.checkpoint, or each rank's state in a file of its own"
                    )
        if self._gathering is not None:
            self._gathering.forget()
        self._arm()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_model", "_batch_dim", "_option_names", "_distribution")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}, "_compiled": None, "_ranks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_matrices" not in self.__dict__:  # a copy, and not Optimizer.load_state_dict
            self._gathering = None
            self._watch()


def _is_zero(lr: float | Tensor) -> bool:
    """Of a learning rate; one on an accelerator is not looked at."""
    return float(lr) == 0.0 if not isinstance(lr, Tensor) or lr.is_cpu else False


def _by_parameter(work: Work, direction: Tensor, rows: Tensor | None) -> dict[nn.Parameter, Tensor]:
    """A matrix's direction as those of its parameters."""
    if rows is not None:
        first = work.matrix.params[0]
        values = direction[0].to(first.dtype).contiguous()
        return {first: torch.sparse_coo_tensor(rows, values, first.shape, is_coalesced=True, check_invariants=False)}
    parts = zip(work.matrix.active_params, work.matrix.layout.split(direction), strict=True)
    return {param: part.to(param.dtype) for param, part in parts}


def state_bytes(state: State) -> int:
    """Bytes that a matrix keeps for its curvature."""
    kept = [value for key, value in state.items() if isinstance(value, Tensor) and key != "momentum_buffer"]
    return sum(value.numel() * value.element_size() for value in kept)
