"""Grafting: the direction of NGPlus with the length of SGD's or Adam's step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference as ref
from helpers.linear import LAMBDA, PAPER, batches, compare, matrix_of, per_sample
from helpers.steps import one_step

pytestmark = pytest.mark.usefixtures("double")


def test_grafting_to_sgd() -> None:
    def direction(k: int, grads: Tensor, _: Tensor) -> Tensor:
        side, mean = ref.side_of(grads), grads.mean(0)
        shape = ref.direction(mean, ref.gfim(grads, side), side, LAMBDA)
        return shape * mean.norm() / shape.norm()

    compare(direction, update_every=1, graft="sgd")


def test_grafting_to_adam() -> None:
    """The length is that of torch's own Adam on the same gradients, whatever the direction."""
    model = nn.Linear(5, 3)
    optimizer = ngplus.NGPlus(model, lr=0.1, update_every=1, **{**PAPER, "graft": "adam"})
    shadow = nn.Linear(5, 3)
    adam = torch.optim.Adam(shadow.parameters(), lr=0.1, betas=(0.0, 0.95), eps=1e-8)
    for x, y in batches(5):
        grads, before = per_sample(model, x, y), matrix_of(model)
        one_step(model, optimizer, x, y)
        update = before - matrix_of(model)
        old = matrix_of(shadow)
        shadow.weight.grad, shadow.bias.grad = grads.mean(0)[0, :, :-1].clone(), grads.mean(0)[0, :, -1].clone()
        adam.step()
        assert float(update.norm()) == pytest.approx(float((old - matrix_of(shadow)).norm()), rel=1e-6)
        shape = ref.direction(grads.mean(0), ref.gfim(grads, "left"), "left", LAMBDA)
        assert ref.relative_error(update / update.norm(), shape / shape.norm()) < 1e-6


@pytest.mark.parametrize("nesterov", [False, True])
def test_grafted_momentum_keeps_the_length(nesterov: bool) -> None:
    """Of gradients that do not change every step is as long as Adam's: a number each."""
    weight = nn.Parameter(torch.zeros(4, 3))
    gradient = torch.randn(4, 3)
    options = {**PAPER, "graft": "adam", "curvature": "batch", "momentum": 0.9, "nesterov": nesterov}
    optimizer = ngplus.NGPlus([weight], lr=0.1, **options)
    for _ in range(6):
        before = weight.detach().clone()
        weight.grad = gradient.clone()
        optimizer.step()
        assert float((weight - before).norm()) == pytest.approx(0.1 * 12**0.5, rel=1e-5)


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("solver", ["dense", "auto"])
def test_an_outlier_makes_no_longer_step_than_the_samples_of_the_last_refresh(
    curvature: str, reduction: str, solver: str
) -> None:
    """|G|^2 <= trace(L) for the batch of a refresh; between refreshes the length of the step is held to it."""
    model = nn.Linear(30, 20)
    options = {**PAPER, "curvature": curvature, "graft": "sgd", "loss_reduction": reduction, "solver": solver}
    if curvature == "momentum":
        options |= {"solver": "dense", "beta": 0.0}
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=3, **options)
    (x, y) = batches(1, samples=4, features=30, outputs=20)[0]
    lengths = []
    for scale in (1.0, 1.0, 1000.0):
        grads, before = per_sample(model, x, y), matrix_of(model)
        squares = float(grads.square().sum((1, 2, 3)).mean())
        optimizer.zero_grad()
        losses = (model(x) - y).square().sum(1)
        gradient = scale * (losses.mean() if reduction == "mean" else losses.sum())
        gradient.backward()
        optimizer.step()
        lengths.append((float((before - matrix_of(model)).norm()), squares, float(grads.mean(0).norm())))
    number = 1 if reduction == "mean" else 4
    (first, squares, mean), (second, _, later), (third, _, _) = lengths
    assert first == pytest.approx(1e-3 * number * mean)
    assert second == pytest.approx(1e-3 * number * later)
    assert third == pytest.approx(1e-3 * number * squares**0.5)
