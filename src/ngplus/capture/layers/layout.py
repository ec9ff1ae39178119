"""How parameters form one matrix: the paper's W (m x n), with the bias as a column.

A matrix is made of parts, each a parameter, that stand side by side as columns. A grouped convolution is a stack of
``groups`` matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

# The kinds of parts:
# rows:    the first dimension is m, the others together are columns (Linear, Conv, Embedding)
# transposed:  the second dimension is m (ConvTranspose, the Conv1D of Hugging Face); inputs and kernel are columns
# column:  all entries are one column of m rows (bias, scale, shift, a lone vector)


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix of a module: the names of its parameters, relative to the module, and how each lies in it.

    Attributes:
        names: of the parameters that stand side by side.
        kinds: how each lies: ``"rows"`` (dimension 0 is m), ``"transposed"`` (dimension 1 is m) or ``"column"`` (a
            bias, a vector).
        groups: of a grouped convolution, each a matrix of its own.

    Examples:
        >>> ngplus.layers.MatrixSpec(("weight", "bias")).kinds
        ('rows', 'column')
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...] = ("rows", "column")
    groups: int = 1


def kind_of(shape: Sequence[int]) -> str:
    """How a parameter lies of which only the shape is known. With one dimension that is not 1, as of LayerScale's
    [C, 1, 1], it is a vector."""
    return "rows" if sum(size != 1 for size in shape) > 1 else "column"


class Layout:
    """Takes the tensors of a matrix's parameters, or of their gradients, to [groups, m, n] and back.

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
        self.places = prod(shapes[0][2:]) if kinds[0] != "column" else 1  # of a kernel: columns of one input channel

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each as the columns that it takes, [groups, m, width]; a view unless it is transposed."""
        return [
            t.reshape(self.groups, self.rows, width) if kind != "transposed" else _transposed(t, self.groups, self.rows)
            for t, kind, width in zip(tensors, self.kinds, self.widths, strict=True)
        ]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """[groups, m, n]; a view where there is one part that is not transposed."""
        parts = self.parts(tensors)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The way back: tensors of the parameters' shapes."""
        pieces = matrix.split(self.widths, dim=-1) if len(self.widths) > 1 else [matrix]
        return [
            _from_matrix(piece, shape, kind) for piece, shape, kind in zip(pieces, self.shapes, self.kinds, strict=True)
        ]

    def columns(self, part: int) -> range:
        """The columns of the matrix that hold that part."""
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
