"""Linear layers, and the transposed Conv1D of Hugging Face transformers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ngplus.capture.layers.base import Active, Inputs, LayerRule, register_layer
from ngplus.capture.layers.layout import MatrixSpec
from ngplus.capture.samples import Batch
from ngplus.fisher.factors import Factors, Outer, Segments

MANY = 2**13  # numbers that the largest sample has: with fewer, rows of zeros cost less than a product for each sample


def linear_factors(x: Tensor | None, grad: Tensor, active: Active, batch: Batch) -> Outer:
    """G_i = sum_p g_ip [a_ip; 1]^T for y = W a + b; without W the input is not needed.

    Examples:
        >>> x, grad = torch.randn(8, 3), torch.randn(8, 2)
        >>> factors = ngplus.layers.linear_factors(x, grad, (True, True), ngplus.layers.Batch())
        >>> factors.samples, factors.rows, factors.cols
        (8, 2, 4)
    """
    g = batch.fold(grad)
    a = batch.fold(x) if active[0] and x is not None else g[..., :0]
    return Outer(g[None], a[None], ones=len(active) > 1 and active[1])


@register_layer(nn.Linear)
class LinearRule(LayerRule):
    """y = x W^T + b on input of any number of dimensions: [W b] is (out, in + 1).

    Examples:
        >>> ngplus.NGPlus(nn.Linear(3, 2)).plan()[0].shape
        (2, 4)
    """

    bias_needs_input = False

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"))]

    def factors(self, module: nn.Module, inputs: Inputs, grad: Tensor, active: Active, batch: Batch) -> Factors:
        (x,) = inputs
        right = x if active[0] and x is not None else grad[..., :0]
        ragged = batch.ragged_of(grad)
        if ragged is None or not ragged.uneven or ragged.longest * (grad.shape[-1] + right.shape[-1]) < MANY:
            return linear_factors(x, grad, active, batch)
        right = F.pad(right, (0, 1), value=1.0) if len(active) > 1 and active[1] else right
        left, right = (ragged.sort(batch.first(side)) for side in (grad, right))
        each = left[0].numel() // left.shape[-1]  # positions of a row
        return Segments(
            left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1]), [each * k for k in ragged.sizes]
        )


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """y = x W + b with W (in, out): transposed, so that its rows are outputs.

    Examples:
        >>> ngplus.layers.TransposedLinearRule().matrices(nn.Module())[0].kinds
        ('transposed', 'column')
    """

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("transposed", "column"))]
