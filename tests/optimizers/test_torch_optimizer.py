"""What torch's own test_optim.py asks of an optimizer, asked of NGPlus and NGAdam with torch's own tools.

``INFOS`` has the OptimizerInfo that torch keeps for each of its optimizers: the settings to test, the learning-rate
schedulers to test them with, and the inputs that must raise an error.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from test_state import assert_same, loss_of, small_net, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, PolynomialLR, ReduceLROnPlateau, StepLR

from ngplus import NGAdam, NGPlus

# torch's testing tools load a hypothesis profile of 10 examples and freeze torch.backends, for the whole process.
profile, frozen = hypothesis.settings.get_current_profile_name(), torch.backends.__allow_nonbracketed_mutation_flag
from torch.testing._internal.common_optimizers import (  # noqa: E402
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    _get_optim_inputs_including_global_cliquey_kwargs,
    get_error_inputs_for_all_optims,
)

hypothesis.settings.load_profile(profile)
torch.backends.__allow_nonbracketed_mutation_flag = frozen

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------------ inputs


def ngplus_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """Each curvature with each graft, then the other options one by one."""
    inputs = []
    for curvature in ("sample", "momentum", "batch"):
        for graft in (None, "sgd", "adam"):
            kwargs = {"lr": 1e-3, "curvature": curvature, "graft": graft, "update_every": 2}
            inputs.append(OptimizerInput(None, kwargs, f"{curvature} {graft}"))
    inputs.append(OptimizerInput(None, {}, "default"))
    plain = {"lr": 0.01, "graft": "sgd"}
    for desc, more in {
        "tensor lr": {"lr": torch.tensor(0.01)},
        "weight_decay": {"weight_decay": 0.1},
        "weight_decay batch": {"weight_decay": 0.1, "curvature": "batch"},
        "maximize": {"maximize": True, "weight_decay": 0.1},
        "no momentum": {"momentum": 0.0},
        "nesterov": {"nesterov": True},
        "nesterov adam": {"nesterov": True, "graft": "adam", "lr": 1e-3},
        "the paper": {"lr": 1e-3, "momentum": 0.0, "graft": None, "damping": 0.1, "update_every": 1},
        "woodbury": {"solver": "woodbury", "block_size": 3},
        "sketched": {"solver": "sketched", "samples": 3},
    }.items():
        inputs.append(OptimizerInput(None, {**plain, **more}, desc))
    return inputs


def ngadam_inputs(device: Any, dtype: Any = None) -> list[OptimizerInput]:
    """The options one by one."""
    return [
        OptimizerInput(None, kwargs, f"NGAdam {desc}")
        for desc, kwargs in {
            "default": {},
            "small lr": {"lr": 1e-3, "update_every": 2},
            "tensor lr": {"lr": torch.tensor([0.001])},
            "betas": {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6},
            "no momentum": {"lr": 1e-3, "betas": (0.0, 0.95), "update_every": 1},
            "weight_decay": {"lr": 1e-3, "weight_decay": 0.1},
            "maximize": {"lr": 1e-3, "maximize": True, "weight_decay": 0.1},
        }.items()
    ]


INFINITY, NAN = float("inf"), float("nan")
BAD_NUMBERS = {
    "lr": (-1e-3, INFINITY, NAN, torch.tensor(-1.0), torch.tensor(NAN), "fast", None),
    "weight_decay": (-0.5, INFINITY),
    "update_every": (0, -1, 2.5, True),
}


def error_inputs(own: dict[str, Any], bad_numbers: dict[str, Any]) -> list[ErrorOptimizerInput]:
    """torch's for all optimizers, and what NGPlus and NGAdam refuse alike. ``own`` options are given in all of them."""
    found = []
    for case in get_error_inputs_for_all_optims("cpu", torch.float32):
        case.optimizer_error_input.kwargs.update(own)
        found.append(case)
    for name, values in bad_numbers.items():
        found += [wrong("learning rate" if name == "lr" else name, **{**own, name: value}) for value in values]
    return [
        *found,
        wrong("two models", nn.Linear(1, 1), model=nn.Linear(1, 1), **own),
        wrong("no parameters", nn.Tanh(), **own),
        wrong("empty parameter list", [], **own),
        wrong("complex", [nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))], **own),
        wrong("complex", nn.Linear(2, 3, dtype=torch.complex64), **own),
        wrong("non-leaf", [nn.Parameter(torch.ones(2)) * 2], **own),
    ]


