"""SENG: the empirical Fisher of vec(G_i), layer by layer, inverted by Woodbury from factors that stay factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from ngplus.baselines.common import Batches, Rival
from ngplus.capture.accumulator import Accumulator, subsample
from ngplus.capture.collector import seed_of
from ngplus.capture.loss_scale import captured_scale
from ngplus.capture.matrices import ParameterMatrix
from ngplus.capture.samples import BatchDims
from ngplus.diagnostics.plan import PlanRow, state_bytes
from ngplus.fisher import inverses
from ngplus.fisher.factors import Bags, Factors, Joined, Lookup, Outer, Rows, as_lookup
from ngplus.fisher.factors.base import take
from ngplus.fisher.products import CHUNK_BYTES
from ngplus.optimizers.matrix_optimizer import ON_ALL_RANKS
from ngplus.optimizers.options import check_samples
from ngplus.preconditioners.base import Direction, MatrixPreconditioner, MatrixUpdate
from ngplus.utils.finite import RefreshStatus, all_finite
from ngplus.utils.typing import Group, State

Part = Outer | Lookup | Rows  # with tensors only, already in the curvature's precision and scale
_FIELDS: dict[type[Factors], tuple[str, ...]] = {
    Outer: ("left", "right"),
    Lookup: ("index", "values"),
    Rows: ("values",),
}


@dataclass
class _Columns(Batches):
    """The columns of U, batch by batch: a part and the number of its first column. Uses of one weight by the same
    samples are parts with the same columns, which add up."""

    parts: list[tuple[int, Part]] = field(default_factory=list)

    def add(self, matrix: ParameterMatrix, factors: Factors, group: Group, seed: int) -> None:
        index = subsample(factors.samples, group["samples"], seed)
        uses = factors.uses if isinstance(factors, Joined) else [factors]
        self.parts += [(self.used, part_of(use, index, matrix.dtype)) for use in uses]
        self.used += factors.samples if index is None else len(index)

    def length(self) -> Tensor:
        """|sum_i G_i| <= sqrt(sum |l|^2 sum |r|^2), the scale of the rounding in it; one-hot rows have length 1."""
        lengths = []
        for _, part in self.parts:
            left, right = _tensors(part) if isinstance(part, Outer) else (None, part.values)
            many = part.samples * (part.positions if isinstance(part, Lookup) else 1)
            lengths.append(((many if left is None else left.square().sum()) * right.square().sum()).sqrt())
        return torch.stack(lengths).sum() * (self.samples / self.used)


class WoodburyPreconditioner(MatrixPreconditioner):
    """(lambda I + U U^T)^-1 of vec(G), by Woodbury's identity, with the columns of U as factors."""

    def refresh(self, update: MatrixUpdate, gathered: Accumulator | None, status: RefreshStatus) -> None:
        matrix, group, state, gradient, rows = update.matrix, update.group, update.state, update.gradient, update.rows
        if gathered is None:  # one column: the mini-batch gradient, so that d = g / (lambda + |g|^2)
            one = Rows(gradient[:, None]) if rows is None else Lookup(rows, gradient, matrix.layout.rows)
            parts: list[tuple[int, Part]] = [(0, one)]
        else:
            assert isinstance(gathered, _Columns)
            scale = gathered.scale(group, captured_scale()) / gathered.used**0.5
            parts = [(start, _scaled(part, scale)) for start, part in gathered.parts]
        kept = _choose(parts, group["sketch"], seed_of(group))
        gram = gram_of([(start, _sketched(part, *kept)) for start, part in parts])
        bad = ~all_finite([gram])
        if bool(bad):
            status.add("dropped", bad)
            if self.fits():
                return
            parts, gram = [(0, Rows(torch.zeros_like(gradient[:, None])))], torch.zeros_like(gram[:1, :1])
        damping = torch.as_tensor(group["damping"], dtype=gram.dtype, device=gram.device)
        for key in [key for key in state if key not in ON_ALL_RANKS]:
            del state[key]
        _write(state, parts)
        state.update(core=inverses.dense_inverse(gram[None], damping, status)[0], damping=damping)
        state.update({key: x for key, x in zip(("kept_rows", "kept_cols"), kept, strict=True) if x is not None})
        state.update(rows=matrix.layout.rows, cols=matrix.layout.cols)

    def fits(self) -> bool:
        matrix, state = self.matrix, self.state
        if "core" not in state or (state["rows"], state["cols"]) != (matrix.layout.rows, matrix.layout.cols):
            return False
        return state["core"].dtype == matrix.dtype and state["core"].device == matrix.params[0].device

    def precondition(self, update: MatrixUpdate) -> Direction:
        matrix, state, gradient, rows = update.matrix, update.state, update.gradient, update.rows
        parts, kept = _read(state), (state.get("kept_rows"), state.get("kept_cols"))
        if rows is not None and not all(isinstance(part, Lookup) for _, part in parts):
            gradient = gradient.new_zeros(1, matrix.layout.rows, matrix.layout.cols).index_copy(1, rows[0], gradient)
            rows = None
        short = _short(gradient, *kept)
        inner = gradient.new_zeros(len(state["core"]))  # U^T g
        for start, part in parts:
            inner[start : start + part.samples] += against(_sketched(part, *kept), short, rows)
        z = state["core"] @ inner
        if rows is None:
            for start, part in parts:
                gradient = gradient - combine(part, z[start : start + part.samples])
            return gradient / state["damping"], None
        # U z has rows of its own, those of the batch of the last refresh; the sum of both is left to torch.
        index, values = [rows[0]], [gradient[0]]
        for start, part in parts:
            assert isinstance(part, Lookup)
            index.append(part.index.flatten())
            values.append(-(z[start : start + part.samples, None, None] * part.values).flatten(0, 1))
        touched, place = torch.cat(index).unique(return_inverse=True)
        direction = gradient.new_zeros(len(touched), gradient.shape[-1]).index_add_(0, place, torch.cat(values))
        return direction[None] / state["damping"], touched[None]


