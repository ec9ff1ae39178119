"""Scaling "adaptive", beyond the paper: Adam's moments kept in the eigenbasis of L or R.

Where both sides are curved, L and R each give a basis: Q_L^T G Q_R; where none is, this is Adam.

The basis Q comes from a refresh; each step turns the gradient into it (Q^T G), keeps the two moments of Adam there, and
turns the step back. The GFIM gives the directions, the gradients' own second moments the scale along each. Of these
``second_moment="factored"`` keeps the means over rows and columns alone: in the eigenbases the second moments of a
matrix are nearly a product of the two, and the mean of a row is known after fewer steps than each of its numbers. But
for few gradients, which have little but their diagonal there, the product is far too small away from the largest, so
such a step is held to the length that Adam's first one has. Where L is made anew, the first moment is carried over by
P = Q_new^T Q_old, the second by P * P, elementwise.

On the way from gradient to step: the direction, where ``scaling`` is "adaptive".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ngplus import solve
from ngplus.alike import alone, bundled
from ngplus.blocks import Cut
from ngplus.curvature import TAILS, Group, State, clear, read, write

NOISE = 100.0  # a root of a second moment below this many roundings of the root of the layer's mean one is noise
FULL_STEP = 1.0  # the root mean square of plain Adam's first step, before the learning rate: no factored one is longer
SECOND = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")  # the second moment: in full, or its means

Pair = tuple[Tensor, Tensor]  # of a second moment, the means over rows and over columns: [.., p, 1] and [.., 1, D]


def carry_moments(state: State, new: Sequence[Tensor], group: Group) -> None:
    """Turns the moments in the state from the old basis into a new one, or drops them."""
    old = read(state, "basis")
    if group["step"] == 0 or old is None or not _same_shapes(old, new):
        clear(state, "exp_avg", *SECOND, "floor")
        return
    change = [q.mT @ o.to(q) for q, o in zip(new, old, strict=True)]
    first, full, rows, cols = (read(state, key) for key in ("exp_avg", *SECOND))
    held = first or full
    if held is not None:
        turns = _bases(change, held)
        shares = [(_squared(left), _squared(right)) for left, right in turns]
        for key, moments, each in (("exp_avg", first, turns), ("exp_avg_sq", full, shares)):
            if moments is not None:
                write(state, key, [_out_of(p, m.to(p[0][0])) for p, m in zip(each, moments, strict=True)])
        if rows is not None:
            write(state, "exp_avg_sq_row", [_along(p[0], row.to(p[0][0])) for p, row in zip(shares, rows, strict=True)])
        if cols is not None:
            write(state, "exp_avg_sq_col", [_across(c.to(p[0][0]), p[1]) for p, c in zip(shares, cols, strict=True)])
    second = read(state, "exp_avg_sq") or read(state, "exp_avg_sq_row")
    if second is not None:
        state["floor"] = _floor(state, second, group)


def steps(works: Sequence[tuple[State, list[Tensor]]], group: Group) -> list[list[Tensor]]:
    """Adam's steps in the eigenbases of many matrices with one group's options; their gradients come in stacks.

    Of each matrix one or two products with Q and its transpose, of small ones of the same shape in one call; what is
    elementwise is done for all matrices in one call. So many small layers cost little more than one large one.
    """
    kept = [_kept(state, stacks, group) for state, stacks in works]
    bundles = bundled(works, kept) if group["step"] > 0 else alone(works)  # at the first step the moments begin anew
    made = _steps([bundle.work for bundle in bundles], group)
    spread = dict(pair for bundle, stacks in zip(bundles, made, strict=True) for pair in bundle.spread(stacks))
    return [spread[i] for i in range(len(works))]


def _kept(state: State, stacks: list[Tensor], group: Group) -> list[str]:
    """The names of what a matrix keeps between steps: bases and moments."""
    second = SECOND[1:] if is_factored(group, *stacks[0].shape[-2:]) else SECOND[:1]
    return [name for tail in TAILS if (name := "basis" + tail) in state] + ["exp_avg", *second]


def _steps(works: Sequence[tuple[State, list[Tensor]]], group: Group) -> list[list[Tensor]]:
    beta1, beta2 = group["momentum"], group["beta2"]
    bases = [q for state, stacks in works for q in _bases(read(state, "basis"), stacks)]
    gradients = [g for _, stacks in works for g in stacks]
    turned = [_into(q, g) for q, g in zip(bases, gradients, strict=True)]
    first: list[Tensor] = []
    second: list[Tensor | Pair] = []
    counts: list[int] = []
    for (state, _), own in zip(works, _split_like(turned, works), strict=True):
        moments = _moments(state, own, group)
        first += moments[0]
        second += moments[1]
        counts += [int(state["adam_step"])] * len(own)
    _take_in_squares(second, turned, 1 - beta2)
    torch._foreach_lerp_(first, turned, 1 - beta1)
    ahead = list(torch._foreach_lerp(first, turned, 1 - beta1)) if group["nesterov"] else [m.clone() for m in first]
    # With c = 1 - beta2^t: m / (sqrt(v / c) + floor) = sqrt(c) m / (sqrt(v) + sqrt(c) floor), in as few passes as can.
    roots = [(1 - beta2**count) ** 0.5 for count in counts]
    torch._foreach_div_(ahead, _denominators(works, second, roots, group))
    _scale(ahead, second, [root / (1 - beta1**count) for root, count in zip(roots, counts, strict=True)])
    return _split_like([_out_of(q, s) for q, s in zip(bases, ahead, strict=True)], works)


def _scale(steps: Sequence[Tensor], second: Sequence[Tensor | Pair], by: Sequence[float]) -> None:
    """The steps times a number each; a factored block whose root mean square exceeds ``FULL_STEP`` is brought to it."""
    full = [(s, k) for s, v, k in zip(steps, second, by, strict=True) if isinstance(v, Tensor)]
    if full:
        torch._foreach_mul_([s for s, _ in full], [k for _, k in full])
    pairs = [(s, k) for s, v, k in zip(steps, second, by, strict=True) if not isinstance(v, Tensor)]
    if pairs:
        lengths = [torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True) for s, _ in pairs]
        torch._foreach_mul_(lengths, [(s.shape[-2] * s.shape[-1]) ** -0.5 / FULL_STEP for s, _ in pairs])
        torch._foreach_clamp_min_(lengths, [1 / k for _, k in pairs])  # s k / max(1, k length), in one pass
        torch._foreach_div_([s for s, _ in pairs], lengths)


def _take_in_squares(second: Sequence[Tensor | Pair], turned: Sequence[Tensor], weight: float) -> None:
    """The moving averages of the squares, or of their means over rows and columns."""
    full = [(v, t) for v, t in zip(second, turned, strict=True) if isinstance(v, Tensor)]
    if full:
        own, gradients = [v for v, _ in full], [t for _, t in full]
        torch._foreach_mul_(own, 1 - weight)
        torch._foreach_addcmul_(own, gradients, gradients, weight)
    pairs = [(v, t) for v, t in zip(second, turned, strict=True) if not isinstance(v, Tensor)]
    if pairs:
        squares = torch._foreach_mul([t for _, t in pairs], [t for _, t in pairs])
        means = [mean for s in squares for mean in _means(s)]
        torch._foreach_lerp_([mean for v, _ in pairs for mean in v], means, weight)


def _means(squares: Tensor) -> Pair:
    """Over each row and over each column, as products: a third of the time of torch's own for tables of few columns."""
    stacks, rows, cols = squares.shape
    along = squares.new_full((cols, 1), 1 / cols).expand(stacks, -1, -1)
    down = squares.new_full((1, rows), 1 / rows).expand(stacks, -1, -1)
    return torch.bmm(squares, along), torch.bmm(down, squares)


