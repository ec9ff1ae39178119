"""Bad input gets a clear error, at construction or at the step that sees it, and changes no parameter."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ngplus
from helpers import reference
from ngplus import NGAdam, NGPlus

EXACT = {"lr": 0.5, "momentum": 0.0, "graft": None, "damping": 0.1, "update_every": 1}
NOT_NUMBERS = [-1.0, -1e-9, math.inf, -math.inf, math.nan, "1", None, True]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(size, 4), make(size, 3)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean()


def train(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    """One step of a loop; the error may come from backward or from step."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


class Unchanged:
    """Holds copies of a model's parameters; leaving the block checks that they are still what they were."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for name, p in self.model.named_parameters():
                assert torch.equal(p, self.before[name]), f"{name} has changed"


# ------------------------------------------------------------------------------------------------ options


def bad(name: str, *values: object, kind: type = NGPlus) -> list[object]:
    return [pytest.param(kind, name, value, id=f"{kind.__name__} {name}={value}") for value in values]


BAD_OPTIONS = [
    *bad("damping", *NOT_NUMBERS),
    *bad("beta", *NOT_NUMBERS, 1.5),
    *bad("gamma", *NOT_NUMBERS),
    *bad("momentum", *NOT_NUMBERS),
    *bad("samples", 0, -3, 0.0, -0.5, 1.5, math.nan, math.inf, "all", True),
    *bad("block_size", 0, -4, 2.0, "4", True),
    *bad("sketch", 0, -1, 2.5, "uniform", True, (4, "uniform")),
    *bad("sketch", {}, {"kind": "uniform"}, {"size": 0}, {"size": 2.0}, {"size": None}, {"size": True}),
    *bad("sketch", {"size": 4, "kind": "magic"}, {"size": 4, "q": 2}, {"size": 4, "kind": None}),
    *bad("curvature", "samples", "", 1, "Sample"),
    *bad("nesterov", "yes", 2),
    *bad("seed", 1.5, "0", None, True),
    *bad("side", "up", "both", "auto", None),
    *bad("solver", "cg", None),
    *bad("graft", "adamw", "", 1),
    *bad("loss_reduction", "none", None),
    *bad("eps", *NOT_NUMBERS, kind=NGAdam),
    *bad("betas", *NOT_NUMBERS, (), (0.9,), (0.9, 0.9, 0.9), kind=NGAdam),
    *bad("betas", *((beta, 0.9) for beta in (*NOT_NUMBERS, 1.0, 1.5)), kind=NGAdam),
    *bad("betas", *((0.9, beta) for beta in (*NOT_NUMBERS, 1.0, 1.5)), kind=NGAdam),
]
for kind in (NGPlus, NGAdam):
    BAD_OPTIONS += [
        *bad("lr", *NOT_NUMBERS, kind=kind),
        *bad("weight_decay", *NOT_NUMBERS, kind=kind),
        *bad("update_every", 0, -1, 1.5, 2.0, math.inf, math.nan, "2", None, True, kind=kind),
        *bad("maximize", "yes", 1, None, kind=kind),
    ]
both = pytest.mark.parametrize("kind", [NGPlus, NGAdam])


@pytest.mark.parametrize("seed", [2**70, 2**63 - 1, -1, -(2**64)])
def test_a_seed_is_any_whole_number(seed: int) -> None:
    model = net()
    optimizer = ngplus.NGPlus(model, **EXACT, samples=3, sketch=2, seed=seed)
    x, y = batch()
    train(optimizer, lambda: loss_fn(model(x), y))
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def names(option: str) -> str:
    """How a message may name the option, as a pattern: torch's own optimizers say "learning rate"."""
    return {"lr": "learning rate|lr", "betas": "betas|beta parameter at index"}.get(option, option)


@pytest.mark.parametrize(("kind", "option", "value"), BAD_OPTIONS)
def test_bad_option_is_refused(kind: Callable[..., Any], option: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=names(option)):
        kind(net(), **{option: value})


@pytest.mark.parametrize(("kind", "option", "value"), BAD_OPTIONS)
def test_bad_option_of_a_group_is_refused(kind: Callable[..., Any], option: str, value: object) -> None:
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), option: value}]
    with pytest.raises((ValueError, TypeError), match=names(option)):
        kind(groups, model=model)


