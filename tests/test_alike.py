"""Small matrices of one shape, worked on as one stack: the same steps as one by one, whatever comes between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from ngplus import alike

pytestmark = pytest.mark.usefixtures("double")

KEYS = ("basis", "basis_tail", "exp_avg", "exp_avg_sq_row", "exp_avg_sq_col")


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
    monkeypatch.setattr(alike, "SMALL", 0)


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


def test_what_is_alike_is_one_tensor_until_a_refresh() -> None:
    model, optimizer = trained(9)  # refreshes at 0, 1 and 7: tied at 8
    states = [optimizer.state[layer.weight] for layer in model.layers]  # type: ignore[index]
    for key in KEYS:
        rows = [state[key] for state in states]
        assert len({row.untyped_storage().data_ptr() for row in rows}) == 1, key
        assert sum(row.numel() for row in rows) * 8 == rows[0].untyped_storage().nbytes(), key  # nothing is kept twice
    loose = optimizer.state[model.last.weight]["exp_avg"]
    assert loose.untyped_storage().nbytes() == loose.numel() * 8


def test_a_step_that_finds_them_tied_keeps_them() -> None:
    places: list[list[int]] = []

    def looked(k: int, model: Experts, optimizer: ngplus.NGPlus) -> Any:
        state = optimizer.state[model.layers[2].weight]  # type: ignore[index]
        places.append([state[key].untyped_storage().data_ptr() for key in KEYS])
        return model, optimizer

    trained(16, between=looked)  # refreshes at 0, 1, 7 and 13
    assert places[7] == places[8] == places[12] != places[13]


@pytest.mark.parametrize("options", [{}, {"second_moment": "full", "side": "both"}], ids=str)
def test_layers_that_a_step_leaves_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    used = ((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (2,), (0, 1, 2, 3), (3, 1, 0))
    together, _ = trained(20, used, **options)
    apart(monkeypatch)
    assert_equal(together, trained(20, used, **options)[0])


def test_a_checkpoint_or_a_copy_between_two_steps() -> None:
    def loaded(k: int, model: Experts, optimizer: ngplus.NGPlus) -> Any:
        if k % 4 == 3:
            with torch.random.fork_rng():
                other = Experts()
            other.load_state_dict(model.state_dict())
            anew = ngplus.NGPlus(other, lr=0.05, update_every=6)
            anew.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return other, anew
        if k % 4 == 1:
            return copy.deepcopy((model, optimizer))
        return model, optimizer

    assert_equal(trained(14)[0], trained(14, between=loaded)[0])


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