def _denominators(
    works: Sequence[tuple[State, list[Tensor]]], second: list[Tensor | Pair], roots: list[float], group: Group
) -> list[Tensor]:
    """sqrt(v) + sqrt(c) (floor + eps) of each stack; without a basis there is no floor."""
    floors: dict[int, Tensor] = {}
    start = 0
    for state, stacks in works:
        end = start + len(stacks)
        if "basis" in state:
            floor = state.get("floor")
            if floor is None:
                held = [v if isinstance(v, Tensor) else v[0] for v in second[start:end]]
                floor = state["floor"] = _floor(state, held, group)
            floors.update(dict.fromkeys(range(start, end), floor))
        start = end
    full = [v for v in second if isinstance(v, Tensor)]
    made = iter(torch._foreach_sqrt(full) if full else ())
    products = iter(_roots([v for v in second if not isinstance(v, Tensor)]))
    out = [next(made if isinstance(v, Tensor) else products) for v in second]
    flat = [i for i in range(len(out)) if i not in floors]
    if flat:
        torch._foreach_add_([out[i] for i in flat], [roots[i] * group["eps"] for i in flat])
    if floors:
        added = torch._foreach_add(list(floors.values()), group["eps"])
        torch._foreach_add_([out[i] for i in floors], torch._foreach_mul(added, [roots[i] for i in floors]))
    return out


