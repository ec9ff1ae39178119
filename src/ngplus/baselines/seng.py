"""SENG: the empirical Fisher matrix of vec(G_i) for each layer, inverted by Woodbury's identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ngplus.baselines import seng_columns as columns
from ngplus.baselines.common import BaselineAccumulator, BaselineOptimizer
from ngplus.baselines.seng_columns import Part
from ngplus.capture.accumulator import Accumulator, subsample
from ngplus.capture.batch import BatchDims
from ngplus.capture.collector import seed_of
from ngplus.capture.loss_scale import captured_scale
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.sample_index import SampleIndex
from ngplus.diagnostics.plan import state_bytes
from ngplus.fisher import inverses
from ngplus.fisher.factors import Factors, Joined, Lookup, Outer, Rows, at_once
from ngplus.optimizers.matrix_optimizer import ON_ALL_RANKS
from ngplus.optimizers.options import check_samples
from ngplus.preconditioners.base import Direction, MatrixPreconditioner, MatrixUpdate
from ngplus.utils.finite import RefreshStatus, all_finite
from ngplus.utils.typing import Group, State


@dataclass
class _Columns(BaselineAccumulator):
    """The columns of U, over all micro-batches."""

    parts: list[tuple[int, Part]] = field(default_factory=list)

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        index = subsample(factors.samples, group["samples"], seed)
        uses = factors.uses if isinstance(factors, Joined) else [factors]
        self.parts += [(self.used, columns.make_part(at_once(use), index, matrix.dtype)) for use in uses]
        self.used += factors.samples if index is None else len(index)

    def length(self) -> Tensor:
        """An upper bound on |sum_i G_i|: sqrt(sum |l|^2 sum |r|^2), where one-hot vectors have norm 1."""
        lengths = []
        for _, part in self.parts:
            left, right = columns.dense_factors(part) if isinstance(part, Outer) else (None, part.values)
            many = part.samples * (part.positions if isinstance(part, Lookup) else 1)
            lengths.append(((many if left is None else left.square().sum()) * right.square().sum()).sqrt())
        return torch.stack(lengths).sum() * (self.samples / self.used)


class WoodburyPreconditioner(MatrixPreconditioner):
    """(lambda I + U U^T)^-1 vec(G) by Woodbury's identity."""

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        matrix, group, state, gradient, rows = update.matrix, update.group, update.state, update.gradient, update.rows
        if gathered is None:  # one column: the mini-batch gradient, so that d = g / (lambda + |g|^2)
            one = Rows(gradient[:, None]) if rows is None else Lookup(rows, gradient, matrix.layout.rows)
            parts: list[tuple[int, Part]] = [(0, one)]
        else:
            assert isinstance(gathered, _Columns)
            scale = gathered.scale(group, captured_scale()) / gathered.used**0.5
            parts = [(start, columns.scaled(part, scale)) for start, part in gathered.parts]
        omega = columns.choose_sketch(parts, group["sketch"], seed_of(group))
        gram = columns.gram([(start, columns.sketched(part, *omega)) for start, part in parts])
        bad = ~all_finite([gram])
        if bool(bad):
            status.add("dropped", bad)
            if self.fits():
                return
            parts, gram = [(0, Rows(torch.zeros_like(gradient[:, None])))], torch.zeros_like(gram[:1, :1])
        damping = torch.as_tensor(group["damping"], dtype=gram.dtype, device=gram.device)
        for key in [key for key in state if key not in ON_ALL_RANKS]:
            del state[key]
        columns.write_state(state, parts)
        state.update(core=inverses.dense_inverse(gram[None], damping, status)[0], damping=damping)
        state.update({key: x for key, x in zip(("kept_rows", "kept_cols"), omega, strict=True) if x is not None})
        state.update(rows=matrix.layout.rows, cols=matrix.layout.cols)

    def fits(self) -> bool:
        matrix, state = self.matrix, self.state
        if "core" not in state or (state["rows"], state["cols"]) != (matrix.layout.rows, matrix.layout.cols):
            return False
        return state["core"].dtype == matrix.dtype and state["core"].device == matrix.params[0].device

    def precondition(self, update: MatrixUpdate) -> Direction:
        matrix, state, gradient, rows = update.matrix, update.state, update.gradient, update.rows
        parts, omega = columns.read_state(state), (state.get("kept_rows"), state.get("kept_cols"))
        if rows is not None and not all(isinstance(part, Lookup) for _, part in parts):
            gradient = gradient.new_zeros(1, matrix.layout.rows, matrix.layout.cols).index_copy(1, rows[0], gradient)
            rows = None
        short = columns.sketch_gradient(gradient, *omega)
        inner = gradient.new_zeros(len(state["core"]))  # U^T g
        for start, part in parts:
            inner[start : start + part.samples] += columns.inner_with(columns.sketched(part, *omega), short, rows)
        z = state["core"] @ inner
        if rows is None:
            for start, part in parts:
                gradient = gradient - columns.combine(part, z[start : start + part.samples])
            return gradient / state["damping"], None
        # U z has the table rows of the last refresh, g those of this batch: their sum has both.
        index, values = [rows[0]], [gradient[0]]
        for start, part in parts:
            assert isinstance(part, Lookup)
            index.append(part.index.flatten())
            values.append(-(z[start : start + part.samples, None, None] * part.values).flatten(0, 1))
        touched, place = torch.cat(index).unique(return_inverse=True)
        direction = gradient.new_zeros(len(touched), gradient.shape[-1]).index_add_(0, place, torch.cat(values))
        return direction[None] / state["damping"], touched[None]


