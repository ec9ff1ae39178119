"""Adaptive scaling in plain formulas, with nothing but torch.linalg.eigh: what the tests compare with."""

from __future__ import annotations

import reference as ref
import torch
from linear_cases import LAMBDA
from torch import Tensor


def second_moment(v: Tensor, kind: str) -> Tensor:
    """As it is, or as the product of its means over rows and columns. These are linear in v, and a change of basis
    keeps its sums, so that it does not matter when they are taken. Of one or two rows or columns it is as it is."""
    rows, cols = v.mean(-1, keepdim=True), v.mean(-2, keepdim=True)
    return v if kind == "full" or min(v.shape[-2:]) < 3 else rows * cols / rows.mean(-2, keepdim=True)


def adam_step(m: Tensor, v: Tensor, t: int, beta1: float, beta2: float, kind: str) -> Tensor:
    """m / sqrt(v), both without their bias; of a factored matrix no longer than 1 a number in the root mean square."""
    second = second_moment(v, kind) / (1 - beta2**t)
    step = (m / (1 - beta1**t)) / (second.sqrt() + 1e-8)
    factored = kind == "factored" and min(v.shape[-2:]) > 2
    return step / step.square().mean().sqrt().clamp_min(1.0) if factored else step


class PlainAdaptive:
    """Adam's moments in the eigenbasis of L or R, as DESIGN.md has it, with nothing but torch.linalg.eigh."""

    def __init__(self, beta1: float, beta2: float, every: int, kind: str = "full") -> None:
        self.beta1, self.beta2, self.every, self.kind = beta1, beta2, every, kind

    def curvature(self, k: int, grads: Tensor, side: str) -> Tensor:
        return ref.gfim(grads, side)

    def __call__(self, k: int, grads: Tensor, _: Tensor) -> Tensor:
        side, mean = ref.side_of(grads), grads.mean(0)
        gradient = mean if side == "left" else mean.mT
        curvature = self.curvature(k, grads, side)
        if k % self.every == 0:
            new = torch.linalg.eigh(curvature).eigenvectors
            if k == 0:
                self.m, self.v = torch.zeros_like(gradient), torch.zeros_like(gradient)
            else:
                change = new.mT @ self.q
                self.m, self.v = change @ self.m, (change * change) @ self.v
            self.q = new
        turned = self.q.mT @ gradient
        self.m = self.beta1 * self.m + (1 - self.beta1) * turned
        self.v = self.beta2 * self.v + (1 - self.beta2) * turned**2
        direction = self.q @ adam_step(self.m, self.v, k + 1, self.beta1, self.beta2, self.kind)
        return direction if side == "left" else direction.mT


class PlainAdaptiveBatch(PlainAdaptive):
    """The same in the eigenbasis of the moving average of mini-batch products."""

    def curvature(self, k: int, grads: Tensor, side: str) -> Tensor:
        product = ref.gfim(grads.mean(0)[None], side)
        old = LAMBDA * torch.eye(product.shape[-1])[None] if k == 0 else self.average
        self.average = 0.8 * old + 0.2 * product
        return self.average


class PlainTwoSided:
    """Adam's moments of Q_L^T G Q_R, with nothing but torch.linalg.eigh.

    The larger side has a null space, whose basis is made definite by the tilt: a rising diagonal of sqrt(eps) of the
    mean eigenvalue.
    """

    def __init__(self, beta1: float, beta2: float, every: int, kind: str) -> None:
        self.beta1, self.beta2, self.every, self.kind = beta1, beta2, every, kind

    def refreshes(self, k: int) -> bool:
        return k % self.every == 0

    def curvature(self, grads: Tensor, side: str) -> Tensor:
        return ref.gfim(grads, side)

    def basis(self, matrix: Tensor) -> Tensor:
        d = matrix.shape[-1]
        tilt = torch.diag(torch.linspace(0, 1, d)) * torch.finfo(matrix.dtype).eps ** 0.5
        return torch.linalg.eigh(matrix * d / matrix[0].trace() + tilt).eigenvectors

    def __call__(self, k: int, grads: Tensor, _: Tensor) -> Tensor:
        gradient = grads.mean(0)
        if self.refreshes(k):
            left, right = (self.basis(self.curvature(grads, side)) for side in ("left", "right"))
            if k == 0:
                self.m, self.v = torch.zeros_like(gradient), torch.zeros_like(gradient)
            else:
                p, q = left.mT @ self.left, right.mT @ self.right
                self.m, self.v = p @ self.m @ q.mT, (p * p) @ self.v @ (q * q).mT
                self.carry(p * p, q * q)
            self.left, self.right = left, right
        turned, before = self.left.mT @ gradient @ self.right, self.m
        self.m = self.beta1 * self.m + (1 - self.beta1) * turned
        self.v = self.beta2 * self.v + (1 - self.beta2) * turned**2
        step = adam_step(self.ahead(turned), self.v, k + 1, self.beta1, self.beta2, self.kind)
        return self.left @ (step * self.factors(turned, before, k + 1)) @ self.right.mT

    def ahead(self, turned: Tensor) -> Tensor:
        return self.m

    def carry(self, left: Tensor, right: Tensor) -> None:
        """What else is kept for each direction, from the old bases into new ones."""

    def factors(self, turned: Tensor, before: Tensor, t: int) -> Tensor:
        """To the learning rate."""
        return torch.ones(())


class PlainDefault(PlainTwoSided):
    """What a newcomer gets: moving averages of L and R, refreshes after 1 and 5 steps and then every T, Nesterov,
    second moments by rows and columns."""

    def __init__(self) -> None:
        super().__init__(0.9, 0.95, 20, "factored")
        self.averages: dict[str, Tensor] = {}

    def refreshes(self, k: int) -> bool:
        return k in (0, 1, 5, 25)

    def curvature(self, grads: Tensor, side: str) -> Tensor:
        new = ref.gfim(grads, side)
        self.averages[side] = 0.5 * self.averages[side] + 0.5 * new if side in self.averages else new
        return self.averages[side]

    def ahead(self, turned: Tensor) -> Tensor:
        return self.beta1 * self.m + (1 - self.beta1) * turned
