"""NG+'s direction in front of another optimizer, which makes the step: here torch's SGD.

For code that must keep its optimizer. Choose one that takes the direction as it is, as SGD
does: Adam would scale each number again.

python examples/preconditioner.py
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
preconditioner = ngplus.Preconditioner(model, damping=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(120):
    batch = torch.randint(1400, (128,))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    preconditioner.step()  # each .grad becomes its direction
    optimizer.step()
    if step % 30 == 29:
        with torch.no_grad():
            right = (model(x[1400:]).argmax(1) == y[1400:]).float().mean()
        print(f"step {step + 1}: loss {loss:.3f}, {right:.1%} of the held-out digits")
