"""Hostile numbers: parameters stay finite, the last good inverse stays in use, and nobody waits for a device.

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
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ngplus
from ngplus import NGAdam, NGPlus
from ngplus.baselines import KFAC, SENG
from ngplus.diagnostics import health
from ngplus.fisher import inverses
from ngplus.utils import finite
from ngplus.utils.finite import RefreshStatus

pytestmark = pytest.mark.filterwarnings("ignore:.*Sparse invariant checks")

Method = Callable[..., Any]  # makes an optimizer of a model
METHODS: dict[str, Method] = {
    "default": NGPlus,
    "dense": partial(NGPlus, solver="dense"),
    "auto": partial(NGPlus, graft="adam", damping="auto"),
    "momentum": partial(NGPlus, curvature="momentum", nesterov=True),
    "momentum in blocks": partial(NGPlus, curvature="momentum", block_size=3),
    "batch": partial(NGPlus, curvature="batch", weight_decay=0.1, graft="sgd"),
    "woodbury": partial(NGPlus, solver="woodbury"),
    "sketched": partial(NGPlus, solver="sketched", weight_decay=0.1),
    "NGAdam": NGAdam,
    "NGAdam without momentum": partial(NGAdam, betas=(0.0, 0.9), weight_decay=0.1),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
both = pytest.mark.parametrize("kind", [NGPlus, NGAdam])


@pytest.fixture(params=["host", "device"], autouse=True)
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Does the host see the flags?"""
    if request.param == "device":
        monkeypatch.setattr(finite, "SEEN", ())
    return bool(request.param == "host")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.Tanh(),
        nn.Linear(6, 3),
    )  # fmt: skip


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 1, 4, 4, generator=generator), torch.randn(8, 3, generator=generator)


def backward(model: nn.Module, seed: int = 0, spoil: Callable[[Tensor], None] | None = None) -> None:
    x, y = batch(seed)
    if spoil is not None:
        spoil(x)
    model.zero_grad()
    (model(x) - y).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, first + steps):
        backward(model, k)
        optimizer.step()


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def all_finite(optimizer: Any, model: nn.Module) -> bool:
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return all(bool(t.isfinite().all()) for t in [*model.parameters(), *kept] if t.is_floating_point())


# ------------------------------------------------------------------------------------------------ nobody waits


class NoWaiting(TorchDispatchMode):
    """An error for every operation that brings a number to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(word in name for word in ("_local_scalar_dense", "is_nonzero", "aten.equal", "aten.item", "nonzero")):
            raise AssertionError(f"the host waits for {name}")
        return func(*args, **(kwargs or {}))


class UnderWay:
    """The event of a copy that has not arrived yet."""

    def query(self) -> bool:
        return Tensor.tolist.__name__ == "tolist"  # as long as tensors cannot be read

    def synchronize(self) -> None: ...


@pytest.fixture
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of every way past the dispatcher, too, in a step that no one can look into."""
    if finite.SEEN:
        return
    monkeypatch.setattr(health, "_copy_to_host", lambda counts: (counts, UnderWay()))
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "numpy", "cpu"):

        def refuse(self: Tensor, *args: Any, name: str = name) -> None:
            raise AssertionError(f"the host waits for Tensor.{name}")

        monkeypatch.setattr(Tensor, name, refuse)


