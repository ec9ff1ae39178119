"""When a refresh is made and taken up: in the background, and by drift."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus.fisher import inverses
from ngplus.preconditioners.curvature import CurvatureEstimate, drift
from ngplus.utils import finite


def data(steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(steps)
    ]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def train(net: nn.Module, optimizer: ngplus.NGPlus, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def paper_step(net: nn.Module, inverses: dict[str, Tensor], batch: tuple[Tensor, Tensor], lr: float) -> None:
    """W - lr * (lambda I + L)^-1 G with the inverses at hand, by plain algebra."""
    net.zero_grad()
    nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    with torch.no_grad():
        for name in ("0", "2"):
            layer = net.get_submodule(name)
            gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
            direction = inverses[name] @ gradient
            layer.weight -= lr * direction[:, :-1]
            layer.bias -= lr * direction[:, -1]


def inverses_of(net: nn.Module, batch: tuple[Tensor, Tensor], damping: float) -> dict[str, Tensor]:
    made = ngplus.gfim(net, nn.functional.cross_entropy, *batch, side="left")
    found = {name: made[f"{name}.weight"].matrix for name in ("0", "2")}
    return {name: torch.linalg.inv(damping * torch.eye(len(m), dtype=m.dtype) + m) for name, m in found.items()}


@pytest.mark.parametrize("delay", [1, 2, 3, 7])
def test_in_the_background_the_inverse_is_taken_up_exactly_so_many_steps_later(delay: int) -> None:
    every, steps, lr = 4, 13, 0.1
    net, batches = model(), data(steps)
    twin = copy.deepcopy(net)
    options: dict[str, Any] = {"lr": lr, "momentum": 0.0, "scaling": "inverse", "damping": 0.5, "side": "left"}
    train(net, ngplus.NGPlus(net, update_every=every, background=delay, **options), batches)
    waiting: dict[int, dict[str, Tensor]] = {}
    held: dict[str, Tensor] = {}
    for k, batch in enumerate(batches):
        if k % every == 0:
            held = waiting.pop(next(iter(waiting))) if waiting else held  # a late one is taken up before the next
            waiting[k if k == 0 else k + delay] = inverses_of(twin, batch, 0.5)
        held = waiting.pop(k, held)
        paper_step(twin, held, batch, lr)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scaling", ["adaptive", "inverse"])
def test_background_refreshes_are_the_same_in_every_run_and_after_resuming(scaling: str) -> None:
    batches = data(24)
    options: dict[str, Any] = {"lr": 0.02, "scaling": scaling, "update_every": 5, "background": 2}
    first, second = model(), model()
    train(first, ngplus.NGPlus(first, **options), batches)
    train(second, ngplus.NGPlus(second, **options), batches)
    assert equal(first, second)

    third = model()
    optimizer = ngplus.NGPlus(third, **options)
    train(third, optimizer, batches[:11])  # a refresh of step 10 is under way: saving takes it up
    saved = copy.deepcopy((third.state_dict(), optimizer.state_dict()))
    train(third, optimizer, batches[11:])
    fourth = model()
    resumed = ngplus.NGPlus(fourth, **options)
    fourth.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(fourth, resumed, batches[11:])
    assert equal(third, fourth)


@pytest.mark.parametrize("scaling", ["adaptive", "inverse"])
def test_taken_up_when_ready_it_trains(scaling: str) -> None:
    net, batches = model(), data(1) * 60
    before = nn.functional.cross_entropy(net(batches[0][0]), batches[0][1]).item()
    optimizer = ngplus.NGPlus(net, lr=0.03, scaling=scaling, update_every=3, background=True)
    train(net, optimizer, batches)
    assert nn.functional.cross_entropy(net(batches[0][0]), batches[0][1]).item() < 0.7 * before


def test_an_error_in_the_background_comes_up_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batches = model(), data(4)
    optimizer = ngplus.NGPlus(net, scaling="inverse", update_every=2, background=1)
    train(net, optimizer, batches[:1])

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of memory in the background")

    monkeypatch.setattr("ngplus.preconditioners.curvature.inverses.dense_inverse", broken)
    monkeypatch.setattr("ngplus.preconditioners.curvature.inverses.woodbury_core", broken)
    with pytest.raises(RuntimeError, match="in the background"):
        train(net, optimizer, batches[1:])


def refreshes(optimizer: ngplus.NGPlus, net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[int]:
    """The steps at which the first layer was refreshed."""
    found = []
    for k, batch in enumerate(batches):
        if optimizer._matrices[0].armed:
            found.append(k)
        train(net, optimizer, [batch])
    return found


@pytest.mark.parametrize("scaling", ["adaptive", "inverse"])
def test_curvature_that_stands_still_is_refreshed_less_and_less_often(scaling: str) -> None:
    net = model()
    optimizer = ngplus.NGPlus(net, lr=0.0, scaling=scaling, update_every=1, drift=0.1)
    assert refreshes(optimizer, net, data(1) * 64) == [0, 1, 3, 7, 15, 31, 47, 63]  # up to 16 T


@pytest.mark.parametrize("scaling", ["adaptive", "inverse"])
def test_curvature_that_moves_is_refreshed_every_t_steps_and_never_more_often(scaling: str) -> None:
    net = model()
    optimizer = ngplus.NGPlus(net, lr=0.0, scaling=scaling, damping=1e-3, update_every=3, drift=1e-4)
    assert refreshes(optimizer, net, data(16)) == [0, 3, 6, 9, 12, 15]


def test_the_schedule_by_drift_goes_on_after_resuming() -> None:
    net, batches = model(), data(1) * 40
    optimizer = ngplus.NGPlus(net, lr=0.0, update_every=1, drift=0.1)
    refreshes(optimizer, net, batches[:20])
    twin = model()
    resumed = ngplus.NGPlus(twin, lr=0.0, update_every=1, drift=0.1)
    twin.load_state_dict(net.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    assert refreshes(resumed, twin, batches[20:]) == refreshes(optimizer, net, batches[20:])


def test_drift_by_plain_algebra() -> None:
    generator = torch.Generator().manual_seed(3)
    root, old_root = torch.randn(2, 1, 6, 4, dtype=torch.float64, generator=generator)
    new, old = root @ root.mT, old_root @ old_root.mT
    eye, damping = torch.eye(6, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    inverse = torch.linalg.inv(0.3 * eye + old)
    for fresh, columns in ((CurvatureEstimate([new]), new), (CurvatureEstimate(None, [root]), root)):
        wanted = torch.linalg.norm((0.3 * eye + new) @ inverse @ columns - columns) / torch.linalg.norm(columns)
        found = drift({"inverse": inverse, "damping": damping}, fresh, {"scaling": "inverse", "solver": "auto"})
        torch.testing.assert_close(found, wanted)
    basis = torch.linalg.eigh(old).eigenvectors
    turned = (basis.mT @ new @ basis)[0]
    off = turned - torch.diag(turned.diagonal())
    found = drift({"basis": basis}, CurvatureEstimate([new]), {"scaling": "adaptive"})
    torch.testing.assert_close(found, (off.square().sum() / turned.square().sum()))


@pytest.mark.parametrize("bad", [{"background": 0}, {"background": -1}, {"background": 1.5}, {"drift": -0.1}])
def test_options_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Invalid {next(iter(bad))}"):
        ngplus.NGPlus(model(), **bad)


@pytest.mark.parametrize("seen", [("cpu",), ()], ids=["host", "device"])
def test_saving_counts_what_the_background_has_met(monkeypatch: pytest.MonkeyPatch, seen: tuple[str, ...]) -> None:
    """As the step does that would have taken the result up: the fault is in health(), and where the host does not look
    the last good inverse stays."""
    monkeypatch.setattr(finite, "SEEN", seen)
    net, batches = model(), data(3)
    optimizer = ngplus.NGPlus(net, scaling="inverse", damping=0.5, update_every=2, background=2, solver="dense")
    train(net, optimizer, batches[:2])
    inverse = inverses._cholesky_inverse

    def failing(matrix: Tensor) -> tuple[Tensor, Tensor]:
        return inverse(matrix)[0], torch.ones(len(matrix), dtype=torch.bool)

    monkeypatch.setattr(inverses, "_cholesky_inverse", failing)
    good = optimizer.state[net[0].weight]["inverse"].clone()
    train(net, optimizer, batches[2:])
    kept = torch.equal(optimizer.state_dict()["state"][0]["inverse"], good)
    counts = [(layer.retried, layer.plain) for layer in optimizer.health().layers]
    assert (counts, kept) == (([(1, 1)] * 2, False) if seen else ([(1, 0)] * 2, True))


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("background", [False, 2])
def test_a_side_that_is_curved_no_more_is_due_no_more(background: bool | int) -> None:
    net, batches = normed(), data(9)
    optimizer = ngplus.NGPlus(net, side="both", drift=0.1, update_every=2, background=background)
    train(net, optimizer, batches[:3])
    assert "refresh_at" in optimizer.state[net[1].weight]
    optimizer.param_groups[0]["side"] = "auto"
    train(net, optimizer, batches[3:6])
    held = set(optimizer.state[net[1].weight])
    assert not held & {"basis", "spectrum", "curvature", "refreshed", "refresh_at", "refresh_interval"}
    optimizer.param_groups[0]["side"] = "both"
    train(net, optimizer, batches[6:])
    assert {"basis", "refresh_at"} <= set(optimizer.state[net[1].weight])


def test_a_layer_that_keeps_u_may_be_initialised_by_a_step_of_zeros() -> None:
    net = nn.Linear(100, 50)
    optimizer = ngplus.NGPlus(net, lr=0.0, scaling="inverse", solver="auto")
    (0 * net(torch.randn(4, 100)).sum()).backward()
    optimizer.step()
    assert {"inverse", "factor", "core"} <= set(optimizer.state[net.weight])
    assert optimizer.plan()["weight"].solver == "woodbury"
    assert not optimizer._due(optimizer._matrices[0]) or optimizer.param_groups[0]["step"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    net(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
    assert optimizer.health().good


def test_a_state_that_is_refused_leaves_the_background_at_work() -> None:
    batches = data(8)
    nets = model(), model()
    for net in nets:
        optimizer = ngplus.NGPlus(net, scaling="inverse", update_every=4, background=2)
        train(net, optimizer, batches[:5])
        if net is nets[0]:
            with pytest.raises(ValueError, match="state_dict"):
                optimizer.load_state_dict({})
        train(net, optimizer, batches[5:])
    assert equal(*nets)