class SENG(Rival):
    """SENG: with U = [vec(G_1) ... vec(G_S)] / sqrt(S) for each layer, every ``update_every`` steps, and g = vec of the
    mini-batch gradient,

        d = (lambda I + U U^T)^-1 g = (g - U (lambda I + U^T U)^-1 U^T g) / lambda.

    U is kept as the factors of the G_i wherever these are smaller than the G_i themselves. With ``sketch`` the
    coefficients z solve the smaller problem min ||Omega U z - Omega g||^2 + lambda ||z||^2, and d = (g - U z)/lambda.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> optimizer = ngplus.baselines.SENG(model, lr=0.1, damping=1.0)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()

    Args:
        params: the model, or parameters or parameter groups of ``model``, as in torch.optim.
        model: the module that the parameters belong to, where ``params`` is not a module.
        lr, momentum, nesterov, weight_decay, maximize: as in ``NGPlus``.
        damping: lambda, absolute and above 0.
        update_every: steps between two refreshes. The first is at the first step.
        samples: how many columns U has: size or fraction of a random sub-sample of the batch; None is the whole batch.
        sketch: q: of the m rows and n columns of each G_i, q at random stand for all in U^T U and U^T g; None is exact.
        loss_reduction: ``"mean"``, the loss is an average over the batch or its tokens, or ``"sum"``.
        batch_dim: the dimension of the samples, as in ``NGPlus``.
        seed: of sub-samples and sketches.
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
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "damping": damping,
            "update_every": update_every,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "samples": samples,
            "sketch": sketch,
            "loss_reduction": loss_reduction,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, model, batch_dim, defaults)

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        check_samples(group)
        if not isinstance(group["sketch"], int | None) or (group["sketch"] is not None and group["sketch"] < 1):
            raise ValueError(f"Invalid sketch: {group['sketch']!r} (a whole number of 1 or more, or None)")
        if not group["damping"] > 0:
            raise ValueError(f"Invalid damping: {group['damping']} (SENG divides by it)")

    def _preconditioner(self, matrix: ParameterMatrix, group: Group, state: State) -> WoodburyPreconditioner:
        return WoodburyPreconditioner(matrix, group, state)

    def _row(self, matrix: ParameterMatrix, group: Group, state: State, samples: int, positions: int) -> PlanRow:
        m, n, groups = matrix.layout.rows, matrix.layout.cols, matrix.groups
        size = len(state["core"]) if "core" in state else samples
        factored = positions * (m + n) < m * n
        per_sample = positions * (m + n) if factored else m * n
        parts = _read(state)
        if parts:
            per_sample = sum(getattr(part, name)[:, 0].numel() for _, part in parts for name in _FIELDS[type(part)])
        form = "+".join(sorted({type(part).__name__.lower() for _, part in parts}))
        bytes_each = torch.finfo(matrix.dtype).bits // 8
        return PlanRow(
            name=matrix.name,
            parameters=tuple(matrix.names),
            shape=(m, n),
            groups=groups,
            source=matrix.refreshed_from,
            side="vec",
            solver="woodbury" if group["sketch"] is None else "sketched",
            blocks=1,
            form=form or ("outer" if factored else "rows"),
            state_bytes=state_bytes(state) or (groups * size * per_sample + size * size) * bytes_each,
            step_flops=4 * groups * size * m * n * (positions if factored else 1) + 2 * size * size,
            refresh_flops=2 * size * size * groups * min(m * n, positions**2 * (m + n)) + size**3,
            note=matrix.note,
        )


# ---------------------------------------------------------------------------------------------- U, part by part


def part_of(factors: Factors, index: Tensor | None, dtype: torch.dtype) -> Part:
    """The samples' G_i as factors or multiplied out, whichever is smaller."""
    samples: Tensor | slice = slice(None) if index is None else index
    if isinstance(factors, Bags):
        factors = as_lookup(factors)
    if isinstance(factors, Lookup):
        return Lookup(factors.index[samples], factors.values[samples].to(dtype), factors.rows)
    small = factors.positions * (factors.rows + factors.cols) < factors.rows * factors.cols
    if isinstance(factors, Outer) and small:
        return Outer(take(factors.left, samples).to(dtype), factors.dense_right(samples).to(dtype))
    count = factors.samples if index is None else len(index)
    pieces = []
    for start, stop in _chunks(count, factors.groups * factors.positions * (factors.rows + factors.cols)):
        pieces.append(factors.gradients(slice(start, stop) if index is None else index[start:stop], dtype))
    return Rows(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1))


