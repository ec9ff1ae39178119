"""Numbers that are not finite: parameters stay finite, and the last good inverse stays in use.

Every test runs twice: with the host looking at the flags in its own memory, and as on an accelerator, where it does
not.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from helpers.hostile import METHODS, SPOILS, backward, every_method, net, state_is_finite, train
from helpers.training import Method, Unchanged, both, equal, parameters
from ngplus import NGAdam, NGPlus
from ngplus.baselines import KFAC, SENG
from ngplus.utils import finite

pytestmark = [pytest.mark.filterwarnings("ignore:.*Sparse invariant checks"), pytest.mark.usefixtures("looks")]


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
@pytest.mark.parametrize("first", [0, 2, 3], ids=["first step", "refresh", "between"])
@every_method
def test_a_bad_gradient_skips_the_step(
    method: Method, first: int, spoil: Callable[[nn.Module], None], looks: bool
) -> None:
    model = net()
    optimizer = method(model, lr=1e-3, update_every=2)
    train(model, optimizer, first)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spoil(model)
        before = parameters(model)
        optimizer.step()
        assert equal(before, parameters(model))
        found = optimizer.health()
        train(model, optimizer, 4, first)
    assert found.skipped == 1
    assert found.steps == first + 1
    assert found["4.weight"].gradients == 1
    assert state_is_finite(optimizer, model)
    assert not equal(before, parameters(model))
    told = [str(w.message) for w in caught if w.category is ngplus.HealthWarning and "Gradients" in str(w.message)]
    assert len(told) == 1
    assert "4.weight" in told[0] or "and more" in told[0]


@every_method
def test_a_skipped_step_leaves_no_trace(method: Method, looks: bool) -> None:
    """On the host: as if it had not been, bit for bit. A device lets the moving averages take in zeros."""
    if not looks:
        pytest.skip("of the host")
    runs = []
    for spoilt in (False, True):
        model = net()
        model.eval()  # BatchNorm's own statistics are not the optimizer's
        model.training = True
        optimizer = method(model, lr=1e-3, update_every=2)
        train(model, optimizer, 3)
        if spoilt:
            SPOILS["one layer"](model)
            with pytest.warns(ngplus.HealthWarning):
                optimizer.step()
        train(model, optimizer, 3, 3)
        runs.append(parameters(model))
    assert equal(*runs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layer", ["embedding", "bag"])
@both
def test_sparse_gradient_that_is_not_finite(value: float, layer: str, kind: Method) -> None:
    make = nn.Embedding if layer == "embedding" else nn.EmbeddingBag
    model = make(20, 3, sparse=True)
    optimizer = kind(model, lr=0.5)
    model(torch.tensor([[1, 2], [2, 5]])).square().sum().backward()
    grad = model.weight.grad
    model.weight.grad = torch.sparse_coo_tensor(grad._indices(), grad._values() * value, grad.shape)
    with Unchanged(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert optimizer.health()["weight"].gradients == 1


@both
def test_warnings_can_be_errors(kind: Method) -> None:
    if not finite.SEEN:
        pytest.skip("a device tells later")
    model = net()
    optimizer = kind(model)
    SPOILS["one layer"](model)
    before = parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ngplus.HealthWarning)
        with pytest.raises(ngplus.HealthWarning, match=r"4\.weight") as told:
            optimizer.step()
    assert "0.weight" not in str(told.value)  # names the culprit, and only it
    assert equal(before, parameters(model))


@pytest.mark.parametrize("kind", [KFAC, SENG])
def test_rivals_skip_as_well(kind: Any) -> None:
    model = net()
    optimizer = kind(model, lr=1e-3, update_every=2)
    train(model, optimizer, 3)
    SPOILS["one sample"](model)
    before = parameters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert equal(before, parameters(model))
    assert optimizer.health().skipped == 1
    train(model, optimizer, 3)
    assert state_is_finite(optimizer, model)


@pytest.mark.parametrize("options", [{}, {"graft": "adam", "momentum": 0.9}], ids=["plain", "grafted"])
def test_the_preconditioner_gives_zeros_for_a_bad_gradient(options: dict[str, Any]) -> None:
    """Also where there is a first moment, from which a step without a gradient could be made."""
    model = net()
    preconditioner = ngplus.Preconditioner(model, update_every=2, **options)
    for k in range(4):
        if k == 2:
            SPOILS["one layer"](model)
        else:
            backward(model, k)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            preconditioner.step()
        lengths = torch.stack([p.grad.norm() for p in model.parameters()])
        assert bool((lengths == 0).all()) if k == 2 else bool((lengths > 0).all())
    assert preconditioner.health().skipped == 1


# ------------------------------------------------------------------------------------------------ mixed precision


@both
@pytest.mark.parametrize("unscale", [False, True])
def test_overflow_of_float16_with_a_grad_scaler(unscale: bool, kind: Method, looks: bool) -> None:
    """The scaler finds its scale by overflows: steps are skipped, nothing is told, and training goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = kind(model, lr=1e-2, update_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    x, y = torch.randn(8, 5), torch.randn(8, 3)
    moved = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            before = parameters(model)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            moved += not equal(before, parameters(model))
            assert state_is_finite(optimizer, model)
    found = optimizer.health()
    assert 5 < moved < 35
    assert found.steps == moved
    assert found.good


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["batch", "NGAdam"])
def test_parameters_of_16_bits_stay_finite(dtype: torch.dtype, name: str) -> None:
    """A step of float32's range does not fit into float16."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    optimizer = METHODS[name](model, lr=6e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    if dtype == torch.float16:
        assert optimizer.health()["weight"].steps > 0


# ------------------------------------------------------------------------------------------------ curvature


@pytest.mark.parametrize("name", [name for name in METHODS if name != "batch" and "NGAdam" not in name])
@pytest.mark.parametrize("first", [0, 2], ids=["first refresh", "later"])
def test_curvature_that_overflows_leaves_the_last_good_one(name: str, first: int) -> None:
    """Gradients that are finite, products that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    optimizer = METHODS[name](model, lr=1e-3, update_every=2)
    x, signs = torch.randn(8, 5).repeat(2, 1), torch.ones(16, 1)
    signs[8:] = -1.0  # every sample has its opposite: the gradients of the batch are zero, those of samples huge

    def go(scale: float) -> None:
        optimizer.zero_grad()
        out = model(x)
        (out.square().mean() + scale * (signs * out).sum()).backward()
        optimizer.step()

    for _ in range(first):
        go(0.0)
    names = ("inverse", "factor", "core", "curvature")
    held = {key: v for key, v in optimizer.state[model[0].weight].items() if key in names}
    kept = {key: v.clone() for key, v in held.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        go(2e18)
        now = optimizer.state[model[0].weight]
        if first:
            assert kept
            assert all(torch.equal(now[key], v) for key, v in kept.items())
        assert state_is_finite(optimizer, model)
        assert optimizer.health()["0.weight"].dropped == 1
        go(0.0)
    assert sum("The curvature of 0.weight" in str(w.message) for w in caught) == 1
    assert state_is_finite(optimizer, model)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20], ids=str)
