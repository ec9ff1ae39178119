"""The candidates for NGAdam against dense formulas, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.reference import BETA1, BETA2, average, dense_direction, random_gradients
from ngplus.lab.candidates import Roots, SampleGradients, block_size, coupled_root, inverse_power, newton_root, qr_root

pytestmark = pytest.mark.usefixtures("one_thread", "double")


def test_optimizer_in_blocks() -> None:
    """Sides of 200 and 161 fall into two blocks each, of which L and R keep the diagonal ones."""

    def two_blocks(x: Tensor) -> Tensor:
        half = -(-len(x) // 2)
        block = torch.arange(len(x)) // half
        return x * (block[:, None] == block)

    model = nn.Linear(161, 200, bias=False)
    optimizer = Roots(model, lr=0.1, update_every=1, decay=True)
    gradients = random_gradients(200, 161, 2)
    for k, gradient in enumerate(gradients):
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step()
        wanted = dense_direction(gradients[: k + 1], lambda left, right: (two_blocks(left), two_blocks(right)))
        torch.testing.assert_close((before - model.weight.detach()) / 0.1, wanted, rtol=1e-7, atol=1e-9)


def test_tables_by_adam() -> None:
    """The first step is the sign of the gradient times lr (1 + beta1), by Nesterov momentum."""
    model = nn.Embedding(6, 4)
    optimizer = Roots(model, lr=0.1, adam_tables=True)  # type: ignore[arg-type]
    before = model.weight.detach().clone()
    model.weight.grad = random_gradients(6, 4, 1)[0]
    optimizer.step()
    torch.testing.assert_close(before - model.weight.detach(), 0.19 * model.weight.grad.sign(), rtol=1e-5, atol=0)


def test_lazy_averages_take_in_the_gradients_of_refreshes() -> None:
    """With roots in the steps 1, 2, 3, 4 and 6, the weight of the 6th gradient is that of two steps."""
    model = nn.Linear(5, 4, bias=False)
    optimizer = Roots(model, lr=0.1, lazy=True)
    gradients = random_gradients(4, 5, 6)
    for gradient in gradients:
        model.weight.grad = gradient
        optimizer.step()
    weights = [BETA2 ** (6 - k) * (1 - BETA2) for k in (1, 2, 3, 4)] + [1 - BETA2**2]
    assert sum(weights) == pytest.approx(1 - BETA2**6)
    taken = [gradients[k] for k in (0, 1, 2, 3, 5)]
    wanted = sum(w * g @ g.mT for w, g in zip(weights, taken, strict=True))
    torch.testing.assert_close(optimizer.state[model.weight]["left"][0], wanted)


def test_tables_have_a_factored_second_moment() -> None:
    model = nn.Embedding(6, 4)
    optimizer = Roots(model, lr=0.1, update_every=1, decay=True)  # type: ignore[arg-type]
    gradients = random_gradients(6, 4, 3)
    for gradient in gradients:
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step()
    wanted = dense_direction(gradients, lambda left, right: (left.diag().diag(), right.diag().diag()))
    torch.testing.assert_close((before - model.weight.detach()) / 0.1, wanted)


def test_vectors_are_adam_with_nesterov_and_decoupled_decay() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(5))
    optimizer = Roots(model, lr=0.02, weight_decay=0.3)
    gradients = [torch.randn(5) for _ in range(4)]
    for k, gradient in enumerate(gradients):
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step()
        bias = 1 - BETA1 ** (k + 1)
        ahead = BETA1 * average(gradients[: k + 1], BETA1) + (1 - BETA1) * gradient / bias
        second = average([g**2 for g in gradients[: k + 1]], BETA2)
        wanted = before * (1 - 0.02 * 0.3) - 0.02 * ahead / (second.sqrt() + 1e-8)
        torch.testing.assert_close(model.weight.detach(), wanted)


@pytest.mark.parametrize(
    ("length", "other", "unit", "size"),
    [
        (160, 10, 1, 160),
        (384, 128, 1, 128),
        (512, 128, 1, 128),
        (2000, 128, 1, 1),
        (288, 64, 9, 144),
        (147, 64, 49, 147),
    ],
)
def test_block_size(length: int, other: int, unit: int, size: int) -> None:
    assert block_size(length, other, unit) == size


@pytest.mark.parametrize(("length", "longest", "size"), [(128, 64, 64), (80, 64, 80), (384, 1000, 384)])
def test_longest_block(length: int, longest: int, size: int) -> None:
    assert block_size(length, 128, longest=longest) == size


def spectral(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of a symmetric positive definite matrix, by a singular value decomposition."""
    u, values, v = torch.linalg.svd(x)
    return u @ torch.diag(function(values)) @ v


