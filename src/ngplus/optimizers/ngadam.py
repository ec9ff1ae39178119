"""NGAdam: both sides of the natural gradient in matrix form at once, with Adam's scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from ngplus.capture.matrices import ParameterMatrix, Use, collect, separate
from ngplus.diagnostics.health import EigenvalueBounds, Health
from ngplus.diagnostics.plan import Plan, PlanRow, state_bytes, unless_frozen
from ngplus.distributed.collectives import Distributor
from ngplus.fisher.blocks import BlockPartition, NoPartition, TwoSidedPartition
from ngplus.optimizers.base import BaseOptimizer
from ngplus.optimizers.options import check_learning_rate
from ngplus.optimizers.param_groups import GIVE_MODULE
from ngplus.optimizers.refused_arguments import OF_NGADAM, refuses
from ngplus.optimizers.update import adamw_steps
from ngplus.preconditioners.base import MatrixPreconditioner
from ngplus.preconditioners.inverse_root import (
    AdamPreconditioner,
    RootsPreconditioner,
    RowsPreconditioner,
    block_size,
    has_diagonal,
)
from ngplus.preconditioners.ngplus_curvature import Curvature
from ngplus.reference import column_stride, is_refresh
from ngplus.utils.typing import Group, State
from ngplus.utils.validation import number
from ngplus.utils.warnings import warn


class NGAdam(BaseOptimizer):
    r"""NGAdam, natural gradient in matrix form with Adam's scale, for any PyTorch model.

    $W$ $(m \times n)$ is a parameter as a matrix, $G$ the gradient of the mini-batch. A bias is not joined to its
    weight.

    Algorithm:
        **Input**: $W$; $\alpha$ (lr), $\beta_1, \beta_2$ (betas), $w$ (weight_decay), $T$ (update_every)

        - $M, L, R \leftarrow 0$
        - **for** $t = 1, 2, \ldots$ **do**
            - $M \leftarrow \beta_1 M + (1 - \beta_1) G$
            - $N \leftarrow (\beta_1 M + (1 - \beta_1) G) / (1 - \beta_1^t)$ (Nesterov's momentum)
            - $L \leftarrow \beta_2 L + (1 - \beta_2) G G^\top$
            - $R \leftarrow \beta_2 R + (1 - \beta_2) G^\top G$
            - **if** $(t - 1) \bmod T = 0$ **or** $t \in \lbrace 2, 3, 4, 6 \rbrace$ **then**
                - $\hat L \leftarrow L / (1 - \beta_2^t)$, $\hat R \leftarrow R / (1 - \beta_2^t)$
                - $\epsilon \leftarrow \max(10^{-5}, t^{-2})$
                - $\lambda_L \leftarrow \epsilon \operatorname{tr}(\hat L) / m$,
                  $\lambda_R \leftarrow \epsilon \operatorname{tr}(\hat R) / n$
                - $P \leftarrow \sqrt{\operatorname{tr} \hat L} (\hat L + \lambda_L I)^{-1/2}$
                - $Q \leftarrow (\hat R + \lambda_R I)^{-1/2}$
            - $D \leftarrow P N Q$
            - $D \leftarrow D / \max(1, \operatorname{rms}(D) / 0.3)$
            - $W \leftarrow (1 - \alpha w) W - \alpha D$

    Sides above 160 have L or R in blocks, some have diagonal ones: docs/method.md lists the forms. Vectors have Adam's
    update with Nesterov's momentum.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = ngplus.NGAdam(model, lr=0.005)
        >>> x, y = torch.randn(8, 4), torch.randint(2, (8,))
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()

    Args:
        params (Module or iterable): the model, or parameters, named parameters or parameter groups as in torch.optim.
        lr (float or Tensor): learning rate (default: 5e-3).
        betas (tuple[float, float]): coefficients of the moving averages of the gradient, and of L and R
            (default: (0.9, 0.95)).
        eps (float): added to the denominator of Adam's update of vectors (default: 1e-8).
        weight_decay (float): decoupled weight decay, as in torch.optim.AdamW, but none of parameters with sparse
            gradients (default: 1e-2).
        maximize (bool): maximize the objective (default: False).
        model (Module): the module that the parameters belong to, if ``params`` is not a module. Without it, tables,
            grouped and transposed convolutions are treated as plain matrices (default: None).

    Args: Curvature
        update_every (int): $T$, steps between two refreshes of the roots. The steps 1, 2, 3, 4 and 6 have one, too
            (default: 5).

    Args: Ranks
        process_group (ProcessGroup): the ranks that train the model together and average its gradients. Taken from a
            DistributedDataParallel (default: None).
        distribution (str): how ranks share the work on replicated parameters. ``"communication"``: every rank computes
            all matrices, and sends nothing. ``"memory"``: one rank stores the state of a matrix and sends its
            direction in every step. Sharded parameters have a fixed form (default: ``"communication"``).

    References:
        Gupta, Koren, Singer: [Shampoo: Preconditioned Stochastic Tensor Optimization](https://arxiv.org/abs/1802.09568)
        (2018).

        Vyas et al.: [SOAP: Improving and Stabilizing Shampoo using Adam](https://arxiv.org/abs/2409.11321) (2024).

        Shazeer, Stern: [Adafactor: Adaptive Learning Rates with Sublinear Memory
        Cost](https://arxiv.org/abs/1804.04235) (2018).
    """

    _identifying_options = ("lr", "betas", "update_every", "step")
    _keys_in_param_dtype = ()
    _update_rule = staticmethod(adamw_steps)
    _decoupled_weight_decay = True
    _harmless_faults = ("retried",)  # float64 finds the same roots

    @refuses(OF_NGADAM)
    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 5e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        update_every: int = 5,
        model: nn.Module | None = None,
        process_group: ProcessGroup | None = None,
        distribution: str = "communication",
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas if isinstance(betas, str) or not isinstance(betas, Sequence) else tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "update_every": update_every,
        }
        super().__init__(params, model, 0, defaults, process_group, distribution)
        if self._model is None and any(map(_depends_on_module, self._names)):
            warn(
                "NGAdam was given parameters without their module: embedding tables and kernels of convolutions are "
                f"treated as plain matrices. {GIVE_MODULE}"
            )

    def _check(self, group: Mapping[str, Any]) -> None:
        check_learning_rate(group)
        betas = group["betas"]
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise ValueError(f"Invalid betas: {betas!r} (two numbers)")
        for i, beta in enumerate(betas):
            number(f"beta parameter at index {i}", beta, top=1.0, open_top=True)
        number("eps", group["eps"])

    @staticmethod
    def _refresh_rule(step: int, update_every: int) -> bool:
        return is_refresh(step + 1, update_every)

    def _captures(self, group: Mapping[str, Any]) -> bool:
        return False

    def _collect(self, params: Mapping[nn.Parameter, str]) -> tuple[list[ParameterMatrix], list[Use]]:
        matrices = [part for matrix in collect(self._model, params)[0] for part in separate(matrix)]
        for matrix in matrices:
            matrix.fixed_partition = _partition(matrix)
        return matrices, []

    def _begin(self) -> None:
        for matrix in self._matrices:
            grad = matrix.params[0].grad
            if grad is not None and grad.is_sparse and not matrix.sparse:
                matrix.sparse = True  # without the module, the first gradient shows it
                matrix.fixed_partition = _partition(matrix)

    def _due(self, matrix: ParameterMatrix) -> bool:
        return bool(matrix.partition_of(self._group(matrix)).stacks) and super()._due(matrix)  # vectors have no roots

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> MatrixPreconditioner:
        partition = matrix.partition_of(group)
        if isinstance(partition, TwoSidedPartition):
            return RootsPreconditioner(matrix, group, state)
        return (RowsPreconditioner if partition.stacks else AdamPreconditioner)(matrix, group, state)

    # ---------------------------------------------------------------------------------------------- inspection

    def plan(
        self, batch_size: int | None = None, positions: int | Mapping[str, int] = 1, *, verbose: bool = False
    ) -> Plan:
        """Returns the shape, blocks, bytes of state and FLOPs of each parameter.

        Args:
            batch_size (int): times ``positions``, the rows of a sparse gradient (default: None).
            positions (int or dict): one number for all parameters, or one by name (default: 1).
            verbose (bool): print all columns and whole names, not 80 columns (default: False).

        Examples:
            >>> plan = ngplus.NGAdam(nn.Linear(4, 2)).plan()
            >>> plan["weight"].side, plan["bias"].side
            ('both', 'none')
        """
        self._follow_groups()
        self._find_replicas()
        rows = []
        for matrix in self._matrices:
            group, state = self._group(matrix), self.state.get(matrix.params[0], {})
            places = positions.get(matrix.name, 1) if isinstance(positions, Mapping) else positions
            touched = min(matrix.layout.rows, (batch_size or 0) * places) if matrix.sparse else matrix.layout.rows
            row = _row(matrix, touched, matrix.partition_of(group), state, self._distributor(matrix))
            rows.append(unless_frozen(row, matrix, state))
        return Plan(tuple(rows), verbose)

    def health(self, eigenvalues: bool = False) -> Health:
        """Returns counts of skipped steps and failed refreshes by layer, since the optimizer was created.

        Args:
            eigenvalues (bool): add the smallest and largest eigenvalue of the matrix by whose inverse each momentum
                becomes a direction, by an eigendecomposition of the roots on this rank (default: False).

        Examples:
            >>> ngplus.NGAdam(nn.Linear(3, 2)).health().good
            True
        """
        found = super().health()
        return replace(found, eigenvalues=tuple(self._eigenvalues())) if eigenvalues else found

    def _eigenvalues(self) -> Iterator[EigenvalueBounds]:
        for matrix in self._matrices:
            preconditioner = self._preconditioner(matrix, self._group(matrix), self.state.get(matrix.params[0], {}))
            bounds = preconditioner.eigenvalue_bounds() if isinstance(preconditioner, RootsPreconditioner) else None
            if bounds is not None:
                yield EigenvalueBounds(matrix.name, *bounds)

    def curvature(self, which: str | nn.Parameter) -> Curvature:
        """Returns the moving average of L or R, the smaller one, of a parameter given by its name or as a tensor.

        Examples:
            >>> model = nn.Linear(4, 2)
            >>> optimizer = ngplus.NGAdam(model)
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> optimizer.step()
            >>> side, matrix = optimizer.curvature("weight")
            >>> side, tuple(matrix.shape)
            ('left', (2, 2))
        """
        matrix = self._find_matrix(which)
        state = self.state.get(matrix.params[0], {})
        if "right" not in state:
            raise RuntimeError(
                f"{matrix.name!r} has no L or R on this rank. Vectors have none. Matrices have them after the first "
                "step; with sharded parameters or distribution='memory', only on their owner (see plan())"
            )
        side = "left" if "left" in state and matrix.layout.rows <= matrix.layout.cols else "right"
        length = matrix.layout.rows if side == "left" else matrix.layout.cols
        blocks = state[side] / (1 - self._group(matrix)["betas"][1] ** state["step"])
        dense = torch.stack([torch.block_diag(*own)[:length, :length] for own in blocks.chunk(matrix.groups)])
        return Curvature(side, dense[0] if matrix.groups == 1 else dense)


def _depends_on_module(param: nn.Parameter) -> bool:
    """Returns True if the module may change a parameter's L and R, as for a table or a convolution's kernel."""
    return param.dim() > 2 or (param.dim() == 2 and has_diagonal(*param.shape))


def _partition(matrix: ParameterMatrix) -> BlockPartition:
    """The blocks of both sides; those of R for sparse gradients; none for vectors."""
    groups, m, n = matrix.groups, matrix.layout.rows, matrix.layout.cols
    if matrix.kinds[0] == "column" or min(m, n) == 0:
        return NoPartition(groups, m, m)
    if matrix.sparse:
        return BlockPartition(groups, n, block_size(n, 1))
    if matrix.lookup:
        return TwoSidedPartition(groups, m, 1, n, 1)
    return TwoSidedPartition(groups, m, block_size(m, n), n, block_size(n, m, matrix.layout.places))


def _row(
    matrix: ParameterMatrix, rows: int, partition: BlockPartition, state: State, distributor: Distributor | None
) -> PlanRow:
    """The row of plan(); ``rows`` is the number of rows of the gradient."""
    m, n, groups = matrix.layout.rows, matrix.layout.cols, matrix.groups
    sides: Sequence[BlockPartition] = [own for _, own in partition.sides("left")]
    both = len(sides) == 2
    bytes_each = torch.finfo(matrix.dtype).bits // 8
    moments = 0 if matrix.sparse else groups * m * n * (1 if sides else 2)
    padded = sum(groups * ceil(own.d / own.size) * own.size**2 for own in sides)  # the last block is filled up
    elements = moments + 2 * padded
    products = [
        (2 * own.elements, rows * n // own.d, own.size) for own in sides
    ]  # a side with a matrix of so many columns
    averages = sum(cost * other // (column_stride(other) if size > 1 else 1) for cost, other, size in products)
    return PlanRow(
        name=matrix.name,
        parameters=tuple(matrix.names),
        shape=(m, n),
        groups=groups,
        source="batch" if sides else "none",
        side="both" if both else "right" if sides else "none",
        solver="root" if sides else "none",
        blocks=partition.count if sides else 0,
        form="mini-batch" if sides else "",
        state_bytes=state_bytes(state) or elements * bytes_each,
        step_flops=averages + sum(cost * other for cost, other, _ in products),  # L and R, and D
        refresh_flops=9 * partition.cubes if sides else 0,
        inverse_flops=9 * partition.cubes if sides else 0,
        note="",
        owner=None if distributor is None else distributor.owners[id(matrix)],
        step_bytes=0 if distributor is None else distributor.traffic(matrix, {}).step * bytes_each,
        sparse=matrix.sparse,
        parameter_bytes=sum(p.numel() * p.element_size() for p in matrix.params),
    )