@pytest.mark.parametrize("name", METHODS)
def test_a_good_step_never_waits(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Plain steps and refreshes, but for the first, which checks once that the capture has missed nothing.

    A sketched solver has another seed in each refresh, so that the last good state cannot be chosen by a device.
    """
    if name == "sketched" and not finite.SEEN:
        pytest.skip("the host looks, once a refresh")
    model = net()
    optimizer = METHODS[name](model, lr=1e-3, update_every=2)
    train(model, optimizer, 2)
    optimizer.health()
    request.getfixturevalue("nothing_read")
    for k in range(4):
        backward(model, k)
        with NoWaiting():
            optimizer.step()
    monkeypatch.undo()
    assert optimizer.health().good


@both
@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_do_not_wait_either(
    table: Callable[..., Any], kind: Method, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    layer = table(20, 3, sparse=True)
    optimizer = kind(layer, lr=1e-3, update_every=2)
    for k in range(6):
        layer(torch.tensor([[1, 2], [2, 5 + k]])).square().sum().backward()
        if k == 1:
            optimizer.health()
            request.getfixturevalue("nothing_read")
        with NoWaiting():
            optimizer.step()
        layer.weight.grad = None


# ------------------------------------------------------------------------------------------------ gradients


def spoil_layer(model: nn.Module, value: float) -> None:
    backward(model, 9)
    grad = model[4].weight.grad
    grad[0].fill_(value)


SPOILS: dict[str, Callable[[nn.Module], None]] = {
    "one sample": lambda model: backward(model, 9, lambda x: x[3].fill_(math.nan)),
    "an input": lambda model: backward(model, 9, lambda x: x.view(-1)[5:6].fill_(math.inf)),
    "one layer": lambda model: spoil_layer(model, -math.inf),
    "too large": lambda model: spoil_layer(model, 3e38),
}


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
        assert same(before, parameters(model))
        found = optimizer.health()
        train(model, optimizer, 4, first)
    assert found.skipped == 1
    assert found.steps == first + 1
    assert found["4.weight"].gradients == 1
    assert all_finite(optimizer, model)
    assert not same(before, parameters(model))
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
    assert same(*runs)


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
        with pytest.raises(ngplus.HealthWarning, match=r"4\.weight"):
            optimizer.step()
    assert same(before, parameters(model))


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
    assert same(before, parameters(model))
    assert optimizer.health().skipped == 1
    train(model, optimizer, 3)
    assert all_finite(optimizer, model)


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
            moved += not same(before, parameters(model))
            assert all_finite(optimizer, model)
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
        (model(x).square().mean() + scale * (signs * model(x)).sum()).backward()
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
        assert all_finite(optimizer, model)
        assert optimizer.health()["0.weight"].dropped == 1
        go(0.0)
    assert sum("The curvature of 0.weight" in str(w.message) for w in caught) == 1
    assert all_finite(optimizer, model)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-10, 1.0, 1e10, 1e20], ids=str)
@pytest.mark.parametrize("condition", [1.0, 1e12])
@pytest.mark.parametrize(
    "method",
    [*(partial(NGPlus, damping=damping) for damping in (0.0, 1e-12, 1e-3, "auto")), NGAdam],
    ids=["0.0", "1e-12", "1e-3", "auto", "NGAdam"],
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
    assert all_finite(optimizer, model)


def test_a_step_that_overflows_is_left_out() -> None:
    """An inverse of 1e30 and a gradient of 1e15: no fault of either, but no step either."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = NGPlus(model, lr=1.0, damping=1e-30, curvature="batch", beta=0.0, gamma=0.0)
    before = parameters(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e15)
        optimizer.step()
        assert same(before, parameters(model))
        assert optimizer.health()["weight"].steps == 1
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-25)
        optimizer.step()
        optimizer.step()
    assert not same(before, parameters(model))
    assert all_finite(optimizer, model)
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


# ------------------------------------------------------------------------------------------------ the ladder


HOPELESS = torch.tensor([[[1.0, 1e12], [1e12, 1.0]]])
INDEFINITE = torch.tensor([[[1.0, 0.0], [0.0, -1e-3]]])


@pytest.mark.parametrize(("matrix", "plain"), [(INDEFINITE, False), (HOPELESS, True)])
def test_trouble_tells_how_far_the_ladder_was_climbed(matrix: Tensor, plain: bool) -> None:
    trouble = RefreshStatus(climb=True)
    inverse = inverses.dense_inverse(matrix, torch.tensor(1e-4), trouble)
    assert inverse.isfinite().all()
    assert trouble.retried is not None
    assert bool(trouble.retried)
    assert (trouble.plain is not None and bool(trouble.plain)) == plain