class SENG(BaselineOptimizer):
    r"""SENG: the empirical Fisher matrix of each layer, inverted by Woodbury's identity.

    With $U = [\operatorname{vec}(G_1) \ldots \operatorname{vec}(G_S)] / \sqrt{S}$ for each layer, every
    ``update_every`` steps, and $g = \operatorname{vec}(\nabla W)$ of the mini-batch gradient,

    $$d = (\lambda I + U U^\top)^{-1} g = \tfrac{1}{\lambda} \left( g - U (\lambda I + U^\top U)^{-1} U^\top g \right)$$

    With ``sketch``, $d = (g - U z) / \lambda$ with $z$ from a smaller least-squares problem. docs/baselines.md has the
    details.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = ngplus.baselines.SENG(model, lr=0.1, damping=1.0)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()

    Args:
        params (Module or iterable): the model, or parameters or parameter groups of ``model``.
        lr (float or Tensor): learning rate (default: 0.1).
        damping (float): $\lambda$, above 0 (default: 1.0).
        update_every (int): steps between two refreshes. The first step has a refresh (default: 10).
        samples (int or float): the number of columns of $U$: size or fraction of a random sub-sample of the batch;
            None for the whole batch (default: None).
        sketch (int): $q$, the random rows and columns of each $G_i$ that stand for all in $U^\top U$ and $U^\top g$;
            None for all (default: None).
        seed (int): seed of sub-samples and sketches (default: 0).
        momentum, nesterov, weight_decay, maximize, model, loss_reduction, batch_dim, sample_index: as in ``NGPlus``.
    """

    _accumulator_type = _Columns

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.1,
        *,
        model: nn.Module | None = None,
        damping: float = 1.0,
        update_every: int = 10,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        samples: int | float | None = None,
        sketch: int | None = None,
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        sample_index: SampleIndex | None = None,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "damping": damping, "update_every": update_every, "momentum": momentum, "nesterov": nesterov,
            "weight_decay": weight_decay, "samples": samples, "sketch": sketch, "loss_reduction": loss_reduction,
            "seed": seed, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, model, batch_dim, sample_index, defaults)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_samples(group)
        if not isinstance(group["sketch"], int | None) or (group["sketch"] is not None and group["sketch"] < 1):
            raise ValueError(f"Invalid sketch: {group['sketch']!r} (a whole number of 1 or more, or None)")
        if not group["damping"] > 0:
            raise ValueError(f"Invalid damping: {group['damping']} (SENG divides by it)")

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> WoodburyPreconditioner:
        return WoodburyPreconditioner(matrix, group, state)

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> dict[str, Any]:
        m, n, groups = matrix.layout.rows, matrix.layout.cols, matrix.groups
        size = len(state["core"]) if "core" in state else samples
        factored = positions * (m + n) < m * n
        per_sample = positions * (m + n) if factored else m * n
        parts = columns.read_state(state)
        if parts:
            per_sample = sum(
                getattr(part, name)[:, 0].numel() for _, part in parts for name in columns.FIELDS[type(part)]
            )
        form = "+".join(sorted({type(part).__name__.lower() for _, part in parts}))
        bytes_each = torch.finfo(matrix.dtype).bits // 8
        return {
            "side": "vec",
            "solver": "woodbury" if group["sketch"] is None else "sketched",
            "blocks": 1,
            "form": form or ("outer" if factored else "rows"),
            "state_bytes": state_bytes(state) or (groups * size * per_sample + size * size) * bytes_each,
            "step_flops": 4 * groups * size * m * n * (positions if factored else 1) + 2 * size * size,
            "refresh_flops": 2 * size * size * groups * min(m * n, positions**2 * (m + n)) + size**3,
        }
