"""Scaling "adaptive", beyond the paper: Adam's moments kept in the eigenbasis of L or R.

Where both sides are curved, L and R each give a basis: Q_L^T G Q_R; where none is, this is Adam.

The basis Q comes from a refresh; each step turns the gradient into it (Q^T G), keeps the two moments of Adam there, and
turns the step back. The GFIM gives the directions, the gradients' own second moments the scale along each. Where L is
made anew, the first moment is carried over by P = Q_new^T Q_old, the second by P * P, elementwise.

On the way from gradient to step: the direction, where ``scaling`` is "adaptive".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ngplus import solve
from ngplus.curvature import Group, State, clear, read, write

NOISE = 100.0  # a second moment below this many roundings of the layer's mean one is noise


def carry_moments(state: State, new: Sequence[Tensor], group: Group) -> None:
    """Turns the moments in the state from the old basis into a new one, or drops them."""
    old = read(state, "basis")
    if group["step"] == 0 or old is None or not _same_shapes(old, new):
        clear(state, "exp_avg", "exp_avg_sq", "floor")
        return
    change = [q.mT @ o.to(q) for q, o in zip(new, old, strict=True)]
    for key, turns in (("exp_avg", change), ("exp_avg_sq", [p.square() for p in change])):
        moments = read(state, key)
        if moments is None:
            continue
        if len(moments) < len(turns):  # both sides of one gradient
            write(state, key, [turns[0] @ moments[0].to(turns[0]) @ turns[1].mT])
        else:
            write(state, key, [solve.times(p, m.to(p)) for p, m in zip(turns, moments, strict=True)])
    second = read(state, "exp_avg_sq")
    if second is not None:
        state["floor"] = _floor(state, second, group)


def steps(works: Sequence[tuple[State, list[Tensor]]], group: Group) -> list[list[Tensor]]:
    """Adam's steps in the eigenbases of many matrices with one group's options; their gradients come in stacks.

    Of each matrix one or two products with Q and its transpose; all that is elementwise is done for all matrices in one
    call, so that many small layers cost little more than one large one.
    """
    beta1, beta2 = group["momentum"], group["beta2"]
    bases = [q for state, stacks in works for q in _bases(state, stacks)]
    gradients = [g for _, stacks in works for g in stacks]
    turned = [_into(q, g) for q, g in zip(bases, gradients, strict=True)]
    parts = _split_like(turned, works)
    first: list[Tensor] = []
    second: list[Tensor] = []
    counts: list[int] = []
    for (state, stacks), own in zip(works, parts, strict=True):
        moments = _moments(state, own, group)
        first += moments[0]
        second += moments[1]
        counts += [int(state["adam_step"])] * len(stacks)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, turned, turned, 1 - beta2)
    torch._foreach_lerp_(first, turned, 1 - beta1)
    ahead = list(torch._foreach_lerp(first, turned, 1 - beta1)) if group["nesterov"] else first
    # With c = 1 - beta2^t: m / (sqrt(v / c) + floor) = sqrt(c) m / (sqrt(v) + sqrt(c) floor), in as few passes as can.
    roots = [(1 - beta2**count) ** 0.5 for count in counts]
    out = list(torch._foreach_div(ahead, _denominators(works, second, roots, group)))
    torch._foreach_mul_(out, [root / (1 - beta1**count) for root, count in zip(roots, counts, strict=True)])
    return _split_like([_out_of(q, s) for q, s in zip(bases, out, strict=True)], works)


def _denominators(
    works: Sequence[tuple[State, list[Tensor]]], second: list[Tensor], roots: list[float], group: Group
) -> list[Tensor]:
    """sqrt(v) + sqrt(c) (floor + eps) of each stack; without a basis there is no floor."""
    floors: dict[int, Tensor] = {}
    start = 0
    for state, stacks in works:
        end = start + len(stacks)
        if "basis" in state:
            floor = state.get("floor")
            if floor is None:
                floor = state["floor"] = _floor(state, second[start:end], group)
            floors.update(dict.fromkeys(range(start, end), floor))
        start = end
    out = list(torch._foreach_sqrt(second))
    flat = [i for i in range(len(out)) if i not in floors]
    if flat:
        torch._foreach_add_([out[i] for i in flat], [roots[i] * group["eps"] for i in flat])
    if floors:
        added = torch._foreach_add(list(floors.values()), group["eps"])
        torch._foreach_add_([out[i] for i in floors], torch._foreach_mul(added, [roots[i] for i in floors]))
    return out


def sparse_steps(state: State, stacks: list[Tensor], group: Group) -> list[Tensor]:
    """The same for the rows of a sparse gradient. They come and go, so nothing is kept for them: no first moment, and
    one second moment for each direction of the basis, the mean over the rows touched."""
    bases, beta2 = _bases(state, stacks), group["beta2"]
    turned = [_into(q, g) for q, g in zip(bases, stacks, strict=True)]
    squares = [t.square().mean(-1, keepdim=True) for t in turned]
    second = read(state, "exp_avg_sq")
    if group["step"] == 0 or not _same_shapes(second, squares):
        second = [torch.zeros_like(s) for s in squares]
        clear(state, "exp_avg", "floor")
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


def _moments(state: State, turned: list[Tensor], group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """The two moments, made anew where they are not there or of another shape, and one more step counted."""
    first, second = read(state, "exp_avg"), read(state, "exp_avg_sq")
    if group["step"] == 0 or not _same_shapes(first, turned) or not _same_shapes(second, turned):
        first, second = [torch.zeros_like(t) for t in turned], [torch.zeros_like(t) for t in turned]
        write(state, "exp_avg", first)
        write(state, "exp_avg_sq", second)
        clear(state, "floor")
        state["adam_step"] = 0
    assert first is not None
    assert second is not None
    state["adam_step"] = int(state["adam_step"]) + 1
    return first, second


def _floor(state: State, second: Sequence[Tensor], group: Group) -> Tensor:
    """What is added to the roots: where a direction has no gradient but rounding, it keeps Adam from blowing the
    rounding up to a full step. It is relative to the mean of the matrix's second moments, taken at each refresh.
    Without a basis nothing is turned, and there is no such rounding."""
    correction = 1 - group["beta2"] ** state["adam_step"]
    mean = torch.stack([v.sum() for v in second]).sum() / (correction * sum(v.numel() for v in second))
    return NOISE * torch.finfo(mean.dtype).eps * mean.sqrt()


Bases = tuple[Tensor | None, Tensor | None]  # of the curved side, and of the other one where that is curved, too


def _bases(state: State, stacks: Sequence[Tensor]) -> list[Bases]:
    """For each stack of a gradient the basis, or the two, that it is turned into."""
    held = read(state, "basis")
    if held is None:  # no side is curved
        return [(None, None)] * len(stacks)
    if len(held) > len(stacks):
        return [(held[0], held[1])]
    return [(basis, None) for basis in held]


def _into(bases: Bases, gradient: Tensor) -> Tensor:
    """Q^T G, or Q_L^T G Q_R."""
    first, second = bases
    turned = gradient if first is None or first.shape[-1] == 1 else solve.times(first.mT, gradient)
    return turned if second is None else torch.bmm(turned, second)


def _out_of(bases: Bases, step: Tensor) -> Tensor:
    first, second = bases
    turned = step if first is None or first.shape[-1] == 1 else solve.times(first, step)  # a basis of one is 1
    return turned if second is None else torch.bmm(turned, second.mT)


def _same_shapes(held: Sequence[Tensor] | None, wanted: Sequence[Tensor]) -> bool:
    return held is not None and [x.shape for x in held] == [x.shape for x in wanted]


def _split_like(tensors: Sequence[Tensor], works: Sequence[tuple[State, list[Tensor]]]) -> list[list[Tensor]]:
    """A flat list cut again into the stacks of each matrix."""
    out, start = [], 0
    for _, stacks in works:
        out.append(list(tensors[start : start + len(stacks)]))
        start += len(stacks)
    return out
