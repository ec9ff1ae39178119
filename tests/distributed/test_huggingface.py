"""Hugging Face's Trainer with FSDP2: training, checkpoint and resume on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import ngplus
from distributed.test_accelerate import place_of, use_fsdp2
from helpers.ranks import Pool

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

WORDS, LENGTH, STEPS, SAVED = 29, 8, 8, 4


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count in steps of one to five."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) * (i % 5 + 1) + i) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


def trained(rank: int, world: int, name: str, kind: str, folder: str, resume: bool) -> list[Tensor]:
    class OnRanks(transformers.Trainer):  # type: ignore[name-defined, misc]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            use_fsdp2(accelerate.FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True

    def make(model: nn.Module, lr: float) -> Any:
        return getattr(ngplus, name)(ngplus.decay_groups(model, 0.1), lr=lr, model=model)

    with place_of(rank, world):
        wrap = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "state_dict_type": kind}
        common = {"max_steps": STEPS, "save_steps": SAVED, "per_device_train_batch_size": 4, "max_grad_norm": 0.0}
        quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 100}
        arguments = transformers.TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", fsdp=True, fsdp_config=wrap, **common, **quiet
        )
        own = (lambda: make, {"lr": 0.01})
        trainer = OnRanks(small_llama(), arguments, train_dataset=Counting(), optimizer_cls_and_kwargs=own)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        optimizer = trainer.optimizer.optimizer
        assert [optimizer.param_groups[0]["step"], len(optimizer.param_groups)] == [STEPS, 2]
        assert all(hasattr(p, "full_tensor") for p in trainer.model.parameters())
        return [p.detach().full_tensor() for p in trainer.model.parameters()]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("name", ["NGAdam", "NGPlus"])
def test_resumed_training_equals_uninterrupted_training(
    ranks: Callable[[int], Pool], tmp_path: Path, name: str, kind: str
) -> None:
    whole = ranks(2).run(trained, name, kind, str(tmp_path), False)
    start = list(small_llama().parameters())
    assert not any(map(torch.equal, whole[0], start))
    resumed = ranks(2).run(trained, name, kind, str(tmp_path), True)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
