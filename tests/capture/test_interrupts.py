"""Ctrl-C in the middle of a pass: torch runs no hook then, so what a call has set up is found by the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import ngplus
from ngplus.capture.sample_tracker import SampleTracker


class Stop(nn.Module):
    """Raises KeyboardInterrupt where it stands, while it is set."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if Stop.on:
            raise KeyboardInterrupt
        return x


@contextmanager
def interrupted() -> Iterator[None]:
    Stop.on = True
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        Stop.on = False


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


def test_attention_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Attends(), torch.randn(3, 5, 4)
    before = model.eval()(x)
    model.train()
    optimizer = ngplus.NGPlus(model)
    softmax = nn.functional.softmax

    def broken_off(*args: object, **kwargs: object) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.functional, "softmax", broken_off)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    monkeypatch.setattr(nn.functional, "softmax", softmax)
    torch.testing.assert_close(model.eval()(x), before)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before)
    model.train()
    model(x).square().mean().backward()
    optimizer.step()
    assert {row.source for row in optimizer.plan()} == {"sample"}


def models() -> dict[str, Callable[[], nn.Module]]:
    def flat() -> nn.Module:
        return nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3), Stop(), nn.Linear(3, 2), nn.Unflatten(0, (6, 5)))

    class Twice(nn.Module):
        """Calls itself, so that a call inside of a call is no sign of an interrupt."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.again = flat(), True

        def forward(self, x: Tensor) -> Tensor:
            if self.again:
                self.again = False
                try:
                    return self(x)
                finally:
                    self.again = True
            return self.inner(x)

    return {"flat": flat, "twice": Twice}


@pytest.mark.parametrize("name", models())
def test_the_next_pass_counts_its_samples(name: str) -> None:
    def curvature(breaks: bool) -> tuple[Tensor, tuple[int, int] | None]:
        torch.manual_seed(0)
        model, x = models()[name](), torch.randn(6, 5, 4)
        optimizer = ngplus.NGPlus(model, damping=1.0)
        if breaks:
            with interrupted():
                model(torch.randn(3, 5, 4))
        model(x).square().mean().backward()
        optimizer.step()
        matrix = next(m for m in optimizer._matrices if m.name.endswith("1.weight"))
        return optimizer.curvature(matrix.name).matrix, matrix.seen

    (got, seen), (wanted, wanted_seen) = curvature(True), curvature(False)
    assert seen == wanted_seen == (6, 5)
    torch.testing.assert_close(got, wanted)


def _deep(depth: int, x: Tensor) -> Tensor:
    """Calls torch from as deep a stack as a model has."""
    return x + 1 if depth == 0 else _deep(depth - 1, x)


def test_no_function_is_followed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []
    follow = SampleTracker._follow
    monkeypatch.setattr(
        SampleTracker, "_follow", lambda self, name, *args: followed.append(name) or follow(self, name, *args)
    )
    model = nn.Sequential(nn.Linear(4, 3), Stop(), nn.Linear(3, 2))
    optimizer = ngplus.NGPlus(model)
    x = torch.randn(6, 4)
    with interrupted():
        model(x)
    assert followed
    followed.clear()
    _deep(0, x)
    _deep(40, x)
    assert not followed
    optimizer.zero_grad()
    assert not _get_current_function_mode_stack()
    model(x)
    assert followed
    assert not _get_current_function_mode_stack()


def test_one_that_the_model_handles() -> None:
    """A call inside of the model that breaks off does not end that of the model."""

    class Handles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 3), Stop()), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            with interrupted():
                self.a(x)
            return self.b(x.transpose(0, 1)).mean(0)

    model = Handles()
    optimizer = ngplus.NGPlus(model, damping=1.0)
    model(torch.randn(6, 5, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer._find_matrix("b.weight").seen == (6, 5)
    assert optimizer.plan()["b.weight"].source == "sample"


def test_compiled_models_are_compiled_again() -> None:
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            runs.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 3), Stop(), nn.Linear(3, 2)), backend=backend)
    optimizer = ngplus.NGPlus(model)
    with interrupted():
        model(torch.randn(6, 4))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()
    assert runs
    torch._dynamo.reset()
