"""Accelerate with FSDP2: it shards the model in ``prepare`` and replaces the parameters in the optimizer's groups.

Accelerate takes FSDP2 for accelerators alone, so these tests tell it that the CPU is one.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ngplus
from distributed import cases
from distributed.test_checkpoint import SAVED_AT
from helpers.ranks import Pool
from helpers.training import parameters

accelerate = pytest.importorskip("accelerate")


@contextmanager
def place_of(rank: int, world: int) -> Iterator[None]:
    """What torchrun tells a process; Accelerate's settings, which are those of the process, are reset at the end."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, str(value))
        yield
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def use_fsdp2(plugin: Any) -> None:
    """What Accelerate does with this plugin where there are accelerators."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = accelerate.DistributedType.FSDP


def trained(rank: int, world: int, name: str, zero_first: bool, kind: str, folder: str) -> list[list[Tensor]]:
    """The parameters of a training, and of one that goes on from its checkpoint (by what transformers calls)."""
    with place_of(rank, world):
        accelerator = accelerate.Accelerator(cpu=True)
        options = {"fsdp_version": 2, "auto_wrap_policy": "no_wrap", "state_dict_type": kind}
        plugin = accelerate.FullyShardedDataParallelPlugin(**options)
        use_fsdp2(plugin)

        def prepared() -> Any:
            net = cases.convolutions(cases.precision(name))
            return accelerator.prepare(net, cases.optimizer_of(net, name))

        def train(net: Any, optimizer: Any, steps: range) -> None:
            for step in steps:
                x, y = cases.batch(step, cases.precision(name))
                mine = cases.share(len(x), rank, world, unequal=False)
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(cases.squared(net(x[mine]), y[mine]).mean())
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*(curvature|changed nothing)")
            net, optimizer = prepared()
            train(net, optimizer, range(SAVED_AT))
        sources = {row.source for row in optimizer.optimizer.plan()}
        assert sources == ({"batch", "none"} if name in cases.NGADAM else {"sample"})
        accelerate.utils.save_fsdp_model(plugin, accelerator, net, folder)
        accelerate.utils.save_fsdp_optimizer(plugin, accelerator, optimizer, net, folder)
        train(net, optimizer, range(SAVED_AT, cases.STEPS))
        again, other = prepared()
        accelerate.utils.load_fsdp_model(plugin, accelerator, again, folder)
        accelerate.utils.load_fsdp_optimizer(plugin, accelerator, other, again, folder)
        train(again, other, range(SAVED_AT, cases.STEPS))
        return [parameters(net), parameters(again)]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("name", ["ngadam", "sample"])
def test_two_ranks_equal_one_process(
    ranks: Callable[[int], Pool], tmp_path: Path, name: str, zero_first: bool, kind: str
) -> None:
    """Where no call of ``zero_grad`` comes before the first forward pass, the first refresh of NGPlus sees no samples,
    and the next step has one."""
    found = ranks(2).run(trained, name, zero_first, kind, str(tmp_path))
    for went_on, resumed in found:
        torch.testing.assert_close(resumed, went_on, rtol=0, atol=0)
    cases.assert_same_everywhere([went_on for went_on, _ in found])
    if name in cases.NGADAM or zero_first:
        cases.assert_close(found[0][0], cases.alone(name))


def test_parameters_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the groups have the same parameters."""
    net = cases.convolutions()
    optimizer = ngplus.NGAdam(net)
    monkeypatch.setattr(optimizer, "_bind_parameters", lambda: pytest.fail("nothing was replaced"))
    for step in range(2):
        optimizer.zero_grad()
        cases.squared(net(cases.batch(step)[0]), cases.batch(step)[1]).mean().backward()
        optimizer.step()
    optimizer.plan()
    monkeypatch.undo()
    copied = copy.deepcopy(net)
    optimizer.param_groups[0]["params"] = list(copied.parameters())
    before = parameters(copied)
    cases.squared(copied(cases.batch(3)[0]), cases.batch(3)[1]).mean().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, copied.parameters()))
