"""NGAdam in Hugging Face's Trainer: a small GPT-2 learns to count, and resumes a checkpoint.

python examples/huggingface_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ngplus


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count in steps of one to five, from anywhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) * (i % 5 + 1) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def with_decay_groups(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer where the Trainer has to make it, as with FSDP."""
    return ngplus.NGAdam(ngplus.decay_groups(model, 0.01), lr=lr, model=model)


def small_gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=16, max_steps=60, save_steps=30,
            logging_steps=15, lr_scheduler_type="cosine", report_to=[], disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        model = small_gpt()
        optimizer = ngplus.NGAdam(ngplus.decay_groups(model, 0.01), lr=1e-2, model=model)
        # None: the Trainer makes the schedule that its arguments ask for
        trainer = Trainer(
            model, arguments, train_dataset=Counting(), optimizers=(optimizer, None)
        )
        trainer.train()
        print(optimizer.health())

        again = Trainer(
            small_gpt(), arguments, train_dataset=Counting(),
            optimizer_cls_and_kwargs=(lambda: with_decay_groups, {"lr": 1e-2}),
        )  # fmt: skip
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-30")
        inner = again.optimizer.optimizer  # inside of Accelerate's wrapper
        print(f"steps after the resumed training: {inner.param_groups[0]['step']}")


if __name__ == "__main__":
    main()
