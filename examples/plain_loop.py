"""NG+ in a plain training loop: handwritten digits, a learning-rate schedule, a checkpoint.

python examples/plain_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ngplus

EPOCHS = 5

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(128, 10),
)  # fmt: skip
optimizer = ngplus.NGAdam(model, lr=0.01)  # the one line that changes
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

for epoch in range(EPOCHS):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
    print(f"epoch {epoch + 1}: {right:.1%} of the held-out digits")

print(optimizer.plan())

# a checkpoint: parameters, curvature and schedule, all in one file
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.pt"
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    saved = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