def _roots(pairs: Sequence[Pair]) -> Sequence[Tensor]:
    """sqrt(v) with v_ij = row_i col_j / mean: of all v with these means the one that knows nothing more."""
    if not pairs:
        return ()
    rows, cols = zip(*pairs, strict=True)
    means = [row.mean(-2, keepdim=True).clamp_min_(torch.finfo(row.dtype).tiny) for row in rows]
    across = torch._foreach_div(cols, means)
    torch._foreach_sqrt_(across)
    return torch._foreach_mul(torch._foreach_sqrt(rows), across)


def sparse_steps(state: State, stacks: list[Tensor], group: Group) -> list[Tensor]:
    """The same for the rows of a sparse gradient. They come and go, so nothing is kept for them: no first moment, and
    one second moment for each direction of the basis, the mean over the rows touched."""
    bases, beta2 = _bases(read(state, "basis"), stacks), group["beta2"]
    turned = [_into(q, g) for q, g in zip(bases, stacks, strict=True)]
    squares = [t.square().mean(-1, keepdim=True) for t in turned]
    second = read(state, "exp_avg_sq")
    if group["step"] == 0 or not _same_shapes(second, squares):
        second = [torch.zeros_like(s) for s in squares]
        clear(state, "exp_avg", *SECOND, "floor")
        write(state, "exp_avg_sq", second)
        state["adam_step"] = 0
    assert second is not None
    state["adam_step"] = int(state["adam_step"]) + 1
    torch._foreach_mul_(second, beta2)
    torch._foreach_add_(second, squares, alpha=1 - beta2)
    correction = 1 - beta2 ** state["adam_step"]
    if "floor" not in state:
        state["floor"] = _floor(state, second, group)
    floor = state["floor"] + group["eps"]
    roots = [(v / correction).sqrt() + floor for v in second]
    return [_out_of(q, t / r) for q, t, r in zip(bases, turned, roots, strict=True)]


def _moments(state: State, turned: list[Tensor], group: Group) -> tuple[list[Tensor], list[Tensor | Pair]]:
    """The two moments, made anew where they are not there or of another shape, and one more step counted."""
    factored = is_factored(group, *turned[0].shape[-2:])
    keys = ("exp_avg", *(SECOND[1:] if factored else SECOND[:1]))
    held = [read(state, key) for key in keys]
    fits = None not in held and _same_shapes(held[0], turned)
    if fits and factored:
        fits = all(r.shape[-1] == 1 == c.shape[-2] for r, c in zip(held[1] or [], held[2] or [], strict=True))
    if group["step"] == 0 or not fits:
        clear(state, "exp_avg", *SECOND, "floor")
        narrow = [t[..., :1] for t in turned], [t[..., :1, :] for t in turned]  # the shapes of the means
        for key, like in zip(keys, (turned, *narrow) if factored else (turned, turned), strict=True):
            write(state, key, [x.new_zeros(x.shape) for x in like])
        held = [read(state, key) for key in keys]
        state["adam_step"] = 0
    state["adam_step"] = int(state["adam_step"]) + 1
    first, *second = (stacks or [] for stacks in held)
    return first, list(zip(*second, strict=True)) if factored else list(second[0])


