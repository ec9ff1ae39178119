"""How parameters form one matrix W (m x n): side by side as columns. A grouped convolution is a stack of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of a module: the names of its parameters, relative to the module, and the layout of each.

    Attributes:
        names: of the parameters, which stand side by side as columns.
        kinds: ``"rows"`` (dimension 0 is m, the others are columns, as in Linear, Conv and Embedding), ``"transposed"``
            (dimension 1 is m, the others are columns, as in ConvTranspose) or ``"column"`` (a bias, a vector).
        groups: of a grouped convolution; each is a matrix.

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
            raise ValueError(f"Parameters of shapes {found} are not one matrix: as {tuple(kinds)} their rows differ")
        self.rows = sizes[0][0]
        self.widths = [cols for _, cols in sizes]
        self.cols = sum(self.widths)
        self.places = prod(shapes[0][2:]) if kinds[0] != "column" else 1  # entries of a convolution's kernel

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
