"""NG+: Algorithm 1 of the paper as a torch optimizer.

``step`` reads top to bottom like the algorithm: take the gradients, refresh L or R and its inverse where k mod T == 0,
turn gradients into directions, update the parameters, arm the capture for the next refresh.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus import curvature as curvatures
from ngplus import options
from ngplus.capture import BatchDims
from ngplus.curvature import Fresh
from ngplus.gathering import Gathering, seed_of
from ngplus.gradients import captured_scale, check_finite, gradient_matrix
from ngplus.matrices import ParameterMatrix, collect, named
from ngplus.plan import Plan, plan_of
from ngplus.sync import Ranks
from ngplus.update import graft_length, update_parameters, with_length

_REFRESHED = ("inverse", "factor", "basis")  # a state that has one of them can make a step


class Curvature(NamedTuple):
    """A matrix's side, "left" or "right", and its dense L or R: [d, d], or [groups, d, d] for a grouped convolution."""

    side: str
    matrix: Tensor


class NGPlus(Optimizer):
    r"""NG+, natural gradient in matrix form, for any PyTorch model.

    With per-sample gradients :math:`G_i` of a parameter matrix :math:`W` (m x n) and the mini-batch gradient
    :math:`G`, every ``update_every`` steps

    .. math:: L = \frac1{|S|}\sum_{i\in S} G_i G_i^\top \;(m \le n), \qquad R = \frac1{|S|}\sum_{i\in S} G_i^\top G_i
        \;(m > n),

    and in each step :math:`W \leftarrow W - \alpha (\lambda I + L)^{-1} G` or
    :math:`W \leftarrow W - \alpha\, G (\lambda I + R)^{-1}`.

    Example::

        optimizer = ngplus.NGPlus(model, lr=0.01)
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    Args:
        params: the model, or parameters, named parameters or parameter groups as in torch.optim. Curvature from samples
            needs the module: given parameters only, pass ``model`` as well.
        lr: learning rate, a number or a one-element tensor.
        model: the module that the parameters belong to, where ``params`` is not a module.
        momentum, nesterov, weight_decay, maximize: as in torch.optim.SGD, applied to the preconditioned direction. With
            ``scaling="adaptive"``, ``momentum`` is Adam's first beta.
        decoupled_weight_decay: decay the weights directly, by ``lr * weight_decay``, outside of the momentum.
        damping: lambda. A number is absolute, as in the paper; with ``damping_mode="relative"`` it is a multiple of the
            mean eigenvalue trace(L)/d of each layer. ``"auto"`` is relative damping of 0.1.
        update_every: T, the number of steps between two refreshes. The first is at the first step.
        curvature: ``"sample"``, the paper's L and R; ``"momentum"``, their moving average with ``beta``; ``"batch"``,
            from mini-batch gradients with ``beta`` and ``gamma`` (1 - beta where None), started from lambda I, updated
            in every step; it needs no model.
        scaling: ``"adaptive"``, Adam's moments in the eigenbasis of L or R (``momentum``, ``beta2``, ``eps``), with
            learning rates like Adam's; ``"inverse"``, the paper's direction, with learning rates like SGD's.
        samples: size or fraction of the random sub-sample S of the batch; None is the whole batch.
        side: ``"auto"`` (left where m <= n), ``"left"`` or ``"right"``.
        solver: ``"dense"`` (Cholesky), ``"woodbury"``, ``"sketched"`` (sketched least squares), or ``"auto"``, the
            cheapest exact one for each layer.
        block_size: p of the block-diagonal form.
        sketch: q of the sketched product, or a dict of ``size``, ``kind`` ("uniform", "gaussian", "countsketch",
            "srht") and ``replacement``. With ``solver="sketched"`` it is the sketch of the least-squares problem.
        graft: ``"sgd"`` or ``"adam"``: each layer's direction takes that method's step length. With ``"adam"``, the
            momentum is a moving average, so that it keeps that length.
        loss_reduction: ``"mean"``, the loss is an average over the batch or its tokens, or ``"sum"``.
        batch_dim: the dimension of the samples, for the whole model or by module name; None for a module without one.
        seed: of the sub-samples and sketches.
        process_group: the ranks that train the model together and average its gradients; of a DistributedDataParallel
            model its own.
    """

    _step_supports_amp_scaling = True
    _initialising = False

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.01,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        damping: float | str = 0.3,
        damping_mode: str = "absolute",
        update_every: int = 10,
        curvature: str = "sample",
        scaling: str = "adaptive",
        beta: float = 0.9,
        gamma: float | None = None,
        beta2: float = 0.95,
        eps: float = 1e-8,
        samples: int | float | None = None,
        side: str = "auto",
        solver: str = "auto",
        block_size: int | None = None,
        sketch: int | Mapping[str, Any] | None = None,
        graft: str | None = None,
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        seed: int = 0,
        maximize: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "damping": damping,
            "damping_mode": damping_mode,
            "update_every": update_every,
            "curvature": curvature,
            "scaling": scaling,
            "beta": beta,
            "gamma": gamma,
            "beta2": beta2,
            "eps": eps,
            "samples": samples,
            "side": side,
            "solver": solver,
            "block_size": block_size,
            "sketch": sketch if not isinstance(sketch, Mapping) else dict(sketch),
            "graft": graft,
            "loss_reduction": loss_reduction,
            "seed": seed,
            "maximize": maximize,
            "step": 0,
        }
        options.check(defaults)
        self._option_names = tuple(defaults)
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError("NGPlus got two models: one in place of the parameters and one as model=")
            model = params
            params = list(_inside(model).named_parameters())
            if not params:
                raise ValueError(f"The model {type(model).__name__} has no parameters")
        self._ranks = Ranks.of(model, process_group)
        # A compiled model's hooks would be compiled with it: watch the model inside, and run refresh steps eagerly.
        self._model = None if model is None else _inside(model)
        self._compiled = model if hasattr(model, "_orig_mod") else None
        self._batch_dim: BatchDims = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self._matrices: list[ParameterMatrix] = []
        self._gathering: Gathering | None = None
        super().__init__(params, defaults)
        self._watch()

    # ---------------------------------------------------------------------------------------------- construction

    def _watch(self) -> None:
        """Binds parameters to matrices and installs the capture; again whenever the parameters change."""
        if self._gathering is not None:
            self._gathering.remove()
        self._held: dict[int, Fresh] = {}
        self._warned = False
        in_model = named(self._model.named_parameters(remove_duplicate=False)) if self._model is not None else {}
        names: dict[nn.Parameter, str] = {}
        for g, group in enumerate(self.param_groups):
            labels = group.get("param_names") or _labels(g, len(group["params"]))
            names.update({p: in_model.get(p, label) for p, label in zip(group["params"], labels, strict=True)})
        self._of_param = {param: group for group in self.param_groups for param in group["params"]}
        # Empty parameters have no matrix and no step.
        self._matrices, uses = collect(self._model, {p: name for p, name in names.items() if p.numel() > 0})
        self._gathering = Gathering(self._matrices, self._of_param)
        if self._model is not None and any(g["curvature"] != "batch" for g in self.param_groups):
            self._gathering.watch(self._model, uses, self._batch_dim, self._compiled)
        self._arm()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim; the new parameters' first refresh is at the next step."""
        if isinstance(param_group, dict):
            merged = {**self.defaults, **param_group, "step": 0}
            options.check(merged)
            param_group = {**param_group, "step": 0}
            if isinstance(merged["sketch"], Mapping):
                param_group["sketch"] = dict(merged["sketch"])
            if merged["curvature"] != "batch" and self._model is None:
                raise ValueError(
                    f"curvature={merged['curvature']!r} comes from the samples that the model sees: give the module in "
                    "place of its parameters, or as model=, or take curvature='batch', which needs none"
                )
            param_group = self._with_names(param_group)
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        try:
            if len(set(added["params"])) != len(added["params"]):
                raise ValueError("A parameter is given twice in one parameter group")
            for i, param in enumerate(added["params"]):
                name = added["param_names"][i] if "param_names" in added else f"number {i}"
                if param.is_complex():
                    raise ValueError(f"Parameter {name} is complex; NGPlus takes real ones (torch.view_as_real)")
                if not param.is_floating_point():
                    raise ValueError(f"Parameter {name} is {param.dtype}; NGPlus takes floating-point ones")
        except ValueError:
            self.param_groups.pop()
            raise
        if self._matrices:
            self._watch()

    def _with_names(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Torch wants all groups named or none; a model names its parameters, so later groups get their names, too."""
        if not self.param_groups or "param_names" not in self.param_groups[0]:
            return param_group
        given = param_group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        if any(isinstance(p, tuple) for p in params):
            return {**param_group, "params": params}
        names: dict[Any, str] = dict(named(self._model.named_parameters())) if self._model is not None else {}
        labels = _labels(len(self.param_groups), len(params))
        pairs = [(names.get(p, label), p) for p, label in zip(params, labels, strict=True)]
        return {**param_group, "params": pairs}

    # ---------------------------------------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of Algorithm 1."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        directions = self._directions()
        if directions is not None:
            for group in self.param_groups:
                update_parameters(group, directions, self.state)
            self._advance()
        return loss

    def _directions(self) -> dict[nn.Parameter, Tensor] | None:
        """(lambda I + L)^-1 G for every parameter that has a gradient; None where the step is to be skipped."""
        for group in self.param_groups:  # they may have been changed since the last step
            options.check(group)
        gathering = self._gathering
        assert gathering is not None
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # torch.amp.GradScaler has found an overflow
            gathering.forget()
            return None
        gathering.finish()
        if self._ranks is not None:
            due = [m for m in self._matrices if self._of_param[m.params[0]]["curvature"] != "batch" and self._due(m)]
            gathering.synchronise(self._ranks, due)
        work = [m for m in self._matrices if any(p.grad is not None for p in m.params)]
        if not work:
            if gathering.forward_seen:
                raise RuntimeError(
                    "No parameter has a gradient, though the model has been called: the loss does not reach any "
                    "parameter of this optimizer, or backward() was not called"
                )
            return None
        norms = check_finite(work)
        # Distributed checkpoints make a step with lr = 0 and zero gradients, only to have the state initialised.
        self._initialising = all(float(g["lr"]) == 0.0 for g in self.param_groups) and not bool(norms.any())
        self._held.clear()
        directions: dict[nn.Parameter, Tensor] = {}
        uncovered: list[ParameterMatrix] = []
        for matrix in work:
            group, state = self._of(matrix)
            for param in matrix.params:  # distributed checkpoints want an entry for every parameter
                self.state.setdefault(param, {})
            gradient, rows = gradient_matrix(matrix, group, getattr(self, "grad_scale", None))
            self._refresh(matrix, group, state, gradient, uncovered)
            preconditioned = self._precondition(matrix, group, state, gradient, sparse=rows is not None)
            if rows is not None:
                param = matrix.params[0]
                directions[param] = torch.sparse_coo_tensor(
                    rows,
                    preconditioned[0].to(param.dtype).contiguous(),
                    param.shape,
                    is_coalesced=True,
                    check_invariants=False,
                )
                continue
            for param, direction in zip(matrix.active_params, matrix.layout.split(preconditioned), strict=True):
                if param.grad is not None:
                    directions[param] = direction.to(param.dtype)
        self._warn_uncovered(uncovered)
        if self._initialising:
            for matrix in work:
                curvatures.add_placeholders(*reversed(self._of(matrix)))
        return directions

    def _of(self, matrix: ParameterMatrix) -> tuple[dict[str, Any], dict[str, Any]]:
        """A matrix goes by the options of its first parameter's group; its curvature is in that parameter's state."""
        return self._of_param[matrix.params[0]], self.state[matrix.params[0]]

    def _refresh(
        self,
        matrix: ParameterMatrix,
        group: dict[str, Any],
        state: dict[str, Any],
        gradient: Tensor,
        uncovered: list[ParameterMatrix],
    ) -> None:
        """L or R and its inverse, where k mod T == 0 or the matrix has none that fits yet."""
        seed = seed_of(group)
        if group["curvature"] == "batch":
            curvatures.online(state, curvatures.mini_batch(matrix, gradient, group, seed), group)
        if not self._due(matrix):
            return
        if group["curvature"] == "batch":
            stacks = curvatures.read(state, "curvature")
            assert stacks is not None
            fresh = Fresh(stacks)
        else:
            gathered = self._gathering.take(matrix) if self._gathering is not None else None
            if matrix.source == "batch" or gathered is None:
                uncovered.append(matrix)
                fresh = curvatures.mini_batch(matrix, gradient, group, seed)
            else:
                cut = matrix.cut(matrix.side(group["side"]), group["block_size"])
                fresh = curvatures.per_sample(gathered, group, cut, captured_scale(self))
            if not curvatures.is_finite(fresh):
                warnings.warn(
                    f"The curvature of {matrix.name!r} is not finite; its last good inverse stays in use", stacklevel=4
                )
                if any(key in state for key in _REFRESHED):
                    return
                fresh = Fresh([torch.zeros_like(m) for m in fresh.dense()])
            elif group["curvature"] == "momentum":
                fresh = curvatures.average(state, fresh, group)
            else:
                self._held[id(matrix)] = fresh
        curvatures.invert(state, fresh, group, seed)

    def _precondition(
        self,
        matrix: ParameterMatrix,
        group: dict[str, Any],
        state: dict[str, Any],
        gradient: Tensor,
        sparse: bool,
    ) -> Tensor:
        """(lambda I + L)^-1 G or G (lambda I + R)^-1, [groups, m, n]."""
        left = matrix.side(group["side"]) == "left"
        cut = matrix.cut("left" if left else "right", group["block_size"])
        stacks = cut.split(gradient if left else gradient.mT)
        if group["scaling"] == "adaptive":
            stacks = curvatures.apply_adaptive(state, stacks, group, sparse)
        else:
            stacks = curvatures.apply(state, stacks, group)
        direction = cut.merge(stacks)
        direction = direction if left else direction.mT
        if group["graft"] is None:
            return direction
        return with_length(direction, graft_length(state, gradient, group, sparse))

    def _advance(self) -> None:
        """k <- k + 1, and the capture armed for the matrices that are due in the next step."""
        for group in self.param_groups:
            if not self._initialising:
                group["step"] += 1
        if self._gathering is not None:
            self._gathering.forget()
        self._arm()

    # ---------------------------------------------------------------------------------------------- capture

    def _due(self, matrix: ParameterMatrix) -> bool:
        first = matrix.params[0]
        group = self._of_param[first]
        # .get: a look must not make an entry, since an optimizer with no state is one that has not been initialised
        return group["step"] % group["update_every"] == 0 or not self._fits(matrix, group, self.state.get(first, {}))

    def _fits(self, matrix: ParameterMatrix, group: dict[str, Any], state: dict[str, Any]) -> bool:
        """Is there an inverse, of the size and precision that the matrix has at present?"""
        cut = matrix.cut(matrix.side(group["side"]), group["block_size"])
        wanted = "basis" if group["scaling"] == "adaptive" else "inverse" if "inverse" in state else "factor"
        held = state.get(wanted)
        return (
            held is not None
            and held.shape[:2] == (cut.groups * cut.stacks[0][1], cut.size)
            and held.dtype == matrix.dtype
            and held.device == matrix.params[0].device
        )

    def _arm(self) -> None:
        for matrix in self._matrices:
            group = self._of_param[matrix.params[0]]
            matrix.armed = group["curvature"] != "batch" and matrix.source != "batch" and self._due(matrix)

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
        warnings.warn(
            f"No per-sample curvature for {'; '.join(shown)}{more}. "
            "Mini-batch curvature is used for them; plan() lists all",
            stacklevel=6,  # the line of the user's step()
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; what a backward pass without a step has gathered is dropped with its gradients."""
        if self._gathering is not None:
            self._gathering.drop()
        super().zero_grad(set_to_none)

    # ---------------------------------------------------------------------------------------------- to look at

    def plan(self, batch_size: int | None = None, positions: int = 1) -> Plan:
        """What each parameter gets: shape, side, solver, blocks, bytes of state, FLOPs of a step and of a refresh.

        Before the first refresh the samples and positions of the layers are not known; ``batch_size`` and ``positions``
        stand in for them.
        """
        return plan_of([(m, *self._of(m)) for m in self._matrices], batch_size, positions)

    def curvature(self, which: str | nn.Parameter) -> Curvature:
        """The side and the dense L or R of a parameter, by name or as it is.

        Exact until the next step; later, where only the inverse is kept, recovered from it, with the rounding of its
        condition number.
        """
        for matrix in self._matrices:
            if (which in matrix.names) if isinstance(which, str) else any(which is p for p in matrix.params):
                group, state = self._of(matrix)
                dense = curvatures.dense_curvature(state, matrix, group, self._held.get(id(matrix)))
                return Curvature(matrix.side(group["side"]), dense[0] if matrix.groups == 1 else dense)
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
        state_dict = seen[-1]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and key.removesuffix("_tail") in curvatures.KEPT_WIDE:
                    self.state[param][key] = value.detach().clone().to(param.device)
                elif isinstance(value, dict) and not value:  # a distributed checkpoint's way to say "not there"
                    self.state[param].pop(key, None)
        for group in self.param_groups:
            for key in self._option_names:  # options that are newer than the checkpoint
                group.setdefault(key, self.defaults[key])
        self._of_param.update({param: group for group in self.param_groups for param in group["params"]})
        self._held.clear()
        if self._gathering is not None:
            self._gathering.forget()
        self._arm()

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "_model": self._model,
            "_compiled": None,
            "_ranks": None,
            "_batch_dim": self._batch_dim,
            "_option_names": self._option_names,
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Optimizer.load_state_dict comes here, too, with nothing but state and groups.
        if "_matrices" not in self.__dict__:
            self._gathering = None
            self._watch()


def _inside(model: nn.Module) -> nn.Module:
    """The model that torch.compile or DistributedDataParallel has wrapped, whose parameters have their plain names."""
    for wrapper in ("module", "_orig_mod"):
        inner = getattr(model, wrapper, None)
        wraps = wrapper == "_orig_mod" or isinstance(model, nn.parallel.DistributedDataParallel)
        if wraps and isinstance(inner, nn.Module):
            return _inside(inner)
    return model


def _labels(group: int, count: int) -> list[str]:
    """Names for parameters that have none."""
    return [f"param_groups[{group}]['params'][{i}]" for i in range(count)]
