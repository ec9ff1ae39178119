"""The optimizer's state: it goes on bit for bit after any save and load, keeps its precision, and owns its hooks."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Iterable
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

from ngplus import NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")
T = 2  # update_every: a save after 3 steps lies between two refreshes, one after 4 just before a refresh


# ------------------------------------------------------------------------------------------------------ helpers


def small_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices of 4 x 10, 10 x 17 (low rank for batches of 4), 10 x 2 (right side) and 3 x 11."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)]
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, k: int = 0) -> Tensor:
    """The loss on the k-th batch."""
    generator = torch.Generator().manual_seed(k)
    x, y = torch.randn(4, 1, 4, 4, generator=generator), torch.randint(3, (4,), generator=generator)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], sign: float = 1.0) -> None:
    for k in steps:
        optimizer.zero_grad()
        (sign * loss_of(model, k)).backward()
        optimizer.step()


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Exactly equal: modules by their parameters, nested dicts and lists by their leaves, tensors with their dtype."""
    if isinstance(a, nn.Module):
        a, b = dict(a.named_parameters()), dict(b.named_parameters())
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), path
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype, f"{path}: {a.dtype} and {b.dtype}"
        assert torch.equal(a, b), f"{path} differs by {(a - b).abs().max()}"
    else:
        assert a == b, path


def through_file(content: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def described(options: dict[str, Any]) -> str:
    """A test's id."""
    return "-".join(f"{key}={value}" for key, value in options.items())


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


# ------------------------------------------------------------------------------------------------------ round trips


def combinations() -> list[Any]:
    axes = {
        "curvature": ("sample", "momentum", "batch"),
        "scaling": ("inverse", "adaptive"),
        "solver": ("auto", "dense", "woodbury", "sketched"),
        "block_size": (None, 3),  # 3 leaves a last block of its own size in most matrices
        "graft": (None, "sgd", "adam"),
    }
    found = []
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        low_rank = options["solver"] in ("woodbury", "sketched")
        if low_rank and (options["curvature"], options["scaling"]) != ("sample", "inverse"):
            continue  # NGPlus refuses these
        found.append(pytest.param(options, id="-".join(map(str, values))))
    return found


def assert_goes_on(options: dict[str, Any], before: int, carry: Any, dtype: torch.dtype = torch.float32) -> None:
    """``before`` steps, the state carried over into a new model and optimizer, then both make the same steps."""
    options = {"lr": 1e-3, "update_every": T, "scaling": "inverse", "graft": "sgd", **options}
    model = small_net(dtype=dtype)
    optimizer = NGPlus(model, **options)
    train(model, optimizer, range(before))

    other = small_net(seed=1, dtype=dtype)
    restored = NGPlus(other, **options)
    other.load_state_dict(model.state_dict())
    restored.load_state_dict(carry(optimizer.state_dict()))
    assert_same(restored.state_dict()["state"], optimizer.state_dict()["state"])

    later = range(before, before + T + 1)
    train(model, optimizer, later)
    train(other, restored, later)
    assert_same(other, model)
    assert_same(restored.state_dict()["state"], optimizer.state_dict()["state"])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", combinations())
def test_every_combination_goes_on_bit_for_bit(options: dict[str, Any]) -> None:
    assert_goes_on(options, before=T + 1, carry=through_file)


@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
@pytest.mark.parametrize("curvature", ["sample", "momentum", "batch"])
def test_a_state_in_memory_goes_on_bit_for_bit(curvature: str, scaling: str) -> None:
    assert_goes_on({"curvature": curvature, "scaling": scaling}, before=T + 1, carry=copy.deepcopy)


@pytest.mark.parametrize("before", [0, 1, T, T + 1])
@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "sample"},
        {"curvature": "momentum", "scaling": "adaptive"},
        {"curvature": "batch", "gamma": 0.3},
        {"samples": 2, "seed": 7},
        {"samples": 0.5, "scaling": "adaptive"},
        {"sketch": {"size": 6, "kind": "gaussian"}, "seed": 3},
        {"solver": "sketched", "sketch": 5, "seed": 3},
        {"damping": 0.3, "damping_mode": "relative", "side": "right"},
        {"nesterov": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"nesterov": True, "scaling": "adaptive", "weight_decay": 0.1},
        {"lr": torch.tensor(1e-3), "maximize": True, "loss_reduction": "sum"},
    ],
    ids=described,
)
def test_other_options_go_on_bit_for_bit_from_any_step(options: dict[str, Any], before: int) -> None:
    assert_goes_on(options, before, through_file)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "sample", "graft": None},
        {"curvature": "momentum"},
        {"curvature": "batch"},
        {"solver": "woodbury", "block_size": 3},
        {"solver": "sketched"},
        {"scaling": "adaptive"},
        {"graft": "adam"},
    ],
    ids=described,
)
def test_other_precisions_go_on_bit_for_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert_goes_on(options, T + 1, through_file, dtype)