@pytest.mark.parametrize("option", ["curvature", "side", "solver", "graft", "loss_reduction"])
def test_unknown_name_is_quoted_beside_the_known_ones(option: str) -> None:
    with pytest.raises(ValueError, match=option) as error:
        ngplus.NGPlus(net(), **{option: "nonsense"})
    assert "'nonsense'" in str(error.value)
    assert str(error.value).count("'") >= 6  # the choices, quoted


@both
@pytest.mark.parametrize("lr", [torch.tensor([0.1, 0.2]), torch.tensor([])])
def test_tensor_lr_has_one_element(lr: Tensor, kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        kind(net(), lr=lr)


@both
@pytest.mark.parametrize("lr", [torch.tensor(-0.1), torch.tensor(math.nan), torch.tensor([math.inf])])
def test_tensor_lr_is_checked_like_a_number(lr: Tensor, kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="learning rate"):
        kind(net(), lr=lr)


CLASHES = [
    ({"solver": "woodbury", "curvature": "momentum"}, "woodbury.*curvature"),
    ({"solver": "woodbury", "curvature": "batch"}, "woodbury.*curvature"),
    ({"solver": "sketched", "curvature": "momentum"}, "sketched.*curvature"),
    ({"solver": "woodbury", "damping": 0.0}, "damping"),
    ({"solver": "sketched", "damping": 0}, "damping"),
    ({"nesterov": True, "momentum": 0.0}, "nesterov=True.*momentum, which is 0.0"),
    ({"solver": "woodbury", "sketch": 3}, "woodbury.*sketch"),
]


@pytest.mark.parametrize(("options", "message"), CLASHES, ids=[str(options) for options, _ in CLASHES])
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ngplus.NGPlus(net(), **options)


@both
@pytest.mark.parametrize("option", ["model", "batch_dim", "process_group", "distribution"])
def test_a_group_takes_no_option_that_is_for_all(option: str, kind: Callable[..., Any]) -> None:
    model = net()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), option: None}]
    with pytest.raises(ValueError, match=f"no {option}: give it to {kind.__name__}"):
        kind(groups, model=model)


def test_a_batch_dim_that_no_tensor_has() -> None:
    model = net()
    optimizer = ngplus.NGPlus(model, batch_dim=2)
    with pytest.raises(ValueError, match="Invalid batch_dim: 2"):
        model(batch()[0])
    assert optimizer.param_groups[0]["step"] == 0


def test_a_batch_dim_of_what_cannot_be_seen() -> None:
    """A model that takes an object of its own and gives its loss: no tensor that could tell goes in or comes out."""

    class Pair(NamedTuple):
        both: Callable[[], tuple[Tensor, Tensor]]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, pair: Pair) -> Tensor:
            x, y = pair.both()
            return (self.inner(x) - y).square().mean()

    model = Model()
    optimizer = ngplus.NGPlus(model, batch_dim=1)
    x, y = batch()
    model(Pair(lambda: (x[None], y[None]))).backward()
    optimizer.step()
    assert optimizer.plan()["inner.0.weight"].source == "sample"


@pytest.mark.parametrize("batch_dim", [{"nowhere": 0}, "0", 1.5])
def test_bad_batch_dim(batch_dim: object) -> None:
    with pytest.raises((ValueError, TypeError), match="batch_dim"):
        ngplus.NGPlus(net(), batch_dim=batch_dim)


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (ngplus.Preconditioner, "lr"),
        *((NGPlus, option) for option in ("momentum_", "dampening", "update_freq", "scaling", "betas")),
        *((NGAdam, option) for option in ("momentum", "damping", "curvature", "batch_dim")),
    ],
)
def test_unknown_argument(kind: Callable[..., Any], option: str) -> None:
    with pytest.raises(TypeError, match=option):
        kind(net(), **{option: 1})


# A schedule changes the group after construction: the step that sees the value refuses it.
@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        *((kind, *bad) for kind in (NGPlus, NGAdam) for bad in (("lr", math.nan), ("lr", -1.0), ("update_every", 0))),
        (NGPlus, "damping", math.nan), (NGPlus, "damping", -1.0), (NGPlus, "side", "up"), (NGAdam, "betas", (0.9, 1.0)),
    ],
)  # fmt: skip
def test_bad_value_set_in_a_group_later(kind: Callable[..., Any], option: str, value: object) -> None:
    model = net()
    optimizer = kind(model)
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.param_groups[0][option] = value
    with Unchanged(model), pytest.raises((ValueError, RuntimeError), match=names(option)):
        optimizer.step()


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
@pytest.mark.parametrize("form", ["parameters", "named", "groups"])
def test_parameters_without_their_module_have_mini_batch_curvature(curvature: str, form: str) -> None:
    model, other = net(), net()
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
        x, y = batch()
        loss_fn(own(x), y).backward()
        made.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [ngplus.baselines.KFAC, ngplus.baselines.SENG])
