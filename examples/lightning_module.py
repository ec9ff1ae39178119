"""NG+ in PyTorch Lightning: configure_optimizers, and a run that goes on from a checkpoint.

python examples/lightning_module.py
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import pytorch_lightning as lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ngplus


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = ngplus.NGAdam(self.net, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)]


def trainer(epochs: int) -> lightning.Trainer:
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def main() -> None:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    lightning.seed_everything(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=400)

    with tempfile.TemporaryDirectory() as folder:
        first = trainer(epochs=3)
        first.fit(Digits(), train, held_out)
        first.save_checkpoint(f"{folder}/half.ckpt")
        print(f"after 3 epochs: {first.callback_metrics['accuracy']:.1%} of those held out")
        second = trainer(epochs=6)
        second.fit(Digits(), train, held_out, ckpt_path=f"{folder}/half.ckpt")
        print(f"after 6 epochs: {second.callback_metrics['accuracy']:.1%} of those held out")


if __name__ == "__main__":
    main()
