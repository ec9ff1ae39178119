"""A good step brings no number to the host: nobody waits for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.hostile import METHODS, backward, net, train
from helpers.training import Method, both
from ngplus.capture import coverage
from ngplus.diagnostics import health
from ngplus.utils import finite

pytestmark = [pytest.mark.filterwarnings("ignore:.*Sparse invariant checks"), pytest.mark.usefixtures("looks")]


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
    for module in (coverage, health):
        monkeypatch.setattr(module, "copy_to_host", lambda counts: (counts, UnderWay()))
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
