"""KFAC against brute force: Kronecker factors by a loop over samples, dense formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers import layer_cases as layers
from helpers import reference as ref
from helpers.steps import LAMBDA, PAPER, plain, update_of
from ngplus.baselines import KFAC
from ngplus.capture.layers import linear

pytestmark = pytest.mark.usefixtures("one_thread")


def kronecker_reference(
    model: nn.Module, module: nn.Module, unfold: Callable[[Tensor], Tensor], x: Tensor, loss_fn: Any, approx: str
) -> tuple[Tensor, Tensor]:
    """A and G of a module, sample by sample. ``unfold`` makes an input to [positions, columns]."""
    a_sum, g_sum, places = 0.0, 0.0, 0
    for i in range(len(x)):
        calls: list[tuple[Tensor, Tensor]] = []
        handle = module.register_forward_hook(lambda _, args, out, calls=calls: calls.append((args[0], out)))
        loss = loss_fn(model(x[i : i + 1]), i)
        handle.remove()
        outs = torch.autograd.grad(loss, [out for _, out in calls])
        spatial = isinstance(module, nn.Conv2d)
        a = torch.cat([unfold(into) for into, _ in calls]).detach()
        a = torch.cat([a, torch.ones(len(a), 1).to(a)], dim=1)
        g = torch.cat([(g.flatten(2).transpose(1, 2) if spatial else g).reshape(-1, g.shape[1 if spatial else -1])
                       for g in outs])  # fmt: skip
        if approx == "reduce":
            a, g = a.mean(0, keepdim=True), g.sum(0, keepdim=True)
        a_sum, g_sum, places = a_sum + a.T @ a, g_sum + g.T @ g, places + len(a)
    return a_sum / places, g_sum / len(x)


KRONECKER = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear-3d": (lambda: nn.Linear(4, 3), (5, 6, 4)),
    "linear-twice": (layers.Twice, (5, 3, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (5, 2, 6, 5)),
    "shared-conv": (layers.SharedConv, (5, 3, 6, 6)),
}


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("name", KRONECKER)
def test_kfac_is_exact(name: str, approx: str) -> None:
    torch.manual_seed(0)
    make, shape = KRONECKER[name]
    model, x = make().double(), torch.randn(*shape).double()
    target = torch.rand(len(x), 1).double()
    prefix, module = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d))
    prefix = f"{prefix}." if prefix else ""
    if isinstance(module, nn.Conv2d):

        def unfold(a: Tensor) -> Tensor:
            return F.unfold(a, 3, padding=module.padding, stride=module.stride)[0].T

    else:

        def unfold(a: Tensor) -> Tensor:
            return a.reshape(-1, a.shape[-1])

    def sample_loss(output: Tensor, i: int) -> Tensor:
        return layers.squared(output, target[i : i + 1])

    a, g = kronecker_reference(model, module, unfold, x, sample_loss, approx)
    optimizer = plain(KFAC, model, approx=approx)
    update = update_of(model, optimizer, lambda: layers.squared(model(x), target))
    got = optimizer.factors(prefix + "weight")
    assert ref.relative_error(got.input, a) < 1e-10
    assert ref.relative_error(got.output, g) < 1e-10
    gradient = ref.rows(module.weight.grad, module.bias.grad)[0]
    damped = [f + LAMBDA**0.5 * torch.eye(len(f)).double() for f in (g, a)]
    # [W b] row by row: vec(G^-1 W A^-1) = (G x A)^-1 vec(W)
    wanted = torch.linalg.solve(torch.kron(*damped), gradient.flatten()).view_as(gradient)
    assert ref.relative_error(ref.rows(update[prefix + "weight"], update[prefix + "bias"])[0], wanted) < 1e-6


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_kfac_has_the_factors_of_curvlinops(approx: str, reduction: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 5)).double()
    x, y = torch.randn(7, 2, 6, 6).double(), torch.randint(5, (7,))
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    theirs = curvlinops.KFACLinearOperator(
        model, loss_fn, list(model.parameters()), [(x, y)], fisher_type="empirical", kfac_approx=approx,
        separate_weight_and_bias=False, check_deterministic=False,
    )  # fmt: skip
    theirs.compute_kronecker_factors()
    optimizer = plain(KFAC, model, approx=approx, loss_reduction=reduction)
    update_of(model, optimizer, lambda: loss_fn(model(x), y))
    for name in ("0", "3"):
        ours = optimizer.factors(f"{name}.weight")
        # Curvlinops' Fisher of a summed loss is the sum over the samples; ours is the mean.
        samples = 1 if reduction == "mean" else len(x)
        assert ref.relative_error(ours.input, theirs._input_covariances[name]) < 1e-12
        assert ref.relative_error(ours.output * samples, theirs._gradient_covariances[name]) < 1e-12


def test_grouped_convolutions_have_factors_for_each_group() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 6, 3, groups=2).double(), torch.randn(5, 4, 5, 5).double()
    halves = [nn.Conv2d(2, 3, 3).double() for _ in range(2)]
    for i, half in enumerate(halves):
        half.weight.data, half.bias.data = model.weight.data.chunk(2)[i].clone(), model.bias.data.chunk(2)[i].clone()
    update = update_of(model, plain(KFAC, model), lambda: model(x).square().flatten(1).sum(1).mean())
    for i, half in enumerate(halves):
        part = x.chunk(2, dim=1)[i]
        alone = update_of(half, plain(KFAC, half), lambda h=half, p=part: h(p).square().flatten(1).sum(1).mean())
        assert ref.relative_error(update["weight"].chunk(2)[i], alone["weight"]) < 1e-12
        assert ref.relative_error(update["bias"].chunk(2)[i], alone["bias"]) < 1e-12


NO_KRONECKER = ["embedding-right", "embedding-sparse", "bag-mean-rows", "layer_norm", "group_norm", "tied", "scalar"]


@pytest.mark.parametrize("case", [c for c in layers.CASES if c.name in NO_KRONECKER], ids=lambda case: case.name)
def test_what_has_no_kronecker_factors_gets_the_matrix_of_ngplus(case: layers.Case) -> None:
    updates = []
    for kind in (KFAC, ngplus.NGPlus):
        torch.manual_seed(0)
        model, inputs = case.model().double(), case.inputs()
        inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        optimizer = plain(kind, model, **(PAPER if kind is ngplus.NGPlus else {}))
        target = torch.ones(case.samples, 1).double()
        update = update_of(model, optimizer, lambda m=model, i=inputs, t=target: layers.squared(m(*i), t))
        updates.append([update[name] for name in case.units[0][0]])
    for ours, theirs in zip(*updates, strict=True):
        assert ref.relative_error(ours, theirs) < 1e-10


def test_the_factors_are_averaged_over_refreshes() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    xs = [torch.randn(6, 4).double() for _ in range(4)]
    optimizer = plain(KFAC, model, beta=0.8, update_every=2)
    wanted = None
    for k, x in enumerate(xs):
        update_of(model, optimizer, lambda x=x: model(x).square().sum(1).mean())
        if k % 2 == 0:
            bias = torch.cat([x, torch.ones(6, 1).double()], 1)
            fresh = bias.T @ bias / 6
            wanted = fresh if wanted is None else 0.8 * wanted + 0.2 * fresh
        assert torch.allclose(optimizer.factors("weight").input, wanted)
    other = plain(KFAC, model, beta=0.0)
    update_of(model, other, lambda: model(xs[0]).square().mean())
    with pytest.raises(RuntimeError, match="beta"):
        other.factors("weight")


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_samples_with_different_numbers_of_rows(approx: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A and G of layers on the rows of uneven samples, against a loop over the samples."""
    monkeypatch.setattr(linear, "MIN_UNPADDED_ENTRIES", 10**9 if padded else 0)
    torch.manual_seed(0)
    sizes, index = [3, 1, 4], torch.tensor([0, 2, 0, 1, 2, 2, 0, 2])
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, target = torch.randn(len(index), 4).double(), torch.randn(len(sizes), 2).double()

    def losses(rows: Tensor, samples: Tensor) -> Tensor:
        out = torch.zeros(len(sizes), 2).double().index_add(0, samples, model(rows))
        return (out - target).square().sum(1)

    kappa = sum(sizes) if approx == "expand" else len(sizes)
    a, g = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    for i in range(len(sizes)):
        rows = x[index == i]
        hidden = model[0](rows)
        loss = (model[2](model[1](hidden)).sum(0) - target[i]).square().sum()
        (grad,) = torch.autograd.grad(loss, hidden)
        inputs = torch.cat([rows, torch.ones(len(rows), 1)], 1)
        if approx == "reduce":
            inputs, grad = inputs.mean(0, keepdim=True), grad.sum(0, keepdim=True)
        a, g = a + inputs.T @ inputs / kappa, g + grad.T @ grad / len(sizes)
    optimizer = plain(KFAC, model, approx=approx, sample_index=lambda rows: index)
    update_of(model, optimizer, lambda: losses(x, index).mean())
    if approx == "reduce" and not padded:  # no mean over positions is made: the layer has L of its own
        with pytest.raises(RuntimeError, match="no Kronecker factors"):
            optimizer.factors("0.weight")
        return
    got = optimizer.factors("0.weight")
    assert ref.relative_error(got.input, a) < 1e-10
    assert ref.relative_error(got.output, g) < 1e-10
