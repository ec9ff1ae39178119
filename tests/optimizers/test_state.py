"""The optimizer's state: it goes on bit for bit after any save and load, and keeps its precision."""

from __future__ import annotations

import copy
import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

from helpers.training import (
    Method,
    assert_same,
    both,
    described,
    every_method,
    small_net,
    through_file,
    train,
)
from ngplus import NGAdam, NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")
T = 2  # update_every: a save after 3 steps lies between two refreshes, one after 4 just before a refresh


# ------------------------------------------------------------------------------------------------------ round trips


def combinations() -> list[Any]:
    axes = {
        "curvature": ("sample", "momentum", "batch"),
        "solver": ("auto", "dense", "woodbury", "sketched"),
        "block_size": (None, 3),  # 3 leaves a last block of its own size in most matrices
        "graft": (None, "sgd", "adam"),
    }
    found = []
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        if options["solver"] in ("woodbury", "sketched") and options["curvature"] != "sample":
            continue  # NGPlus refuses these
        found.append(pytest.param(partial(NGPlus, **options), id="-".join(map(str, values))))
    return [*found, pytest.param(NGAdam, id="NGAdam")]


def assert_goes_on(method: Method, before: int, carry: Any, dtype: torch.dtype = torch.float32) -> None:
    """``before`` steps, the state carried over into a new model and optimizer, then both make the same steps."""
    given = method.keywords if isinstance(method, partial) else {}
    method = partial(method, **{"lr": 1e-3, "update_every": T, **given})
    model = small_net(dtype=dtype)
    optimizer = method(model)
    train(model, optimizer, range(before))

    other = small_net(seed=1, dtype=dtype)
    restored = method(other)
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(carry(optimizer.state_dict()))
    assert_same(restored.state_dict()["state"], optimizer.state_dict()["state"])

    later = range(before, before + T + 1)
    train(model, optimizer, later)
    train(other, restored, later)
    assert_same(other, model)
    assert_same(restored.state_dict()["state"], optimizer.state_dict()["state"])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", combinations())
def test_every_combination_goes_on_bit_for_bit(method: Method) -> None:
    assert_goes_on(method, before=T + 1, carry=through_file)


@every_method
def test_a_state_in_memory_goes_on_bit_for_bit(method: Method) -> None:
    assert_goes_on(method, before=T + 1, carry=copy.deepcopy)


grafted = partial(NGPlus, graft="sgd")


@pytest.mark.parametrize("before", [0, 1, T, T + 1])
@pytest.mark.parametrize(
    "method",
    [
        partial(grafted, curvature="sample"),
        partial(grafted, curvature="momentum", beta=0.5),
        partial(grafted, curvature="batch", gamma=0.3),
        partial(grafted, samples=2, seed=7),
        partial(grafted, samples=0.5, curvature="momentum"),
        partial(grafted, sketch={"size": 6, "kind": "gaussian"}, seed=3),
        partial(grafted, solver="sketched", curvature="sample", sketch=5, seed=3),
        partial(grafted, damping=0.0, relative_damping=0.1, side="right"),
        partial(grafted, nesterov=True, weight_decay=0.1),
        partial(grafted, lr=torch.tensor(1e-3), maximize=True, loss_reduction="sum"),
        NGAdam,
        partial(NGAdam, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1),
        partial(NGAdam, lr=torch.tensor(1e-3), maximize=True),
    ],
    ids=described,
)
def test_other_options_go_on_bit_for_bit_from_any_step(method: Method, before: int) -> None:
    assert_goes_on(method, before, through_file)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "method",
    [
        partial(NGPlus, curvature="sample"),
        partial(grafted, curvature="momentum"),
        partial(grafted, curvature="batch"),
        partial(grafted, solver="woodbury", curvature="sample", block_size=3),
        partial(grafted, solver="sketched", curvature="sample"),
        partial(NGPlus, graft="adam"),
        NGAdam,
    ],
    ids=described,
)
def test_other_precisions_go_on_bit_for_bit(method: Method, dtype: torch.dtype) -> None:
    assert_goes_on(method, T + 1, through_file, dtype)


