"""Steps between two refreshes take what the one before has found out: the same numbers, bit for bit, as the long way,
and everything that has changed in between is seen."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus.optimizers import step_cache
from ngplus.optimizers.base import BaseOptimizer


class Model(nn.Module):
    """Layers of one shape and of others, with and without a bias, turned and in groups; vectors and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16)
        self.first = nn.Conv1d(4, 6, 3, padding=1, groups=2)
        self.back = nn.ConvTranspose1d(6, 4, 3, padding=1)
        self.alike = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.tall = nn.Linear(16, 24, bias=False)
        self.wide = nn.Linear(24, 5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words).unflatten(-1, (4, 4))
        x = self.back(torch.tanh(self.first(x))).flatten(1)
        for layer in self.alike:
            x = torch.tanh(self.norm(layer(x)))
        return self.wide(torch.tanh(self.tall(x)))


Between = Callable[[int, Model, ngplus.NGPlus], tuple[Model, ngplus.NGPlus]]


def trained(steps: int = 16, between: Between | None = None, grouped: bool = False, **options: Any) -> list[Tensor]:
    """The parameters after every step."""
    torch.manual_seed(0)
    model = Model()
    params: Any = model
    if grouped:
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        params = [{"params": weights}, {"params": biases, "lr": 0.02, "weight_decay": 0.1}]
    optimizer = ngplus.NGPlus(params, **{"lr": 0.05, "model": model, "update_every": 8, **options})
    found = []
    for k in range(steps):
        words, target = torch.randint(9, (12,)), torch.randn(12, 5)
        optimizer.zero_grad()
        (model(words) - target).square().mean().backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        if between is not None:
            model, optimizer = between(k, model, optimizer)
    return found


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngplus.NGPlus, "_remember", BaseOptimizer._remember)


