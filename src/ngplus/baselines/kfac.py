"""KFAC with the empirical Fisher, as the NG+ paper compares with it: sqrt(lambda) I on both Kronecker factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ngplus.baselines.common import BaselineAccumulator, BaselineOptimizer
from ngplus.capture.accumulator import Accumulator
from ngplus.capture.batch import BatchDims
from ngplus.capture.loss_scale import captured_scale
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.sample_index import SampleIndex
from ngplus.diagnostics.plan import state_bytes
from ngplus.fisher import inverses, products
from ngplus.fisher.factors import Factors, Joined, Outer, Segments, at_once
from ngplus.fisher.factors.base import take
from ngplus.preconditioners.base import Direction, MatrixPreconditioner, MatrixUpdate
from ngplus.utils.finite import RefreshStatus, all_finite, read_if_on_host
from ngplus.utils.typing import Group, State
from ngplus.utils.validation import choice, number


class KroneckerFactors(NamedTuple):
    r"""$A = \mathbb{E}[a a^\top]$ of a layer's inputs and $G = \mathbb{E}[g g^\top]$ of its outputs' gradients.

    They are undamped, [n, n] and [m, m], with a leading dimension of groups for a grouped convolution.

    Examples:
        >>> pair = ngplus.baselines.KroneckerFactors(input=torch.eye(3), output=torch.eye(2))
        >>> tuple(pair.input.shape), tuple(pair.output.shape)
        ((3, 3), (2, 2))
    """

    input: Tensor
    output: Tensor


@dataclass
class _Sums(BaselineAccumulator):
    """Sums over samples and positions; ``total`` is the sum for L or R of matrices without Kronecker factors."""

    input: Tensor | None = None
    output: Tensor | None = None
    places: int = 0  # summands of ``input``
    bound: float | Tensor = 0.0

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        uses = [at_once(use) for use in (factors.uses if isinstance(factors, Joined) else [factors])]
        expand = group["approx"] == "expand"
        flat = [in_one_sample(use) if isinstance(use, Segments) and expand else use for use in uses]
        outer = [use for use in flat if isinstance(use, Outer)]
        if len(outer) < len(uses):
            side = matrix.side("smaller")
            sums = products.gfim_sum(factors, side, matrix.partition(side, None), dtype=matrix.dtype)
            self.product_sum = (
                sums if self.product_sum is None else [a + b for a, b in zip(self.product_sum, sums, strict=True)]
            )
            self.used += factors.samples
            return
        for together in [[use] for use in outer] if expand else [outer]:
            a, g, lengths = kronecker_sums(together, expand, matrix.dtype)
            self.input = a if self.input is None else self.input + a
            self.output = g if self.output is None else self.output + g
            self.bound = self.bound + lengths
        self.places += sum(positions(use) for use in outer) if expand else factors.samples

    def length(self) -> Tensor:
        """An upper bound on |sum_i G_i|: sqrt(sum |l|^2 sum |r|^2)."""
        plain = super().length() if self.product_sum is not None else torch.zeros(())
        return plain + torch.as_tensor(self.bound)

    def means(self, scale: Tensor | float) -> dict[str, Tensor]:
        if self.product_sum is not None:
            return {"curvature": self.product_sum[0] * (scale * scale / self.used)}
        assert self.input is not None
        assert self.output is not None
        return {"input": self.input / self.places, "output": self.output * (scale * scale / self.samples)}


def positions(factors: Outer) -> int:
    """The positions of all samples, without padding."""
    return factors.samples * factors.positions if factors.sizes is None else sum(factors.sizes)


def is_position(factors: Outer, samples: slice) -> Tensor:
    """[samples, positions]: which positions are not padding."""
    if factors.sizes is None:
        return torch.ones(len(range(factors.samples)[samples]), factors.positions, dtype=torch.bool)
    return torch.arange(factors.positions) < torch.tensor(factors.sizes[samples])[:, None]


def in_one_sample(factors: Segments) -> Outer:
    """The positions of all samples as those of one: A and G of ``approx="expand"`` are sums over all of them."""
    return Outer(factors.left[None, None], factors.right[None, None], factors.ones)


def kronecker_sums(uses: list[Outer], expand: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of a a^T, [groups, n, n], and of g g^T, [groups, m, m], and sqrt(sum |a|^2 sum |g|^2).

    Several uses of one weight by the same samples are further positions. The samples are summed in chunks, since the
    patches of a convolution are larger than its input by the size of the kernel.
    """
    first = uses[0]
    numbers = first.groups * sum(use.positions for use in uses) * (first.rows + first.cols)
    step = max(1, products.CHUNK_BYTES // (numbers * (torch.finfo(dtype).bits // 8)))
    device = first.left.device
    sums = [torch.zeros(first.groups, d, d, dtype=dtype, device=device) for d in (first.cols, first.rows)]
    squares = [torch.zeros((), dtype=dtype, device=device) for _ in sums]
    for start in range(0, first.samples, step):
        piece = slice(start, start + step)
        both: tuple[list[Tensor], list[Tensor]] = ([], [])
        counts = torch.zeros((), device=device)
        for use in uses:
            mask = is_position(use, piece).to(device=device)
            both[0].append(use.dense_right(piece).to(dtype) * mask.unsqueeze(-1))
            both[1].append(take(use.left, piece).to(dtype))
            counts = counts + mask.sum(1)
        for i, parts in enumerate(both):
            squares[i] += sum(x.square().sum() for x in parts)
            if expand:
                tall = [x.flatten(1, 2) for x in parts]
            else:
                reduced = torch.stack([x.sum(2) for x in parts]).sum(0)
                tall = [reduced / counts.clamp_min(1).unsqueeze(-1).to(dtype) if i == 0 else reduced]
            for x in tall:
                sums[i].baddbmm_(x.mT, x)
    return sums[0], sums[1], (squares[0] * squares[1]).sqrt()


class KroneckerPreconditioner(MatrixPreconditioner):
    """(G + sqrt(lambda) I)^-1 grad (A + sqrt(lambda) I)^-1, or (lambda I + L)^-1 grad where there are no factors."""

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        matrix, group, state, gradient = update.matrix, update.group, update.state, update.gradient
        estimate: dict[str, Tensor]
        if gathered is None:
            curved = gradient if matrix.side("smaller") == "left" else gradient.mT
            estimate = {"curvature": curved @ curved.mT}
        else:
            assert isinstance(gathered, _Sums)
            estimate = gathered.means(gathered.scale(group, captured_scale()))
        bad = ~all_finite(list(estimate.values()))
        dropped = read_if_on_host(bad)
        if dropped is not False:
            status.add("dropped", bad)
            if dropped and self.fits():
                return
            estimate = {key: x.masked_fill(bad, 0) for key, x in estimate.items()}
        beta = group["beta"] if group["step"] > 0 else 0.0
        for key, old in [(key, state.get(key)) for key in estimate]:
            if beta and old is not None and old.shape == estimate[key].shape:
                estimate[key] = beta * old.to(estimate[key]) + (1 - beta) * estimate[key]
        for key in ("curvature", "input", "output"):
            state.pop(key, None)
            state.pop(key + "_inverse", None)
        for key, x in estimate.items():
            damping = torch.as_tensor(group["damping"], dtype=x.dtype, device=x.device)
            state[key + "_inverse"] = inverses.dense_inverse(
                x, damping if key == "curvature" else damping.sqrt(), status
            )
        if group["beta"]:
            state.update(estimate)

    def fits(self) -> bool:
        matrix, state, layout = self.matrix, self.state, self.matrix.layout
        if "curvature_inverse" in state:
            sizes = {"curvature": min(layout.rows, layout.cols)}
        else:
            sizes = {"input": layout.cols, "output": layout.rows}
        found = {key: state.get(key + "_inverse") for key in sizes}
        return all(
            x is not None
            and x.shape == (matrix.groups, sizes[key], sizes[key])
            and x.dtype == matrix.dtype
            and x.device == matrix.params[0].device
            for key, x in found.items()
        )

    def precondition(self, update: MatrixUpdate) -> Direction:
        matrix, state, gradient, rows = update.matrix, update.state, update.gradient, update.rows
        if "curvature_inverse" in state:
            inverse = state["curvature_inverse"]
            return (inverse @ gradient if matrix.side("smaller") == "left" else gradient @ inverse), rows
        if rows is not None:  # a tied table whose last gradient was dense, and this one is not
            gradient = gradient.new_zeros(1, matrix.layout.rows, matrix.layout.cols).index_copy(1, rows[0], gradient)
        return state["output_inverse"] @ gradient @ state["input_inverse"], None


class KFAC(BaselineOptimizer):
    r"""KFAC with the empirical Fisher.

    $$W \leftarrow W - \alpha (G + \sqrt{\lambda} I)^{-1} \nabla W (A + \sqrt{\lambda} I)^{-1}$$

    $A = \mathbb{E}[a a^\top]$ of a layer's inputs (with a 1 for the bias) and $G = \mathbb{E}[g g^\top]$ of the
    gradients of its outputs. docs/baselines.md defines them for layers with several positions. Parameters without such
    factors (norm layers, embeddings, modules without a rule) get $(\lambda I + L)^{-1} \nabla W$ of NG+ on their
    smaller side.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = ngplus.baselines.KFAC(model, lr=0.03, damping=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> a, g = optimizer.factors("weight")
        >>> tuple(a.shape), tuple(g.shape)
        ((5, 5), (2, 2))

    Args:
        params (Module or iterable): the model, or parameters or parameter groups of ``model``.
        lr (float or Tensor): learning rate (default: 0.03).
        damping (float): $\lambda$; each factor gets its square root (default: 0.1).
        update_every (int): steps between two refreshes. The first step has a refresh (default: 10).
        beta (float): decay of the moving averages of $A$ and $G$ over refreshes; 0 for none (default: 0.95).
        approx (str): ``"expand"`` or ``"reduce"``, for layers with several positions (default: ``"expand"``).
        momentum, nesterov, weight_decay, maximize, model, loss_reduction, batch_dim, sample_index: as in ``NGPlus``.
    """

    _accumulator_type = _Sums

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.03,
        *,
        model: nn.Module | None = None,
        damping: float = 0.1,
        update_every: int = 10,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        beta: float = 0.95,
        approx: str = "expand",
        loss_reduction: str = "mean",
        batch_dim: BatchDims = 0,
        sample_index: SampleIndex | None = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "damping": damping, "update_every": update_every, "momentum": momentum, "nesterov": nesterov,
            "weight_decay": weight_decay, "beta": beta, "approx": approx, "loss_reduction": loss_reduction,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, model, batch_dim, sample_index, defaults)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        number("beta", group["beta"], top=1.0)
        choice("approx", group["approx"], ("expand", "reduce"))

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> KroneckerPreconditioner:
        return KroneckerPreconditioner(matrix, group, state)

    def factors(self, which: str | nn.Parameter) -> KroneckerFactors:
        """Returns the moving averages of A and G of a parameter (name or tensor), for a ``beta`` above 0."""
        matrix = self._find_matrix(which)
        state = self.state.get(matrix.params[0], {})
        if "input" not in state:
            raise RuntimeError(
                f"{matrix.name!r} has no Kronecker factors: beta is 0, there was no step, or plan() shows another "
                "solver for it"
            )
        pair = KroneckerFactors(state["input"], state["output"])
        return pair if matrix.groups > 1 else KroneckerFactors(pair.input[0], pair.output[0])

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> dict[str, Any]:
        m, n, groups = matrix.layout.rows, matrix.layout.cols, matrix.groups
        likely = matrix.source == "sample" and matrix.kinds[0] != "column" and not matrix.lookup
        kronecker = "output_inverse" in state or ("curvature_inverse" not in state and likely)
        sizes = (m, n) if kronecker else (min(m, n),)
        elements = groups * sum(d * d for d in sizes) * (2 if group["beta"] else 1)
        used = positions if group["approx"] == "expand" else 1
        return {
            "side": "both" if kronecker else matrix.side("smaller"),
            "solver": "kronecker" if kronecker else "dense",
            "blocks": groups,
            "form": group["approx"] if kronecker else "",
            "state_bytes": state_bytes(state) or elements * (torch.finfo(matrix.dtype).bits // 8),
            "step_flops": 2 * groups * m * n * sum(sizes),
            "refresh_flops": groups * sum(d**3 + 2 * samples * used * d * d for d in sizes),
        }