def test_without_a_look_a_failure_is_the_plain_step_and_is_noted(looks: bool) -> None:
    trouble = RefreshStatus()
    matrix = torch.cat([INDEFINITE, torch.eye(2)[None]])
    inverse = inverses.dense_inverse(matrix, torch.tensor(1e-4), trouble)
    assert trouble.retried is not None
    assert bool(trouble.retried)
    torch.testing.assert_close(inverse[1], torch.eye(2) / (1 + 1e-4))
    if not looks:
        assert torch.equal(inverse[0], inverse[0, 0, 0] * torch.eye(2))
        assert trouble.unsolved is not None


def test_a_failure_on_a_device_keeps_the_last_good_inverse_and_is_helped_at_the_next(
    monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = NGPlus(model, lr=1e-3, update_every=1, solver="dense")

    def go() -> Tensor:
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        return optimizer.state[model.weight]["inverse"].clone()

    good = go()
    calls: list[int] = []
    real = inverses._cholesky_inverse

    def attempt(matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        inverse, failed = real(matrix)
        return inverse, torch.ones_like(failed) if len(calls) in (1, 2) else failed

    monkeypatch.setattr(inverses, "_cholesky_inverse", attempt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second, third = go(), go()
    if looks:  # climbs at once: two failures, the third attempt has 100 times the damping
        assert len(calls) == 4
        assert not torch.equal(good, second)
    else:  # the first failure leaves the inverse; the next refresh fails as well, and climbs
        assert torch.equal(good, second)
        assert len(calls) == 3
        assert not torch.equal(second, third)
    assert optimizer.health()["weight"].retried == (1 if looks else 2)
    assert any("did not factorise at once" in str(w.message) for w in caught)


def failing_eigh(monkeypatch: pytest.MonkeyPatch, *dtypes: torch.dtype) -> None:
    real = torch.linalg.eigh

    def eigh(x: Tensor) -> Any:
        if x.dtype in dtypes:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return real(x)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)


def health_after_training(model: nn.Module, optimizer: Any) -> ngplus.LayerHealth:
    train(model, optimizer, 3)
    return optimizer.health()["4.weight"]


def test_an_eigendecomposition_that_fails_in_every_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = NGAdam(model, lr=1e-3, update_every=2)
    failing_eigh(monkeypatch, torch.float32, torch.float64)
    before = parameters(model)
    with pytest.warns(ngplus.HealthWarning, match=r"does not factorise.*NGAdam takes the root of its diagonal"):
        found = health_after_training(model, optimizer)
    assert all_finite(optimizer, model)
    assert all(not torch.equal(p, b) for p, b in zip(parameters(model), before, strict=True))
    assert (found.retried, found.plain) == (3, 3)  # the first four steps make roots each
    root = optimizer.state[model[4].weight]["right_root"][0]
    assert torch.equal(root, root.diagonal().diag())


def test_an_eigendecomposition_that_fails_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in float64 takes its place."""
    model, other = net(), net()
    optimizer, untroubled = (NGAdam(m, lr=1e-3, update_every=2) for m in (model, other))
    train(other, untroubled, 3)
    failing_eigh(monkeypatch, torch.float32)
    with pytest.warns(ngplus.HealthWarning, match=r"did not factorise at once.*NGAdam takes float64"):
        found = health_after_training(model, optimizer)
    assert (found.retried, found.plain) == (3, 0)
    for name in ("0.weight", "6.weight"):  # small matrices, whose roots float32 finds as well
        torch.testing.assert_close(model.get_parameter(name), other.get_parameter(name), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the table


def test_health_is_a_table_to_read_and_to_use() -> None:
    model = net()
    optimizer = NGPlus(model, update_every=2)
    train(model, optimizer, 1)
    assert optimizer.health().good
    assert "no layer had a fault" in str(optimizer.health())
    SPOILS["one layer"](model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    found = optimizer.health()
    assert not found.good
    assert found.as_dict()["layers"][0]["name"] == "4.weight"
    assert found["0.weight"] == ngplus.LayerHealth("0.weight")
    lines = str(found).splitlines()
    assert lines[0].startswith("2 steps, 1 skipped")
    assert lines[-1].split() == ["4.weight", "1", "0", "0", "0", "0"]
