"""A rule for a layer of your own: exact curvature where the fallback would go by vmap.

python examples/own_layer_rule.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import ngplus


class Scaled(nn.Module):
    """y = x M / sqrt(in): the parameter is (in, out), and the input counts by a constant."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix / self.matrix.shape[0] ** 0.5


def build() -> tuple[nn.Module, ngplus.NGPlus]:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(64, 32), nn.Tanh(), Scaled(32, 10))
    # a rate for SGD: gradients, and the effect of a step, have the factor 1 / sqrt(in)
    return model, ngplus.NGPlus(model, lr=3.0)


def train(model: nn.Module, optimizer: ngplus.NGPlus) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    for step in range(60):
        batch = slice(step % 10 * 128, step % 10 * 128 + 128)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        right = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
    row = optimizer.plan()["0.matrix"]
    print(f"curvature by {row.source}, matrix {row.shape}: {right:.1%} of the held-out digits")


train(*build())  # no rule: per-sample gradients by vmap, the matrix as it is


@ngplus.register_layer(Scaled)
class ScaledRule(ngplus.layers.LayerRule):
    def matrices(self, module: nn.Module) -> list[ngplus.layers.MatrixSpec]:
        # transposed: rows of the paper's W are outputs
        return [ngplus.layers.MatrixSpec(("matrix",), ("transposed",))]

    def factors(self, module: Any, inputs: Any, grad: Tensor, active: Any, batch: Any) -> Any:
        # G_i = sum over positions of g (x / sqrt(in))^T
        scale = module.matrix.shape[0] ** -0.5
        return ngplus.layers.linear_factors(inputs[0] * scale, grad, active, batch)


train(*build())  # with the rule: products of factors, no per-sample gradient is formed