def is_factored(group: Group, rows: int, cols: int) -> bool:
    """Are means kept for the second moment? Not where there are one or two rows or columns: nothing is saved there."""
    return group["second_moment"] == "factored" and min(rows, cols) > 2


def _floor(state: State, second: Sequence[Tensor], group: Group) -> Tensor:
    """What is added to the roots, from the second moments or their means over rows: where a direction has no gradient
    but rounding, it keeps Adam from blowing the rounding up to a full step. It is relative to the mean of the matrix's
    second moments, taken at each refresh. Without a basis nothing is turned, and there is no such rounding."""
    correction = 1 - group["beta2"] ** state["adam_step"]
    mean = torch.stack([v.sum() for v in second]).sum() / (correction * sum(v.numel() for v in second))
    return NOISE * torch.finfo(mean.dtype).eps * mean.sqrt()


Blocks = Sequence[Tensor]  # of one side: the bases of its blocks, or the one of the whole side; none where it is flat
Bases = tuple[Blocks, Blocks]  # of the first curved side, and of the other one where that is curved, too


def _bases(held: Blocks | None, stacks: Sequence[Tensor]) -> list[Bases]:
    """For each stack of a gradient the bases that it is turned into."""
    if held is None:  # no side is curved
        return [((), ())] * len(stacks)
    if len(held) == len(stacks):
        return [((basis,), ()) for basis in held]
    (gradient,) = stacks  # of which both sides are curved
    groups, d, _ = gradient.shape
    ends = list(accumulate(len(q) * q.shape[-1] for q in held))
    first = ends.index(groups * d) + 1
    return [(held[:first], held[first:])]


def _into(bases: Bases, gradient: Tensor) -> Tensor:
    """Q^T G, or Q_L^T G Q_R."""
    first, second = bases
    return _across(_along(_turned(first), gradient), _turned(second))


def _out_of(bases: Bases, step: Tensor) -> Tensor:
    """Q S, or Q_L S Q_R^T."""
    first, second = bases
    return _across(_along(first, step), second)


def _along(blocks: Blocks, x: Tensor) -> Tensor:
    """Q X, with Q of blocks along its diagonal."""
    if not blocks or blocks[0].shape[-1] == 1:  # a basis of one is 1
        return x
    if len(blocks) == 1 and len(blocks[0]) == len(x):
        return solve.times(blocks[0], x)
    cut = Cut.of(len(x), x.shape[1], blocks[0].shape[-1])
    return cut.merge([solve.times(q, part) for q, part in zip(blocks, cut.split(x), strict=True)])


def _across(x: Tensor, blocks: Blocks) -> Tensor:
    """X Q^T, each block of columns at its place."""
    if not blocks:
        return x
    if len(blocks) == 1 and len(blocks[0]) == len(x):
        return torch.bmm(x, blocks[0].mT)
    each = [q for stack in blocks for q in stack.unflatten(0, (len(x), -1)).unbind(1)]
    columns = x.split([q.shape[-1] for q in each], dim=-1)
    if torch.compiler.is_compiling():  # which has no products that are written in between
        return torch.cat([torch.bmm(part, q.mT) for part, q in zip(columns, each, strict=True)], dim=-1)
    out = x.new_empty(x.shape)
    for part, q, place in zip(columns, each, out.split([q.shape[-1] for q in each], dim=-1), strict=True):
        torch.bmm(part, q.mT, out=place)
    return out


def _turned(blocks: Blocks) -> Blocks:
    return [q.mT for q in blocks]


def _squared(blocks: Blocks) -> Blocks:
    return [q.square() for q in blocks]


def _same_shapes(held: Sequence[Tensor] | None, wanted: Sequence[Tensor]) -> bool:
    return held is not None and [x.shape for x in held] == [x.shape for x in wanted]


def _split_like(tensors: Sequence[Tensor], works: Sequence[tuple[State, list[Tensor]]]) -> list[list[Tensor]]:
    """A flat list cut again into the stacks of each matrix."""
    out, start = [], 0
    for _, stacks in works:
        out.append(list(tensors[start : start + len(stacks)]))
        start += len(stacks)
    return out