def wrong(regex: str, params: Any = None, **kwargs: Any) -> ErrorOptimizerInput:
    case = OptimizerInput(params, kwargs, f"{regex} {kwargs}")
    return ErrorOptimizerInput(case, error_type=ValueError, error_regex=regex)


def ngplus_error_inputs(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
    bad_numbers = {
        **BAD_NUMBERS,
        "momentum": (-0.5, NAN),
        "damping": (-1e-3, INFINITY, NAN, "none", None),
        "beta": (-0.1, 1.1, NAN),
        "gamma": (-0.1, INFINITY),
        "block_size": (0, -3, 2.5),
        "samples": (0, 0.0, 1.5, -2),
        "sketch": (0, -1, {"size": 4, "kind": "magic"}, {"sizes": 4}),
    }
    batch = {"curvature": "batch"}
    return [
        *error_inputs(batch, bad_numbers),
        *(
            wrong(f"Invalid {name}: 'magic'", **{**batch, name: "magic"})
            for name in ("curvature", "side", "solver", "loss_reduction", "graft")
        ),
        wrong("nesterov", nesterov=True, momentum=0.0, **batch),
        wrong("solver='sketched'", solver="sketched", **batch),
        wrong("damping", solver="woodbury", damping=0.0, model=nn.Linear(1, 1)),
    ]


def ngadam_error_inputs(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
    bad_numbers = {**BAD_NUMBERS, "eps": (-1e-8, NAN), "betas": (0.9, (0.9,), (0.9, 0.9, 0.9))}
    return [
        *error_inputs({}, bad_numbers),
        *(wrong("beta parameter at index 0", betas=(beta, 0.9)) for beta in (-0.1, 1.0, NAN)),
        *(wrong("beta parameter at index 1", betas=(0.9, beta)) for beta in (-0.1, 1.0, NAN)),
    ]


INFOS = tuple(
    OptimizerInfo(
        kind,
        optim_inputs_func=inputs,
        optim_error_inputs_func=errors,
        scheduler_inputs=(
            [lambda opt: StepLR(opt, gamma=0.9, step_size=2)],
            [
                lambda opt: StepLR(opt, gamma=0.9, step_size=2),
                lambda opt: ReduceLROnPlateau(opt, patience=0, threshold=10),
            ],
            [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4), lambda opt: ExponentialLR(opt, gamma=0.99)],
            [lambda opt: PolynomialLR(opt, total_iters=20, power=1.2)],
        ),
        supported_impls=(),
        supports_complex=False,
    )
    for kind, inputs, errors in (
        (NGPlus, ngplus_inputs, ngplus_error_inputs),
        (NGAdam, ngadam_inputs, ngadam_error_inputs),
    )
)


class Setting(NamedTuple):
    """One of the settings to test, with its optimizer."""

    kind: type[NGPlus | NGAdam]
    kwargs: dict[str, Any]
    desc: str


INPUTS = [
    Setting(info.optim_cls, optim_input.kwargs, optim_input.desc)
    for info in INFOS
    for optim_input in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
]
ERRORS = [
    pytest.param(info.optim_cls, case, id=f"{info.optim_cls.__name__} {case.optimizer_error_input.desc}")
    for info in INFOS
    for case in info.optim_error_inputs_func("cpu", torch.float32)
]
every_input = pytest.mark.parametrize("optim_input", INPUTS, ids=lambda optim_input: optim_input.desc)
FIRST = [next(optim_input for optim_input in INPUTS if optim_input.kind is info.optim_cls) for info in INFOS]
each_optimizer = pytest.mark.parametrize("optim_input", FIRST, ids=lambda optim_input: optim_input.kind.__name__)
BASIC_NAMES = {
    "sample None", "sample adam", "momentum None", "momentum adam", "batch None", "batch adam", "the paper",
    "NGAdam small lr", "NGAdam betas", "NGAdam no momentum",
}  # fmt: skip
BASIC = [optim_input for optim_input in INPUTS if optim_input.desc in BASIC_NAMES]
every_curvature = pytest.mark.parametrize("optim_input", BASIC, ids=lambda optim_input: optim_input.desc)


def build(optim_input: Setting, params: Any, **changes: Any) -> Any:
    """The optimizer on a model; where the curvature is the mini-batch's, on its parameters only."""
    kwargs = {**copy.deepcopy(optim_input.kwargs), **changes}
    if isinstance(params, nn.Module) and kwargs.get("curvature") == "batch" and "model" not in kwargs:
        params = params.parameters()
    return optim_input.kind(params, **kwargs)


@torch.no_grad()
def loss_now(model: nn.Module) -> float:
    return float(loss_of(model))


def copies(tensors: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize(("kind", "case"), ERRORS)
def test_errors(kind: Callable[..., Any], case: ErrorOptimizerInput) -> None:
    params, kwargs = case.optimizer_error_input.params, case.optimizer_error_input.kwargs
    if params is None:
        params = [nn.Parameter(torch.randn(2, 3))]
    assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    # a set of parameters: since torch 2.15 a warning
    expected = pytest.warns if issubclass(case.error_type, Warning) else pytest.raises
    with expected(case.error_type, match=case.error_regex):
        kind(params, **kwargs)


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
@pytest.mark.parametrize(
    ("loss", "complains"),
    [
        (
            lambda model: model(torch.randn(4, 1, 4, 4)).sum() * float("nan"),
            pytest.warns(UserWarning, match="not finite"),
        ),
        (
            lambda model: (model(torch.randn(4, 1, 4, 4)).detach() * torch.ones((), requires_grad=True)).sum(),
            pytest.raises(RuntimeError, match="reach"),
        ),
    ],
    ids=["nan loss", "loss that reaches no parameter"],
)
def test_a_step_that_sees_bad_input_changes_nothing_and_can_be_made_again(
    loss: Callable[[nn.Module], Tensor], complains: Any, curvature: str
) -> None:
    model, other = small_net(), small_net()
    optimizer, untouched = (NGPlus(m, lr=1e-3, curvature=curvature) for m in (model, other))
    loss(model).backward()
    with copy.copy(complains):
        optimizer.step()
    assert_same(model, other)
    train(model, optimizer, range(2))
    train(other, untouched, range(2))
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ the step


@every_input
def test_goes_in_the_right_direction(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    before = loss_now(model)
    train(model, optimizer, [0] * 10)
    fell = loss_now(model) < before
    assert fell != optim_input.kwargs.get("maximize", False)


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-D", "1-D"])
@every_curvature
def test_a_tensor_lr_steps_like_its_number(optim_input: Setting, shape: tuple[int, ...]) -> None:
    model, other = (small_net(dtype=torch.float64) for _ in range(2))
    train(model, build(optim_input, model, lr=1 / 128, weight_decay=0.1), range(2))
    train(other, build(optim_input, other, lr=torch.full(shape, 1 / 128), weight_decay=0.1), range(2))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@every_input
def test_a_closure_runs_with_gradients_and_its_loss_comes_back(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    optimizer, plain = build(optim_input, model), build(optim_input, other)
    losses = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(loss_of(model, len(losses)))
        losses[-1].backward()
        return losses[-1]

    for k in range(3):
        with torch.no_grad():
            assert optimizer.step(closure) is losses[k]
    assert len(losses) == 3
    train(other, plain, range(3))
    assert_same(model, other)


@every_input
def test_step_leaves_gradients_alone(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    for k in range(3):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        grads = [p.grad for p in model.parameters()]
        before, versions = copies(grads), [grad._version for grad in grads]
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
        assert_same(copies(grads), before)
        assert [grad._version for grad in grads] == versions


@pytest.mark.parametrize("forward", [True, False], ids=["from a loss", "set by hand"])
@every_input
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_step_is_noop_for_zero_grads(optim_input: Setting, forward: bool) -> None:
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.0)
    before = copies(model.parameters())
    for _ in range(3):
        if forward:
            (0 * loss_of(model)).backward()
        else:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same(copies(model.parameters()), before)


@every_input
def test_step_is_noop_when_params_have_no_grad(optim_input: Setting) -> None:
    """Neither parameters nor state move, with momentum and weight decay waiting."""
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.1)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    before, state = copies(model.parameters()), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    assert_same(copies(model.parameters()), before)
    assert_same(optimizer.state_dict(), state)


@every_curvature
def test_parameters_without_gradient_stay_beside_those_that_have_one(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model, weight_decay=0.1)
    train(model, optimizer, range(2))
    for p in model[0].parameters():
        p.requires_grad_(False)
    before, head = copies(model[0].parameters()), copies(model[5].parameters())
    train(model, optimizer, range(2, 5))
    assert_same(copies(model[0].parameters()), before)
    assert all(not torch.equal(p, h) for p, h in zip(model[5].parameters(), head, strict=True))


@every_input
def test_maximize_is_minimising_the_negative(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    train(model, build(optim_input, model, maximize=True), range(4))
    train(other, build(optim_input, other, maximize=False), range(4), sign=-1.0)
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (0,), (3, 4), (2, 3, 2, 2)], ids=lambda shape: f"{len(shape)}-D {shape}"
)
@every_curvature
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_parameters_of_any_shape(optim_input: Setting, shape: tuple[int, ...]) -> None:
    """As bare parameters of a module, which no layer rule covers."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(shape), torch.randn(2)])
    optimizer = build(optim_input, model)

    def loss() -> Tensor:
        return sum((p - 5).square().sum() for p in model)

    before = [float((p.detach() - 5).square().sum()) for p in model]
    for _ in range(5):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    for p, start in zip(model, before, strict=True):
        assert p.isfinite().all()
        assert p.numel() == 0 or float((p.detach() - 5).square().sum()) < start


@every_input
def test_non_contiguous_parameters_step_like_contiguous_ones(optim_input: Setting) -> None:
    model, other = (small_net(dtype=torch.float64) for _ in range(2))  # roots enlarge the last bits of float32
    for module in other.modules():
        for name, p in module.named_parameters(recurse=False):
            spread = p.new_empty(*p.shape, 2).copy_(p.detach()[..., None].expand(*p.shape, 2))[..., 0]
            assert not spread.is_contiguous()
            setattr(module, name, nn.Parameter(spread))
    train(model, build(optim_input, model), range(3))
    train(other, build(optim_input, other), range(3))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@every_curvature
def test_named_parameters_step_like_plain_ones(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    plain = build(optim_input, model.parameters(), model=model)
    named = build(optim_input, other.named_parameters(), model=other)
    train(model, plain, range(3))
    train(other, named, range(3))
    assert_same(model, other)
    assert named.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in other.named_parameters()]

    # Either loads the other's state, and keeps its own way of naming.
    plain_state, named_state = copy.deepcopy(plain.state_dict()), copy.deepcopy(named.state_dict())
    plain.load_state_dict(named_state)
    named.load_state_dict(plain_state)
    assert "param_names" in named.param_groups[0]
    train(model, plain, range(3, 6))
    train(other, named, range(3, 6))
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ groups


@pytest.mark.parametrize("split", ["by layer", "weights and biases"])
@every_curvature
def test_param_groups_lr(optim_input: Setting, split: str) -> None:
    """The same first step for all, times each group's own learning rate."""
    model, other = small_net(), small_net()
    shares = {True: 1.0, False: 3.0}

    def first(name: str, p: nn.Parameter) -> bool:
        return name.startswith("0.") if split == "by layer" else p.dim() > 1

    of_group = {name: shares[first(name, p)] for name, p in model.named_parameters()}
    groups = [
        {"params": [p for name, p in model.named_parameters() if of_group[name] == share], "lr": 0.01 * share}
        for share in shares.values()
    ]
    start = dict(zip(of_group, copies(model.parameters()), strict=True))
    train(model, build(optim_input, groups, model=model), range(1))
    train(other, build(optim_input, other, model=other, lr=0.01), range(1))
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p - start[name], of_group[name] * (q - start[name]), rtol=1e-3, atol=1e-6)


@every_curvature
def test_a_group_with_lr_0_stays(optim_input: Setting) -> None:
    model = small_net()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1:].parameters()}]
    before = copies(model.parameters())
    train(model, build(optim_input, groups, model=model), range(3))
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [False] * 2 + [True] * 6


