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


class NGAdamTrainer(Trainer):
    """Way one: a subclass that makes the optimizer. The Trainer adds the schedule that its
    arguments ask for."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = ngplus.NGAdam(
            self.model,
            lr=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
        )
        return self.optimizer


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
            logging_steps=15, learning_rate=1e-2, lr_scheduler_type="cosine", report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = NGAdamTrainer(small_gpt(), arguments, train_dataset=Counting())
        trainer.train()

        # Way two: optimizer and schedule as an argument, here from the first one's checkpoint.
        model = small_gpt()
        optimizer = ngplus.NGAdam(model, lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        made = (optimizer, schedule)
        again = Trainer(model, arguments, train_dataset=Counting(), optimizers=made)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-30")
    print(f"steps of the optimizer: {optimizer.param_groups[0]['step']}")


if __name__ == "__main__":
    main()