def _scaled(part: Part, scale: Tensor | float) -> Part:
    if isinstance(part, Outer):
        assert isinstance(part.left, Tensor)
        return Outer(part.left * scale, part.right)
    return Lookup(part.index, part.values * scale, part.rows) if isinstance(part, Lookup) else Rows(part.values * scale)


def _tensors(part: Outer) -> tuple[Tensor, Tensor]:
    assert isinstance(part.left, Tensor)
    assert isinstance(part.right, Tensor)
    return part.left, part.right


def against(part: Part, gradient: Tensor, rows: Tensor | None = None) -> Tensor:
    """<G_i, g> for each sample, with g [groups, m, n] or, for an embedding, some of its rows."""
    if isinstance(part, Outer):
        left, right = _tensors(part)
        return ((left.flatten(1, 2) @ gradient).view_as(right) * right).sum((0, 2, 3))
    if isinstance(part, Rows):
        return (part.values.flatten(2) @ gradient.flatten(1)[..., None]).sum((0, 2))
    if rows is None:
        return (gradient[0][part.index] * part.values).sum((1, 2))
    place = torch.searchsorted(rows[0], part.index).clamp_max(rows.shape[1] - 1)
    found = (rows[0][place] == part.index)[..., None]
    return (gradient[0][place] * part.values * found).sum((1, 2))


def combine(part: Part, z: Tensor) -> Tensor:
    """sum_i z_i G_i, [groups, m, n]."""
    if isinstance(part, Outer):
        left, right = _tensors(part)
        return (z[:, None, None] * left).flatten(1, 2).mT @ right.flatten(1, 2)
    if isinstance(part, Rows):
        return torch.einsum("s,gsmn->gmn", z, part.values)
    values = (z[:, None, None] * part.values).flatten(0, 1)
    return values.new_zeros(part.rows, part.cols).index_add_(0, part.index.flatten(), values)[None]


def gram_of(parts: Sequence[tuple[int, Part]]) -> Tensor:
    """U^T U, [S, S]."""
    size = max(start + part.samples for start, part in parts)
    like = next(getattr(parts[0][1], name) for name in ("left", "values") if hasattr(parts[0][1], name))
    out = like.new_zeros(size, size)
    for i, (at, a) in enumerate(parts):
        for to, b in parts[: i + 1]:
            block = inner_products(a, b)
            out[at : at + a.samples, to : to + b.samples] += block
            if a is not b:
                out[to : to + b.samples, at : at + a.samples] += block.T
    return out


def inner_products(a: Part, b: Part) -> Tensor:
    """<G_i, G_j> for the samples i of one part and j of the other, in the cheaper of two forms.

    By positions, without any G_i: the sum over p, q of (l_ip . l_jq)(r_ip . r_jq), of kappa^2 (m + n) multiplications;
    for one position it is (L L^T) * (R R^T). Or multiplied out: m n, and kappa m n for each sample of ``a`` and, as
    often as ``a`` has chunks, of ``b``.
    """
    size, groups = a.rows * a.cols, a.groups
    out = []
    if not isinstance(a, Rows) and not isinstance(b, Rows):
        dense = isinstance(a, Outer) and isinstance(b, Outer)
        positions = a.positions * b.positions * (a.cols + (a.rows if dense else 0))
        chunk = _chunks(a.samples, groups * size)[0][1]
        if positions <= size * (1 + a.positions / b.samples + b.positions / chunk):
            for start, stop in _chunks(a.samples, 2 * groups * a.positions * b.samples * b.positions):
                product = _left_products(a, b, slice(start, stop)) * _right_products(a, b, slice(start, stop))
                blocks = product.sum(0).view(stop - start, a.positions, b.samples, b.positions)
                out.append(blocks.sum((1, 3)))
            return torch.cat(out)
    for start, stop in _chunks(a.samples, groups * size):
        own = _multiplied_out(a, start, stop)
        pieces = [own @ _multiplied_out(b, *piece).mT for piece in _chunks(b.samples, groups * size)]
        out.append(torch.cat(pieces, dim=-1).sum(0))
    return torch.cat(out)


