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

from ngplus.optimizers.base import Directions, MatrixUpdate, by_parameter
from ngplus.optimizers.gradients import gradient_parts
from ngplus.preconditioners.buckets import Bucket
from ngplus.preconditioners.eigenbasis import Steps
from ngplus.utils.finite import SEEN, norms_of
from ngplus.utils.typing import Group, State

SMALL = 2**16  # numbers of a matrix that is alone: with more, a copy costs more than the calls that it saves
VARYING = ("lr", "weight_decay", "momentum", "beta2", "step")  # options that are read anew in every step


class Share:
    """The matrices that go by one group's options, and what the last step has made ready for them."""

    def __init__(self, group: Group, updates: Sequence[MatrixUpdate], steps: Steps) -> None:
        self.group, self.updates, self.steps = group, updates, steps


class StepCache:
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
        updates = [update for share in shares for update in share.updates]
        self.params = [p for update in updates for p in update.matrix.active_params]
        self._forms = [(*_form(p, p)[:-1], True) for p in self.params]
        moving = set(self.params)
        self.idle = [p for p in params if p not in moving]
        self._states = [(update.matrix.params[0], update.state) for update in updates]
        self._shares = [
            Share(s.group, [MatrixUpdate(w.matrix, w.group, w.state, []) for w in s.updates], s.steps) for s in shares
        ]
        self._slots = [
            [_Slot.of(bucket, [share.updates[i] for i in bucket.places]) for bucket in share.steps.buckets]
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
        buckets = [bucket for share in shares for bucket in share.steps.buckets]
        self._kept: list[tuple[State, str, Tensor, bool]] = [
            (state, key, state[key], bool(bucket.own))
            for bucket in buckets
            for state in bucket.states
            for key in bucket.keys
        ]
        for bucket in buckets:
            bucket.let_go()
        self._note_versions()

    @classmethod
    def of(cls, shares: Sequence[Share], *rest: Any) -> StepCache | None:
        """None where the next step could not be taken this way."""
        step_cache = cls(shares, *rest)
        held = [tensor for _, _, tensor, _ in step_cache._kept]
        idle = all(p.grad is None for p in step_cache.idle)
        return step_cache if idle and not any(tensor.is_inference() for tensor in held) else None

    @staticmethod
    def fits(updates: Sequence[MatrixUpdate]) -> bool:
        """Can the steps of these matrices be taken this way?"""
        return all(
            update.rows is None
            and update.group["graft"] is None
            and not update.group["maximize"]
            and update.matrix.params[0].device.type in SEEN
            and all(type(p.grad) is Tensor and p.dtype == update.matrix.dtype for p in update.matrix.active_params)
            for update in updates
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
            large: dict[int, MatrixUpdate] = {}
            for bucket, slot in zip(share.steps.buckets, slots, strict=True):
                if slot is None:
                    own = {i: _with_gradient(share.updates[i]) for i in bucket.places}
                    gradients += bucket.joined([update.stacks() for update in own.values()])
                    large.update(own)
                else:
                    gradients += slot.stacks
            made = iter(share.steps.step(gradients, share.group))
            for bucket, slot in zip(share.steps.buckets, slots, strict=True):
                stacks = [next(made) for _ in bucket.stacks]
                if slot is None:
                    for i, its_own in bucket.spread(stacks):
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

    def __init__(self, bucket: Bucket, updates: Sequence[MatrixUpdate]) -> None:
        self.params = [p for update in updates for p in update.matrix.active_params]
        self.gradients, self.inputs, self.stacks = _memory(bucket, updates)
        self.steps, self.outputs, self.targets = _memory(bucket, updates)

    @classmethod
    def of(cls, bucket: Bucket, updates: Sequence[MatrixUpdate]) -> _Slot | None:
        """None where the matrices are large, or where no view of their memory has the shape that is needed."""
        if len(updates) == 1 and sum(stack.numel() for stack in bucket.stacks) > SMALL:
            return None
        slot = cls(bucket, updates)
        fits = all(view.shape == p.shape for view, p in zip(slot.inputs, slot.params, strict=True))
        return slot if fits and len({x.untyped_storage().data_ptr() for x in slot.inputs + slot.stacks}) == 1 else None


def _with_gradient(update: MatrixUpdate) -> MatrixUpdate:
    """The same matrix with the gradient of this step."""
    return MatrixUpdate(update.matrix, update.group, update.state, gradient_parts(update.matrix, update.group)[0])


def _memory(bucket: Bucket, updates: Sequence[MatrixUpdate]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Memory for the matrices of a bundle: as it is, as tensors of the parameters' shapes, and in stacks."""
    matrix, group = updates[0].matrix, updates[0].group
    layout = matrix.layout
    buffer = bucket.stacks[0].new_zeros(len(updates) * layout.groups, layout.rows, layout.cols)
    each = zip(updates, buffer.split(layout.groups), strict=True)
    views = [view for update, own in each for view in update.matrix.layout.split(own)]
    return (
        buffer,
        views,
        matrix.partition_of(group).split(buffer if matrix.side(group["side"]) == "left" else buffer.mT),
    )


def _form(param: nn.Parameter, grad: Tensor) -> tuple[Any, ...]:
    """Of a parameter and its gradient all that matters but numbers. A turned matrix would be multiplied as it lies."""
    ordered = grad.dim() != 2 or grad.is_contiguous()
    return param.requires_grad, param.dtype, param.shape, grad.dtype, grad.shape, grad.layout, grad.device, ordered
