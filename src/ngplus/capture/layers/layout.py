"""How parameters form one matrix W (m x n): side by side as columns. A grouped convolution is a stack of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of a module: its parameters and the layout of each.

    Attributes:
        names: the names of the parameters, relative to the module. They stand side by side as columns.
        kinds: ``"rows"`` (dimension 0 is m, the others are columns, as in Linear, Conv and Embedding), ``"transposed"``
            (dimension 1 is m, the others are columns, as in ConvTranspose), ``"batched"`` ([groups, m, n], as in
            torch.bmm) or ``"column"`` (a bias, a vector).
        groups: the number of groups of a grouped convolution or a batched weight, each a matrix.

    Examples:
        >>> ngplus.layers.MatrixSpec(("weight", "bias")).kinds
        ('rows', 'column')
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...] = ("rows", "column")
    groups: int = 1


def kind_of(shape: Sequence[int]) -> str:
    """Returns the kind of a parameter by its shape alone. [C, 1, 1], as in LayerScale, is a vector."""
    return "rows" if sum(size != 1 for size in shape) > 1 else "column"


def spec_of(name: str, shape: Sequence[int], module: nn.Module | None) -> MatrixSpec:
    """Returns the matrix of a parameter without a rule; ``module`` is the one that it belongs to, if that is known.

    A weight [groups, m, n] with sizes above 1 is a stack of matrices, as the weights of all experts in one parameter or
    those of torch.bmm, unless its module is a convolution in one dimension: a module with a ``kernel_size`` or of a
    class named "...Conv1d...", or a parameter named "...kernel...". If the module is not known, it is a stack if
    "expert" is in its name. Whether m or n are the outputs is not known: that swaps L and R.
    """
    stack = len(shape) == 3 and min(shape) > 1
    if stack and module is None:
        stack = "expert" in name.lower()
    elif stack:
        named = "conv1d" in type(module).__name__.lower() or "kernel" in name.rpartition(".")[2].lower()
        stack = not named and not hasattr(module, "kernel_size")
    return MatrixSpec((name,), ("batched",), shape[0]) if stack else MatrixSpec((name,), (kind_of(shape),))


class Layout:
    """Converts the tensors of a matrix's parameters, or their gradients, to [groups, m, n] and back.

    Examples:
        >>> layer = nn.Linear(3, 2)
        >>> layout = ngplus.layers.Layout([layer.weight.shape, layer.bias.shape], ["rows", "column"])
        >>> tuple(layout.join([layer.weight, layer.bias]).shape)
        (1, 2, 4)
    """

    def __init__(self, shapes: Sequence[torch.Size], kinds: Sequence[str], groups: int = 1) -> None:
        self.shapes, self.kinds, self.groups = tuple(shapes), tuple(kinds), groups
        sizes = [_rows_and_cols(shape, kind, groups) for shape, kind in zip(shapes, kinds, strict=True)]
        if len({rows for rows, _ in sizes}) != 1:
            found = [tuple(shape) for shape in shapes]
            raise ValueError(f"Parameters of shapes {found} do not form one matrix: the rows of {tuple(kinds)} differ")
        self.rows = sizes[0][0]
        self.widths = [cols for _, cols in sizes]
        self.cols = sum(self.widths)
        self.places = prod(shapes[0][2:]) if kinds[0] in ("rows", "transposed") else 1  # of a convolution's kernel

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the columns of each tensor, [groups, m, width]: a view unless it is transposed."""
        return [self.part(i, tensor) for i, tensor in enumerate(tensors)]

    def part(self, index: int, tensor: Tensor) -> Tensor:
        """Returns the columns of the tensor of one parameter, [groups, m, width]."""
        if self.kinds[index] == "transposed":
            return _transposed(tensor, self.groups, self.rows)
        return tensor.reshape(self.groups, self.rows, self.widths[index])

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the matrix, [groups, m, n]."""
        parts = self.parts(tensors)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Inverts ``join``: returns tensors of the parameters' shapes."""
        pieces = matrix.split(self.widths, dim=-1) if len(self.widths) > 1 else [matrix]
        return [
            _from_matrix(piece, shape, kind) for piece, shape, kind in zip(pieces, self.shapes, self.kinds, strict=True)
        ]

    def columns(self, part: int) -> range:
        """Returns the columns of one parameter."""
        start = sum(self.widths[:part])
        return range(start, start + self.widths[part])


def _rows_and_cols(shape: torch.Size, kind: str, groups: int) -> tuple[int, int]:
    if kind == "column":
        return prod(shape) // groups, 1
    if kind == "batched":
        return shape[1], shape[2]
    if kind == "transposed":
        return shape[1], shape[0] // groups * prod(shape[2:])
    return shape[0] // groups, prod(shape[1:])


def _transposed(tensor: Tensor, groups: int, rows: int) -> Tensor:
    inputs = tensor.shape[0] // groups
    return tensor.reshape(groups, inputs, rows, -1).transpose(1, 2).reshape(groups, rows, -1)


def _from_matrix(matrix: Tensor, shape: torch.Size, kind: str) -> Tensor:
    if kind != "transposed":
        return matrix.reshape(shape)
    groups, rows, _ = matrix.shape
    return matrix.reshape(groups, rows, shape[0] // groups, -1).transpose(1, 2).reshape(shape)
