"""Scaling "adaptive", beyond the paper: Adam's moments kept in the eigenbasis of L or R.

Where both sides are curved, L and R each give a basis: Q_L^T G Q_R; where none is, this is Adam.

The basis Q comes from a refresh; each step turns the gradient into it (Q^T G), keeps the two moments of Adam there, and
turns the step back. The GFIM gives the directions, the gradients' own second moments the scale along each. Of these
``second_moment="factored"`` keeps the means over rows and columns alone: in the eigenbases the second moments of a
matrix are nearly a product of the two, and the mean of a row is known after fewer steps than each of its numbers. But
for few gradients, which have little but their diagonal there, the product is far too small away from the largest, so
such a step is held to the length that Adam's first one has. Where L is made anew, the first moment is carried over by
P = Q_new^T Q_old, the second by P * P, elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ngplus.fisher import inverses
from ngplus.fisher.blocks import BlockPartition
from ngplus.preconditioners.buckets import Bucket, alone, bundled
from ngplus.preconditioners.curvature import TAILS, clear, read, write
from ngplus.utils.typing import Group, State

NOISE = 100.0  # a root of a second moment below this many roundings of the root of the layer's mean one is noise
FULL_STEP = 1.0  # the root mean square of plain Adam's first step, before the learning rate: no factored one is longer
PIECE = 2**18  # numbers of the matrices whose moments change in the same calls: a few times that fits into a cache
SECOND = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")  # the second moment: in full, or its means
MOMENTS = ("exp_avg", *SECOND, "floor")  # all that is of one basis


def carry_moments(state: State, new: Sequence[Tensor], group: Group) -> None:
    """Turns the moments in the state from the old basis into a new one, or drops them."""
    old = read(state, "basis")
    if group["step"] == 0 or old is None or not _same_shapes(old, new):
        clear(state, *MOMENTS)
        return
    change = [q.mT @ o.to(q) for q, o in zip(new, old, strict=True)]
    first, full = (read(state, key) for key in ("exp_avg", "exp_avg_sq"))
    held = first or full
    if held is not None:
        turns = _bases(change, held)
        shares = [(_squared(left), _squared(right)) for left, right in turns]
        for key, moments, each in (("exp_avg", first, turns), ("exp_avg_sq", full, shares)):
            if moments is not None:
                write(state, key, [_out_of(p, m.to(p[0][0])) for p, m in zip(each, moments, strict=True)])
        for key in ("exp_avg_sq_row",):
            if (rows := read(state, key)) is not None and rows[0].shape[-2] == held[0].shape[-2]:
                write(state, key, [_along(p[0], row.to(p[0][0])) for p, row in zip(shares, rows, strict=True)])
        for key in ("exp_avg_sq_col",):
            if (cols := read(state, key)) is not None and cols[0].shape[-1] == held[0].shape[-1]:
                write(state, key, [_across(c.to(p[0][0]), p[1]) for p, c in zip(shares, cols, strict=True)])
    second = read(state, "exp_avg_sq") or read(state, "exp_avg_sq_row")
    if second is not None:
        state["floor"] = _floor(state, second, group)


class Steps:
    """Adam's steps in the eigenbases of many matrices with one group's options, made ready once for many steps.

    Of each matrix one or two products with Q and its transpose, of small ones of the same shape in one call; what is
    elementwise is done for many matrices in one call, as many as a cache holds: small layers then cost few calls, and
    of large ones nothing is fetched twice.
    """

    def __init__(self, updates: Sequence[tuple[State, list[Tensor]]], group: Group) -> None:
        """``works``: what each matrix keeps, and the stacks of its gradient, of which the shapes matter here."""
        if group["step"] == 0:  # the moments begin anew
            self.buckets = alone(updates)
        else:
            for state, stacks in updates if not torch.compiler.is_compiling() else ():  # which has orders of its own
                _lay_out(state, stacks)
            self.buckets = bundled(updates, [_kept(state, stacks, group) for state, stacks in updates])
        self._lengths = [len(bucket.stacks) for bucket in self.buckets]
        pieces: list[list[Bucket]] = []
        numbers = PIECE
        for bucket in self.buckets:
            own = sum(stack.numel() for stack in bucket.stacks)
            if numbers + own > PIECE:
                pieces.append([])
                numbers = 0
            pieces[-1].append(bucket)
            numbers += own
        self._pieces = [_Piece(buckets, group) for buckets in pieces]

    def gradients(self) -> list[Tensor]:
        """The stacks of all bundles, as they were given."""
        return [stack for bucket in self.buckets for stack in bucket.stacks]

    def step(self, gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        """The steps of all bundles from the stacks of their gradients; each matrix has its new moments."""
        each = _cut(gradients, [piece.length for piece in self._pieces])
        return [step for piece, own in zip(self._pieces, each, strict=True) for step in piece.step(own, group)]

    def spread(self, made: Sequence[Tensor]) -> list[list[Tensor]]:
        """What was made of the stacks of the bundles, for each matrix by its place."""
        of_bundles = zip(self.buckets, _cut(made, self._lengths), strict=True)
        places = dict(pair for bucket, stacks in of_bundles for pair in bucket.spread(stacks))
        return [places[i] for i in range(len(places))]


class _Piece:
    """Bundles whose moments change in the same calls."""

    def __init__(self, buckets: Sequence[Bucket], group: Group) -> None:
        self.buckets = buckets
        self._out_of: list[Bases] = []
        self._first: list[Tensor] = []
        self._second: list[Tensor | Pair] = []
        self._lengths = [len(bucket.stacks) for bucket in buckets]
        self.length = sum(self._lengths)
        for bucket in buckets:
            self._out_of += _bases(read(bucket.state, "basis"), bucket.stacks)
            first, second = _moments(bucket.state, bucket.stacks, group)
            self._first += first
            self._second += second
        self._into = [(_turned(one), _turned(other)) for one, other in self._out_of]
        self._full = [i for i, v in enumerate(self._second) if isinstance(v, Tensor)]
        self._factored = [i for i, v in enumerate(self._second) if not isinstance(v, Tensor)]
        self._pairs = [v for v in self._second if not isinstance(v, Tensor)]
        self._weights = [_weights(self._first[i]) for i in self._factored]
        self._floors: dict[int, Tensor] | None = None
        self._own = [x for bucket in self.buckets for x in bucket.own]
        self._rows = [x for bucket in self.buckets for x in bucket.rows]

    def step(self, gradients: Sequence[Tensor], group: Group) -> list[Tensor]:
        """The steps of all bundles from the stacks of their gradients; each matrix has its new moments."""
        beta1, beta2 = group["momentum"], group["beta2"]
        turned = [_across(_along(one, g), other) for (one, other), g in zip(self._into, gradients, strict=True)]
        counts = [n for b, length in zip(self.buckets, self._lengths, strict=True) for n in [b.count()] * length]
        squares = self._take_in_squares(turned, 1 - beta2)
        torch._foreach_lerp_(self._first, turned, 1 - beta1)
        if group["nesterov"]:
            ahead = list(torch._foreach_lerp(self._first, turned, 1 - beta1))
        else:
            ahead = [m.clone() for m in self._first]
        # With c = 1 - beta2^t: m / (sqrt(v / c) + floor) = sqrt(c) m / (sqrt(v) + sqrt(c) floor), in as few passes as
        # can be.
        roots = [(1 - beta2**count) ** 0.5 for count in counts]
        denominators = self._denominators(roots, group, squares)
        torch._foreach_div_(ahead, denominators)
        self._scale(ahead, [root / (1 - beta1**count) for root, count in zip(roots, counts, strict=True)])
        if self._own:
            torch._foreach_copy_(self._own, self._rows)
        return [_across(_along(one, s), other) for (one, other), s in zip(self._out_of, ahead, strict=True)]

    def _take_in_squares(self, turned: Sequence[Tensor], weight: float) -> Sequence[Tensor]:
        """The moving averages of the squares, or of their means over rows and columns; the squares of the latter."""
        if self._full:
            own, gradients = [self._held(i) for i in self._full], [turned[i] for i in self._full]
            torch._foreach_mul_(own, 1 - weight)
            torch._foreach_addcmul_(own, gradients, gradients, weight)
        if not self._factored:
            return ()
        gradients = [turned[i] for i in self._factored]
        squares = torch._foreach_mul(gradients, gradients)
        means = [mean for s, w in zip(squares, self._weights, strict=True) for mean in _means(s, *w)]
        torch._foreach_lerp_([mean for pair in self._pairs for mean in pair], means, weight)
        return squares

    def _held(self, i: int) -> Tensor:
        """The second moment in full, or its means over rows."""
        second = self._second[i]
        return second if isinstance(second, Tensor) else second[0]

    def _denominators(self, roots: list[float], group: Group, memory: Sequence[Tensor]) -> list[Tensor]:
        """sqrt(v) + sqrt(c) (floor + eps) of each stack; without a basis there is no floor. Those of factored moments
        are written over ``memory``, tensors of their shapes."""
        if self._floors is None:
            self._floors = self._find_floors(group)
        made = iter(torch._foreach_sqrt([self._held(i) for i in self._full]) if self._full else ())
        products = iter(_roots(self._pairs, self._weights, memory))
        out = [next(made if isinstance(v, Tensor) else products) for v in self._second]
        flat = [i for i in range(len(out)) if i not in self._floors]
        if flat:
            torch._foreach_add_([out[i] for i in flat], [roots[i] * group["eps"] for i in flat])
        if self._floors:
            added = torch._foreach_mul(list(self._floors.values()), [roots[i] for i in self._floors])
            torch._foreach_add_([out[i] for i in self._floors], added)
        return out

    def _find_floors(self, group: Group) -> dict[int, Tensor]:
        """floor + eps for each stack that has a basis; the floor is taken where a refresh has left none."""
        floors: dict[int, Tensor] = {}
        start = 0
        for bucket, length in zip(self.buckets, self._lengths, strict=True):
            end, state = start + length, bucket.state
            if "basis" in state:
                if "floor" not in state:
                    state["floor"] = _floor(state, [self._held(i) for i in range(start, end)], group)
                floors.update((i, state["floor"]) for i in range(start, end))
            start = end
        return dict(zip(floors, torch._foreach_add(list(floors.values()), group["eps"]), strict=True)) if floors else {}

    def _scale(self, steps: Sequence[Tensor], by: Sequence[float]) -> None:
        """The steps times a number each; a factored block whose root mean square exceeds ``FULL_STEP`` is brought to
        it."""
        if self._full:
            torch._foreach_mul_([steps[i] for i in self._full], [by[i] for i in self._full])
        if self._factored:
            pairs = [steps[i] for i in self._factored]
            lengths = [torch.linalg.vector_norm(s, dim=(-2, -1), keepdim=True) for s in pairs]
            torch._foreach_mul_(lengths, [(s.shape[-2] * s.shape[-1]) ** -0.5 / FULL_STEP for s in pairs])
            torch._foreach_clamp_min_(
                lengths, [1 / by[i] for i in self._factored]
            )  # s k / max(1, k length), in one pass
            torch._foreach_div_(pairs, lengths)


def _kept(state: State, stacks: list[Tensor], group: Group) -> list[str]:
    """The names of what a matrix keeps between steps: bases and moments."""
    second = SECOND[1:] if is_factored(group, *stacks[0].shape[-2:]) else SECOND[:1]
    bases = [name for tail in TAILS if (name := "basis" + tail) in state]
    return [*bases, "exp_avg", *second]


def _weights(like: Tensor) -> Pair:
    """1/D for each column and 1/p for each row: products with them are means."""
    stacks, rows, cols = like.shape
    return (
        like.new_full((cols, 1), 1 / cols).expand(stacks, -1, -1),
        like.new_full((1, rows), 1 / rows).expand(stacks, -1, -1),
    )


def _means(squares: Tensor, along: Tensor, down: Tensor) -> Pair:
    """Over each row and over each column, as products: a third of the time of torch's own for tables of few columns. A
    stack times columns takes torch four to fifteen times as long as rows times the turned stack."""
    rows = torch.bmm(squares, along) if len(squares) == 1 else torch.bmm(along.mT, squares.mT).mT
    return rows, torch.bmm(down, squares)


def _roots(pairs: Sequence[Pair], weights: Sequence[Pair], memory: Sequence[Tensor]) -> Sequence[Tensor]:
    """sqrt(v) with v_ij = row_i col_j / mean: of all v with these means the one that knows nothing more. Written over
    ``memory``, whose order the numbers then have."""
    if not pairs:
        return ()
    rows, cols = zip(*pairs, strict=True)
    means = [torch.bmm(down, row) for row, (_, down) in zip(rows, weights, strict=True)]
    torch._foreach_clamp_min_(means, torch.finfo(rows[0].dtype).tiny)
    across = torch._foreach_div(cols, means)
    torch._foreach_sqrt_(across)
    along = torch._foreach_sqrt(rows)
    if torch.compiler.is_compiling():
        return torch._foreach_mul(along, across)
    return [torch.mul(row, col, out=place) for row, col, place in zip(along, across, memory, strict=True)]


def sparse_steps(state: State, stacks: list[Tensor], group: Group) -> list[Tensor]:
    """The same for the rows of a sparse gradient. They come and go, so nothing is kept for them: no first moment, and
    one second moment for each direction of the basis, the mean over the rows touched."""
    bases, beta2 = _bases(read(state, "basis"), stacks), group["beta2"]
    turned = [_into(q, g) for q, g in zip(bases, stacks, strict=True)]
    squares = [t.square().mean(-1, keepdim=True) for t in turned]
    second = read(state, "exp_avg_sq")
    if group["step"] == 0 or not _same_shapes(second, squares):
        second = [torch.zeros_like(s) for s in squares]
        clear(state, *MOMENTS)
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


def _lay_out(state: State, stacks: Sequence[Tensor]) -> None:
    """The moments in the order of memory that these stacks of a gradient have once they are turned: taking the one into
    the other takes ten times as long where the orders differ. Products with a second side leave it row by row."""
    bases = _bases(read(state, "basis"), stacks)
    turned = [inverses.is_turned(g) and not second for (_, second), g in zip(bases, stacks, strict=True)]
    for key in ("exp_avg", "exp_avg_sq"):
        held = read(state, key) or []
        if [inverses.is_turned(moment) for moment in held] != turned and _same_shapes(held, stacks):
            pairs = zip(held, turned, strict=True)
            write(state, key, [m.mT.contiguous().mT if across else m.contiguous() for m, across in pairs])


def _moments(state: State, stacks: list[Tensor], group: Group) -> tuple[list[Tensor], list[Tensor | Pair]]:
    """The two moments of a gradient in these stacks, made anew where they are not there or of another shape."""
    factored = is_factored(group, *stacks[0].shape[-2:])
    keys = ("exp_avg", *(SECOND[1:] if factored else SECOND[:1]))
    held = [read(state, key) for key in keys]
    if held[0] is not None and held[0][0].dtype != stacks[0].dtype:  # the model was cast
        for key, moments in zip(keys, held, strict=True):
            write(state, key, [moment.to(stacks[0].dtype) for moment in moments or ()])
        held = [read(state, key) for key in keys]
    fits = None not in held and _same_shapes(held[0], stacks)
    if fits and factored:
        fits = all(r.shape[-1] == 1 == c.shape[-2] for r, c in zip(held[1] or [], held[2] or [], strict=True))
    if group["step"] == 0 or not fits:
        clear(state, *MOMENTS)
        narrow = [g[..., :1] for g in stacks], [g[..., :1, :] for g in stacks]  # the shapes of the means
        for key, like in zip(keys, (stacks, *narrow) if factored else (stacks, stacks), strict=True):
            write(state, key, [x.new_zeros(x.shape) for x in like])
        held = [read(state, key) for key in keys]
        state["adam_step"] = 0
    first, *second = (each or [] for each in held)
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


Pair = tuple[Tensor, Tensor]  # what each row has, [.., p, 1], and each column, [.., 1, D]
Blocks = Sequence[Tensor]  # of one side: the bases of its blocks, or the one of the whole side; none where it is flat
# Of the first curved side, blocks of one size in a stack; of the other one, where that is curved, too, each by itself,
# [groups, p, p]:
Bases = tuple[Blocks, Blocks]


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
    return [(held[:first], [q for stack in held[first:] for q in stack.unflatten(0, (groups, -1)).unbind(1)])]


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
    if len(blocks) == 1 and blocks[0].shape[0] == x.shape[0]:
        return inverses.times(blocks[0], x)
    partition = BlockPartition.of(len(x), x.shape[1], blocks[0].shape[-1])
    return partition.merge([inverses.times(q, part) for q, part in zip(blocks, partition.split(x), strict=True)])


def _across(x: Tensor, blocks: Blocks) -> Tensor:
    """X Q^T, each block of columns at its place."""
    if not blocks:
        return x
    if len(blocks) == 1:
        return torch.bmm(x, blocks[0].mT)
    widths = [q.shape[-1] for q in blocks]
    columns = x.split(widths, dim=-1)
    if torch.compiler.is_compiling():  # which has no products that are written in between
        return torch.cat([torch.bmm(part, q.mT) for part, q in zip(columns, blocks, strict=True)], dim=-1)
    out = x.new_empty(x.shape)
    for part, q, place in zip(columns, blocks, out.split(widths, dim=-1), strict=True):
        torch.bmm(part, q.mT, out=place)
    return out


def _turned(blocks: Blocks) -> Blocks:
    return [q.mT for q in blocks]


def _squared(blocks: Blocks) -> Blocks:
    return [q.square() for q in blocks]


def _same_shapes(held: Sequence[Tensor] | None, wanted: Sequence[Tensor]) -> bool:
    return held is not None and [x.shape for x in held] == [x.shape for x in wanted]


def _cut(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[list[Tensor]]:
    """A flat list in pieces of these lengths."""
    each = iter(tensors)
    return [[next(each) for _ in range(length)] for length in lengths]
