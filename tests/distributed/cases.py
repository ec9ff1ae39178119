"""The model, the batches and the options that all the ways to train are held equal on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ngplus
from helpers.steps import PAPER
from ngplus.preconditioners import inverse_root

STEPS, BATCH = 20, 12
LR = 0.02

OPTIONS: dict[str, dict[str, Any]] = {
    "sample": {**PAPER, "damping": 0.5, "update_every": 3},
    "momentum": {**PAPER, "damping": 0.5, "update_every": 3, "curvature": "momentum"},
    "batch": {**PAPER, "damping": 0.5, "update_every": 3, "curvature": "batch"},
    "blocks": {**PAPER, "damping": 0.5, "update_every": 3, "block_size": 3},
    "relative": {**PAPER, "relative_damping": 0.1, "update_every": 3, "graft": "sgd", "weight_decay": 1e-3},
    "defaults": {"update_every": 3},
}
NGADAM = ("ngadam", "ngadam blocks")


def precision(name: str) -> torch.dtype:
    """Of NGAdam float64: with little damping, its roots multiply what the order of the samples does to rounding."""
    return torch.float64 if name in NGADAM else torch.float32


def optimizer_of(params: Any, name: str, **options: Any) -> ngplus.NGPlus | ngplus.NGAdam:
    """NGPlus with the options of that name, or NGAdam; of "ngadam blocks", sides of more than 4 fall into blocks."""
    if name not in NGADAM:
        return ngplus.NGPlus(params, lr=LR, **{**OPTIONS[name], **options})
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in (("WHOLE", 4), ("BLOCK", 3), ("KERNEL_BLOCK", 9)) if name == "ngadam blocks" else ():
            patch.setattr(inverse_root, constant, value)
        return ngplus.NGAdam(params, lr=LR, update_every=3, **options)


def convolutions(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Left and right sides, a grouped convolution, a norm, sizes that no number of ranks divides."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 9),
        nn.LayerNorm(9),
        nn.Linear(9, 3),
    )
    return net.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    size = 8 if step == STEPS - 1 else BATCH  # a last, short batch
    x, y = torch.randn(size, 1, 6, 6, generator=generator), torch.randn(size, 3, generator=generator)
    return x.to(dtype), y.to(dtype)


def squared(output: Tensor, target: Tensor) -> Tensor:
    """One loss a sample."""
    return (output - target).square().sum(1)


def share(count: int, rank: int, world: int, unequal: bool) -> slice:
    """Each rank's samples; where they are unequal the first rank has the most."""
    sizes = [count - world + 1] + [1] * (world - 1) if unequal else [count // world] * world
    end = sum(sizes[: rank + 1])
    return slice(end - sizes[rank], end)


@functools.cache
def alone(name: str) -> list[Tensor]:
    """The parameters of one process on the whole batches."""
    net = convolutions(precision(name))
    optimizer = optimizer_of(net, name)
    for step in range(STEPS):
        x, y = batch(step, precision(name))
        optimizer.zero_grad()
        squared(net(x), y).mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def sharded(net: nn.Sequential, mesh: tuple[int, int] | None = None) -> nn.Sequential:
    """Two layers in a group of their own, the rest with the root. ``mesh`` is replicas by shards (default: shards)."""
    of = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for layer in (net[2], net[5]):
        fully_shard(layer, mesh=of)
    fully_shard(net, mesh=of)
    return net


def save(net: nn.Module, optimizer: Any, folder: str) -> None:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True)), checkpoint_id=folder)


def load(net: nn.Module, optimizer: Any, folder: str) -> None:
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def numbers_kept(optimizer: Any) -> int:
    """In the state, but for momentum: FSDP2 shards it as it shards the parameters."""
    held = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    return sum(value.numel() for key, value in held if isinstance(value, Tensor) and key != "momentum_buffer")


def assert_same_everywhere(found: list[list[Tensor]]) -> None:
    """Bit for bit."""
    for other in found[1:]:
        for i, (a, b) in enumerate(zip(found[0], other, strict=True)):
            assert torch.equal(a, b), f"parameter {i} differs by {float((a - b).abs().max())}"


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for got, want in zip(found, wanted, strict=True):
        error = float((got - want).norm() / want.norm())
        assert error < (1e-9 if want.dtype == torch.float64 else 1e-5), f"{tuple(want.shape)}: {error}"


class Graphs(nn.Module):
    """Nodes of graphs as rows, and their sum for each graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        shares = self.last(torch.tanh(self.first(x)))[:, 0]
        return shares.new_zeros(graphs).index_add(0, graph, shares)


def train_on_graphs(net: nn.Module, rank: int, world: int, **options: Any) -> None:
    """Six graphs of unlike sizes, shared out in unlike numbers."""
    optimizer = ngplus.NGPlus(net, sample_index=lambda x, graph, graphs: graph, update_every=2, **options)
    whole = torch.repeat_interleave(torch.arange(6), torch.tensor([2, 7, 1, 4, 3, 5]))
    mine = share(6, rank, world, unequal=True)
    here = (whole >= mine.start) & (whole < mine.stop)
    for step in range(4):
        x = torch.randn(len(whole), 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        energies = net(x[here], whole[here] - mine.start, mine.stop - mine.start)
        ((energies - 1).square().sum() * world / 6).backward()
        optimizer.step()


def graphs_alone() -> list[Tensor]:
    """The parameters of one process that has them all."""
    net = Graphs()
    train_on_graphs(net, 0, 1)
    return [p.detach() for p in net.parameters()]
