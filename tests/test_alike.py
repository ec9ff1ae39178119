"""Small matrices of one shape, worked on as one stack: the same steps as one by one, whatever comes between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus.preconditioners import buckets, eigenbasis

pytestmark = pytest.mark.usefixtures("double")


class Experts(nn.Module):
    """Layers of one shape, of which a call may leave some out, and others; vectors, and a table that is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.wide = nn.ModuleList(nn.Linear(5, 9) for _ in range(2))  # right side: their gradients are transposed
        self.norms = nn.ModuleList(nn.LayerNorm(5) for _ in range(3))
        self.last = nn.Linear(9, 3, bias=False)

    def forward(self, words: Tensor, used: tuple[int, ...]) -> Tensor:
        x = self.table(words)
        for i in used:
            x = torch.tanh(self.norms[i % 3](self.layers[i](x)))
        return self.last(torch.tanh(self.wide[0](x) + self.wide[1](x)))


def trained(
    steps: int, used: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),), between: Any = None, **options: Any
) -> tuple[Experts, ngplus.NGPlus]:
    torch.manual_seed(0)
    model = Experts()
    optimizer = ngplus.NGPlus(model, lr=0.05, update_every=6, **options)
    for k in range(steps):
        words, target = torch.randint(7, (12,)), torch.randn(12, 3)
        optimizer.zero_grad()
        (model(words, used[k % len(used)]) - target).square().mean().backward()
        optimizer.step()
        if between is not None:
            model, optimizer = between(k, model, optimizer)
    return model, optimizer


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SMALL", 0)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"side": "both"},
        {"side": "smaller"},
        {"second_moment": "full"},
        {"nesterov": False},
        {"curvature": "batch"},
        {"side": "smaller", "block_size": 2},
    ],
    ids=str,
)
def test_the_steps_are_those_of_each_matrix_alone(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    together, _ = trained(15, **options)
    apart(monkeypatch)
    assert_equal(together, trained(15, **options)[0])


def test_equal_matrices_go_through_a_step_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    real = buckets.bundled

    def watched(*arguments: Any) -> list[buckets.Bucket]:
        made = real(*arguments)
        seen.append(sorted(len(bundle.places) for bundle in made))
        return made

    monkeypatch.setattr(eigenbasis, "bundled", watched)
    model, optimizer = trained(8)
    # The table and the last layer, the two wide ones, three norms and four layers. At the first step nothing is there
    # yet, after the second and the eighth there is a refresh, and the steps between take what the one before has found.
    assert seen == [[1, 1, 2, 3, 4]] * 2
    for p in model.parameters():  # each still keeps its own
        for value in optimizer.state[p].values():
            if isinstance(value, Tensor):
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


@pytest.mark.parametrize("options", [{}, {"second_moment": "full", "side": "both"}], ids=str)
def test_layers_that_a_step_leaves_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    used = ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (2,), (0, 1, 2, 3), (3, 1, 0))
    together, _ = trained(20, used, **options)
    apart(monkeypatch)
    assert_equal(together, trained(20, used, **options)[0])


@pytest.mark.parametrize("options", [{}], ids=str)
@pytest.mark.parametrize("used", [((0, 1, 2, 3),), ((0, 1, 2, 3), (0, 1, 2, 3), (1, 3, 0))], ids=str)
def test_a_checkpoint_or_a_copy_between_two_steps(used: Any, options: dict[str, Any]) -> None:
    """Bit for bit, in float32, where another stack would round otherwise."""
    torch.set_default_dtype(torch.float32)  # the fixture puts it back

    def loaded(k: int, model: Experts, optimizer: ngplus.NGPlus) -> Any:
        if k % 4 == 3:
            with torch.random.fork_rng():
                other = Experts()
            other.load_state_dict(model.state_dict())
            anew = ngplus.NGPlus(other, lr=0.05, update_every=6, **options)
            anew.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return other, anew
        if k % 4 == 1:
            return copy.deepcopy((model, optimizer))
        return model, optimizer

    plain, _ = trained(22, used, **options)
    resumed, _ = trained(22, used, loaded, **options)
    for one, other in zip(plain.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"side": "both"}, {"maximize": True}, {"nesterov": False}], ids=str)
def test_a_step_leaves_the_gradients_as_they_are(options: dict[str, Any]) -> None:
    held: list[Tensor] = []

    def keep(optimizer: Any, *_: Any) -> None:
        held[:] = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]

    def looked(k: int, model: Experts, optimizer: ngplus.NGPlus) -> Any:
        if k == 0:
            optimizer.register_step_pre_hook(keep)
        else:
            assert all(torch.equal(old, p.grad) for old, p in zip(held, model.parameters(), strict=True))  # type: ignore[arg-type]
        return model, optimizer

    trained(5, between=looked, **options)
