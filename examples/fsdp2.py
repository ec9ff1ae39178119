"""NG+ with FSDP2: parameters, gradients and curvature in shares, and a distributed checkpoint.

torchrun --nproc-per-node 2 examples/fsdp2.py

On GPUs, "gloo" becomes "nccl" and "cpu" becomes "cuda"; not tried.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import ngplus

STEPS, BATCH = 100, 32

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)  # the same weights on every rank
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(
    nn.Linear(64, 128),
    nn.GELU(),
    nn.LayerNorm(128),
    nn.Linear(128, 64),
    nn.GELU(),
    nn.Linear(64, 10),
)
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = ngplus.NGAdam(model, lr=0.01)  # after sharding, like every optimizer

shuffled = torch.Generator().manual_seed(rank)
for _ in range(STEPS):
    # this rank's share of the digits
    mine = torch.randint(1400 // world, (BATCH,), generator=shuffled) * world + rank
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[mine]), labels[mine])
    loss.backward()
    optimizer.step()

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(states, checkpoint_id=folder[0])  # each rank writes its shares
dcp.load(states, checkpoint_id=folder[0])  # and any number of ranks reads them
set_state_dict(
    model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
)

with torch.no_grad():
    right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
tensors = [
    x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)
]
kept = sum(x.numel() for x in tensors)
kept_by_all = [torch.zeros((), dtype=torch.long) for _ in range(world)]
dist.all_gather(kept_by_all, torch.tensor(kept))
if rank == 0:
    numbers = [int(k) for k in kept_by_all]
    print(f"{right:.1%} of the held-out digits; numbers of curvature by rank: {numbers}")
dist.destroy_process_group()
