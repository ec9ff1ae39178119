"""Small matrices of one shape, worked on as one stack: a model of many layers then takes the calls of a few.

What a matrix keeps stays in the state of its own parameter. Where matrices are alike, these tensors are tied: they are
the rows of one tensor, which the next step works on as a whole. Whoever puts new tensors there, as a refresh or a
checkpoint does, unties them, and the next step ties them again.

On the way from gradient to step: around the direction, where ``scaling`` is "adaptive".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ngplus.curvature import State

SMALL = 2**16  # numbers of a matrix: in larger ones a call costs little beside its work

Work = tuple[State, list[Tensor]]  # what a matrix keeps, and the stacks of its gradient


class Bundle:
    """Matrices that are worked on together, by their places in a step; or one alone."""

    def __init__(self, works: Sequence[Work], places: list[int], keys: Sequence[str]) -> None:
        self.places, self._states = places, [works[i][0] for i in places]
        if len(places) == 1:
            self.work = works[places[0]]
            return
        state: State = {key: _whole(self._states, key) for key in keys}
        state["adam_step"] = self._states[0]["adam_step"]
        if "basis" in state:
            state["floor"] = torch.stack([own["floor"] for own in self._states])[:, None, None]
        self.work = state, [_cat([works[i][1][0] for i in places])]

    def spread(self, made: list[Tensor]) -> Iterable[tuple[int, list[Tensor]]]:
        """What was made of the stacks, for each matrix by its place."""
        if len(self.places) == 1:
            return [(self.places[0], made)]
        for own in self._states:
            own["adam_step"] = self.work[0]["adam_step"]
        return zip(self.places, ([part] for part in made[0].split(1)), strict=True)


def alone(works: Sequence[Work]) -> list[Bundle]:
    return [Bundle(works, [i], ()) for i in range(len(works))]


def bundled(works: Sequence[Work], keys: Sequence[Sequence[str]]) -> list[Bundle]:
    """The matrices of a step in bundles; ``keys`` names the tensors that each keeps."""
    kinds: dict[object, list[int]] = {}
    for i, (state, stacks) in enumerate(works):
        kinds.setdefault(_kind(state, stacks, keys[i]) or i, []).append(i)
    return [bundle for places in kinds.values() for bundle in _bundles(works, places, keys[places[0]])]


def _bundles(works: Sequence[Work], places: list[int], keys: Sequence[str]) -> list[Bundle]:
    """One for all of them, but for those that are tied to some that have no gradient in this step."""
    if len(places) > 1 and not all(_tie([works[i][0] for i in places], key) for key in keys):
        return [Bundle(works, [place], keys) for place in places]
    return [Bundle(works, places, keys)]


def _kind(state: State, stacks: list[Tensor], keys: Sequence[str]) -> object:
    """Matrices of the same kind are worked on together; None for one that is alone."""
    first = stacks[0]
    if len(stacks) > 1 or len(first) > 1 or first.numel() > SMALL or torch.compiler.is_compiling():
        return None
    if any(len(state.get(key, ())) != 1 for key in keys) or state["exp_avg"].shape != first.shape:
        return None
    if "basis" in state and "floor" not in state:
        return None
    shapes = tuple(state[key].shape for key in keys)
    return shapes, tuple(keys), first.dtype, first.device, _is_turned(first), state["adam_step"]


def _tie(states: Sequence[State], key: str) -> bool:
    """Makes the tensors under a key rows of one; False where some of them are rows of another."""
    held = [state[key] for state in states]
    wholes = [x._base for x in held]
    whole, size = wholes[0], held[0].numel()
    if whole is not None and len(whole) == len(held) and all(own is whole for own in wholes):
        return all(x.storage_offset() == i * size for i, x in enumerate(held))
    if any(own is not None and own.shape[1:] == x.shape[1:] for own, x in zip(wholes, held, strict=True)):
        return False
    for state, row in zip(states, torch.cat(held).split(1), strict=True):
        state[key] = row
    return True


def _whole(states: Sequence[State], key: str) -> Tensor:
    whole = states[0][key]._base
    assert whole is not None
    return whole


def _is_turned(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _cat(tensors: list[Tensor]) -> Tensor:
    """In the memory order that they have."""
    return torch.cat([x.mT for x in tensors]).mT if _is_turned(tensors[0]) else torch.cat(tensors)
