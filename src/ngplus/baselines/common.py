"""What the rivals share: an optimizer that gathers its curvature from the capture of NG+.

``CapturedOptimizer`` is the frame of a step: check, refresh where k mod T == 0, directions, momentum and update. A
rival says what it gathers (a :class:`ngplus.curvature.Gathered`), how a refresh turns that into state, and how state
turns a gradient into a direction.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus import options
from ngplus.capture import BatchDims
from ngplus.curvature import Gathered, Group, State
from ngplus.factors import Bags, Factors, Lookup
from ngplus.gathering import CHECKED_ROWS, Gathering
from ngplus.gradients import captured_scale, check_finite, gradient_matrix
from ngplus.layers import EmbeddingBagRule, EmbeddingRule
from ngplus.matrices import ParameterMatrix, collect, named
from ngplus.plan import Plan, PlanRow
from ngplus.update import update_parameters

# The options of NG+ that the shared functions read, and that the rivals do not have.
_NEUTRAL: dict[str, Any] = {
    "damping_mode": "absolute", "curvature": "sample", "scaling": "inverse", "side": "auto", "solver": "auto",
    "beta": 0.0, "gamma": None, "beta2": 0.0, "eps": 0.0, "samples": None, "sketch": None, "block_size": None,
    "graft": None,
}  # fmt: skip


class Batches(Gathered):
    """What a refresh has gathered: the rival's own, and the counts that NG+ keeps as well."""

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group) -> None:
        """Takes in the factors of one batch."""
        raise NotImplementedError

    def scale(self, group: Group, grad_scale: Tensor | float) -> Tensor | float:
        """What makes a captured gradient that of a sample's own loss: see :func:`ngplus.curvature.per_sample`."""
        return (self.samples if group["loss_reduction"] == "mean" else 1) / grad_scale


class _Gathering(Gathering):
    """The sums of a rival, with NG+'s check that the captured parts add up to the gradient."""

    def __init__(
        self, matrices: list[ParameterMatrix], groups: Mapping[nn.Parameter, Group], gathers: type[Batches]
    ) -> None:
        super().__init__(matrices, groups)
        self._gathers = gathers

    def _gather(self, matrix: ParameterMatrix, factors: Factors) -> None:
        held = self._gathered.setdefault(id(matrix), self._gathers())
        assert isinstance(held, Batches)
        matrix.seen = (factors.samples, factors.positions)
        held.samples += factors.samples
        if not matrix.checked and (not isinstance(factors, Lookup | Bags) or factors.rows <= CHECKED_ROWS):
            held.coarse = held.coarse or factors.coarse
            total = factors.total(matrix.dtype)
            held.gradient = total if held.gradient is None else held.gradient + total
        held.add(matrix, factors, self._groups[matrix.params[0]])