def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that went the long way."""
    seen: list[int] = []
    real = ngplus.NGPlus._directions

    def watched(self: ngplus.NGPlus) -> Any:
        seen.append(self.param_groups[0]["step"])
        return real(self)

    monkeypatch.setattr(ngplus.NGPlus, "_directions", watched)
    return seen


OPTIONS: list[dict[str, Any]] = [
    {},
    {"side": "both"},
    {"side": "smaller"},
    {"side": "smaller", "block_size": 3},
    {"second_moment": "full"},
    {"nesterov": False},
    {"curvature": "sample"},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"lr": torch.tensor(0.05)},
    {"grouped": True},
    {"early_refreshes": False},
]


@pytest.mark.parametrize("small", [step_cache.SMALL, 0], ids=["small", "large"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_steps_are_those_of_the_long_way(
    options: dict[str, Any], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_cache, "SMALL", small)
    long = count(monkeypatch)
    found = trained(**options)
    assert len(long) < 12  # of 16: the way that is tested here was taken
    the_long_way(monkeypatch)
    wanted = trained(**options)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_only_refreshes_go_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    long = count(monkeypatch)
    trained(30, early_refreshes=True)
    assert long == [0, 1, 9, 17, 25]


@pytest.mark.parametrize(
    "options",
    [{"curvature": "batch"}, {"scaling": "inverse"}, {"graft": "sgd"}, {"maximize": True}],
    ids=str,
)
def test_what_it_does_not_know_goes_the_long_way(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    long = count(monkeypatch)
    trained(6, **options)
    assert long == [0, 1, 2, 3, 4, 5]


def between(change: Callable[[Model, ngplus.NGPlus], Any], at: tuple[int, ...] = (3, 12)) -> Between:
    def made(k: int, model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
        if k in at:
            return change(model, optimizer) or (model, optimizer)
        return model, optimizer

    return made


def options_changed(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.param_groups[0].update(beta2=0.8, momentum=0.7)


def refreshes_closer(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.param_groups[0]["update_every"] = 2


def rate_changed(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.param_groups[0]["lr"] = 0.01


def frozen(model: Model, optimizer: ngplus.NGPlus) -> None:
    model.alike[1].weight.requires_grad_(not model.alike[1].weight.requires_grad)


def state_edited(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.state[model.alike[1].weight]["exp_avg"].zero_()
    optimizer.state[model.wide.weight]["exp_avg"].zero_()


def entry_replaced(model: Model, optimizer: ngplus.NGPlus) -> None:
    state = optimizer.state[model.alike[0].weight]
    state["exp_avg"] = torch.ones_like(state["exp_avg"])


def state_forgotten(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.state.clear()


def weights_replaced(model: Model, optimizer: ngplus.NGPlus) -> None:
    with torch.no_grad():
        model.alike[0].weight.data = model.alike[0].weight.detach() * 2


def loaded(model: Model, optimizer: ngplus.NGPlus) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def copied(model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
    return copy.deepcopy((model, optimizer))


def spoiled(model: Model, optimizer: ngplus.NGPlus) -> None:
    """A step with a gradient that is not finite, which is skipped."""
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    with pytest.warns(ngplus.HealthWarning) if not optimizer.health().skipped else _nothing():
        optimizer.step()
    assert optimizer.health().skipped


def spoiled_in_one_place(model: Model, optimizer: ngplus.NGPlus) -> None:
    """The same with one number of one parameter after the other, be it copied or looked at where it is."""
    for name, bad in model.named_parameters():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        assert bad.grad is not None
        bad.grad.view(-1)[-1] = float("inf")
        skipped = optimizer.health().skipped
        with pytest.warns(ngplus.HealthWarning) if not skipped else _nothing():
            optimizer.step()
        assert optimizer.health().skipped == skipped + 1, name


def without_a_gradient(model: Model, optimizer: ngplus.NGPlus) -> None:
    for p in model.parameters():
        p.grad = None if p is model.alike[2].weight else torch.ones_like(p)
    optimizer.step()


def no_learning(model: Model, optimizer: ngplus.NGPlus) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = optimizer.param_groups[0]["step"]
    optimizer.step()  # only initialises the state, so it does not count
    assert optimizer.param_groups[0]["step"] == before
    for group in optimizer.param_groups:
        group["lr"] = 0.05


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


@pytest.mark.parametrize(
    "change",
    [
        options_changed,
        refreshes_closer,
        rate_changed,
        frozen,
        state_edited,
        entry_replaced,
        state_forgotten,
        weights_replaced,
        loaded,
        copied,
        spoiled,
        spoiled_in_one_place,
        without_a_gradient,
        no_learning,
    ],
)
def test_what_changes_between_two_steps_is_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(between=between(change))
    with monkeypatch.context() as patch:
        the_long_way(patch)
        wanted = trained(between=between(change))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if change not in (loaded, copied, spoiled, spoiled_in_one_place):  # which change nothing
        assert not torch.equal(found[-1], trained()[-1])


def test_a_wrong_rate_is_refused() -> None:
    def negative(model: Model, optimizer: ngplus.NGPlus) -> None:
        optimizer.param_groups[0]["lr"] = -1.0

    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        trained(between=between(negative))


def test_new_parameters_are_taken_in() -> None:
    model, other = Model(), nn.Linear(5, 2)
    optimizer = ngplus.NGPlus([{"params": list(model.parameters())}], model=nn.ModuleList([model, other]), lr=0.05)
    held = other.weight.detach().clone()
    for k in range(8):
        if k == 4:
            optimizer.add_param_group({"params": list(other.parameters())})
        optimizer.zero_grad()
        other(model(torch.randint(9, (12,)))).square().mean().backward()
        optimizer.step()
        assert torch.equal(held, other.weight) == (k < 4)


def test_a_group_without_gradients_is_captured_at_its_own_refresh() -> None:
    """Its refreshes are closer together than those of the group that is trained."""
    torch.manual_seed(0)
    body, head = nn.Linear(6, 6), nn.Linear(6, 4)
    groups = [{"params": list(body.parameters()), "update_every": 100}, {"params": list(head.parameters())}]
    optimizer = ngplus.NGPlus(groups, model=nn.ModuleList([body, head]), lr=0.01, update_every=6, early_refreshes=False)
    for k in range(7):
        optimizer.zero_grad()
        x = torch.tanh(body(torch.randn(8, 6)))
        (head(x) if k in (0, 6) else x).square().mean().backward()
        optimizer.step()
    assert not optimizer._warned  # it would have fallen back to the mini-batch


def test_no_gradient_is_kept_beyond_its_step() -> None:
    model = Model()
    optimizer = ngplus.NGPlus(model, lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randint(9, (12,))).square().mean().backward()
        held = [weakref.ref(p.grad) for p in model.parameters()]
        storages = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.step()
    optimizer.zero_grad()
    assert all(ref() is None for ref in held + storages)


def test_an_optimizer_goes_without_the_garbage_collector() -> None:
    model = Model()
    optimizer = ngplus.NGPlus(model, lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(9, (12,))).square().mean().backward()
        optimizer.step()
    assert optimizer._step_cache is not None
    held = weakref.ref(optimizer._step_cache)
    gc.disable()
    try:
        del optimizer
        assert held() is None
    finally:
        gc.enable()


def test_a_schedule_of_the_momentum_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    def scheduled(k: int, model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
        optimizer.param_groups[0].update(momentum=0.95 - 0.01 * k, beta2=0.9 + 0.005 * k)
        return model, optimizer

    long = count(monkeypatch)
    found = trained(between=scheduled)
    assert len(long) < 6
    the_long_way(monkeypatch)
    wanted = trained(between=scheduled)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_step_that_is_broken_off_goes_the_long_way_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(k: int, model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
        if k == 3:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "_foreach_copy_", _refuse)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            assert optimizer._step_cache is None
        return model, optimizer

    assert all(bool(x.isfinite().all()) for x in trained(between=broken))


def _refuse(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_step_that_is_too_long_is_left_out() -> None:
    def long(k: int, model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
        optimizer.param_groups[0]["lr"] = 1e30 if k == 3 else 0.05
        return model, optimizer

    with pytest.warns(ngplus.HealthWarning, match="not finite or too large"):
        found = trained(6, between=long)
    assert torch.equal(found[3], found[4])
    assert found[5].isfinite().all()
    assert not torch.equal(found[4], found[5])


@pytest.mark.parametrize("options", [{}, {"side": "smaller"}, {"second_moment": "full"}], ids=str)
def test_a_checkpoint_that_keeps_no_order_of_memory(options: dict[str, Any]) -> None:
    """Distributed checkpoints and other formats give every tensor back row by row: the run goes on bit for bit."""

    def row_by_row(k: int, model: Model, optimizer: ngplus.NGPlus) -> tuple[Model, ngplus.NGPlus]:
        held = optimizer.state_dict()
        for state in held["state"].values():
            state.update({key: x.contiguous() for key, x in state.items() if isinstance(x, Tensor)})
        optimizer.load_state_dict(held)
        return model, optimizer

    plain, loaded = trained(**options), trained(between=row_by_row, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, loaded, strict=True))


def test_first_moments_lie_in_memory_as_the_gradients_do() -> None:
    """What is taken in is then read and written in one order, which is several times as fast."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 8))
    optimizer = ngplus.NGPlus(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(40, (16,))).square().mean().backward()
        optimizer.step()
    held = optimizer.state[model[0].weight]["exp_avg"]
    assert held.shape == (1, 8, 40)
    assert held.mT.is_contiguous()
    assert optimizer.state[model[1].weight]["exp_avg"].is_contiguous()
