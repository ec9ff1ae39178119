"""What a user changes in the middle of training: frozen and thawed layers, another precision, other batches."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.training import METHODS, Method, all_finite, both, equal, floats, train_to_zero

methods = {**METHODS, "grafted": partial(ngplus.NGPlus, graft="adam")}
every_method = pytest.mark.parametrize("method", methods.values(), ids=methods)


def net() -> nn.Sequential:
    """Two norms of one shape between matrices."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


@every_method
def test_layers_are_thawed_and_a_bias_is_frozen(method: Method) -> None:
    model = net()
    model[:4].requires_grad_(False)
    optimizer = method(model, lr=1e-3)
    for k in range(12):
        if k in (2, 7):
            model.requires_grad_(True)
        if k == 4:
            model[1].bias.requires_grad_(False)
            model[0].weight.requires_grad_(False)
        before = copy.deepcopy(model.state_dict())
        train_to_zero(model, optimizer, floats(8, 4), [k])
        for name, p in model.named_parameters():
            assert p.requires_grad != torch.equal(p, before[name]), name


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "4.weight", "4.bias"])
@pytest.mark.parametrize("when", ["between backward and step", "between two micro-batches"])
@every_method
def test_a_parameter_is_frozen_within_a_step(method: Method, when: str, frozen: str) -> None:
    """NGPlus leaves it out of its matrix. NGAdam makes a step of the gradient that it has, as torch.optim does."""
    model = net()
    optimizer = method(model, lr=1e-3, update_every=2)
    for k in range(7):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        model.get_parameter(frozen).requires_grad_(k not in (2, 3, 4))  # with a refresh and without
        if when == "between two micro-batches":
            model(torch.randn(8, 4)).square().mean().backward()
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.isfinite().all()
            trained = p.requires_grad if method is not ngplus.NGAdam else p.grad is not None
            assert trained != torch.equal(p, before[name]), (k, name)
        model.get_parameter(frozen).requires_grad_(True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@every_method
def test_the_model_is_cast(method: Method, dtype: torch.dtype) -> None:
    """The state follows, and a checkpoint of it goes on bit for bit."""
    model = net()
    optimizer = method(model, lr=1e-3)
    for k in range(3):
        train_to_zero(model, optimizer, floats(8, 4), [k])
    model.to(dtype)
    for k in range(3, 6):
        train_to_zero(model, optimizer, floats(8, 4), [k])
    twin = net().to(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = method(twin, lr=1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for k in range(6, 9):
        train_to_zero(model, optimizer, floats(8, 4), [k])
        train_to_zero(twin, resumed, floats(8, 4), [k])
    assert equal(model, twin)
    assert all_finite(model)
    for p in model.parameters():
        buffer = optimizer.state[p].get("momentum_buffer")
        assert buffer is None or buffer.dtype == dtype


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_curvature_in_the_state_is_not_the_memory_of_the_gradient() -> None:
    """With zero_grad(set_to_none=False) that memory is written anew in every step."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.head = nn.Parameter(torch.randn(3, 5)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x @ self.matrix.mT))

    def trained(set_to_none: bool, solver: str) -> Tensor:
        torch.manual_seed(0)
        model = Bare()
        optimizer = ngplus.NGPlus(model, lr=0.1, solver=solver, curvature="sample", momentum=0.0)
        for k in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(k))).square().mean().backward()
            optimizer.step()
        return model.matrix.detach()

    for solver in ("woodbury", "sketched", "dense"):
        assert torch.equal(trained(True, solver), trained(False, solver))


@both
def test_parameters_in_another_order_are_refused(kind: Method) -> None:
    model = net()
    optimizer = kind(model)
    train_to_zero(model, optimizer, floats(8, 4), [0])
    turned = kind(list(reversed(list(model.named_parameters()))), model=model)
    with pytest.raises(ValueError, match="another order"):
        turned.load_state_dict(optimizer.state_dict())


class Words(nn.Module):
    """A language model that takes and gives its states, which have the layers first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 11)

    def forward(self, ids: Tensor, states: Any) -> Any:
        y, states = self.lstm(self.table(ids), states)
        return self.head(y), states


class Weighed(nn.Module):
    """Constants of one length go in beside the batch, and all hidden layers come out."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, *weights: Tensor) -> Any:
        y = self.head(x)
        for w in weights:
            y = y * w
        return y, torch.stack([y, y, y]), *weights


class LastState(nn.Module):
    """Time first, and a head that sees the last state alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return (self.head(self.gru(x)[0][-1]),)


@pytest.mark.filterwarnings("ignore:No per-sample curvature")
@pytest.mark.parametrize("kind", ["states", "constants", "last state"])
def test_the_samples_are_found(kind: str) -> None:
    torch.manual_seed(0)
    dim = 0
    if kind == "states":
        model: nn.Module = Words()
        given: tuple[Any, ...] = (torch.randint(11, (6, 7)), (torch.zeros(1, 6, 5), torch.zeros(1, 6, 5)))
    elif kind == "constants":
        model, given = Weighed(), (torch.randn(6, 4), *torch.rand(3, 3))
    else:
        model, given, dim = LastState(), (torch.randn(7, 6, 4),), 1
    optimizer = ngplus.NGPlus(model, batch_dim=dim)
    model(*given)[0].square().mean().backward()
    optimizer.step()
    matrix = optimizer._find_matrix("head.weight")
    if kind == "constants":  # the output has dimensions of 6 and of 3, as the inputs
        assert optimizer.plan()["head.weight"].source == "batch"
        return
    assert matrix.seen == (6, 7 if kind == "states" else 1)
    assert optimizer.plan()["head.weight"].source == "sample"