def _multiplied_out(part: Part, start: int, stop: int) -> Tensor:
    if isinstance(part, Rows):
        return part.values[:, start:stop].flatten(2)
    return part.gradients(
        slice(start, stop), (_tensors(part)[0] if isinstance(part, Outer) else part.values).dtype
    ).flatten(2)


def _right_products(a: Outer | Lookup, b: Outer | Lookup, piece: slice) -> Tensor:
    left, right = (x.right if isinstance(x, Outer) else x.values[None] for x in (a, b))
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    return left[:, piece].flatten(1, 2) @ right.flatten(1, 2).mT


def _left_products(a: Outer | Lookup, b: Outer | Lookup, piece: slice) -> Tensor:
    """The left factor of an embedding is one-hot: its products are comparisons of indices, or a choice of entries."""
    one = a.index[piece].flatten() if isinstance(a, Lookup) else _tensors(a)[0][:, piece].flatten(1, 2)
    two = b.index.flatten() if isinstance(b, Lookup) else _tensors(b)[0].flatten(1, 2)
    if isinstance(a, Lookup):
        return (one[:, None] == two)[None] if isinstance(b, Lookup) else two[:, :, one].mT
    return one[:, :, two] if isinstance(b, Lookup) else one @ two.mT


def _chunks(count: int, numbers: int) -> list[tuple[int, int]]:
    """Ranges of samples that need so many numbers each."""
    step = max(1, CHUNK_BYTES // (8 * max(1, numbers)))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


# ---------------------------------------------------------------------------------------------- the sketch

Kept = tuple[Tensor | None, Tensor | None]  # rows and columns of G that stand for all, with E[Omega^T Omega] = I


def _choose(parts: Sequence[tuple[int, Part]], size: int | None, seed: int) -> Kept:
    """q rows and q columns, without replacement. An embedding keeps all rows: of its G_i few are not zero."""
    first = parts[0][1]
    generator = torch.Generator().manual_seed(seed)
    device = next(getattr(first, name) for name in _FIELDS[type(first)]).device
    table = any(isinstance(part, Lookup) for _, part in parts)

    def choose(d: int) -> Tensor | None:
        if size is None or size >= d:
            return None
        return torch.randperm(d, generator=generator)[:size].sort().values.to(device)

    return None if table else choose(first.rows), choose(first.cols)


def _pick(x: Tensor, dim: int, kept: Tensor | None) -> Tensor:
    """Omega along one dimension: the entries kept, times sqrt(d/q)."""
    return x if kept is None else x.index_select(dim, kept) * (x.shape[dim] / len(kept)) ** 0.5


def _short(gradient: Tensor, rows: Tensor | None, cols: Tensor | None) -> Tensor:
    return _pick(_pick(gradient, -2, rows), -1, cols)


def _sketched(part: Part, rows: Tensor | None, cols: Tensor | None) -> Part:
    if isinstance(part, Outer):
        left, right = _tensors(part)
        return Outer(_pick(left, -1, rows), _pick(right, -1, cols))
    if isinstance(part, Rows):
        return Rows(_short(part.values, rows, cols))
    return Lookup(part.index, _pick(part.values, -1, cols), part.rows)


# ---------------------------------------------------------------------------------------------- state


def _write(state: State, parts: Sequence[tuple[int, Part]]) -> None:
    """Tensors and numbers only (torch's load_state_dict takes a string apart): ``part0_start``, ``part0_left``, ..."""
    for i, (start, part) in enumerate(parts):
        state[f"part{i}_start"] = start
        state.update({f"part{i}_{name}": getattr(part, name) for name in _FIELDS[type(part)]})


def _read(state: State) -> list[tuple[int, Part]]:
    parts: list[tuple[int, Part]] = []
    while (at := f"part{len(parts)}_") + "start" in state:
        if at + "left" in state:
            part: Part = Outer(state[at + "left"], state[at + "right"])
        elif at + "index" in state:
            part = Lookup(state[at + "index"], state[at + "values"], int(state["rows"]))
        else:
            part = Rows(state[at + "values"])
        parts.append((int(state[at + "start"]), part))
    return parts
