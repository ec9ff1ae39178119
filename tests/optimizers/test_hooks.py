"""Hooks on the model: copies of it have none that work, and they go with their optimizer."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

from helpers.training import (
    METHODS,
    assert_same,
    hooks_of,
    loss_of,
    small_net,
    through_file,
    train,
)
from ngplus import NGPlus

pytestmark = pytest.mark.usefixtures("one_thread")
T = 2  # update_every


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
@pytest.mark.parametrize("name", METHODS)
def test_deleting_the_optimizer_removes_its_hooks_and_frees_the_model(name: str, steps: int) -> None:
    model = small_net()
    optimizer = METHODS[name](model, lr=1e-3, update_every=T)
    assert (hooks_of(model) > 0) == (name in ("sample", "momentum"))  # the others have no need of any
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