@pytest.mark.parametrize(("p", "q"), [(0.25, 0.25), (0.4, 0.4), (1.0, 0.0), (0.0, 0.5)])
def test_other_exponents(p: float, q: float) -> None:
    model = nn.Linear(5, 4, bias=False)
    optimizer = Roots(model, lr=0.1, update_every=1, damping=0.01, max_rms=math.inf, exponents=(p, q))
    gradients = random_gradients(4, 5, 3)
    for gradient in gradients:
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step()
    left, right = average([g @ g.mT for g in gradients], BETA2), average([g.mT @ g for g in gradients], BETA2)
    ahead = BETA1 * average(gradients, BETA1) * (1 - BETA1**3) + (1 - BETA1) * gradients[-1]
    left_root, right_root = (
        spectral(x * len(x) / x.trace() + 0.01 * torch.eye(len(x)), lambda values, e=e: values**-e)  # type: ignore[misc]
        for x, e in ((left, p), (right, q))
    )
    wanted = (20 / left.trace()).sqrt() * left_root @ ahead @ right_root / (1 - BETA1**3)
    torch.testing.assert_close((before - model.weight.detach()) / 0.1, wanted)


def test_full_tables_have_a_diagonal_left_side() -> None:
    model = nn.Embedding(6, 4)
    optimizer = Roots(model, lr=0.1, update_every=1, decay=True, full_tables=True)  # type: ignore[arg-type]
    gradients = random_gradients(6, 4, 3)
    for gradient in gradients:
        before = model.weight.detach().clone()
        model.weight.grad = gradient
        optimizer.step()
    wanted = dense_direction(gradients, lambda left, right: (left.diag().diag(), right))
    torch.testing.assert_close((before - model.weight.detach()) / 0.1, wanted)


def averages(decay: float, steps: int, jump: int) -> Iterator[Tensor]:
    """Two blocks L of 24 rows in float32, moving averages of products of random gradients with the mean eigenvalue 1.
    The standard deviations of the gradients in the eigenbasis of L are 1, 2^-decay, 3^-decay, ... The eigenbasis of the
    second block is another one from the step ``jump`` on, and its old average is gone."""
    torch.manual_seed(0)
    basis, other = (torch.linalg.qr(torch.randn(24, 24)).Q for _ in range(2))
    scale = torch.arange(1, 25) ** -decay
    left = torch.zeros(2, 24, 24)
    for step in range(1, steps + 1):
        gradient = torch.stack([basis, other if step >= jump else basis]) * scale @ torch.randn(2, 24, 48)
        weight = torch.tensor([1 - BETA2, 1.0 if step == jump else 1 - BETA2]).view(2, 1, 1)
        left = left.lerp(gradient @ gradient.mT, weight)
        yield (left * (24 / left.diagonal(dim1=-2, dim2=-1).sum(-1).view(2, 1, 1))).float()


@pytest.mark.parametrize(
    ("follow", "decay", "bound", "tolerance"),
    [(qr_root, 1.0, 0.3, 0.1), (newton_root, 0.25, 0.1, 0.01), (coupled_root, 1.0, 0.1, 0.001)],
)
def test_tracked_roots(follow: Callable[..., Any], decay: float, bound: float, tolerance: float) -> None:
    """No restart while L changes slowly; one, of that block alone, where it jumps, except by the coupled iteration,
    which keeps no root; all roots within the tolerance."""
    last = torch.eye(24, dtype=torch.float32).expand(2, 24, 24)
    for step, left in enumerate(averages(decay, 60, jump=50), start=1):
        root, last, restarted = follow(left, 1e-5, last, bound)
        if step > 20:
            exact = torch.stack([spectral(x.double() + 1e-5 * torch.eye(24), torch.rsqrt) for x in left])
            assert float((root - exact).norm() / exact.norm()) < tolerance
            if step <= 50:
                assert restarted.tolist() == [False, step == 50 and follow is not coupled_root]


