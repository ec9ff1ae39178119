"""Model surgery after construction: what is replaced, cast, tied, copied or deleted, and who is kept alive by whom."""

from __future__ import annotations

import copy
import gc
import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.training import Method, all_finite, both, floats, train_to_zero


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@both
def test_a_replaced_parameter_stays_out_until_it_is_added(kind: Method) -> None:
    """As in torch.optim: the optimizer has the old one, and goes on with the rest."""
    model = net()
    optimizer = kind(model, lr=0.01, update_every=2)
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    model[2].weight = nn.Parameter(torch.randn(3, 6))
    before = model[2].weight.detach().clone()
    first = model[0].weight.detach().clone()
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    assert torch.equal(before, model[2].weight)
    assert not torch.equal(first, model[0].weight)
    optimizer.add_param_group({"params": [model[2].weight]})
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    assert not torch.equal(before, model[2].weight)
    assert all_finite(model)


@both
def test_a_layer_added_and_one_removed(kind: Method) -> None:
    model = net()
    optimizer = kind(model, lr=0.01, update_every=2)
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    model.append(nn.Linear(3, 2))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    before = model[3].weight.detach().clone()
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    assert not torch.equal(before, model[3].weight)
    del model[3]
    train_to_zero(model, optimizer, floats(8, 5), range(3))  # its parameters have no gradient any more
    assert all_finite(model)
    assert len(optimizer.plan()) == (3 if kind is ngplus.NGPlus else 6)  # with it: nobody has taken it out


@both
def test_weights_tied_and_untied(kind: Method) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
    optimizer = kind(model, lr=0.01, update_every=2)
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    own = model[2].weight
    model[2].weight = model[0].weight  # tied: the second use has a gradient that no watched use of its own brings
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    assert all_finite(model)
    model[2].weight = own
    train_to_zero(model, optimizer, floats(8, 5), range(3))
    assert all_finite(model)