@every_curvature
def test_param_groups_weight_decay(optim_input: Setting) -> None:
    """The first step with decay is the one without, less lr * decay * W."""
    model, other = small_net(), small_net()
    kwargs = {"lr": 0.01, "model": model, "weight_decay": 0.0}
    groups = [{"params": model[:3].parameters(), "weight_decay": 0.5}, {"params": model[3:].parameters()}]
    decays = [0.5] * 4 + [0.0] * 4
    start = copies(model.parameters())
    train(model, build(optim_input, groups, **kwargs), range(1))
    train(other, build(optim_input, other.parameters(), **{**kwargs, "model": other}), range(1))
    for p, q, w, decay in zip(model.parameters(), other.parameters(), start, decays, strict=True):
        torch.testing.assert_close(p, q - 0.01 * decay * w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("schedulers", INFOS[0].scheduler_inputs, ids=["step", "plateau", "warm-up", "polynomial"])
@pytest.mark.parametrize("optim_input", BASIC[::3], ids=lambda optim_input: optim_input.desc)
def test_lr_schedulers(optim_input: Setting, schedulers: list[Any], tensor_lr: bool) -> None:
    model = small_net()
    groups = [{"params": model[:3].parameters()}, {"params": model[3:].parameters(), "lr": 5e-4}]
    optimizer = build(optim_input, groups, model=model, lr=torch.tensor(1e-3) if tensor_lr else 1e-3)
    running = [scheduler(optimizer) for scheduler in schedulers]
    before = loss_now(model)
    rates = []
    for _ in range(6):
        train(model, optimizer, [0])
        for scheduler in running:
            scheduler.step(*([loss_now(model)] if isinstance(scheduler, ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    assert loss_now(model) < before
    assert rates[0] != rates[-1]
    for first, second in rates:
        assert second == pytest.approx(first / 2)

    # The step takes what the scheduler has left in the group.
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if tensor_lr else 0.0
    stay = copies(model.parameters())
    train(model, optimizer, [0])
    assert_same(copies(model.parameters()), stay)


# ------------------------------------------------------------------------------------------------------ state


@every_input
def test_state_dict_is_deterministic(optim_input: Setting) -> None:
    model, other = small_net(), small_net()
    first, second = build(optim_input, model), build(optim_input, other)
    train(model, first, range(3))
    torch.manual_seed(123)  # torch's global generator plays no part
    train(other, second, range(3))
    assert_same(first.state_dict(), second.state_dict())
    assert_same(model, other)


@every_input
def test_state_holds_only_what_checkpoints_take(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return type(value) in (Tensor, bool, int, float, str)

    assert any(saved["state"].values())
    for key, value in saved["state"].items():
        assert isinstance(key, int)
        assert plain(value), key
    for group in saved["param_groups"]:
        for key, value in group.items():
            values = value if key == "betas" else (value,)
            assert all(x is None or plain(x) for x in values) or key in ("params", "param_names"), key


def test_a_fresh_optimizer_has_no_state() -> None:
    """torch.distributed.checkpoint takes any entry for a sign that the state is initialised."""
    assert [len(build(optim_input, small_net()).state) for optim_input in INPUTS] == [0] * len(INPUTS)


@every_curvature
def test_load_state_dict_with_param_groups(optim_input: Setting) -> None:
    """Groups of different options come back as they were, in the order of the groups."""
    changes = {"lr": 0.7, "weight_decay": 0.0}

    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": model[3:].parameters(), "lr": 5e-4, "weight_decay": 0.1}, {"params": model[:3].parameters()}]

    model, other = small_net(), small_net(seed=1)
    optimizer = build(optim_input, groups(model), model=model)
    train(model, optimizer, range(3))
    restored = build(optim_input, groups(other), model=other, **changes)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    for key in ("lr", "weight_decay", "step"):
        assert [g[key] for g in restored.param_groups] == [g[key] for g in optimizer.param_groups]
    train(model, optimizer, range(3, 6))
    train(other, restored, range(3, 6))
    assert_same(model, other)


AUTO = [
    optim_input._replace(kwargs={**optim_input.kwargs, "damping": "auto"}, desc=f"{optim_input.desc} auto")
    for optim_input in BASIC
    if optim_input.kind is NGPlus
]


@pytest.mark.parametrize("optim_input", BASIC + AUTO, ids=lambda optim_input: optim_input.desc)
def test_initialising_the_state_does_not_consume_the_first_refresh(optim_input: Setting) -> None:
    """torch.distributed.checkpoint steps with lr = 0 on zero gradients: nothing of that is in the curvature later."""
    model, other = small_net(), small_net()
    optimizer = build(optim_input, model, model=model, update_every=5)
    fresh = build(optim_input, other, model=other, update_every=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _init_optim_state(optimizer)
    assert all(optimizer.state[group["params"][0]] for group in optimizer.param_groups)
    assert_same(model, other)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3]
    assert [group["step"] for group in optimizer.param_groups] == [0]
    train(model, optimizer, range(1))
    train(other, fresh, range(1))
    for name in ("0.weight", "2.weight", "3.weight", "5.weight"):
        own, its = model.get_parameter(name), other.get_parameter(name)
        if optimizer.plan()[name].side == "none":
            torch.testing.assert_close(optimizer.state[own]["exp_avg_sq"], fresh.state[its]["exp_avg_sq"])
        else:
            torch.testing.assert_close(optimizer.curvature(own).matrix, fresh.curvature(its).matrix)


# ------------------------------------------------------------------------------------------------------ hooks, copies


@each_optimizer
def test_step_hooks(optim_input: Setting) -> None:
    model, order = small_net(), []
    optimizer = build(optim_input, model)

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        order.append(("before", opt.param_groups[0]["step"]))

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        assert opt is optimizer
        order.append(("after", opt.param_groups[0]["step"]))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    train(model, optimizer, range(2))
    assert order == [("before", 0), ("after", 1), ("before", 1), ("after", 2)]
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(2, 3))
    assert len(order) == 4


@each_optimizer
def test_a_pre_hook_may_replace_the_closure(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: ((args[0], lambda: 7.0), {}))
    loss_of(model).backward()
    assert optimizer.step() == 7.0


@each_optimizer
def test_state_dict_hooks(optim_input: Setting) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(2))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda opt, saved: {**saved, "note": "mine"})
    optimizer.register_load_state_dict_pre_hook(lambda opt, saved: calls.append(saved["note"]))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "mine", "loaded"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("steps", [0, 3])
@every_curvature
def test_a_copied_model_and_optimizer_go_on_alike(optim_input: Setting, steps: int, duplicate: Any) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(steps))
    other, twin = duplicate((model, optimizer))
    assert_same(twin.state_dict(), optimizer.state_dict())
    assert not {id(p) for p in model.parameters()} & {id(p) for group in twin.param_groups for p in group["params"]}
    train(model, optimizer, range(steps, steps + 3))
    train(other, twin, range(steps, steps + 3))
    assert_same(other, model)
    assert_same(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
@every_curvature
@pytest.mark.filterwarnings("ignore:No per-sample curvature")
def test_a_copied_optimizer_steps_its_own_parameters(optim_input: Setting, duplicate: Any) -> None:
    model = small_net()
    optimizer = build(optim_input, model)
    train(model, optimizer, range(3))
    before = copies(model.parameters())
    twin = duplicate(optimizer)
    own = twin.param_groups[0]["params"]
    for p in own:
        p.grad = torch.ones_like(p)
    twin.step()
    assert_same(copies(model.parameters()), before)
    assert all(not torch.equal(p, b) for p, b in zip(own, before, strict=True))


def test_optimizer_can_be_printed() -> None:
    for optim_input in INPUTS:
        text = repr(build(optim_input, small_net()))
        assert text.startswith(f"{optim_input.kind.__name__} (")
        name, usual = ("curvature", "sample") if optim_input.kind is NGPlus else ("betas", (0.9, 0.95))
        assert f"{name}: {optim_input.kwargs.get(name, usual)}" in text
