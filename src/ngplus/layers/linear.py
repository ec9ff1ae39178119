"""Linear layers, and the transposed Conv1D of Hugging Face transformers.

On the way from gradient to step: the rule between capture and factors, and the shortest one to read first.
"""

from __future__ import annotations

from torch import Tensor, nn

from ngplus.factors import Factors, Outer
from ngplus.layers.matrix import MatrixSpec
from ngplus.layers.rule import Active, Batch, Inputs, LayerRule, register_layer


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
        return linear_factors(x, grad, active, batch)


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """y = x W + b with W (in, out): turned, so that its rows are outputs.

    Examples:
        >>> ngplus.layers.TransposedLinearRule().matrices(nn.Module())[0].kinds
        ('turned', 'column')
    """

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("turned", "column"))]