def test_rivals_need_the_model(kind: Any) -> None:
    with pytest.raises(ValueError, match="model="):
        kind(net().parameters())


@pytest.mark.parametrize("method", [partial(NGPlus, curvature="batch"), NGAdam], ids=["batch", "NGAdam"])
def test_curvature_of_mini_batches_needs_no_model(method: Callable[..., Any]) -> None:
    model = net()
    optimizer = method(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_two_models() -> None:
    with pytest.raises(ValueError, match="two models"):
        ngplus.NGPlus(net(), model=net())


def test_the_same_model_twice_is_no_error() -> None:
    model = net()
    assert len(ngplus.NGPlus(model, model=model).plan()) == 2


@pytest.mark.parametrize("model", [nn.Sequential(), nn.ReLU(), nn.BatchNorm1d(3, affine=False)], ids=repr)
def test_model_without_parameters(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no parameters"):
        ngplus.NGPlus(model)


@pytest.mark.parametrize("params", [[], iter(())])
def test_no_parameters(params: object) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        ngplus.NGPlus(params, curvature="batch")


@pytest.mark.parametrize("params", [torch.zeros(3, requires_grad=True), [1.0], ["weight"]])
def test_params_that_are_none(params: object) -> None:
    with pytest.raises(TypeError, match="optimizer"):
        ngplus.NGPlus(params, curvature="batch")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="complex"):
        ngplus.NGPlus([nn.Parameter(torch.zeros(3, 2, dtype=dtype))], curvature="batch")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integer_parameters(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(3, 2, dtype=dtype), requires_grad=False)
    with pytest.raises(ValueError, match=re.escape(str(dtype))):
        ngplus.NGPlus([param], curvature="batch")


def test_complex_parameter_of_a_model_is_named() -> None:
    model = net()
    model.register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="phase"):
        ngplus.NGPlus(model)