class BesideItsModule(nn.Module):
    """The weight is used by its layer and once more past it, which capture cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.layer(x)[:, :3] + 2 * F.linear(x.flip(0), self.layer.weight)[:, :3]


@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
def test_a_fall_back_to_mini_batch_curvature_survives_the_round_trip(scaling: str) -> None:
    torch.manual_seed(0)
    model = BesideItsModule()
    optimizer = NGPlus(model, lr=1e-3, update_every=T, scaling=scaling)
    with pytest.warns(UserWarning, match="No per-sample curvature"):
        train(model, optimizer, range(T + 1))
    other = copy.deepcopy(model)
    restored = NGPlus(other, lr=1e-3, update_every=T, scaling=scaling)
    restored.load_state_dict(through_file(optimizer.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to name the parameter again is fine
        train(model, optimizer, range(T + 1, 3 * T))
        train(other, restored, range(T + 1, 3 * T))
    assert_same(other, model)


# ------------------------------------------------------------------------------------------------------ loading


def test_loading_into_a_fresh_optimizer_takes_options_and_step_from_the_state() -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3, damping=0.5, update_every=T, scaling="adaptive", seed=5)
    train(model, optimizer, range(3))
    restored = NGPlus(small_net(1), lr=0.7)
    restored.load_state_dict(optimizer.state_dict())
    wanted = {"lr": 1e-3, "damping": 0.5, "update_every": T, "scaling": "adaptive", "seed": 5, "step": 3}
    assert {key: restored.param_groups[0][key] for key in wanted} == wanted


@pytest.mark.parametrize("change", [{"side": "smaller"}, {"side": "smaller", "block_size": 3}], ids=str)
@pytest.mark.parametrize("when", ["before loading", "after loading", "between two steps", "after zero_grad"])
def test_a_changed_option_is_a_refresh_from_samples(change: dict[str, Any], when: str) -> None:
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
        model(torch.randn(8, 6)).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    (row,) = optimizer.plan()
    assert (row.source, row.side) == ("sample", "left")
    assert optimizer.state[model.weight]["adam_step"] == 1
    assert optimizer.state[model.weight]["basis"].shape[-1] == change.get("block_size", 5)


def test_loading_adds_nothing_to_the_groups() -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copy.deepcopy(before))
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("curvature", ["sample", "momentum", "batch"])
def test_loading_does_not_change_the_loaded_state_later(curvature: str) -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3, curvature=curvature, scaling="adaptive")
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    restored = NGPlus(model, lr=1e-3)
    restored.load_state_dict(copy.deepcopy(saved))
    train(model, restored, range(2, 5))
    assert_same(saved, kept)


@pytest.mark.parametrize(
    "missing", ["beta2", "eps", "seed", "loss_reduction", "damping_mode", "decoupled_weight_decay"]
)
def test_a_state_from_before_an_option_existed_takes_its_default(missing: str) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "update_every": T, "graft": "adam"}
    model = small_net()
    optimizer = NGPlus(model, **options)
    train(model, optimizer, range(T + 1))
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        del group[missing]
    other = copy.deepcopy(model)
    restored = NGPlus(other, **options)
    restored.load_state_dict(old)
    assert restored.param_groups[0][missing] == restored.defaults[missing]
    train(model, optimizer, range(T + 1, 2 * T + 1))
    train(other, restored, range(T + 1, 2 * T + 1))
    assert_same(other, model)


def test_a_state_for_other_groups_is_refused_and_changes_nothing() -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3)
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    two_groups = NGPlus([{"params": model[0].parameters()}, {"params": model[2].parameters()}], model=model)
    with pytest.raises(ValueError, match="parameters in its groups"):
        optimizer.load_state_dict(two_groups.state_dict())
    with pytest.raises(ValueError, match="parameters in its groups"):
        optimizer.load_state_dict(NGPlus(model[0]).state_dict())
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
@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
@pytest.mark.parametrize("curvature", ["sample", "momentum", "batch"])
def test_distributed_checkpoints_go_on_bit_for_bit(curvature: str, scaling: str, flatten: bool) -> None:
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    options: dict[str, Any] = {"lr": 1e-3, "update_every": T, "curvature": curvature, "scaling": scaling}
    model = small_net()
    optimizer = NGPlus(model, **options)
    train(model, optimizer, range(T + 1))
    saved = through_file(get_optimizer_state_dict(model, optimizer, options=how))

    other = copy.deepcopy(model)
    restored = NGPlus(other, **options)
    set_optimizer_state_dict(other, restored, saved, options=how)
    train(model, optimizer, range(T + 1, 3 * T))
    train(other, restored, range(T + 1, 3 * T))
    assert_same(other, model)


# ------------------------------------------------------------------------------------------------------ new groups


@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
@pytest.mark.parametrize("curvature", ["sample", "momentum", "batch"])
def test_add_param_group_after_steps(curvature: str, scaling: str) -> None:
    model = small_net()
    head = list(model[5].parameters())
    optimizer = NGPlus(model[:5].parameters(), model=model, lr=1e-3, curvature=curvature, scaling=scaling)
    start = [p.clone() for p in head]
    train(model, optimizer, range(3))
    assert_same(list(map(torch.Tensor.detach, head)), [s.detach() for s in start])
    state = copy.deepcopy(optimizer.state_dict()["state"])

    optimizer.add_param_group({"params": head, "lr": 2e-3})
    kept = optimizer.state_dict()["state"]
    assert_same({i: kept[i] for i in state}, state)
    assert [group["step"] for group in optimizer.param_groups] == [3, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the new parameters are captured from their first step on
        train(model, optimizer, range(3, 6))
    assert all(not torch.equal(p, s) for p, s in zip(head, start, strict=True))
    assert optimizer.curvature("5.weight").matrix.shape == (3, 3)
    assert [group["step"] for group in optimizer.param_groups] == [6, 3]


@pytest.mark.parametrize("graft", [None, "adam"])
@pytest.mark.parametrize("scaling", ["inverse", "adaptive"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bias_may_join_its_weight_later(side: str, scaling: str, graft: str | None) -> None:
    model = small_net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = NGPlus(weights, model=model, lr=1e-3, side=side, scaling=scaling, graft=graft)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": biases})
    start = [p.detach().clone() for p in biases]
    train(model, optimizer, range(2, 4))
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(not torch.equal(p, s) for p, s in zip(biases, start, strict=True))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "learning rate"),
        ({"update_every": 0}, "update_every"),
        ({"curvature": "none"}, "curvature"),
        ({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}, "complex"),
        ({"params": [nn.Parameter(torch.zeros(2))] * 2}, "twice"),
    ],
    ids=["lr", "update_every", "curvature", "complex", "twice"],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_bad_group_is_refused_and_the_optimizer_goes_on(group: dict[str, Any], message: str) -> None:
    model, other = small_net(), small_net()
    optimizer, untouched = (NGPlus(m.parameters(), model=m, lr=1e-3, update_every=T) for m in (model, other))
    train(model, optimizer, range(T + 1))
    train(other, untouched, range(T + 1))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], **group})
    assert_same(optimizer.state_dict(), untouched.state_dict())
    train(model, optimizer, range(T + 1, 3 * T))
    train(other, untouched, range(T + 1, 3 * T))
    assert_same(model, other)


# ------------------------------------------------------------------------------------------------------ hooks


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: through_file(model, False)],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("curvature", ["sample", "momentum"])
def test_a_copied_model_has_hooks_that_do_nothing(curvature: str, duplicate: Any) -> None:
    """Batches that go through the copy between the optimizer's own leave no trace in its curvature."""
    model, alone = small_net(), small_net()
    optimizer = NGPlus(model, lr=1e-3, curvature=curvature, update_every=1)
    reference = NGPlus(alone, lr=1e-3, curvature=curvature, update_every=1)
    twin = duplicate(model)
    assert_same(twin, model)
    for k in range(3):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        loss_of(twin, k + 100).backward()  # with capture armed for this step
        optimizer.step()
    train(alone, reference, range(3))
    assert_same(model, alone)
    assert_same(optimizer.state_dict(), reference.state_dict())
    del model, optimizer
    loss_of(twin).backward()


