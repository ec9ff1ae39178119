"""Small matrices of one shape, worked on as one stack: a model of many layers then takes the calls of a few.

What a matrix keeps stays in the state of its own parameter: it is copied into the stack before the step, and what has
changed back after it. For small matrices that is less than the calls would cost.

On the way from gradient to step: around the direction, where ``scaling`` is "adaptive".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ngplus.curvature import State

SMALL = 2**15  # numbers that a matrix keeps: with more, copies cost more than calls

Work = tuple[State, list[Tensor]]  # what a matrix keeps, and the stacks of its gradient


class Bundle:
    """Matrices that are worked on together, by their places in a step; or one alone.

    ``work`` is that of one matrix, or of the stack. Of a stack ``spread`` takes apart what was made of it.
    """

    def __init__(self, works: Sequence[Work], places: list[int], keys: Sequence[str]) -> None:
        self.places, self._keys, self._states = places, keys, [works[i][0] for i in places]
        if len(places) == 1:
            self.work = works[places[0]]
            return
        state: State = {key: torch.cat([own[key] for own in self._states]) for key in keys}
        state["adam_step"] = self._states[0]["adam_step"]
        if "basis" in state:
            state["floor"] = torch.stack([own["floor"] for own in self._states])[:, None, None]
        self.work = state, [_cat([works[i][1][0] for i in places])]

    def spread(self, made: list[Tensor]) -> Iterable[tuple[int, list[Tensor]]]:
        """What was made of the stacks, for each matrix by its place; and the moments, back to their own."""
        if len(self.places) == 1:
            return [(self.places[0], made)]
        state = self.work[0]
        moments = [key for key in self._keys if not key.startswith("basis")]
        own = [held[key] for key in moments for held in self._states]
        torch._foreach_copy_(own, [row for key in moments for row in state[key].split(1)])
        for held in self._states:
            held["adam_step"] = state["adam_step"]
        return zip(self.places, ([row] for row in made[0].split(1)), strict=True)


def alone(works: Sequence[Work]) -> list[Bundle]:
    return [Bundle(works, [i], ()) for i in range(len(works))]


def bundled(works: Sequence[Work], keys: Sequence[Sequence[str]]) -> list[Bundle]:
    """The matrices of a step in bundles; ``keys`` names the tensors that each keeps: bases and moments.

    What goes together is decided by shapes alone, so that a run that goes on from a checkpoint makes the same stacks.
    """
    kinds: dict[object, list[int]] = {}
    for i, (state, stacks) in enumerate(works):
        kinds.setdefault(_kind(state, stacks, keys[i]) or i, []).append(i)
    return [Bundle(works, places, keys[places[0]]) for places in kinds.values()]


def _kind(state: State, stacks: list[Tensor], keys: Sequence[str]) -> object:
    """Matrices of the same kind are worked on together; None for one that is alone."""
    first = stacks[0]
    if len(stacks) > 1 or len(first) > 1 or torch.compiler.is_compiling():
        return None
    if any(len(state.get(key, ())) != 1 for key in keys) or state["exp_avg"].shape != first.shape:
        return None
    if ("basis" in state and "floor" not in state) or sum(state[key].numel() for key in keys) > SMALL:
        return None
    shapes = tuple(state[key].shape for key in keys)
    return shapes, tuple(keys), first.dtype, first.device, _is_turned(first), state["adam_step"]


def _is_turned(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _cat(tensors: list[Tensor]) -> Tensor:
    """In the memory order that they have."""
    return torch.cat([x.mT for x in tensors]).mT if _is_turned(tensors[0]) else torch.cat(tensors)
