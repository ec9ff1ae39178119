"""NG+ with Accelerate: gradient accumulation, clipping, and a checkpoint in the middle.

python examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ngplus

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target))

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = ngplus.NGAdam(model, lr=0.01)  # before prepare(), from the model itself
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=16, shuffle=True), scheduler
)

with tempfile.TemporaryDirectory() as folder:
    for epoch in range(4):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}")
        if epoch == 1:
            # model, optimizer with its curvature, schedule, random numbers
            accelerator.save_state(folder)
    accelerator.load_state(folder)  # and back to the end of the second epoch
print(f"steps of the optimizer at the checkpoint: {optimizer.param_groups[0]['step']}")
