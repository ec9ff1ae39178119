"""What the model's passes bring for the next refresh: capture on one side, sums of products on the other.

The optimizer arms the matrices that are due and takes what was gathered at the step; this class does what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.hooks import weak_method
from ngplus.capture.matrices import ParameterMatrix, Use
from ngplus.capture.recorder import Recorder
from ngplus.capture.sample_index import SampleIndex
from ngplus.capture.samples import BatchDims
from ngplus.fisher.factors import Bags, Factors, Lookup
from ngplus.utils.dtensor import holds_gradients, is_dtensor, local, many_ranks
from ngplus.utils.typing import Group
from ngplus.utils.warnings import warn

CHECKED_ROWS = 1_000_000  # embeddings above this size are not checked for uses that capture has missed


def seed_of(group: Group) -> int:
    """The seed of a step's sub-sample and sketches: by the group's seed and the step alone, on every rank alike. As
    large as a generator takes."""
    return (int(group.get("seed", 0)) * 1_000_003 + int(group["step"])) % 2**63


class Collector:
    """The sums of products of all matrices since the last step. ``groups`` has the options of each parameter;
    ``on_forward``, a method, is called before each training pass, with True where a matrix has changed."""

    def __init__(
        self,
        matrices: list[ParameterMatrix],
        groups: Mapping[nn.Parameter, Group],
        accumulator_type: type[Accumulator],
        on_forward: Callable[[bool], None],
    ) -> None:
        self._matrices, self._groups, self._accumulator_type = matrices, groups, accumulator_type
        self._on_forward = weak_method(on_forward)
        self._gathered: dict[int, Accumulator] = {}
        self._before: dict[int, list[_Mark]] = {}  # the gradients before the pass under way, where that is checked
        self._after: dict[int, list[_Mark]] = {}  # and after the last one, of matrices for which it has brought samples
        self._capture: Recorder | None = None
        self.wrapper: nn.Module | None = None  # a DistributedDataParallel in which the model was seen to run

    def watch(
        self,
        model: nn.Module,
        uses: list[Use],
        batch_dim: BatchDims,
        sample_index: SampleIndex | None,
        compiled: nn.Module | None,
    ) -> None:
        """Installs the capture. It knows this object weakly, so that hooks go with the optimizer."""
        before, after = weak_method(self._before_forward), weak_method(self._after_backward)
        first = weak_method(self._before_gradients)
        self._capture = Recorder(model, uses, weak_method(self._gather), batch_dim, before, after, first, sample_index)
        if compiled is not None:
            self._capture.compiled_calls.add_wrapper(compiled)

    def remove(self) -> None:
        if self._capture is not None:
            self._capture.remove()

    @property
    def forward_seen(self) -> bool:
        """Has the model been called, with gradients, since the last step?"""
        return self._capture is not None and self._capture.forward_seen

    def finish(self) -> None:
        """Before the step: all that has arrived is counted in."""
        if self._capture is not None:
            self._capture.flush()
            if complaint := self._capture.complaint():
                warn(complaint)

    def of(self, matrix: ParameterMatrix) -> Accumulator:
        """The sums of a matrix, which begin with nothing."""
        return self._gathered.setdefault(id(matrix), self._accumulator_type())

    def take(self, matrix: ParameterMatrix) -> Accumulator | None:
        return self._gathered.pop(id(matrix), None)

    def note_armed(self) -> None:
        """After matrices have been armed for the next step."""
        if self._capture is not None:
            self._capture.note_armed()
            self._capture.find_compiled_modules()

    def drop(self) -> None:
        """Forgets what was gathered, as when gradients are set to zero."""
        self._gathered.clear()
        self._before.clear()
        self._after.clear()
        if self._capture is not None:
            self._capture.discard()
            self._capture.find_compiled_modules()

    def forget(self) -> None:
        """After the step: the next one begins."""
        self.drop()
        if self._capture is not None:
            self._capture.forward_seen = False

    def _gather(self, matrix: ParameterMatrix, factors: Factors) -> None:
        group = self._groups[matrix.params[0]]
        small = not isinstance(factors, Lookup | Bags) or factors.rows <= CHECKED_ROWS
        check = small and id(matrix) in self._before
        gathered = self.of(matrix)
        gathered.take_in(matrix, factors, group, seed_of(group), check)

    def _before_forward(self, changed: list[ParameterMatrix]) -> None:
        """Is the model one of several ranks'? And gradients thrown away (model.zero_grad()) take with them what was
        gathered."""
        self._on_forward(bool(changed))
        for matrix in changed:
            self._before.pop(id(matrix), None)
            if self._gathered.pop(id(matrix), None) is not None:  # frozen or cast between two micro-batches
                matrix.armed = False  # samples of one of them alone would not be those of the gradient
        if self.wrapper is None:
            self.wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
        for matrix in self._matrices if self._gathered else ():
            # FSDP2 keeps the gradients of accumulated micro-batches to itself.
            dropped = all(p.grad is None for p in matrix.params) and not any(map(holds_gradients, matrix.managed))
            if id(matrix) in self._gathered and dropped:
                del self._gathered[id(matrix)]
        self._drop_thrown_away()

    def _drop_thrown_away(self) -> None:
        """Samples whose gradients have been set to zero or None since their pass. In the usual loop no gradient has
        been touched, so that none is looked at and nothing is waited for."""
        for matrix in self._matrices if self._after else ():
            found = zip(matrix.params, self._after.get(id(matrix), []), strict=False)
            touched = any(mark.grad is not None and mark.changed(p.grad) for p, mark in found)
            if touched and all(_is_zero(p.grad) for p in matrix.params):
                del self._after[id(matrix)]
                self._gathered.pop(id(matrix), None)
                if self._capture is not None:
                    self._capture.discard(matrix)

    def _after_backward(self) -> None:
        """The check, and a mark on the gradients that the pass has left."""
        self._check_coverage()
        kept = set() if self._capture is None else self._capture.retained()
        for matrix in self._matrices if self._gathered or kept else ():
            if (id(matrix) in self._gathered or id(matrix) in kept) and not matrix.managed:
                self._after[id(matrix)] = [_Mark(p.grad, entries=False) for p in matrix.params]

    def _before_gradients(self) -> None:
        """What is in .grad before a backward pass, which may be no work of a captured one. It is a time to see what was
        thrown away, too: there is no other where parts of the model are called by themselves."""
        self._drop_thrown_away()
        for matrix in () if many_ranks() else self._matrices:
            table = matrix.lookup == "only" and matrix.layout.rows > CHECKED_ROWS
            if not matrix.armed or (matrix.checked and not matrix.own_forward) or table:
                continue
            if matrix.managed and id(matrix) in self._before:
                continue
            self._before[id(matrix)] = [_Mark(p.grad) for p in matrix.active_params]
            if id(matrix) in self._gathered:
                self._gathered[id(matrix)].gradient = None  # of a pass that has failed

    def _check_coverage(self) -> None:
        """After the backward pass of the first refresh: do the captured parts add up to the gradients?

        What is left over comes from a use that no watched module made, such as ``F.linear(x, embedding.weight)`` or a
        penalty on the weights in the loss. A pass that adds to no .grad, as that of ``torch.autograd.grad``, cannot
        tell; the next one may.
        """
        for matrix in self._matrices if self._before else ():
            gathered = self._gathered.get(id(matrix))
            marks = self._before.get(id(matrix), [])
            added = [mark.added(p.grad) for p, mark in zip(matrix.active_params, marks, strict=False)]
            if matrix.managed and all(grad is None for grad in added):
                continue  # FSDP2 keeps the gradients of accumulated micro-batches to itself, and brings their sum
            self._before.pop(id(matrix), None)
            if gathered is None or gathered.gradient is None:
                continue
            captured, gathered.gradient = matrix.layout.split(gathered.gradient), None
            # No side is curved where the option was changed in the middle of the pass.
            if matrix.falls_back or gathered.total == [] or all(grad is None for grad in added):
                continue
            # Of a forward that leaves the bias out, the weight is looked at all the same.
            pairs = [(grad, part) for grad, part in zip(added, captured, strict=True) if grad is not None]
            left_over = [torch.linalg.vector_norm(grad.to(part) - part) for grad, part in pairs]
            # Factors of 16 bits come from float16 or bfloat16 parameters, or from autocast.
            rounding = (5e-2 if gathered.coarse else 1e-3) * gathered.length() + sum(mark.rounding() for mark in marks)
            matrix.checked = all(grad is not None for grad in added)
            if bool(torch.linalg.vector_norm(torch.stack(left_over)) > rounding):
                matrix.fall_back_at_step("a part of its gradient does not come from calls of its module")


class _Mark:
    """A gradient as it was, to tell what is added to it."""

    def __init__(self, grad: Tensor | None, entries: bool = True) -> None:
        self.grad, self.version = grad, None if grad is None else grad._version
        self.entries = grad.clone() if entries and grad is not None else None

    def changed(self, grad: Tensor | None) -> bool:
        """Is it another tensor since, or has it been written to?"""
        return grad is not self.grad or (grad is not None and grad._version != self.version)

    def added(self, grad: Tensor | None) -> Tensor | None:
        """What has been added since, on this rank; None where nothing has."""
        if grad is None or not self.changed(grad):
            return None
        found = local(grad).to_dense()
        return found if self.entries is None else found - local(self.entries).to_dense()

    def rounding(self) -> Tensor | float:
        """What a difference from it may be off by."""
        if self.entries is None:
            return 0.0
        return 4 * torch.finfo(self.entries.dtype).eps * torch.linalg.vector_norm(local(self.entries).to_dense())


def _is_zero(grad: Tensor | None) -> bool:
    """Or None. Of a sharded gradient a rank sees its part alone, so it is not asked."""
    if grad is None:
        return True
    return not is_dtensor(grad) and not bool((grad._values() if grad.is_sparse else grad).any())
