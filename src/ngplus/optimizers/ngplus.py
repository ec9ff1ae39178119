"""NG+: the paper's method, its constructions and options, on the frame of :mod:`ngplus.optimizers.base`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.calls import BatchDims, SampleIndex
from ngplus.capture.collector import Collector, seed_of
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.diagnostics.plan import Plan, plan_of
from ngplus.distributed.collectives import Distributor, ReplicatedDistributor
from ngplus.fisher.inverses import SMALL, Product
from ngplus.optimizers import options
from ngplus.optimizers.base import BaseOptimizer, Direction, Directions, MatrixUpdate, Task, is_zero
from ngplus.optimizers.binding import next_refresh
from ngplus.optimizers.gradients import captured_scale
from ngplus.optimizers.step_cache import Share, StepCache
from ngplus.optimizers.update import graft_length, with_length
from ngplus.preconditioners import curvature as curvatures
from ngplus.preconditioners import eigenbasis, sharing
from ngplus.preconditioners.curvature import Curvature, CurvatureEstimate, Solved
from ngplus.utils.finite import RefreshStatus, read_if_on_host
from ngplus.utils.typing import Group, State
from ngplus.utils.warnings import warn


class NGPlus(BaseOptimizer):
    """NG+, natural gradient in matrix form, for any PyTorch model.

    With per-sample gradients G_i of a parameter matrix W (m x n), every ``update_every`` steps

        L = 1/S sum_i G_i G_i^T    and    R = 1/S sum_i G_i^T G_i

    By default, ``scaling="adaptive"``, a step is Adam's in the eigenbases of the two: its moments are those of Q_L^T G
    Q_R, with G the mini-batch gradient, all of the first, and of the second the means over rows and columns. With
    ``scaling="inverse"``, the method of the paper, it is

        W <- W - lr (lambda I + L)^-1 G    where m <= n
        W <- W - lr G (lambda I + R)^-1    where m > n

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = ngplus.NGPlus(model, lr=0.01)
        >>> x, y = torch.randn(8, 4), torch.randint(2, (8,))
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()

    Args:
        params: the model, or parameters, named parameters or parameter groups as in torch.optim. Curvature from samples
            needs the module: given parameters only, pass ``model`` as well.
        lr: learning rate, a number or a one-element tensor.
        model: the module that the parameters belong to, where ``params`` is not a module.
        momentum, nesterov, weight_decay, maximize: as in torch.optim.SGD, applied to the preconditioned direction. With
            ``scaling="adaptive"``, ``momentum`` is Adam's first beta, and ``nesterov`` is on unless it is given.
        decoupled_weight_decay: decay the weights directly, by ``lr * weight_decay``, outside of the momentum.
        damping: lambda, of ``scaling="inverse"`` and of the start of ``"batch"``. A number is absolute, the paper's;
            ``"auto"`` is relative damping of 0.1.
        damping_mode: ``"absolute"``, or ``"relative"``: damping is a multiple of each layer's mean eigenvalue
            trace(L)/d.
        update_every: T, the number of steps between two refreshes. The first is at the first step.
        early_refreshes: refreshes after 1, 5, 25, ... steps, below T/2, and from the last of these on every T: at the
            beginning the curvature changes fast. On with ``scaling="adaptive"``, off with ``"inverse"``, unless it is
            given.
        curvature: ``"sample"``, the paper's L and R; ``"momentum"``, their moving average with ``beta``; ``"batch"``,
            from mini-batch gradients with ``beta`` and ``gamma`` (1 - beta where None), started from lambda I, updated
            in every step; it needs no model. Unless it is given, ``"momentum"`` with ``scaling="adaptive"``, and
            ``"sample"`` with ``"inverse"``.
        scaling: ``"adaptive"``, Adam's moments in the eigenbases of L and R (``momentum``, ``beta2``, ``eps``), with
            learning rates like Adam's; ``"inverse"``, the paper's direction, with learning rates like SGD's.
        beta, gamma: the weights of the moving averages: Lbar = beta Lbar + (1 - beta) L for ``"momentum"``, and
            Ltilde = beta Ltilde + gamma G G^T for ``"batch"``. Unless it is given, ``beta`` is 0.9 with
            ``scaling="inverse"``, and with ``"adaptive"`` 0.5 for ``"momentum"`` and 0.95 for ``"batch"``.
        beta2, eps: Adam's second beta and epsilon, for ``scaling="adaptive"`` and ``graft="adam"``.
        second_moment: of ``scaling="adaptive"``. ``"factored"`` keeps the means over rows and columns of the squared
            gradient in its eigenbasis, m + n numbers, and no step is longer than lr a number in the root mean square;
            ``"full"``, all of them, as Adam does, without that bound. Vectors always have all, and the rows of sparse
            gradients one for each column, without it.
        samples: size or fraction of the random sub-sample S of the batch (of each micro-batch, and of that of each
            rank); None is the whole batch.
        side: ``"smaller"`` (left where m <= n), ``"left"`` or ``"right"``. With ``scaling="adaptive"`` also ``"both"``:
            the bases of L and of R where the larger one has 640 rows or less; the smaller side's elsewhere, and of
            vectors (those of norm layers) and tables. ``"auto"`` is the same up to 160 rows; a longer side d falls into
            blocks of 4 sqrt(d) rows, 128 at most, each with a basis of its own (of a convolution's inputs, whole
            channels of 144 columns at most), and a larger side above 640 has none where it is five times the smaller
            one or more (of a convolution: where its channels are, or a block would be more than twice the smaller
            side). It leaves to plain Adam vectors, and tables that are only looked up and have no sparse gradients;
            with ``scaling="inverse"``, blocks or a sketch it is ``"smaller"``.
        solver: ``"dense"`` (Cholesky), ``"woodbury"``, ``"sketched"`` (sketched least squares), or ``"auto"``, the
            cheapest exact one for each layer.
        block_size: p of the block-diagonal form.
        sketch: q of the sketched product, or a dict of ``size``, ``kind`` ("uniform", "gaussian", "countsketch",
            "srht") and ``replacement``. With ``solver="sketched"`` it is the sketch of the least-squares problem.
        graft: ``"sgd"`` or ``"adam"``: each layer's direction takes that method's step length. With ``"adam"``, the
            momentum is a moving average, so that it keeps that length.
        loss_reduction: ``"mean"``, the loss is an average over the batch or its tokens, or ``"sum"``.
        batch_dim: the dimension of the samples, for the whole model or by module name; None for a module without one.
        sample_index: where samples have unlike numbers of rows, as the nodes and edges of graphs or packed sequences: a
            function of the model's inputs that returns the sample of each row, counted from 0, as a tensor [rows], or
            several such tensors; a layer whose input has as many rows in its batch dimension goes by it. It is called
            on refresh steps.
        seed: of the sub-samples and sketches.
        process_group: the ranks that train the model together and average its gradients; of a DistributedDataParallel
            model its own.
        distribution: of replicated parameters, as with DistributedDataParallel. ``"communication"``: each inverse or
            eigenbasis is found by one rank and sent to all at a refresh; steps send nothing. ``"memory"``: that rank
            alone keeps the curvature, and sends the direction in every step. Sharded parameters always go by owners.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.01,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        nesterov: bool | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        damping: float | str = 0.3,
        damping_mode: str = "absolute",
        update_every: int = 20,
        curvature: str | None = None,
        scaling: str = "adaptive",
        beta: float | None = None,
        gamma: float | None = None,
        beta2: float = 0.95,
        eps: float = 1e-8,
        second_moment: str = "factored",
        samples: int | float | None = None,
        side: str = "auto",
        solver: str = "auto",
        block_size: int | None = None,
        sketch: int | Mapping[str, Any] | None = None,
        graft: str | None = None,
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        sample_index: SampleIndex | None = None,
        early_refreshes: bool | None = None,
        seed: int = 0,
        maximize: bool = False,
        process_group: ProcessGroup | None = None,
        distribution: str = "communication",
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
            "second_moment": second_moment,
            "samples": samples,
            "side": side,
            "solver": solver,
            "block_size": block_size,
            "sketch": sketch if not isinstance(sketch, Mapping) else dict(sketch),
            "graft": graft,
            "loss_reduction": loss_reduction,
            "early_refreshes": early_refreshes,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, model, batch_dim, defaults, process_group, distribution, sample_index)
        signature = inspect.signature(NGPlus).parameters
        if idle := options.without_effect(defaults, {name: signature[name].default for name in defaults}):
            warn(idle)

    def _resolve_defaults(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return options.resolve_defaults(group)

    def _captures(self, group: Mapping[str, Any]) -> bool:
        return bool(group["curvature"] != "batch")

    def _bound(self, uses: list[Use]) -> None:
        self._held: dict[int, CurvatureEstimate] = {}  # L of this step's refresh, for curvature() until the next step
        self._shares: list[Share] | None = None  # of the last step, where the next may be like it
        self._step_cache: StepCache | None = None

    def _begin(self) -> None:
        self._held.clear()
        for matrix in self._matrices:
            state = self.state.get(matrix.params[0], {})
            if ("refreshed" in state or "basis" in state) and not self._curved(matrix):  # as a side was before
                curvatures.clear(state, "basis", "spectrum", "curvature", *eigenbasis.MOMENTS)
                curvatures.clear(state, "refreshed")

    def _curved(self, matrix: ParameterMatrix) -> bool:
        return bool(matrix.partition_of(self._group(matrix)).stacks)

    def _observe(self, update: MatrixUpdate) -> None:
        if update.group["curvature"] == "batch" and self._curved(update.matrix):
            estimate = curvatures.mini_batch(update.matrix, update.gradient, update.group, seed_of(update.group))
            curvatures.online(update.state, estimate, update.group)

    def _sums(self, group: Mapping[str, Any]) -> bool:
        return group["samples"] is None and group["sketch"] is None

    def _refreshed_together(self, updates: Sequence[MatrixUpdate]) -> list[list[MatrixUpdate]]:
        """Small matrices in one list; not on many ranks, where each has other ones, and a stack may round otherwise."""
        small = [
            update
            for update in updates
            if update.group["scaling"] == "adaptive"
            and not self._distributors
            and all(size <= SMALL for _, size in update.matrix.partition_of(update.group).shapes)
        ]
        alone = {id(update) for update in updates} - {id(update) for update in small}
        return ([small] if small else []) + [[update] for update in updates if id(update) in alone]

    def _refresh_all(self, tasks: Sequence[Task]) -> None:
        """L or R and its inverse, or its eigenbasis."""
        at_once: list[tuple[MatrixUpdate, CurvatureEstimate, RefreshStatus]] = []
        for update, gathered, status in tasks:
            estimate = self._fresh(update, gathered, status)
            if estimate is None:
                continue
            at_once.append((update, estimate, status))
        bases = curvatures.eigenbases([(f, t) for update, f, t in at_once if update.group["scaling"] == "adaptive"])
        for update, estimate, status in at_once:
            if update.group["scaling"] == "adaptive":
                new = next(bases)
            else:
                new = curvatures.solved(estimate, update.group, seed_of(update.group), status)
            self._install(update.state, new, update.group)

    def _fresh(
        self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus
    ) -> CurvatureEstimate | None:
        """The curvature to be inverted; None where it is not finite and the last one stays in use."""
        matrix, group, state = update.matrix, update.group, update.state
        if group["curvature"] == "batch":
            stacks = curvatures.read(state, "curvature")
            assert stacks is not None
            return CurvatureEstimate(stacks)
        if gathered is None:
            estimate = curvatures.mini_batch(matrix, update.gradient, group, seed_of(group))
            if (
                self._distributor(matrix) is not None
            ):  # as from samples, where ranks add up L: a checkpoint has one form
                estimate = CurvatureEstimate(estimate.dense())
        else:
            estimate = curvatures.per_sample(gathered, group, matrix.partition_of(group), captured_scale())
        bad = ~estimate.finite()
        dropped = status.looks(bad)
        if dropped is not False:
            status.add("dropped", bad)
            if dropped and self._fits(matrix, group, state):
                return None
            estimate = estimate.zero_where(bad)
            if dropped:
                return estimate
        if group["curvature"] == "momentum":
            return curvatures.average(state, estimate, group)
        self._held[id(matrix)] = estimate
        return estimate

    def _share(
        self, distributor: Distributor, estimate: list[ParameterMatrix], collector: Collector, due: set[int]
    ) -> None:
        """Of a matrix that every rank keeps, the owner finds the inverse or the eigenbasis, and all get it."""
        if not isinstance(distributor, ReplicatedDistributor):
            return
        shared = [matrix for matrix in estimate if distributor.shares(matrix)]
        solved: list[Solved | None] = []
        for matrix in shared:
            due.discard(id(matrix))
            for param in matrix.params:
                self.state.setdefault(param, {})
            update = MatrixUpdate(matrix, self._group(matrix), self.state[matrix.params[0]], [])
            update.state["refreshed"] = self._measures(matrix)
            # Where all ranks keep the moving average, all have the sums; else the owner has.
            gathered = collector.take(matrix)
            known = gathered is not None and gathered.total is not None
            status = RefreshStatus(climb=True)  # what is sent is waited for anyway
            latest = self._fresh(update, gathered, status) if known else None
            seed, owned = seed_of(update.group), distributor.owns(matrix)
            solved.append(sharing.solved(latest, update.state, update.group, seed, status) if owned else None)
            self._conclude(update, update.state, status)
        for matrix, new in zip(shared, sharing.send(distributor, shared, self._of_param, solved), strict=True):
            state = self.state[matrix.params[0]]
            if not sharing.unchanged(state, new):
                self._install(state, new, self._group(matrix))

    def _install(self, state: State, new: Solved, group: Group) -> None:
        """A refresh's result into the state, and out of it what other options than today's have left there."""
        if group["curvature"] == "sample":
            curvatures.clear(state, "curvature")
        if "basis" in new:
            eigenbasis.carry_moments(state, new["basis"], group)
        else:
            curvatures.clear(state, "basis", "spectrum", *eigenbasis.MOMENTS, "adam_step")
        curvatures.install(state, new)

    def _fits(self, matrix: ParameterMatrix, group: Group, state: State) -> bool:
        keys = ("basis",) if group["scaling"] == "adaptive" else ("inverse", "factor")
        held = next((stacks for key in keys if (stacks := curvatures.read(state, key)) is not None), None)
        return (
            held is not None
            and [x.shape[:2] for x in held] == matrix.partition_of(group).shapes
            and held[0].dtype == matrix.dtype
            and held[0].device == matrix.params[0].device
        )

    def _precondition(self, updates: Sequence[MatrixUpdate]) -> list[Direction]:
        """(lambda I + L)^-1 G or G (lambda I + R)^-1, or Adam's step in the eigenbasis, [groups, m, n]."""
        directions: dict[int, Tensor | list[Product]] = {}
        together: dict[int, list[int]] = {}
        shares: list[Share] = []
        for i, update in enumerate(updates):
            if update.group["scaling"] == "inverse":
                products = self._products(update)
                if products is None:
                    stacks = curvatures.apply(update.state, update.stacks(), update.group)
                directions[i] = self._grafted(update, update.merged(stacks)) if products is None else products
            elif update.rows is not None:
                stacks = eigenbasis.sparse_steps(update.state, update.stacks(), update.group)
                directions[i] = self._grafted(update, update.merged(stacks))
            else:
                together.setdefault(id(update.group), []).append(i)
        for own in together.values():
            group = updates[own[0]].group
            steps = eigenbasis.Steps([(updates[i].state, updates[i].stacks()) for i in own], group)
            made = steps.spread(steps.step(steps.gradients(), group))
            shares.append(Share(group, [updates[i] for i in own], steps))
            for i, stacks in zip(own, made, strict=True):
                directions[i] = self._grafted(updates[i], updates[i].merged(stacks))
        self._shares = (
            shares if sum(len(share.updates) for share in shares) == len(updates) and StepCache.fits(updates) else None
        )
        return [(directions[i], update.rows) for i, update in enumerate(updates)]

    def _repeated(self) -> tuple[Directions, Tensor] | None:
        step_cache, self._step_cache = self._step_cache, None
        self._find_replicas()
        if (
            step_cache is None
            or self._distributors
            or torch.compiler.is_compiling()
            or not step_cache.holds(self.state)
        ):
            return None
        if any(is_zero(group["lr"]) for group in self.param_groups):  # as where the state is to be initialised
            return None
        for group in self.param_groups:
            self._check(group)
        if not read_if_on_host(step_cache.take_gradients()):
            return None
        self._held.clear()
        self._skip, self._initialising = None, False
        self._faults.steps += 1
        directions = step_cache.directions()
        self._step_cache = step_cache
        return directions, step_cache.length(directions)

    def _remember(self, again: bool) -> None:
        shares, self._shares = self._shares, None
        if self._step_cache is not None or shares is None or not again or self._skip is not None or self._initialising:
            return
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        plain = all(g["curvature"] != "batch" and g["step"] > 1 for g in self.param_groups)
        if plain and not any(map(self._due, self._matrices)):
            until = [next_refresh(group) for group in self.param_groups]
            self._step_cache = StepCache.of(shares, self.param_groups, until, self._option_names, list(self._names))

    def _arm(self) -> None:
        if self._step_cache is not None and self._step_cache.goes_on:
            self._armed_by = self._arming_options()  # nothing is due
        else:
            super()._arm()

    def _arm_anew(self, changed: bool) -> None:
        if changed or self._arming_options() != self._armed_by:
            self._step_cache = None
        super()._arm_anew(changed)

    def _products(self, update: MatrixUpdate) -> list[Product] | None:
        """The directions of the parameters as products that the update works out, where that is all there is to do."""
        matrix, group = update.matrix, update.group
        partition, distributor = matrix.partition_of(group), self._distributor(matrix)
        if (
            not matrix.straight
            or partition.size != partition.d
            or update.rows is not None
            or group["graft"] is not None
        ):
            return None
        if distributor is not None and distributor.is_remote(matrix):
            return None
        return curvatures.direction_products(update.state, update.parts, matrix.side(group["side"]), group)

    def _grafted(self, update: MatrixUpdate, direction: Tensor) -> Tensor:
        """At the step length of another method where one is grafted on."""
        if update.group["graft"] is None:
            return direction
        return with_length(
            direction, graft_length(update.state, update.gradient, update.group, update.rows is not None)
        )

    def _initialised(self, group: Group, state: State) -> None:
        curvatures.add_placeholders(state, group)

    # ---------------------------------------------------------------------------------------------- to look at

    def plan(self, batch_size: int | None = None, positions: int | Mapping[str, int] = 1) -> Plan:
        """What each parameter gets: shape, side, solver, blocks, bytes of state, FLOPs of a step and of a refresh.

        Before the first refresh the samples and positions of the layers are not known; ``batch_size`` and ``positions``
        (one number, or one by the name of a matrix's first parameter) stand in for them.

        Examples:
            >>> plan = ngplus.NGPlus(nn.Linear(4, 2)).plan(batch_size=8)
            >>> plan["weight"].shape, plan["weight"].side
            ((2, 5), 'both')
        """
        self._find_replicas()
        entries = [(m, self._group(m), self.state.get(m.params[0], {}), self._distributor(m)) for m in self._matrices]
        return plan_of(entries, batch_size, positions)

    def curvature(self, which: str | nn.Parameter) -> Curvature:
        """The side and the dense L or R of a parameter, by name or as it is; of both sides, the smaller one's. Where it
        has blocks, it is zero outside of them.

        With ``curvature="momentum"`` or ``"batch"`` it is the moving average. With ``"sample"`` it is that of the last
        refresh, exact until the next step; later, where only the inverse or the basis is kept, recovered from it, with
        the rounding of its condition number. On many ranks, where the owner alone keeps it, ask the owner: ``plan()``
        names it.

        Examples:
            >>> model = nn.Linear(4, 2)
            >>> optimizer = ngplus.NGPlus(model)
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> side, matrix = optimizer.curvature("weight")
            >>> side, tuple(matrix.shape)
            ('left', (2, 2))
        """
        matrix = self._find(which)
        group, distributor = self._group(matrix), self._distributor(matrix)
        if distributor is not None and not distributor.keeps(matrix):
            raise RuntimeError(
                f"The curvature of {matrix.name!r} is with its owner, number {distributor.owners[id(matrix)]} of the "
                "ranks that share the work on it: ask there"
            )
        if not matrix.partition_of(group).stacks:
            raise RuntimeError(
                f"{matrix.name!r} has no curvature of its own: side='auto' leaves vectors, and tables that are only "
                "looked up, to plain Adam. side='both' or 'smaller' gives it one"
            )
        state = self.state.get(matrix.params[0], {})
        dense = curvatures.dense_curvature(state, matrix, group, self._held.get(id(matrix)))
        return Curvature(matrix.side(group["side"]), dense[0] if matrix.groups == 1 else dense)

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim."""
        for matrix in self._matrices:  # a distributed checkpoint may be loaded where others are kept: it looks for all
            state = self.state.get(matrix.params[0], {})
            if "inverse" in state:
                curvatures.add_placeholders(state, self._group(matrix))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch.optim, but curvature keeps its own precision whatever the parameters' dtype."""
        self._shares = self._step_cache = None
        super().load_state_dict(state_dict)
        self._held.clear()