def test_uninitialized_parameters() -> None:
    with pytest.raises(ValueError, match=r"[Uu]ninitialized|Lazy"):
        ngplus.NGPlus(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("method", [partial(NGPlus, curvature="batch"), NGAdam], ids=["batch", "NGAdam"])
def test_parameter_twice_in_one_group_is_told_and_moves_once(method: Callable[..., Any]) -> None:
    weight, other = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizers = method([weight, weight]), method([other])
    for param, optimizer in zip((weight, other), optimizers, strict=True):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(weight, other)


def test_parameter_in_two_groups() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        ngplus.NGPlus([{"params": [weight]}, {"params": [weight]}], curvature="batch")


@pytest.mark.parametrize("kind", ["known", "complex", "integer", "option"])
def test_refused_group_leaves_the_optimizer_as_it_was(kind: str) -> None:
    model = net()
    optimizer = ngplus.NGPlus(model.parameters(), model=model, **EXACT)
    new = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    group: dict[str, object] = {
        "known": {"params": [model[0].weight]},
        "complex": {"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
        "integer": {"params": [nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)]},
        "option": {"params": [new], "damping": -1.0},
    }[kind]
    with pytest.raises(ValueError, match=r"more than one|complex|int32|damping"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    assert [row.source for row in optimizer.plan()] == ["sample", "sample"]


def test_unknown_name_in_curvature() -> None:
    optimizer = ngplus.NGPlus(net(), **EXACT)
    with pytest.raises(KeyError, match=r"9\.weight"):
        optimizer.curvature("9.weight")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        optimizer.curvature("0.weight")  # not before the first step


# ------------------------------------------------------------------------------------------------ batches and losses

MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "sequence": (lambda: nn.Linear(4, 3), (5, 4)),
    "conv": (lambda: nn.Conv1d(4, 3, 2), (4, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (4,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "unknown": (lambda: nn.PReLU(4), (4,)),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_empty_batch(kind: str, curvature: str) -> None:
    make, shape = MODELS[kind]
    model = make()
    optimizer = ngplus.NGPlus(model, **EXACT, curvature=curvature)
    with Unchanged(model), pytest.raises((ValueError, RuntimeError), match=r"no samples|empty batch"):
        train(optimizer, lambda: model(torch.zeros(0, *shape)).sum())


def test_empty_batch_between_refreshes() -> None:
    """A mean over nothing is NaN; a sum is a zero gradient, and a zero step."""
    model = net()
    optimizer = ngplus.NGPlus(model, **{**EXACT, "update_every": 3})
    x, y = batch()
    loss_fn(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with Unchanged(model):
        (model(x[:0]) - y[:0]).square().sum().backward()
        optimizer.step()


def test_batch_of_one_is_exact() -> None:
    model = net()
    x, y = batch(1)
    (sample,) = reference.per_sample_gradients(model, loss_fn, [(x, y)])
    optimizer = ngplus.NGPlus(model, **EXACT)
    expected = {}
    for layer in ("0", "2"):
        weight, bias = model.get_parameter(f"{layer}.weight"), model.get_parameter(f"{layer}.bias")
        gradient = reference.rows(sample[f"{layer}.weight"], sample[f"{layer}.bias"])
        side = reference.side_of(gradient)
        curvature = reference.gfim(gradient[None], side)
        direction = reference.direction(gradient, curvature, side, damping=0.1)
        expected[layer] = (reference.rows(weight, bias) - 0.5 * direction).detach()
    loss_fn(model(x), y).backward()
    optimizer.step()
    for layer, want in expected.items():
        got = reference.rows(model.get_parameter(f"{layer}.weight"), model.get_parameter(f"{layer}.bias")).detach()
        assert reference.relative_error(got, want) < 1e-9


def test_loss_that_reaches_no_parameter() -> None:
    model = net()
    optimizer = ngplus.NGPlus(model, **EXACT)
    x, _ = batch()
    x.requires_grad_()
    model(x)
    x.square().mean().backward()
    with Unchanged(model), pytest.raises(RuntimeError, match="parameter"):
        optimizer.step()


def test_step_without_backward() -> None:
    model = net()
    optimizer = ngplus.NGPlus(model, **EXACT)
    model(batch()[0])
    with Unchanged(model), pytest.raises(RuntimeError, match=r"backward\(\) was not called"):
        optimizer.step()


def test_step_before_anything_is_a_no_op() -> None:
    """As with torch's optimizers."""
    model = net()
    with Unchanged(model):
        ngplus.NGPlus(model, **EXACT).step()


# ------------------------------------------------------------------------------------------------ hostile gradients


def tensors(optimizer: Any) -> dict[tuple[int, str], Tensor]:
    """All of the state, by the parameter's number and the key."""
    state = optimizer.state_dict()["state"]
    return {(i, key): v.clone() for i, own in state.items() for key, v in own.items() if isinstance(v, Tensor)}


METHODS: dict[str, Callable[..., Any]] = {
    "sample": partial(NGPlus, curvature="sample", damping=0.1),
    "momentum": partial(NGPlus, curvature="momentum", damping=0.1),
    "batch": partial(NGPlus, curvature="batch", damping=0.1),
    "NGAdam": NGAdam,
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("later", [False, True], ids=["first step", "a later one"])
def test_gradient_that_is_not_finite(value: float, method: Callable[..., Any], later: bool) -> None:
    model = net()
    optimizer = method(model, lr=0.5, update_every=3)
    x, y = batch()
    if later:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    grad = model[2].weight.grad
    grad[0, 0] = value
    count = optimizer.param_groups[0]["step"]
    state = tensors(optimizer)
    assert bool(state) == later
    with Unchanged(model), pytest.warns(ngplus.HealthWarning, match=r"2\.weight") as caught:
        optimizer.step()
    assert "0.weight" not in str(caught[0].message)  # names the culprit, and only it
    assert optimizer.param_groups[0]["step"] == count
    after = tensors(optimizer)
    assert all(torch.equal(after[key], state[key]) for key in state)
    # And training goes on as if the bad step had not been.
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layer", ["embedding", "bag"])
@both
def test_sparse_gradient_that_is_not_finite(value: float, layer: str, kind: Callable[..., Any]) -> None:
    make = nn.Embedding if layer == "embedding" else nn.EmbeddingBag
    model = make(20, 3, sparse=True)
    optimizer = kind(model, lr=0.5)
    model(torch.tensor([[1, 2], [2, 5]])).square().sum().backward()
    grad = model.weight.grad
    model.weight.grad = torch.sparse_coo_tensor(grad._indices(), grad._values() * value, grad.shape)
    with Unchanged(model), pytest.warns(ngplus.HealthWarning, match="weight"):
        optimizer.step()


@pytest.mark.parametrize("method", [METHODS["batch"], NGAdam], ids=["batch", "NGAdam"])
def test_overflow_of_a_norm_skips_the_step(method: Callable[..., Any]) -> None:
    """Gradients that are finite, but so large that no step can be made of them."""
    model = nn.Linear(4, 3)
    optimizer = method(model, lr=0.5)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3e38)
    with Unchanged(model), pytest.warns(ngplus.HealthWarning, match=r"not finite.*weight"):
        optimizer.step()


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
        train(optimizer, lambda model=model: model(torch.tensor([[1, 2], [2, 5]])).square().sum())
        made.append(model.weight.detach())
    assert torch.equal(*made)


def test_sketch_larger_than_the_matrix_is_the_exact_product() -> None:
    plain = net()
    sketched = copy.deepcopy(plain)
    x, y = batch()
    for model, options in ((plain, {}), (sketched, {"sketch": {"size": 1000, "replacement": False}})):
        optimizer = ngplus.NGPlus(model, **EXACT, **options)
        train(optimizer, lambda model=model: loss_fn(model(x), y))
    for a, b in zip(plain.parameters(), sketched.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# ------------------------------------------------------------------------------------------------ as a user reads them


def test_warnings_point_at_the_users_line() -> None:
    model = nn.LSTM(3, 2)
    for optimizer in (
        ngplus.NGPlus(model, lr=0.01),
        ngplus.baselines.KFAC(model, lr=0.01),
        ngplus.Preconditioner(model),
    ):
        model(torch.randn(4, 5, 3))[0].sum().backward()
        with pytest.warns(UserWarning, match=r"No per-sample curvature for weight_ih_l0") as caught:
            optimizer.step()
        assert caught[0].filename == __file__


def test_a_name_that_is_not_there_brings_the_nearest() -> None:
    optimizer = ngplus.NGPlus(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(KeyError, match=r"No parameter '0.wieght' in this optimizer: did you mean '0.weight'\?"):
        optimizer.curvature("0.wieght")
    with pytest.raises(KeyError, match=r"No parameter 'x' in this plan: print\(plan\(\)\) lists all"):
        optimizer.plan()["x"]
    with pytest.raises(KeyError, match=r"of shape \(2, 3\) is not one of this optimizer's: plan\(\) lists them"):
        optimizer.curvature(nn.Parameter(torch.zeros(2, 3)))


def test_errors_name_the_parameter() -> None:
    model = nn.Linear(3, 2)
    online = ngplus.OnlineNGPlus(model.named_parameters())
    model(torch.full((1, 3), torch.inf)).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of parameter weight is not finite"):
        online.step()
    with pytest.raises(ValueError, match=r"Invalid momentum: -1 \(a number of 0 or more\)"):
        ngplus.NGPlus(model, momentum=-1)
    with pytest.raises(ValueError, match=r"Invalid beta parameter at index 1: 1.0 \(a number of 0 or more and below 1"):
        ngplus.NGAdam(model, betas=(0.9, 1.0))


def test_sharded_parameters_are_refused_where_torch_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(torch.Tensor):
        """A DTensor is known by this method."""

        def to_local(self) -> Tensor:
            return self.as_subclass(Tensor)

    monkeypatch.setattr(torch, "__version__", "2.8.0")
    weight = nn.Parameter(torch.zeros(2, 3).as_subclass(Sharded))
    with pytest.raises(RuntimeError, match=r"need torch 2\.13 or newer, and this is 2\.8\.0"):
        ngplus.NGPlus([("weight", weight)], curvature="batch")


@both
def test_parameters_of_another_model(kind: Callable[..., Any]) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    with pytest.raises(ValueError, match="None of the parameters is one of model="):
        kind(model.parameters(), model=other)


def test_a_parameter_that_the_model_does_not_have_is_told_by_the_plan() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    mixed = ngplus.NGPlus([*model.parameters(), *other.parameters()], model=model)
    assert [row.note for row in mixed.plan()] == ["", *["it is no parameter of the model that was given"] * 2]
