"""NG+: Algorithm 1 of the paper as a torch optimizer.

``step`` reads top to bottom like the algorithm: take the gradients, refresh L or R and its inverse where k mod T == 0,
turn gradients into directions, update the parameters, arm the capture for the next refresh.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from ngplus import curvature as curvatures
from ngplus import options
from ngplus.capture import BatchDims, Capture
from ngplus.curvature import Fresh, Gathered
from ngplus.fisher import Bags, Factors, Lookup
from ngplus.matrices import ParameterMatrix, collect, named
from ngplus.plan import Plan, plan_of
from ngplus.update import graft_length, update_parameters, with_length

_REFRESHED = ("inverse", "factor", "basis")  # a state that has one of them can make a step
_CHECKED_ROWS = 1_000_000  # embeddings above this size are not checked for uses that capture has missed


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

        optimizer = ngplus.NGPlus(model, lr=0.1)
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
        scaling: ``"inverse"``, the paper; ``"adaptive"``, Adam's moments in the eigenbasis of L or R (``momentum``,
            ``beta2``, ``eps``).
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
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.1,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        damping: float | str = "auto",
        damping_mode: str = "absolute",
        update_every: int = 10,
        curvature: str = "sample",
        scaling: str = "inverse",
        beta: float = 0.95,
        gamma: float | None = None,
        beta2: float = 0.99,
        eps: float = 1e-8,
        samples: int | float | None = None,
        side: str = "auto",
        solver: str = "auto",
        block_size: int | None = None,
        sketch: int | Mapping[str, Any] | None = None,
        graft: str | None = "sgd",
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        seed: int = 0,
        maximize: bool = False,
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
        if isinstance(params, nn.Module):
            if model is not None and model is not params:
                raise ValueError("NGPlus got two models: one in place of the parameters and one as model=")
            model = params
            params = list(model.named_parameters())
            if not params:
                raise ValueError(f"The model {type(model).__name__} has no parameters")
        self._model = model
        self._batch_dim: BatchDims = dict(batch_dim) if isinstance(batch_dim, Mapping) else batch_dim
        self._matrices: list[ParameterMatrix] = []
        self._capture: Capture | None = None
        super().__init__(params, defaults)
        self._watch()

    # ---------------------------------------------------------------------------------------------- construction

    def _watch(self) -> None:
        """Binds parameters to matrices and installs the capture; again whenever the parameters change."""
        if self._capture is not None:
            self._capture.remove()
        self._gathered: dict[int, Gathered] = {}
        self._held: dict[int, Fresh] = {}
        self._warned = False
        names: dict[nn.Parameter, str] = {}
        self._of_param: dict[nn.Parameter, dict[str, Any]] = {}
        in_model = named(self._model.named_parameters(remove_duplicate=False)) if self._model is not None else {}
        for g, group in enumerate(self.param_groups):
            given = group.get("param_names") or [
                f"param_groups[{g}]['params'][{i}]" for i in range(len(group["params"]))
            ]
            for param, name in zip(group["params"], given, strict=True):
                names[param] = in_model.get(param, name)
                self._of_param[param] = group
        self._names = names
        # Empty parameters have no matrix and no step.
        filled = {param: name for param, name in names.items() if param.numel() > 0}
        self._matrices, uses = collect(self._model, filled)
        self._capture = None
        if self._model is not None and any(g["curvature"] != "batch" for g in self.param_groups):
            this = weakref.ref(self)  # no cycle: a deleted optimizer goes at once, and its hooks with it

            def sink(matrix: ParameterMatrix, factors: Factors) -> None:
                optimizer = this()
                if optimizer is not None:
                    optimizer._gather(matrix, factors)

            self._capture = Capture(self._model, uses, sink, self._batch_dim)
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
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        try:
            if len(set(params)) != len(params):
                raise ValueError("A parameter is given twice in one parameter group")
            for param in params:
                if param.is_complex():
                    raise ValueError("NGPlus does not take complex parameters; view them as real ones")
                if not param.is_floating_point():
                    raise ValueError(f"NGPlus takes floating-point parameters, not {param.dtype}")
        except ValueError:
            self.param_groups.pop()
            raise
        if self._matrices:
            self._watch()

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
        if self._overflowed():
            self._forget()
            return None
        if self._capture is not None:
            self._capture.flush()
        work = [m for m in self._matrices if any(p.grad is not None for p in m.params)]
        if not work:
            if self._capture is not None and self._capture.forward_seen:
                raise RuntimeError(
                    "No parameter has a gradient, though the model has been called: the loss does not reach any "
                    "parameter of this optimizer, or backward() was not called"
                )
            return {}
        self._check_finite(work)
        self._held.clear()
        directions: dict[nn.Parameter, Tensor] = {}
        uncovered: list[ParameterMatrix] = []
        for matrix in work:
            group, state = self._of(matrix)
            gradient, rows = self._gradient(matrix, group)
            self._refresh(matrix, group, state, gradient, uncovered)
            preconditioned = self._precondition(matrix, group, state, gradient, sparse=rows is not None)
            if rows is not None:
                param = matrix.params[0]
                directions[param] = torch.sparse_coo_tensor(
                    rows, preconditioned[0].to(param.dtype), param.shape, is_coalesced=True, check_invariants=False
                )
                continue
            for param, direction in zip(matrix.active_params, matrix.layout.split(preconditioned), strict=True):
                if param.grad is not None:
                    directions[param] = direction.to(param.dtype)
        self._warn_uncovered(uncovered)
        return directions

    def _of(self, matrix: ParameterMatrix) -> tuple[dict[str, Any], dict[str, Any]]:
        """A matrix goes by the options of its first parameter's group; its curvature is in that parameter's state."""
        return self._of_param[matrix.params[0]], self.state[matrix.params[0]]

    def _gradient(self, matrix: ParameterMatrix, group: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """G as [groups, m, n]. Of a sparse gradient only the rows that it touches, and their indices."""
        matrix.update_layout()
        grads = [p.grad for p in matrix.active_params]
        sign = -1.0 if group["maximize"] else 1.0
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            sign = sign / scale
        first = grads[0]
        if first is not None and first.is_sparse:
            if group["weight_decay"] != 0:
                raise RuntimeError(f"weight_decay option is not compatible with the sparse gradient of {matrix.name!r}")
            if len(grads) == 1 and matrix.side(group["side"]) == "right" and matrix.kinds[0] == "rows":
                first = first.coalesce()
                values = first.values().flatten(1).to(matrix.dtype)[None]
                return values * sign if group["maximize"] or scale is not None else values, first.indices()
            grads[0] = first.to_dense()
        filled = [
            torch.zeros_like(p) if grad is None else grad for p, grad in zip(matrix.active_params, grads, strict=True)
        ]
        gradient = matrix.layout.join(filled).to(matrix.dtype)
        return (gradient * sign if group["maximize"] or scale is not None else gradient), None

    def _refresh(
        self,
        matrix: ParameterMatrix,
        group: dict[str, Any],
        state: dict[str, Any],
        gradient: Tensor,
        uncovered: list[ParameterMatrix],
    ) -> None:
        """L or R and its inverse, where k mod T == 0 or the matrix has none that fits yet."""
        seed = self._seed(group)
        if group["curvature"] == "batch":
            curvatures.online(state, curvatures.mini_batch(matrix, gradient, group, seed), group)
        if not self._due(matrix):
            return
        if group["curvature"] == "batch":
            stacks = curvatures.read(state, "curvature")
            assert stacks is not None
            fresh = Fresh(stacks)
        else:
            gathered = self._gathered.pop(id(matrix), None)
            if gathered is not None and gathered.gradient is not None:
                self._check_coverage(matrix, gathered.gradient, gradient)
            if matrix.source == "batch" or gathered is None:
                uncovered.append(matrix)
                fresh = curvatures.mini_batch(matrix, gradient, group, seed)
            else:
                side = matrix.side(group["side"])
                scale = getattr(self, "grad_scale", None)
                fresh = curvatures.per_sample(
                    gathered, group, matrix.cut(side, group["block_size"]), 1.0 if scale is None else scale
                )
            if not curvatures.is_finite(fresh):
                warnings.warn(
                    f"The curvature of {matrix.name!r} is not finite; its last good inverse stays in use", stacklevel=4
                )
                if any(key in state for key in _REFRESHED):
                    return
                fresh = Fresh([torch.zeros_like(m) for m in fresh.dense()])
            if group["curvature"] == "momentum":
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
            # Distributed checkpoints make a step with lr = 0 and no forward pass, only to have the state initialised.
            if not (self._starved and float(group["lr"]) == 0.0):
                group["step"] += 1
        self._forget()
        self._arm()

    # ---------------------------------------------------------------------------------------------- capture

    def _due(self, matrix: ParameterMatrix) -> bool:
        group, state = self._of(matrix)
        return group["step"] % group["update_every"] == 0 or not self._fits(matrix, group, state)

    def _fits(self, matrix: ParameterMatrix, group: dict[str, Any], state: dict[str, Any]) -> bool:
        """Is there an inverse, of the size that the matrix has at present?"""
        cut = matrix.cut(matrix.side(group["side"]), group["block_size"])
        wanted = "basis" if group["scaling"] == "adaptive" else "inverse" if "inverse" in state else "factor"
        return wanted in state and state[wanted].shape[:2] == (self._first_blocks(cut), cut.size)

    @staticmethod
    def _first_blocks(cut: Any) -> int:
        return int(cut.groups * cut.stacks[0][1])

    def _arm(self) -> None:
        for matrix in self._matrices:
            group = self._of_param[matrix.params[0]]
            matrix.armed = group["curvature"] != "batch" and matrix.source != "batch" and self._due(matrix)

    def _gather(self, matrix: ParameterMatrix, factors: Factors) -> None:
        """The capture's sink."""
        if factors.samples == 0:
            raise ValueError(f"The batch that reached {matrix.name!r} has no samples")
        group, state = self._of(matrix)
        first = not any(key in state for key in _REFRESHED)
        small = not isinstance(factors, Lookup | Bags) or factors.rows <= _CHECKED_ROWS
        curvatures.gather(
            self._gathered.setdefault(id(matrix), Gathered()),
            matrix,
            factors,
            group,
            self._seed(group),
            check=first and small and not _many_ranks(),
        )

    def _check_coverage(self, matrix: ParameterMatrix, captured: Tensor, gradient: Tensor) -> None:
        """Once: do the captured factors add up to the gradient? A use outside of a watched module would be missing."""
        a, b = captured.flatten(), gradient.to_dense().flatten()
        if a.shape != b.shape:
            return
        norms = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
        if bool((torch.dot(a, b).abs() < 0.95 * norms) & norms.isfinite() & (norms > 0)):
            matrix.fall_back("its gradient has parts that no call of its module explains")

    def _warn_uncovered(self, uncovered: list[ParameterMatrix]) -> None:
        self._starved = (bool(uncovered) and all(m.source != "batch" for m in uncovered)) or not self._forward_seen()
        if self._warned or not uncovered or all(float(g["lr"]) == 0.0 for g in self.param_groups):
            return
        self._warned = True
        what = "; ".join(
            f"{', '.join(m.names)} ({m.reason or 'no gradient was captured: see train() and the graph of the loss'})"
            for m in uncovered[:20]
        )
        more = f" and {len(uncovered) - 20} more" if len(uncovered) > 20 else ""
        warnings.warn(
            f"No per-sample curvature for {what}{more}. Mini-batch curvature is used for them; plan() lists all.",
            stacklevel=6,  # the line of the user's step()
        )

    def _forward_seen(self) -> bool:
        return self._capture is None or self._capture.forward_seen

    _starved = False

    def _forget(self) -> None:
        self._gathered.clear()
        if self._capture is not None:
            self._capture.discard()
            self._capture.forward_seen = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; what a backward pass without a step has gathered is dropped with its gradients."""
        self._gathered.clear()
        if self._capture is not None:
            self._capture.discard()
        super().zero_grad(set_to_none)

    def _seed(self, group: dict[str, Any]) -> int:
        return int(group["seed"]) * 1_000_003 + int(group["step"])

    # ---------------------------------------------------------------------------------------------- hostile numbers

    def _overflowed(self) -> bool:
        """Has torch.amp.GradScaler found an overflow in these gradients?"""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _check_finite(self, work: Iterable[ParameterMatrix]) -> None:
        grads = [(name, p.grad) for m in work for name, p in zip(m.names, m.params, strict=True) if p.grad is not None]
        tensors = [grad.coalesce().values() if grad.is_sparse else grad for _, grad in grads]
        norms = torch.stack([n.float().cpu() for n in torch._foreach_norm(tensors)])
        if bool(norms.isfinite().all()):
            return
        bad = [name for (name, _), t in zip(grads, tensors, strict=True) if not bool(t.isfinite().all())]
        if bad:
            self._forget()
            raise RuntimeError(
                f"Gradients that are not finite: {', '.join(bad[:5])}{' and more' if len(bad) > 5 else ''}. "
                "No parameter was changed"
            )

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
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, param in zip(ids, params, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor) and key.removesuffix("_tail") in curvatures.KEPT_WIDE:
                    self.state[param][key] = value.detach().clone().to(param.device)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._of_param = {param: group for group in self.param_groups for param in group["params"]}
        self._held.clear()
        self._forget()
        self._arm()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": self._model, "_batch_dim": self._batch_dim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Optimizer.load_state_dict comes here, too, with nothing but state and groups.
        if "_matrices" not in self.__dict__:
            self._capture = None
            self._watch()


def _many_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
