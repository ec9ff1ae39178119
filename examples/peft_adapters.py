"""LoRA and DoRA with peft: a small Llama that counts up learns to count down.

python examples/peft_adapters.py
"""

from __future__ import annotations

import copy
import tempfile

import peft
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ngplus

WORDS, LENGTH = 64, 16


def batch(step: int) -> Tensor:
    """Sequences that count up or down by ``step``, from anywhere."""
    return (torch.randint(WORDS, (64, 1)) + step * torch.arange(LENGTH)) % WORDS


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, steps: int) -> float:
    """Returns the loss of the last step."""
    for _ in range(steps):
        tokens = batch(step)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    print(f"all weights, counting up: loss {train(base, ngplus.NGAdam(base), 1, 150):.3f}")

    for name, dora in (("LoRA", False), ("DoRA", True)):
        adapters = peft.LoraConfig(r=8, target_modules="all-linear", use_dora=dora)
        model = peft.get_peft_model(copy.deepcopy(base), adapters)
        optimizer = ngplus.NGAdam(model, lr=5e-3)  # the frozen weights have no state
        tokens = batch(-1)
        before = model(input_ids=tokens, labels=tokens).loss.item()
        after = train(model, optimizer, -1, 150)
        trained = [row for row in optimizer.plan() if row.state_bytes]
        size = sum(row.state_bytes for row in trained) / 1e3
        print(f"{name}, counting down: loss {before:.3f} before and {after:.3f} after")
        print(f"  {len(trained)} parameters are trained, their state has {size:.0f} kB")

        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)  # the adapters alone
            again = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder)
        with torch.no_grad():
            print(f"  loaded: loss {again(input_ids=tokens, labels=tokens).loss.item():.3f}")


if __name__ == "__main__":
    main()