def test_newton_from_the_last_root_fails_where_eigenvalues_differ() -> None:
    """An error of the root between the eigenvectors i and j is multiplied by (2 - r - 1/r) / 4 in a step, with r the
    ratio of their roots: it grows where the eigenvalues differ by a factor of 34 or more."""
    last = torch.eye(24, dtype=torch.float32).expand(2, 24, 24)
    restarts = []
    for left in averages(1.0, 60, jump=0):
        _, last, restarted = newton_root(left, 1e-5, last, 0.1)
        restarts.append(restarted.float().mean())
    assert torch.stack(restarts[20:]).mean() > 0.9


def test_newton_restarts_where_the_root_changes_its_sign() -> None:
    """An eigenvalue of X A X of 4 becomes 1 in a step, and the eigenvalue of X is negative then."""
    root, _, restarted = newton_root(torch.tensor([[[4.0, 0], [0, 1]]]), 0.0, torch.eye(2)[None], 0.1)
    assert restarted.tolist() == [True]
    torch.testing.assert_close(root, torch.tensor([[[0.5, 0], [0, 1]]]))


@pytest.mark.parametrize("tracking", ["qr", "newton", "coupled"])
def test_tracked_roots_that_never_pass_the_check_are_exact(tracking: str) -> None:
    """With ``bound`` -1, eigh makes all blocks."""
    weights = []
    for options in ({}, {"tracking": tracking, "bound": -1.0}):
        model = nn.Linear(5, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = Roots(model, lr=0.1, update_every=1, **options)  # type: ignore[arg-type]
        for gradient in random_gradients(4, 5, 3):
            model.weight.grad = gradient
            optimizer.step()
        weights.append(model.weight)
        assert optimizer.restarts == optimizer.tracked == (6 if options else 0)
    torch.testing.assert_close(*weights)


def test_inverse_power_of_diagonal_blocks() -> None:
    x = torch.tensor([3.0, 8.0]).view(2, 1, 1)
    torch.testing.assert_close(inverse_power(x, 1.0, 1.0).flatten(), torch.tensor([1 / 4, 1 / 9]))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(12, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.conv(x).transpose(1, 2).flatten(2))  # [batch, 4, 12]
        return self.last(torch.tanh(h).mean(1))


def test_sample_gradients_are_those_of_batches_of_one() -> None:
    model, x = Sequences(), torch.randn(3, 2, 4, 4)
    samples = SampleGradients(model)
    model(x).square().sum().backward()
    weights = [model.conv.weight, model.first.weight, model.last.weight]
    found = [samples.pop(weight) for weight in weights]
    samples.remove()
    for own, weight in zip(found, weights, strict=True):
        alone = [torch.autograd.grad(model(one[None]).square().sum(), weight)[0].flatten(1) for one in x]
        torch.testing.assert_close(own, torch.stack(alone))


def test_sample_gradients_of_rows_with_an_index() -> None:
    class Rows(nn.Linear):
        @staticmethod
        def sample_index(x: Tensor) -> tuple[Tensor]:
            return (torch.tensor([0, 0, 1, 2, 2]),)

    model, x = Rows(3, 2), torch.randn(5, 3)
    samples = SampleGradients(model)
    model(x).square().sum().backward()
    found = samples.pop(model.weight)
    for k, rows in enumerate(([0, 1], [2], [3, 4])):
        alone = torch.autograd.grad(
            nn.functional.linear(x[rows], model.weight, model.bias).square().sum(), model.weight
        )
        assert found is not None
        torch.testing.assert_close(found[k], alone[0])


def test_start_per_sample_then_mini_batch() -> None:
    torch.manual_seed(0)
    model, x = Sequences(), torch.randn(8, 2, 4, 4)
    optimizer = Roots(model, lr=0.01, sample_steps=2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert not model.conv._forward_hooks