def test_a_copied_model_can_have_an_optimizer_of_its_own() -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3, update_every=1)
    twin = copy.deepcopy(model)
    second = NGPlus(twin, lr=1e-3, update_every=1)
    for k in range(3):
        train(model, optimizer, [k])
        train(twin, second, [k])
    assert_same(twin, model)


@pytest.mark.parametrize("steps", [0, 3], ids=lambda n: f"after {n} steps")
@pytest.mark.parametrize("curvature", ["sample", "momentum", "batch"])
def test_deleting_the_optimizer_removes_its_hooks_and_frees_the_model(curvature: str, steps: int) -> None:
    model = small_net()
    optimizer = NGPlus(model, lr=1e-3, curvature=curvature, update_every=T)
    assert (hooks_of(model) > 0) == (curvature != "batch")
    train(model, optimizer, range(steps))
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    assert hooks_of(model) == 0
    loss_of(model).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_deleting_one_of_two_optimizers_leaves_the_other_watching() -> None:
    model, alone = small_net(), small_net()
    first, second = NGPlus(model, lr=1e-3, update_every=1), NGPlus(model, lr=1e-3, update_every=1)
    reference = NGPlus(alone, lr=1e-3, update_every=1)
    del first
    gc.collect()
    train(model, second, range(2))
    train(alone, reference, range(2))
    assert_same(model, alone)


def test_add_param_group_leaves_no_hooks_behind() -> None:
    model = small_net()
    whole = NGPlus(model)
    wanted = hooks_of(model)
    del whole
    gc.collect()
    parts = NGPlus(model[:2].parameters(), model=model)
    parts.add_param_group({"params": model[2:].parameters()})
    assert hooks_of(model) == wanted
