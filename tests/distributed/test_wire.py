"""Bytes on the wire: what plan() says is what the collectives carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ngplus
from distributed.cases import OPTIONS, batch, convolutions, sharded, squared
from helpers.ranks import Pool
from helpers.steps import PAPER

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_to_all_single")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Bytes of float32 numbers by collective. Counts of samples, and what ranks agree on, are of float64: a few numbers
    a matrix."""
    found: Counter[str] = Counter()
    plain = {name: getattr(dist, name) for name in COLLECTIVES}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor: Tensor = args[1] if name == "all_to_all_single" else args[0]
            if tensor.dtype == torch.float32:
                found[name] += tensor.numel() * tensor.element_size()
            return plain[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counted(name))
    yield found
    for name in COLLECTIVES:
        setattr(dist, name, plain[name])


def two_steps(rank: int, world: int, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """A step with a refresh and one without, and the plan."""
    plain = convolutions()
    net = sharded(plain) if kind == "fsdp2" else DistributedDataParallel(plain)
    distribution = "memory" if kind == "ddp memory" else "communication"
    optimizer = ngplus.NGPlus(net, distribution=distribution, **{**PAPER, "damping": 0.3, **options})
    steps = []
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        squared(net(x), y).mean().backward()
        with counting() as found:
            optimizer.step()
        steps.append(dict(found))
    plan = optimizer.plan()
    text = str(optimizer.plan(verbose=True))
    assert all(word in text for word in ("inverse sent", "each step", "owner"))
    said = {"average": plan.wire_bytes, "inverse": plan.inverse_bytes, "step": plan.step_bytes}
    return {"refresh": steps[0], "step": steps[1], "plan": said}


def triangles() -> int:
    """4 bytes for each of d (d + 1) / 2 numbers a layer, d the smaller side."""
    sides = [(1, 4, 10), (2, 2, 19), (1, 9, 17), (1, 9, 2), (1, 3, 10)]  # groups, m, n
    return 4 * sum(g * min(m, n) * (min(m, n) + 1) // 2 for g, m, n in sides)


KINDS = {"dense": OPTIONS["sample"], "average": OPTIONS["momentum"]}


@pytest.mark.parametrize("name", KINDS)
def test_least_communication(ranks: Callable[[int], Pool], name: str) -> None:
    for found in ranks(2).run(two_steps, "ddp", KINDS[name]):
        refresh, plan = found["refresh"], found["plan"]
        assert plan["average"] == triangles() == refresh.get("reduce", 0) + refresh.get("all_reduce", 0)
        assert plan["inverse"] == refresh["broadcast"] > 0
        assert plan["step"] == 0
        assert found["step"] == {}


@pytest.mark.parametrize("name", KINDS)
def test_least_memory(ranks: Callable[[int], Pool], name: str) -> None:
    for found in ranks(2).run(two_steps, "ddp memory", KINDS[name]):
        plan = found["plan"]
        assert plan["average"] == triangles() == found["refresh"]["reduce"]
        assert plan["inverse"] == 0
        assert found["step"] == {"broadcast": plan["step"]}
        assert plan["step"] == 4 * sum(p.numel() for p in convolutions().parameters())


@pytest.mark.parametrize("name", KINDS)
def test_sharded_parameters(ranks: Callable[[int], Pool], name: str) -> None:
    """What all ranks send together: each gradient and each direction once."""
    found = ranks(2).run(two_steps, "fsdp2", KINDS[name])
    for each in found:
        assert each["plan"]["average"] == triangles() == each["refresh"]["reduce"]
        assert each["step"].keys() == {"all_to_all_single"}
    assert sum(each["step"]["all_to_all_single"] for each in found) == found[0]["plan"]["step"]
    assert found[0]["plan"]["step"] == 2 * 4 * sum(p.numel() for p in convolutions().parameters())


@pytest.mark.parametrize("kind", ["ddp", "ddp memory", "fsdp2"])
def test_mini_batch_curvature_sends_nothing_of_its_own(ranks: Callable[[int], Pool], kind: str) -> None:
    for found in ranks(2).run(two_steps, kind, OPTIONS["batch"]):
        assert found["plan"]["average"] == found["plan"]["inverse"] == 0
        assert found["refresh"] == found["step"]  # a refresh sends what every step does
        assert (found["step"] == {}) is (kind == "ddp")


def test_less_than_kfac() -> None:
    """d (d + 1) / 2 with d the smaller side, against m (m + 1) / 2 + n (n + 1) / 2."""
    plan = ngplus.NGPlus(convolutions(), side="smaller").plan()
    kfac = sum(r.groups * (m * (m + 1) + n * (n + 1)) // 2 for r in plan for m, n in [r.shape])
    assert plan.wire_bytes < 4 * kfac / 3


def test_loads_of_ranks_that_are_not_at_hand() -> None:
    plan = ngplus.NGPlus(convolutions()).plan(batch_size=4)
    one, many = plan.on_ranks(1), plan.on_ranks(8)
    assert (
        (one.state_bytes, one.step_flops) == (plan.state_bytes, plan.step_flops) == (many.state_bytes, many.step_flops)
    )
    assert one.refresh_flops == plan.refresh_flops > many.refresh_flops
    assert one.step_bytes == many.step_bytes == 0
    memory, sharded_load = plan.on_ranks(2, "memory"), plan.on_ranks(2, "sharded")
    assert plan.state_bytes / 2 <= memory.state_bytes < plan.state_bytes
    assert memory.step_bytes == sum(row.parameter_bytes for row in plan)
    assert sharded_load.parameter_bytes == memory.parameter_bytes // 2
    assert sharded_load.step_bytes >= memory.step_bytes
    with pytest.raises(ValueError, match="Invalid distribution"):
        plan.on_ranks(2, "nowhere")


def solvers(rank: int, world: int) -> list[list[str]]:
    """What the plan says, before and after a step."""
    out = []
    for solver in ("auto", "woodbury", "sketched"):
        net = DistributedDataParallel(nn.Linear(100, 50))
        optimizer = ngplus.NGPlus(net, solver=solver, curvature="sample")
        before = optimizer.plan(batch_size=4)[0].solver
        net(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        assert "factor" not in optimizer.state[net.module.weight]
        out.append([before, optimizer.plan()[0].solver])
    return out


def test_ranks_add_up_dense_matrices_and_the_plan_says_so(ranks: Callable[[int], Pool]) -> None:
    assert ranks(2).run(solvers) == [[["dense", "dense"]] * 3] * 2