@pytest.mark.parametrize("condition", [1.0, 1e12])
@pytest.mark.parametrize(
    "method",
    [
        *(partial(NGPlus, damping=damping) for damping in (0.0, 1e-12, 1e-3)),
        partial(NGPlus, damping=0.0, relative_damping=0.1),
        NGAdam,
    ],
    ids=["0.0", "1e-12", "1e-3", "relative", "NGAdam"],
)
def test_hostile_curvature(scale: float, condition: float, method: Method) -> None:
    """L of zero, rank-deficient, badly conditioned, of huge scales: the model stays finite and goes on moving."""
    torch.manual_seed(0)
    model = nn.Linear(12, 6)
    optimizer = method(model, lr=1e-3, update_every=2)
    axes = torch.logspace(0, -math.log10(condition) / 2, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(4):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(k)) * axes
            optimizer.zero_grad()
            # The refresh sees gradients of that scale, its root: L is of the scale itself.
            (math.sqrt(scale) * model(x)).sum().backward()
            optimizer.step()
    assert state_is_finite(optimizer, model)


def test_a_step_that_overflows_is_left_out() -> None:
    """An inverse of 1e30 and a gradient of 1e15: no fault of either, but no step either."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = NGPlus(
        model, lr=1.0, damping=1e-30, relative_damping=0.0, curvature="batch", beta=0.0, gamma=0.0, graft=None
    )
    before = parameters(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e15)
        optimizer.step()
        assert equal(before, parameters(model))
        assert optimizer.health()["weight"].steps == 1
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-25)
        optimizer.step()
        optimizer.step()
    assert not equal(before, parameters(model))
    assert state_is_finite(optimizer, model)
    assert sum("The step of weight" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(
    "method",
    [
        partial(NGPlus, curvature="batch", weight_decay=1e6),
        partial(NGPlus, curvature="batch", momentum=3.0),
        partial(NGAdam, weight_decay=1e6),
    ],
    ids=["weight_decay", "momentum", "decoupled weight_decay"],
)
def test_options_that_blow_up_stop_short_of_infinity(method: Method) -> None:
    model = nn.Linear(3, 2)
    optimizer = method(model, lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(100):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.health()["weight"].steps > 0
