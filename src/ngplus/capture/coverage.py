"""Checks in every refresh that the captured per-sample gradients sum to the gradient.

A difference comes from a use outside of the watched modules: ``F.linear(x, embedding.weight)``, a penalty on the
weights, a double backward. The matrix then gets mini-batch curvature.

The gradient is that of this rank, before ranks average it: a hook on the parameter reads what each backward pass adds.
The first check of a matrix compares all entries. A later one compares up to 4 rows and 4 columns, evenly spaced from a
random place on, and one of a module under vmap or with its own forward all entries again.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ngplus.capture.accumulator import Accumulator
from ngplus.capture.autograd import is_batched
from ngplus.capture.matrices import ParameterMatrix
from ngplus.fisher.factors import Factors
from ngplus.utils.dtensor import whole
from ngplus.utils.finite import copy_to_host, read_if_on_host
from ngplus.utils.precision import bfloat16_products

BLOCK = 4  # rows and columns of a block
SMALL = 1024  # entries of a matrix up to which all are compared
MAX_ROWS = 1_000_000  # of a lookup table; larger ones are not checked


class Coverage:
    """The differences between gradients and captured gradients since the last step.

    Args:
        matrices: the matrices of the optimizer.
        on_gradient: called before the gradient of a parameter is taken, in the backward pass.
    """

    def __init__(self, matrices: list[ParameterMatrix], on_gradient: Callable[[], None]) -> None:
        self._matrices, self._on_gradient = matrices, on_gradient
        self._differences: dict[int, _Difference] = {}  # by id of the matrix
        self._hooks: dict[tuple[int, int], Any] = {}  # by the ids of the matrix and of the tensor in the graph
        self._unread: list[tuple[list[ParameterMatrix], Tensor, Any]] = []  # flags that an accelerator computes
        self._random = random.Random(0)
        self._paused = False
        self._finalizer = weakref.finalize(self, _remove, self._hooks)

    def watch(self) -> None:
        """Registers hooks on the parameters of armed matrices, and removes those on others."""
        armed = {id(matrix) for matrix in self._matrices if matrix.armed}
        for key in [key for key in self._hooks if key[0] not in armed]:
            self._hooks.pop(key).remove()
        for matrix in self._matrices:
            if matrix.armed and not matrix.managed:
                for index in matrix.parts:
                    self._hook(matrix, index, matrix.params[index])

    def watch_managed(self, matrix: ParameterMatrix) -> None:
        """The same for a matrix of FSDP2, whose tensors in the graph are known while its module is called."""
        for index in matrix.parts if matrix.managed else ():
            self._hook(matrix, index, matrix.managed[index]._unsharded_param)

    def _hook(self, matrix: ParameterMatrix, index: int, param: Tensor) -> None:
        key = (id(matrix), id(param))
        if key in self._hooks or not param.requires_grad:
            return
        this = weakref.ref(self)

        def add(grad: Tensor) -> None:
            coverage = this()
            if coverage is not None and matrix.armed and index in matrix.parts and not is_batched(grad):
                coverage._on_gradient()
                with torch.no_grad():
                    difference = coverage._of(matrix)
                    if difference is not None:
                        difference.add_gradient(matrix.parts.index(index), whole(grad.detach()))

        self._hooks[key] = param.register_hook(add)

    def remove(self) -> None:
        """Removes all hooks."""
        self._finalizer()

    def pause(self) -> None:
        """Compares nothing until the gradients are reset."""
        self._paused = True

    def reset(self, matrix: ParameterMatrix | None = None) -> None:
        """Forgets the gradients of a matrix, or of all, as when they are set to zero."""
        if matrix is None:
            self._differences.clear()
            self._paused = False
        else:
            self._differences.pop(id(matrix), None)

    def has(self, matrix: ParameterMatrix) -> bool:
        """Returns True if a backward pass since the last step has reached the matrix."""
        return id(matrix) in self._differences

    def _of(self, matrix: ParameterMatrix) -> _Difference | None:
        if matrix.lookup == "only" and matrix.layout.rows > MAX_ROWS:
            return None
        difference = self._differences.get(id(matrix))
        if difference is None or difference.layout is not matrix.layout:
            difference = self._differences[id(matrix)] = _Difference(matrix, self._random)
        return difference

    def subtract(self, matrix: ParameterMatrix, factors: Factors) -> None:
        """Subtracts captured gradients."""
        difference = self._of(matrix)
        if difference is not None:
            difference.subtract(factors)

    def conclude(self, accumulators: Mapping[int, Accumulator]) -> None:
        """Compares, at the step. A matrix with a difference falls back.

        The first check of a matrix on an accelerator waits for it. Later ones are read when they have arrived, at one
        of the next steps.
        """
        self._read()
        first: list[tuple[ParameterMatrix, Tensor]] = []
        later: list[tuple[ParameterMatrix, Tensor]] = []
        for matrix in self._matrices if self._differences else ():
            difference, accumulator = self._differences.get(id(matrix)), accumulators.get(id(matrix))
            if difference is None or accumulator is None or matrix.falls_back:
                continue
            if difference.layout is not matrix.layout:  # a parameter was frozen or cast since the pass
                continue
            if self._paused or not difference.captured or not difference.parts or accumulator.product_sum == []:
                continue  # no gradient, or an option that changed during the pass
            (later if matrix.checked else first).append((matrix, difference.exceeds(accumulator.length())))
            matrix.checked = matrix.checked or (difference.whole and len(difference.parts) == len(matrix.parts))
        self._differences.clear()
        for checked in (first, later):
            if not checked:
                continue
            matrices, flags = [m for m, _ in checked], torch.stack([flag for _, flag in checked])
            if checked is first or read_if_on_host(flags) is not None:
                _fall_back(matrices, flags.tolist())
            else:
                self._unread.append((matrices, *copy_to_host(flags)))

    def _read(self) -> None:
        """Reads the flags that have arrived from an accelerator."""
        waiting = []
        for matrices, flags, event in self._unread:
            if event is not None and not event.query():
                waiting.append((matrices, flags, event))
            else:
                _fall_back(matrices, flags.tolist())
        self._unread = waiting


class _Difference:
    """A block of the gradient of a matrix, minus what was captured of it."""

    def __init__(self, matrix: ParameterMatrix, numbers: random.Random) -> None:
        self._matrix, self.layout = matrix, matrix.layout
        layout = self.layout
        small = layout.rows * layout.cols <= SMALL
        # The sum of G_i under vmap is computed as a whole.
        self.whole = not matrix.checked or matrix.own_forward or small or matrix.source == "vmap"
        self._rows = self._cols = slice(None)
        if not self.whole:
            if matrix.lookup != "only":
                self._rows = _spread(layout.rows, numbers)
            width = layout.widths[0]
            self._cols = _run(width, layout.places, numbers) if layout.places > 1 else _spread(width, numbers)
        shape = layout.rows, layout.cols if self.whole else layout.widths[0]
        lengths = [len(range(*own.indices(size))) for own, size in zip((self._rows, self._cols), shape, strict=True)]
        self._values = torch.zeros(
            layout.groups, *lengths, dtype=matrix.dtype, device=matrix.params[0].device
        )  # the difference
        self._squares: Tensor | float = 0.0
        self._samples = 0
        self._half_precision = False
        self.captured = False
        self.parts: set[int] = set()  # of the matrix that have a gradient

    def add_gradient(self, part: int, grad: Tensor) -> None:
        """Adds the gradient of a parameter."""
        if not self.whole and part > 0:
            return
        self.parts.add(part)
        grad = grad.to_dense() if grad.is_sparse else grad
        block = self.layout.part(part, grad)
        if self.whole:
            columns = self.layout.columns(part)
            self._values[:, :, columns.start : columns.stop] += block
        else:
            self._values += block[:, self._rows, self._cols]

    def subtract(self, factors: Factors) -> None:
        """Subtracts captured gradients."""
        self.captured = True
        half = factors.half_precision or bfloat16_products(self._values.device)
        self._half_precision = self._half_precision or half
        self._samples += factors.samples
        if self.whole:
            self._values -= factors.gradient_sum(self._matrix.dtype)
        else:
            block, squares = factors.gradient_block(self._rows, self._cols, self._matrix.dtype)
            self._values -= block
            self._squares = self._squares + squares

    def exceeds(self, length: Tensor) -> Tensor:
        """A flag: the difference is more than rounding. ``length`` is sqrt(N sum_i |G_i|^2) of the whole matrix."""
        tolerance = 5e-2 if self._half_precision else 1e-7 if self._values.dtype == torch.float64 else 1e-3
        if self.whole:  # a forward that does not use the bias adds to the weight alone
            parts = [self._values[:, :, self.layout.columns(part)] for part in self.parts]
            return torch.stack([torch.linalg.vector_norm(part) for part in parts]).norm() > tolerance * length
        own = (self._samples * torch.as_tensor(self._squares)).sqrt()
        return torch.linalg.vector_norm(self._values) > tolerance * (own + 1e-3 * length)


def _spread(size: int, numbers: random.Random) -> slice:
    """Up to ``BLOCK`` entries of ``size``, evenly spaced from a random place on, so that they meet each quarter."""
    step = max(1, size // BLOCK)
    last = (min(size, BLOCK) - 1) * step
    start = numbers.randrange(size - last)
    return slice(start, start + last + 1, step)


def _run(size: int, unit: int, numbers: random.Random) -> slice:
    """Up to ``BLOCK`` consecutive entries of ``size``, from a random place on: whole units, or a part of one."""
    if unit > BLOCK:
        start = unit * numbers.randrange(size // unit) + numbers.randrange(unit - BLOCK + 1)
        return slice(start, start + BLOCK)
    length = min(size, BLOCK // unit * unit)
    start = unit * numbers.randrange((size - length) // unit + 1)
    return slice(start, start + length)


def _fall_back(matrices: list[ParameterMatrix], flags: list[bool]) -> None:
    for matrix, missed in zip(matrices, flags, strict=True):
        if missed:
            matrix.fall_back_at_step(matrix.uncovered)


def _remove(hooks: dict[Any, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
