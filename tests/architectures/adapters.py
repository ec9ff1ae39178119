"""Adapters of peft on models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import peft
import transformers as hf

from architectures.cases import WORDS, Case, architecture, batched, normal, tokens

LIBRARY = "peft"


def _gpt2() -> Any:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def _llama() -> Any:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
        )
    )  # fmt: skip


def _adapted(name: str, config: Any, base: Any = _llama) -> None:
    def build() -> Case:
        model = peft.get_peft_model(base(), config())
        return batched(model, {"input_ids": tokens()}, "logits")

    architecture(name, LIBRARY)(build)


LLAMA, GPT2 = ["q_proj", "v_proj", "down_proj"], ["c_attn", "c_proj"]
_adapted("LoRA on Llama", lambda: peft.LoraConfig(r=3, target_modules=LLAMA))
_adapted("LoRA on GPT-2", lambda: peft.LoraConfig(r=3, target_modules=GPT2, fan_in_fan_out=True), _gpt2)
_adapted("LoRA with embeddings", lambda: peft.LoraConfig(r=3, target_modules=[*LLAMA, "embed_tokens"]))
_adapted("DoRA on Llama", lambda: peft.LoraConfig(r=3, target_modules=LLAMA, use_dora=True))
_adapted("rsLoRA and modules to save", lambda: peft.LoraConfig(
    r=3, target_modules=LLAMA, use_rslora=True, modules_to_save=["lm_head"]))  # fmt: skip
_adapted("AdaLoRA", lambda: peft.AdaLoraConfig(init_r=4, target_r=2, target_modules=LLAMA, total_step=10))
_adapted("IA3", lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"],
                                       feedforward_modules=["down_proj"]))  # fmt: skip
_adapted("VeRA", lambda: peft.VeraConfig(r=3, target_modules=["q_proj"]))
_adapted("OFT", lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]))
_adapted("LoHa", lambda: peft.LoHaConfig(r=3, target_modules=LLAMA))
_adapted("Prompt tuning", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
_adapted("Prefix tuning", lambda: peft.PrefixTuningConfig(
    task_type="CAUSAL_LM", num_virtual_tokens=3, num_layers=2, num_attention_heads=1, token_dim=8))  # fmt: skip


@architecture("LoRA on ViT", LIBRARY)
def vit() -> Case:
    config = hf.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = hf.ViTForImageClassification(config)
    names = ["query", "value"] if any(n.endswith("query") for n, _ in model.named_modules()) else ["q_proj", "v_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=names, modules_to_save=["classifier"]))
    return batched(adapted, {"pixel_values": normal(3, 16, 16)}, "logits")


@architecture("LoRA, two adapters", LIBRARY)
def several() -> Case:
    """Their outputs are added."""
    model = peft.get_peft_model(_llama(), peft.LoraConfig(r=3, target_modules=LLAMA), adapter_name="a")
    model.add_adapter("b", peft.LoraConfig(r=2, target_modules=LLAMA))
    model.base_model.set_adapter(["a", "b"])
    return batched(model, {"input_ids": tokens()}, "logits")
