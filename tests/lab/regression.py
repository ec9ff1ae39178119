"""A task of the laboratory that trains in no time: for the tests of its loop, and for tools/reliability."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ngplus.lab.workloads import Task


class Regression(Task):
    """A regression with dropout, so that random numbers matter."""

    widths, samples = (64, 64), 16

    def model(self) -> nn.Module:
        a, b = self.widths
        return nn.Sequential(nn.Linear(6, a), nn.Tanh(), nn.Dropout(0.2), nn.Linear(a, b), nn.Tanh(), nn.Linear(b, 1))

    def batch(self, seed: int, step: int) -> Tensor:
        return torch.randn(self.samples, 6, generator=torch.Generator().manual_seed(1000 * seed + step))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            return {"loss": self.loss(model, self.batch(99, 0)).item()}