class CapturedOptimizer(Optimizer):
    """The frame of KFAC and SENG, which give ``_gathers``, ``_refresh``, ``_fits``, ``_direction`` and ``_row``."""

    _gathers: type[Batches]
    _step_supports_amp_scaling = True

    def __init__(
        self, params: nn.Module | ParamsT, model: nn.Module | None, batch_dim: BatchDims, defaults: dict[str, Any]
    ) -> None:
        defaults = {**defaults, "step": 0}
        self._check(defaults)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            raise RuntimeError(f"{type(self).__name__} is for one process: its curvature does not cross ranks")
        if isinstance(params, nn.Module):
            model, params = params, list(params.parameters())
            if not params:
                raise ValueError(f"The model {type(model).__name__} has no parameters")
        if model is None:
            raise ValueError(
                f"{type(self).__name__} watches the model: give it in place of the parameters, or as model="
            )
        # As in NGPlus: a compiled model's hooks would be compiled with it.
        inside = getattr(model, "_orig_mod", None)
        self._model: nn.Module = inside if isinstance(inside, nn.Module) else model
        self._compiled: nn.Module | None = model if isinstance(inside, nn.Module) else None
        self._batch_dim: BatchDims = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self._option_names = tuple(defaults)
        self._gathering: _Gathering | None = None
        super().__init__(params, defaults)
        self._watch()

    # ---------------------------------------------------------------------------------------------- of each rival

    def _refresh(
        self, matrix: ParameterMatrix, group: Group, state: State, gathered: Batches | None, gradient: Tensor,
        rows: Tensor | None,
    ) -> bool:  # fmt: skip
        """New curvature in the state; without ``gathered``, from the mini-batch gradient. False: it was not finite."""
        raise NotImplementedError

    def _fits(self, matrix: ParameterMatrix, state: State) -> bool:
        """Is there curvature, of the size and precision that the matrix has at present?"""
        raise NotImplementedError

    def _direction(
        self, matrix: ParameterMatrix, group: Group, state: State, gradient: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The preconditioned gradient [groups, m, n]; of a sparse one, the rows touched and their indices."""
        raise NotImplementedError

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> PlanRow:
        raise NotImplementedError

    def _check(self, group: Mapping[str, Any]) -> None:
        """ValueError for the first option that does not make sense."""
        if isinstance(group["damping"], str):
            raise ValueError(f"Invalid damping: {group['damping']!r}")
        options.check({**_NEUTRAL, **group})

    # ---------------------------------------------------------------------------------------------- construction

    def _watch(self) -> None:
        """Binds parameters to matrices and installs the capture; again whenever the parameters change."""
        if self._gathering is not None:
            self._gathering.remove()
        self._warned = False
        in_model = named(self._model.named_parameters(remove_duplicate=False))
        self._of_param: dict[nn.Parameter, Group] = {p: group for group in self.param_groups for p in group["params"]}
        names = {p: in_model.get(p, f"parameter {i}") for i, p in enumerate(self._of_param) if p.numel() > 0}
        self._matrices, uses = collect(self._model, names)
        self._tables = {id(use.matrix) for use in uses if isinstance(use.rule, EmbeddingRule | EmbeddingBagRule)}
        self._gathering = _Gathering(self._matrices, self._of_param, self._gathers)
        self._gathering.watch(self._model, uses, self._batch_dim, self._compiled)
        self._arm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; the new parameters' first refresh is at the next step."""
        if isinstance(param_group, dict):
            self._check({**self.defaults, **param_group})
            param_group = {**param_group, "step": 0}
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len(set(params)) != len(params) or not all(p.is_floating_point() for p in params):
            self.param_groups.pop()
            raise ValueError("A parameter group must have real floating-point parameters, each of them once")
        if self._gathering is not None:
            self._watch()

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
                update_parameters({**_NEUTRAL, **group}, directions, self.state)
                group["step"] += 1
            self._arm()
        return loss

    def _directions(self) -> dict[nn.Parameter, Tensor] | None:
        for group in self.param_groups:
            self._check(group)
        gathering = self._gathering
        assert gathering is not None
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # torch.amp.GradScaler has found an overflow
            gathering.forget()
            return None
        gathering.finish()
        work = [m for m in self._matrices if any(p.grad is not None for p in m.params)]
        if not work:
            if gathering.forward_seen:
                raise RuntimeError("No parameter has a gradient, though the model has been called")
            return None
        check_finite(work)
        directions: dict[nn.Parameter, Tensor] = {}
        uncovered: list[ParameterMatrix] = []
        for matrix in work:
            group, state = self._of_param[matrix.params[0]], self.state[matrix.params[0]]
            gradient, rows = gradient_matrix(matrix, {**_NEUTRAL, **group}, getattr(self, "grad_scale", None))
            if self._due(matrix):
                gathered = gathering.take(matrix)
                if matrix.source == "batch" or not isinstance(gathered, Batches):
                    uncovered.append(matrix)
                    gathered = None
                if not self._refresh(matrix, group, state, gathered, gradient, rows):
                    warnings.warn(f"The curvature of {matrix.name!r} is not finite and was left out", stacklevel=4)
            direction, rows = self._direction(matrix, group, state, gradient, rows)
            if rows is not None:
                param = matrix.params[0]
                values = direction[0].to(param.dtype)
                directions[param] = torch.sparse_coo_tensor(rows, values, param.shape, check_invariants=False)
                continue
            for param, part in zip(matrix.active_params, matrix.layout.split(direction), strict=True):
                if param.grad is not None:
                    directions[param] = part.to(param.dtype)
        self._warn(uncovered)
        gathering.forget()
        return directions

    def _grad_scale(self) -> Tensor | float:
        return captured_scale(self)

    def _due(self, matrix: ParameterMatrix) -> bool:
        group = self._of_param[matrix.params[0]]
        held = self.state.get(matrix.params[0], {})
        return group["step"] % group["update_every"] == 0 or not self._fits(matrix, held)

    def _arm(self) -> None:
        for matrix in self._matrices:
            matrix.armed = matrix.source != "batch" and self._due(matrix)

    def _warn(self, uncovered: list[ParameterMatrix]) -> None:
        """One warning in an optimizer's life."""
        if uncovered and not self._warned:
            self._warned = True
            shown = [f"{', '.join(m.names)} ({m.reason or 'no gradient was captured'})" for m in uncovered[:20]]
            more = f" and {len(uncovered) - 20} more" if len(uncovered) > 20 else ""
            warnings.warn(
                f"No per-sample curvature for {'; '.join(shown)}{more}. Mini-batch curvature is used for them",
                stacklevel=6,
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; what a backward pass without a step has gathered is dropped with its gradients."""
        if self._gathering is not None:
            self._gathering.drop()
        super().zero_grad(set_to_none)

    # ---------------------------------------------------------------------------------------------- to look at

    def plan(self, batch_size: int | None = None, positions: int = 1) -> Plan:
        """What each parameter gets and costs; before the first refresh, for that many samples and positions."""
        rows = []
        for matrix in self._matrices:
            first = matrix.params[0]
            seen = matrix.seen or (batch_size or 0, positions)
            rows.append(self._row(matrix, self._of_param[first], self.state.get(first, {}), *seen))
        return Plan(tuple(rows))

    def _find(self, which: str | nn.Parameter) -> ParameterMatrix:
        for matrix in self._matrices:
            if (which in matrix.names) if isinstance(which, str) else any(which is p for p in matrix.params):
                return matrix
        raise KeyError(f"No parameter {which!r} in this optimizer" if isinstance(which, str) else "Unknown parameter")

    # ---------------------------------------------------------------------------------------------- state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but curvature keeps its own precision whatever the parameters' dtype."""
        seen: list[dict[str, Any]] = []  # what is loaded, after the user's own hooks
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = [i for group in seen[-1]["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in seen[-1]["state"].get(i, {}).items():
                if isinstance(value, Tensor) and key != "momentum_buffer":
                    self.state[param][key] = value.detach().clone().to(param.device)
        for group in self.param_groups:
            for key in self._option_names:  # options that are newer than the checkpoint
                group.setdefault(key, self.defaults[key])
        self._of_param.update({param: group for group in self.param_groups for param in group["params"]})
        if self._gathering is not None:
            self._gathering.forget()
        self._arm()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_model": self._model, "_compiled": None, "_batch_dim": self._batch_dim}
        return {**super().__getstate__(), **own, "_option_names": self._option_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_matrices" not in self.__dict__:  # a copy, and not Optimizer.load_state_dict
            self._gathering = None
            self._watch()


def state_bytes(state: State) -> int:
    """Bytes that a matrix keeps for its curvature."""
    kept = [value for key, value in state.items() if isinstance(value, Tensor) and key != "momentum_buffer"]
    return sum(value.numel() * value.element_size() for value in kept)
