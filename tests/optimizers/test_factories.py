"""Optimizers that a framework makes from parameters: mini-batch curvature, one hint, and the module by model=."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import UserList
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus

HINT = "given parameters without their module.*or as model="
both = pytest.mark.parametrize("kind", [ngplus.NGPlus, ngplus.NGAdam])


class Net(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.conv = nn.Embedding(12, 4, sparse=sparse), nn.Conv1d(4, 4, 3, groups=2)
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(self.table(tokens).mT).mean(2)))


def timm_like(net: nn.Module, kind: Callable[..., Any], weight_decay: float, **options: Any) -> Any:
    """As timm's create_optimizer_v2: groups by dimensions, then opt_class(params, **opt_args)."""
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
    return kind(groups, **{"weight_decay": 0.0, "foreach": True, **options})


def torchtune_like(net: nn.Module, kind: Any, **options: Any) -> Any:
    """As torchtune's config.instantiate: a dotted name, the parameters, and the options of a file."""
    module, _, name = f"ngplus.{kind.__name__}".rpartition(".")
    return getattr(importlib.import_module(module), name)(net.parameters(), **{"fused": False, **options})


def named(net: nn.Module, kind: Any, **options: Any) -> Any:
    return kind(net.named_parameters(), **options)


FACTORIES: dict[str, Callable[..., Any]] = {
    "timm": functools.partial(timm_like, weight_decay=0.1), "torchtune": torchtune_like, "named": named
}  # fmt: skip


def train(model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    torch.manual_seed(1)
    x, y = torch.randint(12, (16, 6)), torch.randint(3, (16,))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@both
@pytest.mark.parametrize("factory", FACTORIES)
def test_parameters_alone_train_with_one_hint(kind: Any, factory: str) -> None:
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = FACTORIES[factory](model, kind, lr=0.02)
        losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=HINT) as again:
        FACTORIES[factory](model, kind, lr=0.02)
    assert len(again) == 1  # for many groups, too
    assert {row.source for row in optimizer.plan()} <= {"batch", "none"}


@both
@pytest.mark.parametrize("factory", FACTORIES)
def test_model_among_the_options_hands_over_the_module(kind: Any, factory: str) -> None:
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = FACTORIES[factory](model, kind, lr=0.02, model=model)
        train(model, optimizer)
    plan = optimizer.plan()
    assert plan["conv.weight"].groups == 2
    if kind is ngplus.NGPlus:
        assert {row.source for row in plan} == {"sample"}
        assert plan["head.weight"].parameters == ("head.weight", "head.bias")


@both
def test_a_partial_is_a_class_for_a_factory(kind: Any) -> None:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = timm_like(model, functools.partial(kind, model=model), 0.1, lr=0.02)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]


def test_betas_of_a_configuration_file() -> None:
    """Hydra passes a sequence that is neither a list nor a tuple, as torch's AdamW takes it. The state has a tuple."""
    optimizer = ngplus.NGAdam(nn.Linear(8, 4), betas=UserList([0.8, 0.9]))  # type: ignore[arg-type]
    assert optimizer.state_dict()["param_groups"][0]["betas"] == (0.8, 0.9)
    with pytest.raises(ValueError, match="Invalid betas: '99'"):
        ngplus.NGAdam(nn.Linear(8, 4), betas="99")  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.filterwarnings(f"ignore:.*{HINT}")
def test_sparse_gradients_of_parameters_alone(kind: Any, factory: str) -> None:
    torch.manual_seed(0)
    model = Net(sparse=True)
    # With weight decay on a sparse table, NGPlus raises torch's error.
    make = functools.partial(timm_like, weight_decay=0.0) if factory == "timm" else FACTORIES[factory]
    losses = train(model, make(model, kind, lr=0.02))
    assert losses[-1] < losses[0]
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse


def test_no_hint_where_the_module_makes_no_difference() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ngplus.NGAdam(nn.Linear(8, 4).parameters())
        ngplus.NGPlus(nn.Linear(8, 4).parameters(), curvature="batch")
    with pytest.warns(UserWarning, match=HINT):
        ngplus.NGAdam(nn.Embedding(1000, 8).parameters())


@both
def test_an_empty_list_is_torchs_error(kind: Any) -> None:
    for nothing in ([], iter([]), nn.ReLU().parameters()):
        with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
            kind(nothing)
    with pytest.raises(ValueError, match="no parameters: there is nothing to train"):
        kind(nn.ReLU())


@both
@pytest.mark.filterwarnings(f"ignore:.*{HINT}")
def test_groups_without_parameters_make_no_step(kind: Any) -> None:
    """As with torch: a rank of a pipeline may have none."""
    optimizer = kind([{"params": []}])
    optimizer.step()
    assert optimizer.health().steps == 0
