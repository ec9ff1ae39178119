"""Small matrices of one shape, worked on as one stack: a model of many layers then takes the calls of a few.

What a matrix keeps stays in the state of its own parameter: it is copied into the stack before the step, and what has
changed back after it. For small matrices that is less than the calls would cost. Between two refreshes the stacks stay,
and only what has changed is copied back (:mod:`ngplus.optimizers.step_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ngplus.fisher.inverses import is_turned
from ngplus.utils.typing import State

SMALL = 2**15  # numbers that a matrix keeps: with more, copies cost more than calls

MatrixUpdate = tuple[State, list[Tensor]]  # what a matrix keeps, and the stacks of its gradient


class Bucket:
    """Matrices that are worked on together, by their places in a step; or one alone.

    ``state`` and ``stacks`` are those of one matrix, or of the stack. Of a stack, ``rows`` are the moments of each
    matrix in it, and ``own`` where that matrix keeps them.
    """

    def __init__(self, updates: Sequence[MatrixUpdate], places: list[int], keys: Sequence[str]) -> None:
        self.places, self.keys, self.states = places, keys, [updates[i][0] for i in places]
        self.own: list[Tensor] = []
        self.rows: list[Tensor] = []
        if len(places) == 1:
            self.state, self.stacks = updates[places[0]]
            return
        self.state = {key: _cat([own[key] for own in self.states]) for key in keys}
        self.state["adam_step"] = self.states[0]["adam_step"]
        if "basis" in self.state:
            self.state["floor"] = torch.stack([own["floor"] for own in self.states])[:, None, None]
        self.stacks = self.joined([updates[i][1] for i in places])
        for key in keys:
            if not key.startswith("basis"):
                self.own += [own[key] for own in self.states]
                self.rows += self.state[key].split(1)

    def joined(self, gradients: Sequence[list[Tensor]]) -> list[Tensor]:
        """The stacks of each matrix's gradient as those of the bundle."""
        return gradients[0] if len(gradients) == 1 else [_cat([stacks[0] for stacks in gradients])]

    def let_go(self) -> None:
        """Of the gradients that it was made with, so that they are not kept beyond their step."""
        self.stacks = [stack.new_empty(0) for stack in self.stacks]

    def count(self) -> int:
        """One more step of the moments."""
        count = int(self.state["adam_step"]) + 1
        for state in (self.state, *self.states):
            state["adam_step"] = count
        return count

    def spread(self, made: list[Tensor]) -> Iterable[tuple[int, list[Tensor]]]:
        """What was made of the stacks, for each matrix by its place."""
        if len(self.places) == 1:
            return [(self.places[0], made)]
        return zip(self.places, ([row] for row in made[0].split(1)), strict=True)


def alone(updates: Sequence[MatrixUpdate]) -> list[Bucket]:
    return [Bucket(updates, [i], ()) for i in range(len(updates))]


def bundled(updates: Sequence[MatrixUpdate], keys: Sequence[Sequence[str]]) -> list[Bucket]:
    """The matrices of a step in bundles; ``keys`` names the tensors that each keeps: bases and moments.

    What goes together is decided by shapes alone, so that a run that goes on from a checkpoint makes the same stacks.
    """
    kinds: dict[object, list[int]] = {}
    for i, (state, stacks) in enumerate(updates):
        kinds.setdefault(_kind(state, stacks, keys[i]) or i, []).append(i)
    return [Bucket(updates, places, keys[places[0]]) for places in kinds.values()]


def _kind(state: State, stacks: list[Tensor], keys: Sequence[str]) -> object:
    """Matrices of the same kind are worked on together; None for one that is alone."""
    first = stacks[0]
    if len(stacks) > 1 or len(first) > 1 or torch.compiler.is_compiling():
        return None
    if any(len(state.get(key, ())) != 1 for key in keys) or state["exp_avg"].shape != first.shape:
        return None
    if state["exp_avg"].dtype != first.dtype:  # the model was cast, and each follows by itself
        return None
    if ("basis" in state and "floor" not in state) or sum(state[key].numel() for key in keys) > SMALL:
        return None
    shapes = tuple(state[key].shape for key in keys)
    return shapes, tuple(keys), first.dtype, first.device, is_turned(first), state["adam_step"]


def _cat(tensors: list[Tensor]) -> Tensor:
    """In the memory order that they have."""
    return torch.cat([x.mT for x in tensors]).mT if is_turned(tensors[0]) else torch.cat(tensors)
