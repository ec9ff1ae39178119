"""Linear layers, and the transposed Conv1D of Hugging Face transformers."""

from __future__ import annotations

from torch import Tensor, nn

from ngplus.fisher import Factors, Outer
from ngplus.layers.matrix import MatrixSpec
from ngplus.layers.rule import Batch, LayerRule, register_layer


def linear_factors(x: Tensor, grad: Tensor, active: tuple[bool, ...], batch: Batch) -> Outer:
    """G_i = sum_p g_ip [a_ip; 1]^T for y = W a + b."""
    a, g = batch.fold(x), batch.fold(grad)
    weight, bias = active[0], len(active) > 1 and active[1]
    return Outer(g[None], (a if weight else a[..., :0])[None], ones=bias)


@register_layer(nn.Linear)
class LinearRule(LayerRule):
    """y = x W^T + b on input of any number of dimensions: [W b] is (out, in + 1)."""

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"))]

    def factors(
        self,
        module: nn.Module,
        inputs: tuple[Tensor | None, ...],
        grad: Tensor,
        active: tuple[bool, ...],
        batch: Batch,
    ) -> Factors:
        (x,) = inputs
        assert x is not None
        return linear_factors(x, grad, active, batch)


@register_layer("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """y = x W + b with W (in, out): turned, so that its rows are outputs."""

    def matrices(self, module: nn.Module) -> list[MatrixSpec]:
        return [MatrixSpec(("weight", "bias"), ("turned", "column"))]
