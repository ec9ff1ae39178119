"""Options: every bad value gets an error that names it, at construction or at the step that sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, data, loss_fn, mlp, one_step
from helpers.training import Method, Unchanged, all_finite, both
from ngplus import NGAdam, NGPlus
from ngplus.baselines import KFAC, SENG

pytestmark = pytest.mark.usefixtures("double")

NOT_NUMBERS = [-1.0, -1e-9, math.inf, -math.inf, math.nan, "1", None, True]
EVERY = (NGPlus, NGAdam, KFAC, SENG)
BASELINES = (KFAC, SENG)
BAD: list[tuple[tuple[type, ...], str, tuple[object, ...]]] = [
    (EVERY, "lr", (*NOT_NUMBERS, torch.tensor(-0.1), torch.tensor(math.nan), torch.tensor([math.inf]))),
    (EVERY, "lr", (torch.tensor([0.1, 0.2]), torch.tensor([]))),
    (EVERY, "weight_decay", (*NOT_NUMBERS,)),
    (EVERY, "update_every", (0, -1, 1.5, 2.0, math.inf, math.nan, "2", None, True)),
    (EVERY, "maximize", ("yes", 1, None)),
    (EVERY, "distribution", ("magic", None)),
    ((NGPlus, *BASELINES), "damping", (*NOT_NUMBERS, "auto")),
    ((NGPlus,), "relative_damping", (*NOT_NUMBERS,)),
    ((NGPlus, *BASELINES), "momentum", (*NOT_NUMBERS,)),
    ((NGPlus, *BASELINES), "loss_reduction", ("none", None)),
    ((NGPlus, *BASELINES), "batch_dim", (-1, {"nowhere": 0}, "0", 1.5)),
    ((NGPlus,), "beta", (*NOT_NUMBERS, 1.5)),
    ((NGPlus,), "gamma", (*NOT_NUMBERS,)),
    ((NGPlus,), "samples", (0, -3, 0.0, -0.5, 1.5, math.nan, math.inf, "all", True)),
    ((NGPlus,), "block_size", (0, -4, 2.0, "4", True)),
    ((NGPlus,), "sketch", (0, -1, 2.5, "uniform", True, (4, "uniform"), {}, {"kind": "uniform"}, {"sizes": 4})),
    ((NGPlus,), "sketch", ({"size": 0}, {"size": 2.0}, {"size": None}, {"size": True}, {"size": 4, "q": 2})),
    ((NGPlus,), "sketch", ({"size": 4, "kind": "magic"}, {"size": 4, "kind": None})),
    ((NGPlus,), "curvature", ("samples", "", 1, "Sample")),
    ((NGPlus,), "nesterov", ("yes", 2)),
    ((NGPlus,), "seed", (1.5, "0", None, True)),
    ((NGPlus,), "side", ("up", "both", "auto", None)),
    ((NGPlus,), "solver", ("cg", None)),
    ((NGPlus,), "graft", ("adamw", "", 1)),
    ((NGPlus,), "refresh_memory", (0, -1, 1e9, "1GB", None, True)),
    ((NGAdam,), "eps", (*NOT_NUMBERS,)),
    ((NGAdam,), "betas", (*NOT_NUMBERS, (), (0.9,), (0.9, 0.9, 0.9))),
    ((NGAdam,), "betas", tuple((beta, 0.9) for beta in (*NOT_NUMBERS, 1.0, 1.5))),
    ((NGAdam,), "betas", tuple((0.9, beta) for beta in (*NOT_NUMBERS, 1.0, 1.5))),
    ((KFAC,), "approx", ("sum",)),
    ((KFAC,), "beta", (2.0,)),
    ((SENG,), "damping", (0.0,)),
    ((SENG,), "samples", (0,)),
    ((SENG,), "sketch", ({"size": 2},)),
]
BAD_OPTIONS = [
    pytest.param(kind, option, value, id=f"{kind.__name__} {option}={value}")
    for kinds, option, values in BAD
    for value in values
    for kind in kinds
]
FOR_ALL = ("batch_dim", "distribution", "model", "process_group")  # options that no group has


def names(option: str) -> str:
    """How a message may name the option, as a pattern: torch's own optimizers say "learning rate"."""
    return {"lr": "learning rate|lr", "betas": "betas|beta parameter at index"}.get(option, option)


@pytest.mark.parametrize(("kind", "option", "value"), BAD_OPTIONS)
def test_bad_option_is_refused(kind: Method, option: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=names(option)):
        kind(mlp(), **{option: value})


