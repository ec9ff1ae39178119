"""Modules that no rule knows run again for their samples: outputs, gradients and the modules stay as they were."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus


class Noting(nn.Module):
    """No rule knows it; it notes what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.calls = nn.Parameter(torch.randn(3, 4)), 0
        self.last: Tensor | None = None
        self.all: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x @ self.matrix.mT
        self.last = y.detach()
        self.all.append(self.last)
        return y


def test_a_module_that_runs_again_for_its_samples_leaves_no_trace() -> None:
    model = nn.Sequential(Noting(), nn.Tanh(), nn.Linear(3, 2))
    noting, seen = model[0], []
    assert isinstance(noting, Noting)
    optimizer = ngplus.NGPlus(model)
    noting.register_forward_hook(lambda *args: seen.append(1))
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.plan()["0.matrix"].source == "vmap"
    assert (noting.calls, len(seen), len(noting.all)) == (1, 1, 1)
    assert noting.last is not None
    assert noting.last.norm().isfinite()
    copy.deepcopy(model)


class Halved(nn.Module):
    """Changes its weight in place when it is called, as masks, clamps and renorms do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).view(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.5)
        return x @ self.weight


class AddedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        x += self.weight[: x.shape[1]]
        return x


class Noted(nn.Module):
    """Keeps what it has seen, in containers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: deque[Tensor] = deque(maxlen=10)
        self.by_name: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.within: dict[str, Any] = {"all": [[]]}
        self.within["itself"] = self.within

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        self.seen.append(mean)
        self.by_name["mean"].append(mean)
        self.within["all"][0].append(mean)
        return x * self.weight


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [Halved, AddedInPlace, Noted])
def test_a_module_that_vmap_calls_again_leaves_nothing_changed(kind: Callable[[], nn.Module], place: int) -> None:
    def run(watched: bool) -> tuple[nn.Module, list[Tensor]]:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 2)]
        model = nn.Sequential(*layers[:place], kind(), *layers[place:])
        optimizer = ngplus.NGPlus(model) if watched else None
        out: list[Tensor] = []
        for _ in range(2):
            made = model(torch.randn(6, 5, 3))
            before = made.detach().clone()
            made.square().mean().backward()
            assert torch.equal(made, before)
            out += [before, *(p.detach().clone() for p in model.parameters()), *(p.grad for p in model.parameters())]
        if optimizer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
        return model, out

    (model, with_it), (_, without) = run(True), run(False)
    for one, other in zip(with_it, without, strict=True):
        torch.testing.assert_close(one, other)
    if kind is Noted:
        (noted,) = (module for module in model if isinstance(module, Noted))
        for kept in (noted.seen, noted.by_name["mean"], noted.within["all"][0]):
            assert torch.stack(list(kept)).shape == (2,)


def test_a_module_that_changes_its_input_is_told() -> None:
    model = nn.Sequential(nn.Linear(3, 3), AddedInPlace())
    optimizer = ngplus.NGPlus(model)
    model(torch.randn(6, 5, 3)).square().mean().backward()
    with pytest.warns(UserWarning, match="changes its inputs in place: AddedInPlace"):
        optimizer.step()
    assert optimizer.plan()["1.weight"].source == "batch"


class Renormed(nn.Module):
    """torch.renorm has no batching rule: vmap runs it sample by sample, and warns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("of the module's own", stacklevel=1)
        return torch.renorm(x, 2, 0, 1.0) * self.weight


def test_no_warning_of_vmap_reaches_the_user_and_all_others_do() -> None:
    def warned(call: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [str(w.message) for w in caught]

    def batched() -> None:
        torch.func.vmap(lambda x: torch.renorm(x[None], 2, 0, 1.0))(torch.ones(4, 3))

    def refresh() -> None:
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()

    model = nn.Sequential(Renormed())
    optimizer = ngplus.NGPlus(model, batch_dim={"0": 0})
    assert any("performance drop" in text for text in warned(batched))
    told = warned(refresh)
    assert optimizer.plan()["0.weight"].source == "vmap"
    assert set(told) == {"of the module's own"}
    assert any("performance drop" in text for text in warned(batched))
