"""Steps between two refreshes, which are alike but for their numbers.

The same parameters have gradients, the same options hold, and every matrix keeps the same tensors. So what the first of
them has found out, which gradients form which stacks and go through which products, stands for the next ones, too, as
long as all of this holds; where something else is met, the step goes the long way of :mod:`.base`, which
makes the same numbers. The gradients of small matrices are copied into memory that stays, and their steps into other
such memory, each in one call: so their parts, blocks and turned sides are views that are made once.

For plain tensors in the host's own memory, and adaptive scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngplus.optimizers.base import Directions, Work, by_parameter
from ngplus.optimizers.gradients import gradient_parts
from ngplus.preconditioners.buckets import Bundle
from ngplus.preconditioners.eigenbasis import Steps
from ngplus.utils.finite import SEEN, norms_of
from ngplus.utils.typing import Group, State

SMALL = 2**16  # numbers of a matrix that is alone: with more, a copy costs more than the calls that it saves
VARYING = ("lr", "weight_decay", "momentum", "beta2", "step")  # options that are read anew in every step


class Share:
    """The matrices that go by one group's options, and what the last step has made ready for them."""

    def __init__(self, group: Group, works: Sequence[Work], steps: Steps) -> None:
        self.group, self.works, self.steps = group, works, steps


