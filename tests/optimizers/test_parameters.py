"""Parameters: the forms in which an optimizer takes them, and those that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers.steps import EXACT, data, loss_fn, mlp, one_step
from helpers.training import METHODS, Method, Unchanged, both
from ngplus import NGAdam

pytestmark = pytest.mark.usefixtures("double")
METHODS_WITHOUT_MODEL = pytest.mark.parametrize("method", [METHODS["batch"], NGAdam], ids=["batch", "NGAdam"])


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
@pytest.mark.parametrize("form", ["parameters", "named", "groups"])
def test_parameters_without_their_module_have_mini_batch_curvature(curvature: str, form: str) -> None:
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    params = {
        "parameters": list(model.parameters()),
        "named": list(model.named_parameters()),
        "groups": [{"params": [p]} for p in model.parameters()],
    }[form]
    with pytest.warns(UserWarning, match="model=") as told:
        optimizer = ngplus.NGPlus(params, curvature=curvature)
    assert len(told) == 1
    for own, made in ((model, optimizer), (other, ngplus.NGPlus(other.parameters(), curvature="batch"))):
        x, y = data(4)
        loss_fn(own(x), y).backward()
        made.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@METHODS_WITHOUT_MODEL
def test_curvature_of_mini_batches_needs_no_model(method: Method) -> None:
    model = mlp()
    optimizer = method(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    x, y = data(4)
    one_step(model, optimizer, x, y)
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_same_model_twice_is_no_error() -> None:
    model = mlp()
    assert len(ngplus.NGPlus(model, model=model).plan()) == 2


def shared_by_groups() -> list[dict[str, Any]]:
    weight = nn.Parameter(torch.zeros(3, 2))
    return [{"params": [weight]}, {"params": [weight]}]


def of_type(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2, dtype=dtype), requires_grad=dtype.is_complex)]


def with_a_phase() -> nn.Module:
    model = mlp()
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    return model


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no layers": (nn.Sequential, ValueError, "no parameters"),
    "a layer without parameters": (lambda: nn.BatchNorm1d(3, affine=False), ValueError, "no parameters"),
    "an empty list": (list, ValueError, "empty parameter list"),
    "an empty iterator": (lambda: iter(()), ValueError, "empty parameter list"),
    "a tensor": (lambda: torch.zeros(3, requires_grad=True), TypeError, "optimizer"),
    "a number": (lambda: [1.0], TypeError, "optimizer"),
    "a name": (lambda: ["weight"], TypeError, "optimizer"),
    "a product": (lambda: [nn.Parameter(torch.ones(2)) * 2], ValueError, "non-leaf"),
    "in two groups": (shared_by_groups, ValueError, "more than one parameter group"),
    "complex64": (lambda: of_type(torch.complex64), ValueError, "complex"),
    "complex128": (lambda: of_type(torch.complex128), ValueError, "complex"),
    "int64": (lambda: of_type(torch.int64), ValueError, r"torch\.int64"),
    "uint8": (lambda: of_type(torch.uint8), ValueError, r"torch\.uint8"),
    "bool": (lambda: of_type(torch.bool), ValueError, r"torch\.bool"),
    "complex in a model": (with_a_phase, ValueError, "phase"),
    "uninitialized": (lambda: nn.Sequential(nn.LazyLinear(3)), ValueError, r"[Uu]ninitialized|Lazy"),
}


@METHODS_WITHOUT_MODEL
@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_are_refused(case: str, method: Method) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        method(make())


@METHODS_WITHOUT_MODEL
def test_two_models(method: Method) -> None:
    with pytest.raises(ValueError, match="two models"):
        method(mlp(), model=mlp())


@METHODS_WITHOUT_MODEL
def test_parameter_twice_in_one_group_is_told_and_moves_once(method: Method) -> None:
    weight, other = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizers = method([weight, weight]), method([other])
    for param, optimizer in zip((weight, other), optimizers, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(weight, other)


@both
def test_parameters_of_another_model(kind: Method) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="None of the parameters belongs to model="):
        kind(model.parameters(), model=other)


def test_a_parameter_that_the_model_does_not_have_is_told_by_the_plan() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    mixed = ngplus.NGPlus([*model.parameters(), *other.parameters()], model=model)
    assert [row.note for row in mixed.plan()] == ["", *["it is not a parameter of the given model"] * 2]


def test_sharded_parameters_are_refused_where_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(torch.Tensor):
        """A DTensor is known by this method."""

        def to_local(self) -> Tensor:
            return self.as_subclass(Tensor)

    monkeypatch.setattr(torch, "__version__", "2.8.0")
    weight = nn.Parameter(torch.zeros(2, 3).as_subclass(Sharded))
    with pytest.raises(RuntimeError, match=r"need torch 2\.13 or newer, and this is 2\.8\.0"):
        ngplus.NGPlus([("weight", weight)], curvature="batch")


@pytest.mark.parametrize("layer", ["embedding", "bag"])
def test_weight_decay_with_sparse_gradients(layer: str) -> None:
    make = nn.Embedding if layer == "embedding" else nn.EmbeddingBag
    model = nn.Sequential(make(20, 3, sparse=True), nn.Linear(3, 2))
    # The dense layer stands first, so that it would be changed before the error if the check came late.
    groups = [{"params": list(model[1].parameters())}, {"params": [model[0].weight], "weight_decay": 0.1}]
    optimizer = ngplus.NGPlus(groups, model=model, **EXACT)
    model(torch.tensor([[1, 2], [2, 5]])).square().sum().backward()
    with Unchanged(model), pytest.raises(RuntimeError, match="weight_decay"):
        optimizer.step()


def test_ngadam_has_no_weight_decay_for_rows_of_sparse_gradients() -> None:
    """A default of 0.01 that refused them would be in the way."""
    made = []
    for decay in (0.0, 0.1):
        torch.manual_seed(0)
        model = nn.Embedding(20, 3, sparse=True)
        optimizer = ngplus.NGAdam(model, weight_decay=decay)
        model(torch.tensor([[1, 2], [2, 5]])).square().sum().backward()
        optimizer.step()
        made.append(model.weight.detach())
    assert torch.equal(*made)