@both
def test_two_optimizers_on_one_model_do_not_see_each_other(kind: Method) -> None:
    """Each on half of the parameters: as one optimizer with two groups."""
    one, two = net(), net()
    together = kind([{"params": one[0].parameters()}, {"params": one[2].parameters()}], 0.01, model=one)
    first = kind(two[0].parameters(), 0.01, model=two)
    second = kind(two[2].parameters(), 0.01, model=two)

    class Both:
        def zero_grad(self) -> None:
            first.zero_grad()
            second.zero_grad()

        def step(self) -> None:
            first.step()
            second.step()

    train_to_zero(one, together, floats(8, 5), range(12))
    train_to_zero(two, Both(), floats(8, 5), range(12))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_threads_that_share_a_model() -> None:
    """Other threads call the model without gradients while one trains it: the curvature is that of training alone."""
    model, quiet = net(), net()
    optimizer, alone = (ngplus.NGPlus(m, lr=0.01, update_every=1) for m in (model, quiet))
    stop, errors = threading.Event(), []

    def look() -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    model(torch.randn(4, 5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        train_to_zero(model, optimizer, floats(8, 5), range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    train_to_zero(quiet, alone, floats(8, 5), range(20))
    assert not errors
    for a, b in zip(model.parameters(), quiet.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inside", ["training", "looking"])
def test_attention_that_threads_share(inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is in the middle of attention, in a refresh pass or without gradients, when another one calls it."""
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(3, 5, 4)
    wanted = attention(x, x, x)[0].detach()
    optimizer = ngplus.NGPlus(attention, lr=0.01)
    entered, go_on, made = threading.Event(), threading.Event(), {}
    softmax = nn.functional.softmax

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        if threading.current_thread().name == inside:
            entered.set()
            assert go_on.wait(30)
        return softmax(*args, **kwargs)

    def call(gradients: bool) -> None:
        with torch.set_grad_enabled(gradients):
            made[threading.current_thread().name] = attention(x, x, x)[0]

    monkeypatch.setattr(nn.functional, "softmax", slow)
    threads = {name: threading.Thread(target=call, args=(name == "training",), name=name) for name in NAMES}
    threads[inside].start()
    assert entered.wait(30)
    (other,) = (thread for name, thread in threads.items() if name != inside)
    other.start()
    other.join(0.2)
    go_on.set()
    for thread in threads.values():
        thread.join(30)
    for name in NAMES:
        torch.testing.assert_close(made[name].detach(), wanted)
    made["training"].square().mean().backward()
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


NAMES = ("training", "looking")


# ------------------------------------------------------------------------------------------------ size


@pytest.mark.parametrize("method", [partial(ngplus.NGPlus, curvature="batch"), ngplus.NGAdam], ids=["batch", "NGAdam"])
def test_ten_thousand_parameter_tensors(method: Method) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(2, 2)) for _ in range(10_000)]
    optimizer = method(params, lr=0.01, update_every=2)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert all(bool(p.isfinite().all()) and not torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert len(optimizer.plan()) == 10_000


@pytest.mark.parametrize(
    ("kind", "side", "shape"), [(ngplus.NGPlus, "right", (50_000, 9)), (ngplus.NGAdam, "both", (50_000, 8))]
)
def test_a_weight_of_50000_by_8(kind: Method, side: str, shape: tuple[int, int]) -> None:
    """R is 8 x 8, the L of NGAdam diagonal, and nothing of 50,000 x 50,000 is ever made."""
    torch.manual_seed(0)
    model = nn.Linear(8, 50_000)
    optimizer = kind(model, lr=0.01)
    planned = optimizer.plan()["weight"].state_bytes
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    row = optimizer.plan()["weight"]
    assert (row.side, row.shape) == (side, shape)
    assert row.state_bytes < 3 * 50_000 * 9 * 4 + 10_000
    assert planned < 3 * 50_000 * 9 * 4 + 10_000
    assert all_finite(model)


def test_a_layer_of_100_million_parameters_is_planned_before_anything_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Linear(10_000, 10_000, bias=False)
    dense = ngplus.NGPlus(model, solver="dense", curvature="sample", block_size=None).plan(batch_size=32)
    assert dense.state_bytes == 4 * 10_000**2
    blocks = ngplus.NGPlus(model, solver="dense", curvature="sample", block_size=100).plan(batch_size=32)
    assert blocks.state_bytes == 4 * 100 * 100**2


def test_ngadam_plans_a_layer_of_100_million_parameters_before_anything_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Linear(10_000, 10_000, bias=False)
    # the momentum; of each side L or R and its roots, in 79 blocks of 127 rows, the last one filled up with zeros
    assert ngplus.NGAdam(model).plan().state_bytes == 4 * (10_000**2 + 2 * 2 * 79 * 127**2)


# ------------------------------------------------------------------------------------------------ determinism


@pytest.mark.parametrize(
    "method",
    [
        ngplus.NGPlus,
        partial(ngplus.NGPlus, samples=4, sketch=3),
        partial(ngplus.NGPlus, curvature="batch"),
        ngplus.NGAdam,
    ],
    ids=["sample", "sketch", "batch", "NGAdam"],
)
def test_same_seed_same_bits_with_deterministic_algorithms(method: Method) -> None:
    """Also across a resume; torch.use_deterministic_algorithms(True) refuses no operation."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.conv = nn.Embedding(11, 4), nn.Conv1d(4, 4, 3, groups=2, padding=1)
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, index: Tensor) -> Tensor:
            return self.head(self.norm(self.conv(self.table(index).mT).mT))

    def run(break_at: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Mixed()
        optimizer = method(model, lr=0.01, update_every=2)
        for k in range(6):
            if k == break_at:
                held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = Mixed()
                optimizer = method(model, lr=0.01, update_every=2)
                model.load_state_dict(held[0])
                optimizer.load_state_dict(held[1])
            index = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(k))
            optimizer.zero_grad()
            model(index).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        results = [run(None), run(None), run(2), run(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_no_file_is_left_open() -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("reads /proc")
    model = net()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        train_to_zero(model, ngplus.NGPlus(model, lr=0.01), floats(8, 5), range(3))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
