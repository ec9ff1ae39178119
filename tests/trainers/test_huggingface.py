"""Hugging Face's Trainer: NG+ by ``optimizers=`` and by the hook ``create_optimizer``, its checkpoints, its options."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ngplus
from helpers import reference
from helpers.training import flat

WORDS, LENGTH, STEPS, SAVED = 29, 8, 8, 4
OPTIONS = {"lr": 0.1, "update_every": 3}  # the save after 4 steps lies between two refreshes


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count in steps of one to five."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) * (i % 5 + 1) + i) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def small_gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM"))


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))


class Recording(Trainer):
    """Keeps the batches that it trains on. Its loss: a sum over tokens over their number in the batch."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        kept = {**copy.deepcopy(inputs), "num_items_in_batch": num_items_in_batch}
        self.batches = [*getattr(self, "batches", []), kept]
        return super().training_step(model, inputs, num_items_in_batch)


class WithNGPlus(Recording):
    """The subclass hook: the one method that a user writes."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = ngplus.NGPlus(self.model, **OPTIONS)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = decay(optimizer or self.optimizer)
        return self.lr_scheduler


def by_argument(model: nn.Module, arguments: TrainingArguments) -> Recording:
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    return Recording(model, arguments, train_dataset=Counting(), optimizers=(optimizer, decay(optimizer)))


def by_hook(model: nn.Module, arguments: TrainingArguments) -> Recording:
    return WithNGPlus(model, arguments, train_dataset=Counting())


Way = Callable[[nn.Module, TrainingArguments], Recording]
WAYS = pytest.mark.parametrize("way", [by_argument, by_hook])


def run(way: Way, folder: Path, resume: Path | None = None, **arguments: Any) -> Recording:
    """The Trainer's whole training, from the start or from a checkpoint."""
    common = {"per_device_train_batch_size": 4, "max_steps": STEPS, "save_steps": SAVED, "seed": 3, "report_to": []}
    quiet = {"use_cpu": True, "disable_tqdm": True, "logging_steps": 100}
    trainer = way(small_gpt(), TrainingArguments(str(folder), **{**common, **quiet, **arguments}))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def inside(trainer: Trainer) -> ngplus.NGPlus:
    optimizer = trainer.optimizer.optimizer  # Accelerate's wrapper
    assert isinstance(optimizer, ngplus.NGPlus)
    return optimizer


def plain_loop(batches: list[dict[str, Tensor]], accumulate: int = 1) -> Tensor:
    """What the Trainer does, written out."""
    model = small_gpt()
    optimizer = ngplus.NGPlus(model, **OPTIONS)
    scheduler = decay(optimizer)
    for k, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        if k % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # max_grad_norm is 1 by default
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return flat(model)


@WAYS
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_makes_the_steps_of_a_plain_loop(way: Way, accumulate: int, tmp_path: Path) -> None:
    trainer = run(way, tmp_path, gradient_accumulation_steps=accumulate)
    assert inside(trainer).param_groups[0]["step"] == STEPS
    assert {row.source for row in inside(trainer).plan()} == {"sample"}
    assert reference.relative_error(flat(trainer.model), plain_loop(trainer.batches, accumulate)) < 1e-5


@WAYS
def test_resumed_training_equals_uninterrupted_training(way: Way, tmp_path: Path) -> None:
    whole = run(way, tmp_path / "whole")
    resumed = run(way, tmp_path / "resumed", resume=tmp_path / "whole" / f"checkpoint-{SAVED}")
    assert len(resumed.batches) == STEPS - SAVED
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert inside(resumed).param_groups[0]["step"] == STEPS
    for name, row in ((row.name, row) for row in inside(whole).plan()):
        curvatures = [inside(t).curvature(name).matrix for t in (whole, resumed)]
        assert torch.equal(*curvatures), row


@pytest.mark.parametrize("option", ["gradient_checkpointing", "bf16", "torch_compile"])
def test_options_of_the_trainer(option: str, tmp_path: Path) -> None:
    """They change how a step is computed, not what it is."""
    torch._dynamo.reset()
    extra = {"torch_compile_backend": "aot_eager"} if option == "torch_compile" else {}
    trainer = run(by_argument, tmp_path, **{option: True}, **extra)
    assert {row.source for row in inside(trainer).plan()} == {"sample"}
    start, want, have = flat(small_gpt()), plain_loop(trainer.batches), flat(trainer.model)
    assert reference.relative_error(have - start, want - start) < (0.3 if option == "bf16" else 1e-3)


@pytest.mark.parametrize("kind", [ngplus.NGPlus, ngplus.NGAdam])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_class_and_its_options(kind: Any, with_model: bool, tmp_path: Path) -> None:
    """The Trainer's own groups, with one hint from NGPlus; or the module among the options."""

    def way(model: nn.Module, arguments: TrainingArguments) -> Recording:
        options = {"lr": 0.01, "model": model} if with_model else {"lr": 0.01}
        return Recording(model, arguments, train_dataset=Counting(), optimizer_cls_and_kwargs=(kind, options))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = run(way, tmp_path, save_steps=STEPS, max_steps=3)
    hints = [w for w in caught if "without their module" in str(w.message)]
    assert len(hints) == (kind is ngplus.NGPlus and not with_model)
    optimizer: Any = trainer.optimizer.optimizer  # Accelerate's wrapper
    assert isinstance(optimizer, kind)
    assert [len(optimizer.param_groups), optimizer.health().steps] == [1 if with_model else 2, 3]
    if kind is ngplus.NGPlus:
        assert {row.source for row in optimizer.plan()} == ({"sample"} if with_model else {"batch"})
    else:
        table = next(row for row in optimizer.plan() if row.shape == (WORDS, 16))
        assert table.blocks == (WORDS + 16 if with_model else 2)  # its L and R are diagonal
