"""NG+ with DistributedDataParallel: each rank trains on its share of the digits.

torchrun --nproc-per-node 2 examples/ddp.py

On GPUs, "gloo" becomes "nccl" and the model and batches go to the rank's device; nothing else
should change (not tried).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ngplus

EPOCHS = 4

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1400], labels[:1400])
sampler: DistributedSampler[TensorDataset] = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)  # a rank's batch

net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
model = DistributedDataParallel(net)
# distribution="memory": each layer's curvature on one rank alone; the default sends less in
# between refreshes
optimizer = ngplus.NGAdam(model, lr=0.01)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        right = (net(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: {right:.1%} of the held-out digits")

if dist.get_rank() == 0:
    print(optimizer.plan())
dist.destroy_process_group()
