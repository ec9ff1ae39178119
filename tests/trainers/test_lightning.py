"""PyTorch Lightning: NG+ from ``configure_optimizers``, with the trainer's accumulation, clipping and checkpoints."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from classification import OPTIONS, SAVED, STEPS, loader, plain_loop, small_net
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F

import ngplus
from helpers import reference
from helpers.project import block_of
from helpers.training import flat

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning")


EPOCHS = [*loader(8, 32), *loader(8, 32)]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = ngplus.NGPlus(self.net, **OPTIONS)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def run(
    folder: Path, steps: int = STEPS, resume: Path | None = None, accumulate: int = 1, **arguments: Any
) -> tuple[Classifier, lightning.Trainer]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", default_root_dir=folder, gradient_clip_val=0.1, enable_checkpointing=False,
        accumulate_grad_batches=accumulate, **quiet, **arguments,
    )  # fmt: skip
    module = Classifier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="pytorch_lightning")
        path = None if resume is None else str(resume)
        trainer.fit(module, loader(8 // accumulate, 32), loader(8, 32), ckpt_path=path)
    return module, trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_makes_the_steps_of_a_plain_loop(accumulate: int, tmp_path: Path) -> None:
    """With an evaluation after each epoch, and a closure in each step."""
    module, trainer = run(tmp_path, accumulate=accumulate)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, ngplus.NGPlus)
    assert optimizer.param_groups[0]["step"] == STEPS
    assert {row.source for row in optimizer.plan()} == {"sample"}
    assert reference.relative_error(flat(module), plain_loop(EPOCHS)) < 1e-5


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    whole, _ = run(tmp_path)
    _, trainer = run(tmp_path, steps=SAVED)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, after = run(tmp_path, resume=tmp_path / "half.ckpt")
    assert after.global_step == STEPS
    assert after.optimizers[0].param_groups[0]["step"] == STEPS
    assert torch.equal(flat(resumed), flat(whole))


def test_the_whole_module_may_be_given(tmp_path: Path) -> None:
    """A LightningModule is a module like any other, though its forward is never called."""

    class Whole(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = ngplus.NGPlus(self, **OPTIONS)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
            ]

    module = Whole()
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path, gradient_clip_val=0.1,
    )  # fmt: skip
    trainer.fit(module, loader(8, 32))
    assert reference.relative_error(flat(module), plain_loop(EPOCHS)) < 1e-5


def test_bfloat16_autocast(tmp_path: Path) -> None:
    module, trainer = run(tmp_path, precision="bf16-mixed")
    assert {row.source for row in trainer.optimizers[0].plan()} == {"sample"}
    start = flat(Classifier())
    assert reference.relative_error(flat(module) - start, plain_loop(EPOCHS) - start) < 0.3


def test_the_recipe_for_logging_logs(tmp_path: Path) -> None:
    """The method on the page of recipes, which logs in step 100."""
    names: dict[str, Any] = {}
    exec(block_of("recipes.md", "def on_train_batch_end"), names)
    logged = type("Logged", (Classifier,), {"on_train_batch_end": names["on_train_batch_end"]})
    trainer = lightning.Trainer(
        max_steps=100, accelerator="cpu", logger=CSVLogger(tmp_path), log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(logged(), loader(8, 32))
    written = Path(trainer.log_dir or "", "metrics.csv").read_text()
    head, *rows = csv.reader(written.splitlines())
    assert {"ngplus/steps", "ngplus/faults/dropped", "ngplus/update_rms"} <= set(head)
    (row,) = rows
    assert float(row[head.index("ngplus/steps")]) == 100
    assert float(row[head.index("ngplus/update_rms")]) > 0


def test_fabric_makes_the_steps_of_a_plain_loop() -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    net = small_net()
    model, optimizer = fabric.setup(net, ngplus.NGPlus(net, **OPTIONS))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in loader(8):
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        scheduler.step()
    assert {row.source for row in optimizer.optimizer.plan()} == {"sample"}
    assert reference.relative_error(flat(net), plain_loop()) < 1e-5
