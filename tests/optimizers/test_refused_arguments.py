"""Arguments of torch's AdamW and SGD: taken, or refused with the name of what to use."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ngplus
from ngplus.optimizers.refused_arguments import OF_NGADAM, OF_NGPLUS

TABLES = {ngplus.NGPlus: OF_NGPLUS, ngplus.NGAdam: OF_NGADAM}
both = pytest.mark.parametrize("kind", TABLES)


@both
@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_every_argument_of_torch_is_taken_or_named(kind: Any, other: Any) -> None:
    own, table = inspect.signature(kind).parameters, TABLES[kind]
    for name, argument in inspect.signature(other).parameters.items():
        assert (name in own) != (name in table), name
        if name in table and name not in (
            "betas",
            "eps",
            "momentum",
            "dampening",
            "nesterov",
            "decoupled_weight_decay",
        ):
            kind(nn.Linear(3, 2), **{name: argument.default})  # what torch does by default, too


@both
def test_the_error_names_the_argument_and_what_to_use(kind: Any) -> None:
    for name, refused in TABLES[kind].items():
        with pytest.raises(TypeError) as error:
            kind(nn.Linear(3, 2), **{name: object()})
        assert str(error.value) == f"{kind.__name__} has no argument {name!r}: {refused.instead}"
        for value in refused.accepted:
            assert name not in kind(nn.Linear(3, 2), **{name: value}).defaults
    with pytest.raises(TypeError, match="unexpected keyword argument 'lerning_rate'"):
        kind(nn.Linear(3, 2), lerning_rate=1.0)


def test_what_the_errors_recommend_is_there() -> None:
    assert {"momentum", "beta", "damping", "relative_damping"} <= set(inspect.signature(ngplus.NGPlus).parameters)
    assert "betas=(momentum, 0.95)" in OF_NGADAM["momentum"].instead
    assert ngplus.NGAdam(nn.Linear(3, 2)).defaults["betas"][1] == 0.95


@both
def test_the_signature_is_that_of_what_is_taken(kind: Any) -> None:
    """Factories choose the arguments to pass by it."""
    found = inspect.signature(kind).parameters
    assert "lr" in found
    assert not found.keys() & TABLES[kind].keys()
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in found.values())
    taken = inspect.getfullargspec(kind.__init__)
    assert taken.args[:3] == ["self", "params", "lr"]
    assert taken.varkw is None


@both
def test_subclasses_copies_and_pickles(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)

    with pytest.raises(TypeError, match="Mine has no argument 'fused'"):
        Mine(nn.Linear(3, 2), fused=True)
    optimizer = kind(nn.Linear(3, 2), lr=0.5)
    assert copy.deepcopy(optimizer).defaults["lr"] == pickle.loads(pickle.dumps(optimizer)).defaults["lr"] == 0.5
    assert functools.partial(kind, lr=0.1)(nn.Linear(3, 2)).defaults["lr"] == 0.1
    with pytest.raises(TypeError, match="NGPlus has no argument 'betas'"):
        ngplus.Preconditioner(nn.Linear(3, 2), betas=(0.9, 0.99))
