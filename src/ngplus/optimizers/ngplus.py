"""NG+: Algorithm 1 of the paper, with all its constructions of L and R."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from ngplus.capture.batch import BatchDims
from ngplus.capture.collector import Collector, seed_of
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.sample_index import SampleIndex
from ngplus.diagnostics.health import EigenvalueBounds, Health
from ngplus.diagnostics.plan import Plan, plan_of
from ngplus.distributed.collectives import Distributor, ReplicatedDistributor
from ngplus.fisher.products import REFRESH_MEMORY
from ngplus.optimizers.base import BaseOptimizer
from ngplus.optimizers.param_groups import GIVE_MODULE
from ngplus.optimizers.refused_arguments import OF_NGPLUS, refuses
from ngplus.preconditioners import ngplus_curvature as curvatures
from ngplus.preconditioners.broadcast import broadcast_inverses, entries_to_send
from ngplus.preconditioners.inverse import InversePreconditioner
from ngplus.preconditioners.ngplus_curvature import Curvature, StateEntries
from ngplus.utils.finite import RefreshStatus
from ngplus.utils.precision import full_precision
from ngplus.utils.typing import Group, State
from ngplus.utils.warnings import warn


class NGPlus(BaseOptimizer):
    r"""NG+, natural gradient in matrix form, for any PyTorch model.

    Takes the learning rate, momentum and schedule of SGD. $W$ $(m \times n)$ is a weight as a matrix, with its bias as
    the last column; $G$ is the gradient of the mini-batch, $G_i$ that of sample $i$ of $S$.

    Algorithm:
        **Input**: $W$; $\alpha$ (lr), $\mu$ (momentum), $w$ (weight_decay), $T$ (update_every), $\beta$ (beta)

        - **for** $k = 0, 1, 2, \ldots$ **do**
            - **if** $k \bmod T = 0$ **then**
                - $R \leftarrow \frac{1}{S} \sum_i G_i^\top G_i$
                - $\bar R \leftarrow \beta \bar R + (1 - \beta) R$, with $\bar R = R$ at the first refresh
                - $\lambda \leftarrow$ damping + relative_damping $\cdot \operatorname{tr}(\bar R) / n$
                - $P \leftarrow (\lambda I + \bar R)^{-1}$
            - $D \leftarrow G P$
            - **if** graft = "sgd" **then**
                - $D \leftarrow D \cdot \min(\lVert G \rVert, \sqrt{\operatorname{tr} \bar R}) / \lVert D \rVert$
            - $D \leftarrow D + w W$
            - $V \leftarrow \mu V + D$, with $V = D$ in the first step
            - **if** nesterov **then** $D \leftarrow D + \mu V$ **else** $D \leftarrow V$
            - $W \leftarrow W - \alpha D$

    These are the defaults. With ``side="left"``, $L = \frac{1}{S} \sum_i G_i G_i^\top$ and
    $D = (\lambda I + L)^{-1} G$.

    The paper's form::

        ngplus.NGPlus(
            model, lr=0.18, momentum=0, damping=0.16, relative_damping=0, update_every=500,
            curvature="sample", side="smaller", block_size=None, graft=None,
        )

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
        params (Module or iterable): the model, or parameters, named parameters or parameter groups as in torch.optim.
            Without a module, ``curvature`` is ``"batch"``.
        lr (float or Tensor): learning rate (default: 0.01).
        momentum (float): momentum factor of the preconditioned gradient (default: 0.9).
        nesterov (bool): enable Nesterov momentum (default: False).
        weight_decay (float): weight decay, added to the preconditioned gradient (default: 0).
        maximize (bool): maximize the objective (default: False).
        model (Module): the module that the parameters belong to, if ``params`` is not a module (default: None).

    Args: Curvature
        update_every (int): $T$, steps between two refreshes. The first step has a refresh (default: 10).
        damping (float): the absolute part of $\lambda$ (default: 0).
        relative_damping (float): the part of $\lambda$ relative to the mean eigenvalue of each L or R (default: 1).
        curvature (str): ``"momentum"``: the moving average $\bar L \leftarrow \beta \bar L + (1 - \beta) L$ over
            refreshes. ``"sample"``: L or R of the last refresh. ``"batch"``: mini-batch gradients,
            $\tilde L \leftarrow \beta \tilde L + \gamma G G^\top$ in every step from $\lambda I$, inverted every
            $T$ steps (default: ``"momentum"``).
        beta (float): $\beta$, the decay of $\bar L$ or $\tilde L$ (default: 0.8).
        side (str): ``"right"``: R, which whitens the inputs of a linear or convolution layer, and of an embedding
            table (rows x features) has the size of the features. ``"left"``: L. ``"smaller"``, the paper's rule:
            ``"left"`` if $m \le n$, else ``"right"`` (default: ``"right"``).
        block_size (int): $p$, the size of the diagonal blocks of L or R; None for one block (default: 128).
        graft (str): the step length of each layer. ``"sgd"``: $\lVert G \rVert$, at most $\sqrt{\operatorname{tr} L}$
            of the last refresh, which only outliers exceed. ``"adam"``: that of Adam; ``momentum`` is then also its
            $\beta_1$, and the momentum a moving average. None: that of $D$ (default: ``"sgd"``).
        refresh_memory (int): bytes that a refresh may take beyond the state and a step without a refresh. A matrix that
            needs more has mini-batch curvature (default: 2**30).

    Args: Samples
        samples (int or float): size or fraction of a random sub-sample, drawn from every micro-batch on every rank;
            None for the whole batch (default: None).
        loss_reduction (str): ``"mean"``: the loss is a mean over the batch or its tokens. ``"sum"``: it is a sum
            (default: ``"mean"``).
        batch_dim (int or dict): the dimension of the samples, for the whole model or by module name; None in the dict
            for a module without samples (default: 0).
        sample_index (callable): for samples with different numbers of rows, such as the nodes of graphs. Takes the
            model's inputs and returns the sample of each row, counted from 0, as a tensor [rows], or several such
            tensors for layers with different numbers of rows. Called on refresh steps (default: None).
        seed (int): seed of ``samples`` and ``sketch`` (default: 0).

    Args: Ranks
        process_group (ProcessGroup): the ranks that train the model together and average its gradients. Taken from a
            DistributedDataParallel (default: None).
        distribution (str): how ranks share the work on replicated parameters. ``"communication"``: one rank inverts a
            matrix and sends the inverse to all at a refresh; steps send nothing. ``"memory"``: one rank stores the
            curvature of a matrix and sends its direction in every step. Sharded parameters and sparse gradients have
            a fixed form (default: ``"communication"``).

    Args: The paper's
        gamma (float): $\gamma$, the weight of a new gradient in $\tilde L$ (default: 0.1).
        solver (str): ``"dense"``: Cholesky. ``"woodbury"``: low rank. ``"sketched"``: sketched least squares.
            ``"auto"``: the cheaper one of the first two for each layer; on several ranks, ``"dense"``. Woodbury and
            sketched need ``curvature="sample"`` and a damping above 0 (default: ``"auto"``).
        sketch (int or dict): $q$ of the sketched product, or a dict of ``size``, ``kind`` (``"uniform"``,
            ``"gaussian"``, ``"countsketch"``, ``"srht"``) and ``replacement`` (of ``"uniform"``). With
            ``solver="sketched"``, of the least-squares problem, by default twice the number of its unknowns
            (default: None).

    References:
        Yang, Xu, Cui, Wen, Xu: [NG+: A Multi-Step Matrix-Product Natural Gradient Method for Deep
        Learning](https://arxiv.org/abs/2106.07454) (2021).

        The same: An Efficient Fisher Matrix Approximation Method for Large-Scale Neural Network Optimization, IEEE
        Transactions on Pattern Analysis and Machine Intelligence (2022), the journal version.
    """

    _hinted = False  # has the hint been given that the module would bring per-sample curvature?

    @refuses(OF_NGPLUS)
    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.01,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        damping: float = 0.0,
        relative_damping: float = 1.0,
        update_every: int = 10,
        curvature: str = "momentum",
        beta: float = 0.8,
        gamma: float = 0.1,
        samples: int | float | None = None,
        side: str = "right",
        solver: str = "auto",
        block_size: int | None = 128,
        sketch: int | Mapping[str, Any] | None = None,
        graft: str | None = "sgd",
        refresh_memory: int = REFRESH_MEMORY,
        model: nn.Module | None = None,
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        sample_index: SampleIndex | None = None,
        seed: int = 0,
        process_group: ProcessGroup | None = None,
        distribution: str = "communication",
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "damping": damping,
            "relative_damping": relative_damping,
            "update_every": update_every,
            "curvature": curvature,
            "beta": beta,
            "gamma": gamma,
            "samples": samples,
            "side": side,
            "solver": solver,
            "block_size": block_size,
            "sketch": sketch if not isinstance(sketch, Mapping) else dict(sketch),
            "graft": graft,
            "refresh_memory": refresh_memory,
            "loss_reduction": loss_reduction,
            "seed": seed,
        }
        super().__init__(params, model, batch_dim, defaults, process_group, distribution, sample_index)

    def _captures(self, group: Mapping[str, Any]) -> bool:
        return bool(group["curvature"] != "batch")

    def _without_model(self, param_group: dict[str, Any]) -> dict[str, Any]:
        if not self._hinted:
            self._hinted = True
            warn(
                "NGPlus was given parameters without their module: their curvature comes from mini-batch "
                f"gradients, as with curvature='batch'. {GIVE_MODULE}"
            )
        return {**param_group, "curvature": "batch"}

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> InversePreconditioner:
        return InversePreconditioner(matrix, group, state, self._distributor(matrix))

    def _begin(self) -> None:
        for matrix in self._matrices:
            matrix.estimate = None

    def _refresh_replicated(
        self, distributor: Distributor, matrices: list[ParameterMatrix], collector: Collector, due: set[int]
    ) -> None:
        """The owner of a matrix computes its inverse and sends it to all ranks."""
        if not isinstance(distributor, ReplicatedDistributor):
            return
        shared = [matrix for matrix in matrices if not distributor.kept_by_owner_only(matrix)]
        found: list[StateEntries | None] = []
        for matrix in shared:
            due.discard(id(matrix))
            for param in matrix.params:
                self.state.setdefault(param, {})
            own = self._preconditioner(matrix, self._group(matrix), self.state[matrix.params[0]])
            own.state["refreshed"] = self._refresh_key(matrix)
            gathered = collector.take(matrix)  # with sums at the owner; with a moving average, at all ranks
            status = RefreshStatus(may_wait=True)
            latest = None
            if gathered is not None and gathered.product_sum is not None:
                latest = own.estimate(None, gathered, status)
            seed, owned = seed_of(own.group), distributor.owns(matrix)
            found.append(entries_to_send(latest, own.state, own.group, seed, status) if owned else None)
            self._conclude(own, own.state, status)
        inverses = broadcast_inverses(distributor, shared, self._group_of_param, found)
        for matrix, new in zip(shared, inverses, strict=True):
            self._preconditioner(matrix, self._group(matrix), self.state[matrix.params[0]]).install(new)

    # ---------------------------------------------------------------------------------------------- inspection

    def plan(
        self, batch_size: int | None = None, positions: int | Mapping[str, int] = 1, *, verbose: bool = False
    ) -> Plan:
        """Returns the shape, side, solver, blocks, bytes of state and FLOPs of each matrix.

        Args:
            batch_size (int): the samples, which are not known before the first refresh (default: None).
            positions (int or dict): the positions of a sample, for all matrices or by the name of a matrix's first
                parameter; not known before, either (default: 1).
            verbose (bool): print all columns and whole names, not 80 columns (default: False).

        Examples:
            >>> plan = ngplus.NGPlus(nn.Linear(4, 2)).plan(batch_size=8)
            >>> plan["weight"].shape, plan["weight"].side
            ((2, 5), 'right')
        """
        self._follow_groups()
        self._find_replicas()
        entries = [(m, self._group(m), self.state.get(m.params[0], {}), self._distributor(m)) for m in self._matrices]
        return plan_of(entries, batch_size, positions, verbose)

    def curvature(self, which: str | nn.Parameter) -> Curvature:
        """Returns the side and the dense L or R of a parameter, given by its name or as a tensor.

        Entries outside of the blocks are 0. With ``curvature="momentum"`` or ``"batch"`` it is the moving average. With
        ``"sample"`` it is that of the last refresh: exact until the next step, then recovered from the inverse, with
        the rounding of its condition number. If only one of several ranks has it, call this on the owner, which
        ``plan()`` names.

        Examples:
            >>> model = nn.Linear(4, 2)
            >>> optimizer = ngplus.NGPlus(model)
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> side, matrix = optimizer.curvature("weight")
            >>> side, tuple(matrix.shape)
            ('right', (5, 5))
        """
        matrix = self._find_matrix(which)
        group, distributor = self._group(matrix), self._distributor(matrix)
        if distributor is not None and not distributor.has_curvature(matrix):
            raise RuntimeError(
                f"The curvature of {matrix.name!r} is not on this rank: call curvature() on its owner, rank "
                f"{distributor.owners[id(matrix)]} of the process group"
            )
        state = self.state.get(matrix.params[0], {})
        with full_precision(matrix.params[0].device):
            dense = curvatures.dense_curvature(state, matrix, group, matrix.estimate)
        return Curvature(matrix.side(group["side"]), dense[0] if matrix.groups == 1 else dense)

    def health(self, eigenvalues: bool = False) -> Health:
        r"""Returns counts of skipped steps and failed refreshes by layer, since the optimizer was created.

        Args:
            eigenvalues (bool): add the smallest and largest eigenvalue of $\lambda I + L$ of each layer, $h_1$ and
                $h_2$ of the paper's Assumption 1, by an eigendecomposition of each inverse on this rank
                (default: False).

        Examples:
            >>> ngplus.NGPlus(nn.Linear(3, 2)).health().good
            True
        """
        found = super().health()
        if not eigenvalues:
            return found
        pairs = ((m.name, curvatures.eigenvalue_bounds(self.state.get(m.params[0], {}))) for m in self._matrices)
        return replace(found, eigenvalues=tuple(EigenvalueBounds(n, *bounds) for n, bounds in pairs if bounds))

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim."""
        for matrix in self._matrices:  # a distributed checkpoint has the keys of every solver
            state = self.state.get(matrix.params[0], {})
            if "inverse" in state:
                curvatures.add_placeholders(state, self._group(matrix))
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, as in torch.optim; curvature keeps its own dtype."""
        super().load_state_dict(state_dict)
        self._begin()