class BesideItsModule(nn.Module):
    """The weight is used by its layer and once more past it, which capture cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x)[:, :3] + 2 * F.linear(x.flip(0), self.layer.weight)[:, :3]


@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_a_fall_back_to_mini_batch_curvature_survives_the_round_trip(curvature: str) -> None:
    torch.manual_seed(0)
    model = BesideItsModule()
    optimizer = NGPlus(model, lr=1e-3, update_every=T, curvature=curvature)
    with pytest.warns(UserWarning, match="No per-sample curvature"):
        train(model, optimizer, range(T + 1))
    other = copy.deepcopy(model)
    restored = NGPlus(other, lr=1e-3, update_every=T, curvature=curvature)
    restored.load_state_dict(through_file(optimizer.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to name the parameter again is fine
        train(model, optimizer, range(T + 1, 3 * T))
        train(other, restored, range(T + 1, 3 * T))
    assert_same(other, model)


# ------------------------------------------------------------------------------------------------------ loading


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NGPlus, {"lr": 1e-3, "damping": 0.5, "update_every": T, "curvature": "momentum", "seed": 5}),
        (NGAdam, {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.0, "update_every": T}),
    ],
    ids=["NGPlus", "NGAdam"],
)
def test_loading_into_a_fresh_optimizer_takes_options_and_step_from_the_state(
    kind: Method, options: dict[str, Any]
) -> None:
    model = small_net()
    optimizer = kind(model, **options)
    train(model, optimizer, range(3))
    restored = kind(small_net(1), lr=0.7)
    restored.load_state_dict(optimizer.state_dict())
    wanted = {**options, "step": 3}
    assert {key: restored.param_groups[0][key] for key in wanted} == wanted


@pytest.mark.parametrize("change", [{"side": "left"}, {"side": "left", "block_size": 3}], ids=str)
@pytest.mark.parametrize("when", ["before loading", "after loading", "between two steps", "after zero_grad"])
def test_a_changed_option_is_a_refresh_from_samples(change: dict[str, Any], when: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = NGPlus(model)
    for k in range(9):
        if k == 8 and "loading" in when:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["param_groups"][0].update(change if when == "before loading" else {})
            optimizer = NGPlus(model)
            optimizer.load_state_dict(saved)
        if k == 8 and when in ("after loading", "between two steps"):
            optimizer.param_groups[0].update(change)
        optimizer.zero_grad()
        if k == 8 and when == "after zero_grad":
            optimizer.param_groups[0].update(change)
        fresh_model = copy.deepcopy(model)
        fresh, x = NGPlus(fresh_model, **change), torch.randn(8, 6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for own, its in ((model, optimizer), (fresh_model, fresh)):
                own(x).square().mean().backward()
                its.step()
    (row,) = optimizer.plan()
    assert (row.source, row.side) == ("sample", "left")
    assert optimizer.state[model.weight]["inverse"].shape[-1] == change.get("block_size", 5)
    torch.testing.assert_close(optimizer.curvature("weight").matrix, fresh.curvature("weight").matrix)


@every_method
def test_loading_adds_nothing_to_the_groups(method: Method) -> None:
    model = small_net()
    optimizer = method(model, lr=1e-3)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before))
    assert_same(optimizer.state_dict(), before)


@every_method
def test_loading_does_not_change_the_loaded_state_later(method: Method) -> None:
    """But for the momentum of NGPlus, which torch's load_state_dict does not copy."""
    model = small_net()
    optimizer = method(model, lr=1e-3)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    restored = method(model, lr=1e-3)
    restored.load_state_dict(saved)
    train(model, restored, range(2, 5))
    for entries in (*saved["state"].values(), *kept["state"].values()):
        entries.pop("momentum_buffer", None)
    assert_same(saved, kept)
    assert any(saved["state"].values())


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(NGPlus, missing) for missing in ("beta", "gamma", "seed", "loss_reduction", "maximize")]
    + [(NGAdam, missing) for missing in ("eps", "weight_decay", "maximize")],
)
def test_a_state_from_before_an_option_existed_takes_its_default(kind: Method, missing: str) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "update_every": T}
    model = small_net()
    optimizer = kind(model, **options)
    train(model, optimizer, range(T + 1))
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        del group[missing]
    other = copy.deepcopy(model)
    restored = kind(other, **options)
    restored.load_state_dict(old)
    assert restored.param_groups[0][missing] == restored.defaults[missing]
    train(model, optimizer, range(T + 1, 2 * T + 1))
    train(other, restored, range(T + 1, 2 * T + 1))
    assert_same(other, model)


@both
def test_a_state_for_other_groups_is_refused_and_changes_nothing(kind: Method) -> None:
    model = small_net()
    optimizer = kind(model, lr=1e-3)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    two_groups = kind([{"params": model[0].parameters()}, {"params": model[2].parameters()}], model=model)
    with pytest.raises(ValueError, match="parameters in its groups"):
        optimizer.load_state_dict(two_groups.state_dict())
    with pytest.raises(ValueError, match="parameters in its groups"):
        optimizer.load_state_dict(kind(model[0]).state_dict())
    assert_same(optimizer.state_dict(), before)
    train(model, optimizer, range(2, 4))


def test_a_load_hook_has_the_last_word_on_the_curvature() -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3, curvature="momentum")
    train(model, optimizer, range(2))
    restored = NGPlus(model, lr=1e-3, curvature="momentum")

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: 2 * v if k == "curvature" else v for k, v in s.items()} for i, s in state_dict["state"].items()}
        return {**state_dict, "state": state}

    restored.register_load_state_dict_pre_hook(double)
    restored.load_state_dict(optimizer.state_dict())
    assert torch.equal(restored.curvature("0.weight").matrix, 2 * optimizer.curvature("0.weight").matrix)


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
@every_method
def test_distributed_checkpoints_go_on_bit_for_bit(method: Method, flatten: bool) -> None:
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = small_net()
    optimizer = method(model, lr=1e-3, update_every=T)
    train(model, optimizer, range(T + 1))
    saved = through_file(get_optimizer_state_dict(model, optimizer, options=how))

    other = copy.deepcopy(model)
    restored = method(other, lr=1e-3, update_every=T)
    set_optimizer_state_dict(other, restored, saved, options=how)
    train(model, optimizer, range(T + 1, 3 * T))
    train(other, restored, range(T + 1, 3 * T))
    assert_same(other, model)
