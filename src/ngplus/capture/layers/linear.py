"""Rules of Linear, that of torch_geometric included, and of the transposed Conv1D of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.batch import Batch
from ngplus.capture.layers.base import Active, Inputs, register_layer
from ngplus.capture.layers.computed import Functions, WeightRule, with_sources
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.layers.parts import by_parts
from ngplus.fisher.factors import Factors, Outer, Segments

# Samples of different sizes are padded with zeros if the largest has fewer entries than this. Otherwise each sample has
# its own product.
MIN_UNPADDED_ENTRIES = 2**13


def linear_factors(x: Tensor | None, grad: Tensor, active: Active, batch: Batch) -> Outer:
    r"""$G_i = \sum_p g_{ip} [a_{ip}; 1]^\top$ for $y = W a + b$. ``x`` may be None if W is not active.

    Examples:
        >>> x, grad = torch.randn(8, 3), torch.randn(8, 2)
        >>> factors = ngplus.layers.linear_factors(x, grad, (True, True), ngplus.layers.Batch())
        >>> factors.samples, factors.rows, factors.cols
        (8, 2, 4)
    """
    g = batch.fold(grad)
    a = batch.fold(x) if active[0] and x is not None else g[..., :0]
    entries = batch.first(grad)
    sizes = batch.sizes(len(entries)) if grad.dim() > 1 else None
    own = entries[0].numel() // entries.shape[-1] if sizes else 1  # positions of each entry along the batch dimension
    return Outer(g[None], a[None], len(active) > 1 and active[1], [own * k for k in sizes] if sizes else None)


def linear_parts(
    x: Tensor | None,
    grad: Tensor,
    active: Active,
    batch: Batch,
    finish: Callable[[Outer], Factors] = lambda factors: factors,
) -> Factors:
    """``finish`` of the same, for some samples at a time where ``fold`` copies."""

    def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
        return finish(linear_factors(tensors[1] if len(tensors) > 1 else None, tensors[0], active, batch))

    given = [tensor for tensor in (grad, x if active[0] else None) if tensor is not None]
    if grad.dim() == 1:
        return build(given, batch)
    return by_parts(build, [batch.first(tensor) for tensor in given], batch.in_front)


@register_layer(nn.Linear, "torch_geometric.nn.dense.linear.Linear")
class LinearRule(WeightRule):
    r"""$y = x W^\top + b$ on input of any number of dimensions: $[W\ b]$ is (out, in + 1).

    Examples:
        >>> ngplus.NGPlus(nn.Linear(3, 2)).plan()[0].shape
        (2, 4)
    """

    bias_needs_input = False
    product = True
    functions: ClassVar[Functions] = {F.linear: ("input", "weight", "bias")}

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return with_sources(module, MatrixSpec(("weight", "bias")))

    def factors(self, module: Any, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        right = x if active[0] and x is not None else grad[..., :0]
        ragged = batch.ragged_of(grad)
        if (
            ragged is None
            or not ragged.uneven
            or ragged.longest * (grad.shape[-1] + right.shape[-1]) < MIN_UNPADDED_ENTRIES
        ):
            return linear_parts(x, grad, active, batch)
        bias = len(active) > 1 and active[1]

        def build(tensors: Sequence[Tensor], batch: Batch) -> Factors:
            ragged = batch.ragged_of(tensors[0])
            assert ragged is not None
            left, right = (ragged.sort(side) for side in tensors)
            positions = left[0].numel() // max(1, left.shape[-1])  # of each entry along the batch dimension
            return Segments(left.flatten(0, -2), right.flatten(0, -2), [positions * k for k in ragged.sizes], bias)

        front = [batch.first(side) for side in (grad, right)]
        return by_parts(build, front, batch.in_front, fills=False) if ragged.shuffled else build(front, batch.in_front)


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    r"""$y = x W + b$ with $W$ (in, out): the matrix is $W^\top$.

    Examples:
        >>> ngplus.layers.TransposedLinearRule().matrices(nn.Module())[0].kinds
        ('transposed', 'column')
    """

    functions: ClassVar[Functions] = {}

    def matrices(self, module: Any) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("transposed", "column"))]
