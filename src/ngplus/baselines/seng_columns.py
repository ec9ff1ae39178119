"""The columns vec(G_i) of SENG's U, as factors or multiplied out: their products, their sketch, their state.

A part is the G_i of some samples; U is a list of parts, each with the index of its first column. Parts with the same
columns are added: they are the uses of one weight by the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ngplus.fisher.factors import Bags, Factors, Lookup, Outer, Rows, as_lookup
from ngplus.fisher.factors.base import take
from ngplus.fisher.products import CHUNK_BYTES
from ngplus.utils.typing import State

Part = Outer | Lookup | Rows  # tensors only, in the precision of the curvature
FIELDS: dict[type[Factors], tuple[str, ...]] = {
    Outer: ("left", "right"),
    Lookup: ("index", "values"),
    Rows: ("values",),
}
Columns = Sequence[tuple[int, Part]]  # of U: the index of the first column, and the part


def make_part(factors: Factors, index: Tensor | None, dtype: torch.dtype) -> Part:
    """The G_i of the samples, as factors or explicitly, whichever is smaller."""
    samples: Tensor | slice = slice(None) if index is None else index
    if isinstance(factors, Bags):
        factors = as_lookup(factors)
    if isinstance(factors, Lookup):
        return Lookup(factors.index[samples], factors.values[samples].to(dtype), factors.rows)
    small = factors.positions * (factors.rows + factors.cols) < factors.rows * factors.cols
    if isinstance(factors, Outer) and small:
        return Outer(take(factors.left, samples).to(dtype), factors.dense_right(samples).to(dtype))
    count = factors.samples if index is None else len(index)
    chunks = []
    for start, stop in _chunks(count, factors.groups * factors.positions * (factors.rows + factors.cols)):
        chunks.append(factors.gradients(slice(start, stop) if index is None else index[start:stop], dtype))
    return Rows(chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1))


def scaled(part: Part, scale: Tensor | float) -> Part:
    if isinstance(part, Outer):
        assert isinstance(part.left, Tensor)
        return Outer(part.left * scale, part.right)
    return Lookup(part.index, part.values * scale, part.rows) if isinstance(part, Lookup) else Rows(part.values * scale)


def dense_factors(part: Outer) -> tuple[Tensor, Tensor]:
    assert isinstance(part.left, Tensor)
    assert isinstance(part.right, Tensor)
    return part.left, part.right


def inner_with(part: Part, gradient: Tensor, rows: Tensor | None = None) -> Tensor:
    """<G_i, g> for each sample, with g [groups, m, n] or, for an embedding, the rows of g with these indices."""
    if isinstance(part, Outer):
        left, right = dense_factors(part)
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
        left, right = dense_factors(part)
        return (z[:, None, None] * left).flatten(1, 2).mT @ right.flatten(1, 2)
    if isinstance(part, Rows):
        return torch.einsum("s,gsmn->gmn", z, part.values)
    values = (z[:, None, None] * part.values).flatten(0, 1)
    return values.new_zeros(part.rows, part.cols).index_add_(0, part.index.flatten(), values)[None]


def gram(parts: Columns) -> Tensor:
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

    Factored: the sum over p, q of (l_ip . l_jq)(r_ip . r_jq), kappa^2 (m + n) multiplications. Explicit: m n
    multiplications, and kappa m n to compute G_i and G_j; those of ``b`` are computed again for each chunk of ``a``.
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
        own = _explicit(a, start, stop)
        pieces = [own @ _explicit(b, *piece).mT for piece in _chunks(b.samples, groups * size)]
        out.append(torch.cat(pieces, dim=-1).sum(0))
    return torch.cat(out)


def _explicit(part: Part, start: int, stop: int) -> Tensor:
    if isinstance(part, Rows):
        return part.values[:, start:stop].flatten(2)
    return part.gradients(
        slice(start, stop), (dense_factors(part)[0] if isinstance(part, Outer) else part.values).dtype
    ).flatten(2)


def _right_products(a: Outer | Lookup, b: Outer | Lookup, piece: slice) -> Tensor:
    left, right = (x.right if isinstance(x, Outer) else x.values[None] for x in (a, b))
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    return left[:, piece].flatten(1, 2) @ right.flatten(1, 2).mT


def _left_products(a: Outer | Lookup, b: Outer | Lookup, piece: slice) -> Tensor:
    """Inner products of left factors; those of an embedding are one-hot, given by their indices."""
    one = a.index[piece].flatten() if isinstance(a, Lookup) else dense_factors(a)[0][:, piece].flatten(1, 2)
    two = b.index.flatten() if isinstance(b, Lookup) else dense_factors(b)[0].flatten(1, 2)
    if isinstance(a, Lookup):
        return (one[:, None] == two)[None] if isinstance(b, Lookup) else two[:, :, one].mT
    return one[:, :, two] if isinstance(b, Lookup) else one @ two.mT


def _chunks(count: int, numbers: int) -> list[tuple[int, int]]:
    """Ranges of samples of at most ``CHUNK_BYTES``, with so many float64 entries per sample."""
    step = max(1, CHUNK_BYTES // (8 * max(1, numbers)))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


Omega = tuple[Tensor | None, Tensor | None]  # indices of the sampled rows and columns of G; None is all of them


def choose_sketch(parts: Columns, size: int | None, seed: int) -> Omega:
    """q rows and q columns, without replacement; all rows of an embedding, whose G_i have few nonzero rows."""
    first = parts[0][1]
    generator = torch.Generator().manual_seed(seed)
    device = next(getattr(first, name) for name in FIELDS[type(first)]).device
    table = any(isinstance(part, Lookup) for _, part in parts)

    def choose(d: int) -> Tensor | None:
        if size is None or size >= d:
            return None
        return torch.randperm(d, generator=generator)[:size].sort().values.to(device)

    return None if table else choose(first.rows), choose(first.cols)


def _select(x: Tensor, dim: int, index: Tensor | None) -> Tensor:
    """Applies Omega along one dimension: samples entries, times sqrt(d/q), so that E[Omega^T Omega] = I."""
    return x if index is None else x.index_select(dim, index) * (x.shape[dim] / len(index)) ** 0.5


def sketch_gradient(gradient: Tensor, rows: Tensor | None, cols: Tensor | None) -> Tensor:
    return _select(_select(gradient, -2, rows), -1, cols)


def sketched(part: Part, rows: Tensor | None, cols: Tensor | None) -> Part:
    if isinstance(part, Outer):
        left, right = dense_factors(part)
        return Outer(_select(left, -1, rows), _select(right, -1, cols))
    if isinstance(part, Rows):
        return Rows(sketch_gradient(part.values, rows, cols))
    return Lookup(part.index, _select(part.values, -1, cols), part.rows)


def write_state(state: State, parts: Columns) -> None:
    """Writes the parts as ``part0_start``, ``part0_left``, ...: tensors and numbers only."""
    for i, (start, part) in enumerate(parts):
        state[f"part{i}_start"] = start
        state.update({f"part{i}_{name}": getattr(part, name) for name in FIELDS[type(part)]})


def read_state(state: State) -> list[tuple[int, Part]]:
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