class Steady:
    """What stands from one step to the next, as long as ``holds`` says so and no refresh is due.

    ``groups`` are all of the optimizer, with the step of the next refresh of each and the names of their options;
    ``params`` are all parameters.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        groups: Sequence[Group],
        until: Sequence[int],
        options: Sequence[str],
        params: Sequence[nn.Parameter],
    ) -> None:
        self._groups, self._until = groups, until
        self._names = [name for name in options if name not in VARYING]
        self._options = [[group[name] for name in self._names] for group in groups]
        self._step = [group["step"] for group in groups]
        works = [work for share in shares for work in share.works]
        self.params = [p for work in works for p in work.matrix.active_params]
        self._forms = [(*_form(p, p)[:-1], True) for p in self.params]
        moving = set(self.params)
        self.idle = [p for p in params if p not in moving]
        self._states = [(work.matrix.params[0], work.state) for work in works]
        self._shares = [
            Share(s.group, [Work(w.matrix, w.group, w.state, []) for w in s.works], s.steps) for s in shares
        ]
        self._slots = [
            [_Slot.of(bundle, [share.works[i] for i in bundle.places]) for bundle in share.steps.bundles]
            for share in self._shares
        ]
        own = [slot for slots in self._slots for slot in slots if slot is not None]
        self._inputs = [view for slot in own for view in slot.inputs]
        self._targets = [stack for slot in own for stack in slot.targets]
        self._small = [p for slot in own for p in slot.params]
        copied = set(self._small)
        self._large = [p for p in self.params if p not in copied]
        self._gradients, self._steps_memory = [slot.gradients for slot in own], [slot.steps for slot in own]
        self._views = dict(zip(self._small, [view for slot in own for view in slot.outputs], strict=True))
        bundles = [bundle for share in shares for bundle in share.steps.bundles]
        self._kept: list[tuple[State, str, Tensor, bool]] = [
            (state, key, state[key], bool(bundle.own))
            for bundle in bundles
            for state in bundle.states
            for key in bundle.keys
        ]
        for bundle in bundles:
            bundle.let_go()
        self._note_versions()

    @classmethod
    def of(cls, shares: Sequence[Share], *rest: Any) -> Steady | None:
        """None where the next step could not be taken this way."""
        steady = cls(shares, *rest)
        held = [tensor for _, _, tensor, _ in steady._kept]
        idle = all(p.grad is None for p in steady.idle)
        return steady if idle and not any(tensor.is_inference() for tensor in held) else None

    @staticmethod
    def fits(works: Sequence[Work]) -> bool:
        """Can the steps of these matrices be taken this way?"""
        return all(
            work.rows is None
            and work.group["graft"] is None
            and not work.group["maximize"]
            and work.matrix.params[0].device.type in SEEN
            and all(type(p.grad) is Tensor and p.dtype == work.matrix.dtype for p in work.matrix.active_params)
            for work in works
        )

    def holds(self, states: Mapping[Tensor, State]) -> bool:
        """Is the step that comes like the last one?"""
        steps = zip(self._groups, self._step, self._until, strict=True)
        return (
            all(group["step"] == step < until for group, step, until in steps)
            and [[group[name] for name in self._names] for group in self._groups] == self._options
            and all(p.grad is not None and _form(p, p.grad) == f for p, f in zip(self.params, self._forms, strict=True))
            and all(p.grad is None for p in self.idle)
            and all(states.get(p) is state for p, state in self._states)
            and all(
                state.get(key) is held and (not copied or held._version == version)
                for (state, key, held, copied), version in zip(self._kept, self._versions, strict=True)
            )
        )

    @property
    def goes_on(self) -> bool:
        """After a step: is no refresh due in the next one?"""
        return all(step < until for step, until in zip(self._step, self._until, strict=True))

    def take_gradients(self) -> Tensor:
        """Copies those of small matrices; one flag: are all finite?"""
        if self._inputs:
            torch._foreach_copy_(self._inputs, [p.grad for p in self._small])  # type: ignore[misc]
        large = [p.grad for p in self._large if p.grad is not None]
        return norms_of([*self._gradients, *large]).sum().isfinite()

    def length(self, directions: Directions) -> Tensor:
        """A bound on the length of each of them: the sum of those of what they lie in."""
        large = [directions[p] for p in self._large]
        return norms_of([*self._steps_memory, *(d for d in large if isinstance(d, Tensor))]).sum()

    def directions(self) -> Directions:
        """Of all parameters, after ``take_gradients``. What is given back is good until the next step."""
        directions: Directions = {**self._views}
        small: list[Tensor] = []
        for share, slots in zip(self._shares, self._slots, strict=True):
            gradients: list[Tensor] = []
            large: dict[int, Work] = {}
            for bundle, slot in zip(share.steps.bundles, slots, strict=True):
                if slot is None:
                    own = {i: _with_gradient(share.works[i]) for i in bundle.places}
                    gradients += bundle.joined([work.stacks() for work in own.values()])
                    large.update(own)
                else:
                    gradients += slot.stacks
            made = iter(share.steps.step(gradients, share.group))
            for bundle, slot in zip(share.steps.bundles, slots, strict=True):
                stacks = [next(made) for _ in bundle.stacks]
                if slot is None:
                    for i, its_own in bundle.spread(stacks):
                        directions.update(by_parameter(large[i], large[i].merged(its_own), None))
                else:
                    small += stacks
        if small:
            torch._foreach_copy_(self._targets, small)
        self._step = [step + 1 for step in self._step]
        self._note_versions()
        return directions

    def _note_versions(self) -> None:
        self._versions = [held._version for _, _, held, _ in self._kept if not held.is_inference()]


class _Slot:
    """The memory of a bundle of small matrices: of their gradients, and of their steps. ``stacks`` and ``targets`` are
    the same in stacks, ``inputs`` and ``outputs`` as tensors of the parameters' shapes."""

    def __init__(self, bundle: Bundle, works: Sequence[Work]) -> None:
        self.params = [p for work in works for p in work.matrix.active_params]
        self.gradients, self.inputs, self.stacks = _memory(bundle, works)
        self.steps, self.outputs, self.targets = _memory(bundle, works)

    @classmethod
    def of(cls, bundle: Bundle, works: Sequence[Work]) -> _Slot | None:
        """None where the matrices are large, or where no view of their memory has the shape that is needed."""
        if len(works) == 1 and sum(stack.numel() for stack in bundle.stacks) > SMALL:
            return None
        slot = cls(bundle, works)
        fits = all(view.shape == p.shape for view, p in zip(slot.inputs, slot.params, strict=True))
        return slot if fits and len({x.untyped_storage().data_ptr() for x in slot.inputs + slot.stacks}) == 1 else None


def _with_gradient(work: Work) -> Work:
    """The same matrix with the gradient of this step."""
    return Work(work.matrix, work.group, work.state, gradient_parts(work.matrix, work.group)[0])


def _memory(bundle: Bundle, works: Sequence[Work]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Memory for the matrices of a bundle: as it is, as tensors of the parameters' shapes, and in stacks."""
    matrix, group = works[0].matrix, works[0].group
    layout = matrix.layout
    buffer = bundle.stacks[0].new_zeros(len(works) * layout.groups, layout.rows, layout.cols)
    each = zip(works, buffer.split(layout.groups), strict=True)
    views = [view for work, own in each for view in work.matrix.layout.split(own)]
    return buffer, views, matrix.cut_of(group).split(buffer if matrix.side(group["side"]) == "left" else buffer.mT)


def _form(param: nn.Parameter, grad: Tensor) -> tuple[Any, ...]:
    """Of a parameter and its gradient all that matters but numbers. A turned matrix would be multiplied as it lies."""
    ordered = grad.dim() != 2 or grad.is_contiguous()
    return param.requires_grad, param.dtype, param.shape, grad.dtype, grad.shape, grad.layout, grad.device, ordered