@pytest.mark.parametrize(("kind", "option", "value"), [case for case in BAD_OPTIONS if case.values[1] not in FOR_ALL])
def test_bad_option_of_a_group_is_refused(kind: Method, option: str, value: object) -> None:
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), option: value}]
    with pytest.raises((ValueError, TypeError), match=names(option)):
        kind(groups, model=model)


@both
@pytest.mark.parametrize("option", FOR_ALL)
def test_a_group_takes_no_option_that_is_for_all(option: str, kind: Method) -> None:
    model = mlp()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), option: None}]
    with pytest.raises(ValueError, match=f"does not take {option}: pass it to {kind.__name__}"):
        kind(groups, model=model)


@pytest.mark.parametrize("option", ["curvature", "side", "solver", "graft", "loss_reduction"])
def test_unknown_name_is_quoted_beside_the_known_ones(option: str) -> None:
    with pytest.raises(ValueError, match=option) as error:
        ngplus.NGPlus(mlp(), **{option: "nonsense"})
    assert "'nonsense'" in str(error.value)
    assert str(error.value).count("'") >= 6  # the choices, quoted


CLASHES = [
    ({"solver": "woodbury", "curvature": "momentum"}, "woodbury.*curvature"),
    ({"solver": "woodbury", "curvature": "batch"}, "woodbury.*curvature"),
    ({"solver": "sketched", "curvature": "momentum"}, "sketched.*curvature"),
    ({"solver": "woodbury", "curvature": "sample", "relative_damping": 0.0}, "damping"),
    ({"solver": "sketched", "curvature": "sample", "relative_damping": 0}, "damping"),
    ({"nesterov": True, "momentum": 0.0}, "nesterov=True.*momentum=0.0"),
    ({"solver": "woodbury", "curvature": "sample", "sketch": 3}, "woodbury.*sketch"),
]


@pytest.mark.parametrize(("options", "message"), CLASHES, ids=[str(options) for options, _ in CLASHES])
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ngplus.NGPlus(mlp(), **options)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *((NGPlus, option) for option in ("momentum_", "dampening", "update_freq", "scaling", "betas")),
        *((NGAdam, option) for option in ("momentum", "damping", "curvature", "batch_dim")),
    ],
)
def test_unknown_argument(kind: Method, option: str) -> None:
    with pytest.raises(TypeError, match=option):
        kind(mlp(), **{option: 1})


# A schedule changes the group after construction: the step that sees the value refuses it.
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((kind, *bad) for kind in (NGPlus, NGAdam) for bad in (("lr", math.nan), ("lr", -1.0), ("update_every", 0))),
        (NGPlus, "damping", math.nan), (NGPlus, "damping", -1.0), (NGPlus, "side", "up"), (NGAdam, "betas", (0.9, 1.0)),
    ],
)  # fmt: skip
def test_bad_value_set_in_a_group_later(kind: Method, option: str, value: object) -> None:
    model = mlp()
    optimizer = kind(model)
    x, y = data(4)
    loss_fn(model(x), y).backward()
    optimizer.param_groups[0][option] = value
    with Unchanged(model), pytest.raises((ValueError, RuntimeError), match=names(option)):
        optimizer.step()


@pytest.mark.parametrize("seed", [2**70, 2**63 - 1, -1, -(2**64)])
def test_a_seed_is_any_whole_number(seed: int) -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, **EXACT, samples=3, sketch=2, seed=seed)
    x, y = data(4)
    one_step(model, optimizer, x, y)
    assert all_finite(model)


def test_a_batch_dim_that_no_tensor_has() -> None:
    model = mlp()
    optimizer = ngplus.NGPlus(model, batch_dim=2)
    with pytest.raises(ValueError, match="Invalid batch_dim: 2"):
        model(data(4)[0])
    assert optimizer.param_groups[0]["step"] == 0


def test_a_batch_dim_of_what_cannot_be_seen() -> None:
    """A model that takes an object of its own and gives its loss: no tensor that could tell goes in or comes out."""

    class Pair(NamedTuple):
        both: Callable[[], tuple[Tensor, Tensor]]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, pair: Pair) -> Tensor:
            x, y = pair.both()
            return (self.inner(x) - y).square().mean()

    model = Model()
    optimizer = ngplus.NGPlus(model, batch_dim=1)
    x, y = data(4)
    model(Pair(lambda: (x[None], y[None]))).backward()
    optimizer.step()
    assert optimizer.plan()["inner.0.weight"].source == "sample"
