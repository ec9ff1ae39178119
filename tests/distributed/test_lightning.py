"""PyTorch Lightning on two ranks: its strategies for DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from distributed import cases
from distributed.test_accelerate import place_of
from helpers.ranks import Pool
from helpers.training import parameters

lightning = pytest.importorskip("pytorch_lightning")
pytest.importorskip("accelerate")  # place_of

STEPS, BATCH = 6, 12


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = cases.precision(name)
    x, y = torch.randn(STEPS * BATCH, 1, 6, 6, generator=generator), torch.randn(STEPS * BATCH, 3, generator=generator)
    return x.to(dtype), y.to(dtype)


def alone(name: str) -> list[Tensor]:
    net = cases.convolutions(cases.precision(name))
    optimizer = cases.optimizer_of(net, name)
    for x, y in zip(*(whole.split(BATCH) for whole in data(name)), strict=True):
        optimizer.zero_grad()
        cases.squared(net(x), y).mean().backward()
        optimizer.step()
    return parameters(net)


def trained(rank: int, world: int, name: str, sharded: bool, folder: str) -> tuple[list[Tensor], int, list[str]]:
    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = cases.convolutions(cases.precision(name))

        def configure_model(self) -> None:
            if sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            return cases.squared(self.net(batch[0]), batch[1]).mean()

        def configure_optimizers(self) -> Any:
            return cases.optimizer_of(self.net, name)

    with place_of(rank, world), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", "0")
        patch.setenv("TORCHELASTIC_RUN_ID", "0")  # as of torchrun
        strategy: Any = "ddp"
        if sharded:
            strategy = lightning.strategies.ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        mine = torch.cat([part.chunk(world)[rank] for part in torch.arange(STEPS * BATCH).split(BATCH)])
        x, y = data(name)
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", devices=world, strategy=strategy, use_distributed_sampler=False,
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=folder, inference_mode=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, DataLoader(TensorDataset(x[mine], y[mine]), batch_size=BATCH // world))
        optimizer = trainer.optimizers[0]
        return parameters(module.net), optimizer.health().steps, sorted({row.source for row in optimizer.plan()})


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.parametrize("name", ["ngadam", "sample"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_ranks_equal_one_process(ranks: Callable[[int], Pool], tmp_path: Path, name: str, sharded: bool) -> None:
    found = ranks(2).run(trained, name, sharded, str(tmp_path))
    cases.assert_same_everywhere([parts[0] for parts in found])
    cases.assert_close(found[0][0], alone(name))
    sources = ["batch", "none"] if name in cases.NGADAM else ["sample"]
    assert [parts[1:] for parts in found] == [(STEPS, sources)] * 2
