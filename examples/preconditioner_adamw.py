"""NG+'s curvature in front of another optimizer: AdamW takes the natural gradient.

python examples/preconditioner_adamw.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import ngplus

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
preconditioner = ngplus.Preconditioner(model, damping=0.1, update_every=5)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(120):
    batch = torch.randint(1400, (128,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    preconditioner.step()  # each .grad becomes (lambda I + L)^-1 G or G (lambda I + R)^-1
    optimizer.step()
    if step % 30 == 29:
        with torch.no_grad():
            right = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        print(f"step {step + 1}: loss {loss:.3f}, {right:.1%} of the held-out digits")
