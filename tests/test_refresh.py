"""When a refresh is due."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ngplus


def data(steps: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(steps)
    ]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def train(net: nn.Module, optimizer: ngplus.NGPlus, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


def test_a_side_that_is_curved_no_more_is_due_no_more() -> None:
    net, batches = normed(), data(9)
    optimizer = ngplus.NGPlus(net, side="both", update_every=2)
    train(net, optimizer, batches[:3])
    assert "refreshed" in optimizer.state[net[1].weight]
    optimizer.param_groups[0]["side"] = "auto"
    train(net, optimizer, batches[3:6])
    held = set(optimizer.state[net[1].weight])
    assert not held & {"basis", "spectrum", "curvature", "refreshed"}
    optimizer.param_groups[0]["side"] = "both"
    train(net, optimizer, batches[6:])
    assert {"basis", "refreshed"} <= set(optimizer.state[net[1].weight])


def test_a_layer_that_keeps_u_may_be_initialised_by_a_step_of_zeros() -> None:
    net = nn.Linear(100, 50)
    optimizer = ngplus.NGPlus(net, lr=0.0, scaling="inverse", solver="auto")
    (0 * net(torch.randn(4, 100)).sum()).backward()
    optimizer.step()
    assert {"inverse", "factor", "core"} <= set(optimizer.state[net.weight])
    assert optimizer.plan()["weight"].solver == "woodbury"
    assert not optimizer._due(optimizer._matrices[0]) or optimizer.param_groups[0]["step"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    net(torch.randn(4, 100)).square().mean().backward()
    optimizer.step()
    assert optimizer.health().good
