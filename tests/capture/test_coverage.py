"""The check of every refresh: a matrix whose captured gradients do not sum to its gradient falls back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, Model, N, loss_fn

pytestmark = pytest.mark.usefixtures("double")
MISSED = "does not come from calls of its module"


def wide_net() -> nn.Sequential:
    """Too large to be compared whole after its first refresh."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N, 6, generator=generator), torch.randn(N, 3, generator=generator)


def penalty(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    """R1 or a gradient penalty: the double backward goes around the hooks."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss + slope.square().sum(1).mean()).backward()


def penalty_in_a_pass_of_its_own(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    """As in WGAN-GP, with a backward pass for each term."""
    loss.backward()
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def penalty_first(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    """A pass that no hook of a module sees, before the one that they see."""
    sum(p.square().sum() for p in model.parameters()).backward()
    loss.backward()


def weights_decayed_in_the_loss(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    (loss + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()


def functional_use(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    (loss + F.linear(x.flip(1), model[0].weight).square().mean()).backward()


LATER = {f.__name__: f for f in (penalty, penalty_in_a_pass_of_its_own, penalty_first, weights_decayed_in_the_loss)}


@pytest.mark.parametrize("name", LATER)
def test_a_term_that_begins_at_a_later_refresh(name: str) -> None:
    model = wide_net()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=2)
    for step in range(7):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if step < 5:
            loss.backward()
            optimizer.step()
            assert {row.source for row in optimizer.plan()} == {"sample"}
            continue
        LATER[name](model, loss, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if step == 5 else "ignore")  # 5 is no refresh
            optimizer.step()
    weights = [row for row in optimizer.plan() if row.name.endswith("weight")]
    # The penalties on slopes do not reach the last bias.
    assert {row.source for row in weights} == {"batch"}
    reasons = (MISSED, "comes from a double backward", "several calls of its module")
    assert all(any(reason in row.note for reason in reasons) for row in weights)


@pytest.mark.parametrize(
    ("rows", "cols", "refreshes"),
    [(slice(20, 30), slice(None), 1), (slice(None), slice(100, 200), 1), (slice(5), slice(80), 9)],
    ids=["a quarter of the rows", "a quarter of the columns", "less"],
)
def test_a_use_of_a_part_that_begins_at_a_later_refresh(rows: slice, cols: slice, refreshes: int) -> None:
    """The entries that are compared meet each quarter."""
    model = wide_net()
    model[0] = nn.Linear(6, 400)
    model[2] = nn.Linear(400, 40)
    optimizer = ngplus.NGPlus(model, lr=0.0, update_every=1)
    for step in range(refreshes + 1):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        used = F.linear(torch.ones(1, 400)[:, cols], model[2].weight[rows, cols])
        (loss + used.square().mean() * min(step, 1)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert step or optimizer.plan()["2.weight"].source == "sample"
    assert optimizer.plan()["2.weight"].source == "batch"


@pytest.mark.parametrize("weight", [1e-3, 1e-5])
def test_a_small_penalty_is_found_in_float64(weight: float) -> None:
    model = wide_net()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, y = batch(0)
    (loss_fn(model(x), y) + weight * sum(p.square().sum() for p in model.parameters())).backward()
    with pytest.warns(UserWarning, match=MISSED):
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}


def test_a_use_by_a_function_that_begins_at_a_later_refresh() -> None:
    model = wide_net()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=1)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        if step < 2:
            loss.backward()
        else:
            functional_use(model, loss, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == (step == 2)
    assert [row.source for row in optimizer.plan()] == ["batch", "sample", "sample"]


@pytest.mark.parametrize("kind", ["conv", "grouped", "transposed", "table", "bag", "norm", "sequence", "attention"])
def test_later_refreshes_of_all_layers_find_no_difference(kind: str) -> None:
    torch.manual_seed(0)
    image, tokens = torch.randn(N, 16, 5, 5), torch.randint(200, (N, 7))
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "conv": (nn.Conv2d(16, 24, 3), image),
        "grouped": (nn.Conv2d(16, 24, 3, groups=2), image),
        "transposed": (nn.ConvTranspose2d(16, 24, 3), image),
        "table": (nn.Embedding(200, 12), tokens),
        "bag": (nn.EmbeddingBag(200, 12), tokens),
        "norm": (nn.LayerNorm(600), torch.randn(N, 600)),
        "sequence": (nn.Linear(40, 50), torch.randn(N, 9, 40)),
        "attention": (nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), torch.randn(N, 9, 32)),
    }
    model, x = made[kind]
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=1)
    for _ in range(12):
        optimizer.zero_grad()
        (model(x) * torch.linspace(-1, 1, model(x)[0].numel()).view_as(model(x)[0])).square().mean().backward()
        optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


class Scaled(nn.Embedding):
    """As Gemma's: the rows are scaled after they are looked up."""

    def forward(self, tokens: Tensor) -> Tensor:
        return 3.0 * super().forward(tokens)


def test_a_scaled_table_that_is_tied_to_the_output() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(m.table(x).mean(1), m.table.weight)

    model = Model(forward, table=Scaled(20, 4))
    optimizer = ngplus.NGPlus(model, **EXACT)
    model(torch.randint(20, (N, 3))).square().mean().backward()
    with pytest.warns(UserWarning, match=MISSED):
        optimizer.step()
    assert optimizer.plan()[0].source == "batch"


def test_hooks_are_there_for_refreshes_only() -> None:
    model = wide_net()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=2)
    x, y = batch(0)
    counts = []
    for _ in range(4):
        counts.append([len(p._backward_hooks or ()) for p in model.parameters()])
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    assert counts == [[1] * 6, [0] * 6] * 2
    twin = copy.deepcopy(model)
    assert not any(p._backward_hooks for p in twin.parameters())
    del optimizer
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.usefixtures("looks")
def test_an_accelerator_reads_the_flags_of_later_refreshes_after_the_step() -> None:
    model = wide_net()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=1)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        (weights_decayed_in_the_loss if step >= 2 else _plain)(model, loss, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if step >= 2 else "error")
            optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"batch"}


def _plain(model: nn.Module, loss: Tensor, x: Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize("reset", ["model.zero_grad", "set to None", "zeros"])
def test_gradients_that_were_thrown_away_do_not_count(reset: str) -> None:
    """A generator's backward pass leaves gradients in the discriminator, which are reset without the optimizer."""
    model = wide_net()
    optimizer = ngplus.NGPlus(model, lr=1e-3, update_every=1)
    for step in range(4):
        x, y = batch(step)
        weights_decayed_in_the_loss(model, loss_fn(model(x), y), x)
        if reset == "set to None":
            for p in model.parameters():
                p.grad = None
        else:
            model.zero_grad(set_to_none=reset != "zeros")
        loss_fn(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
    assert {row.source for row in optimizer.plan()} == {"sample"}
