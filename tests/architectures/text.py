"""Language models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import transformers as hf

from architectures.cases import LENGTH, WORDS, Case, architecture, batched, tokens

LIBRARY = "transformers"


def _text(config: Any, model: Any, *outputs: str, length: int = LENGTH, **more: Any) -> Case:
    config._attn_implementation = more.pop("attention", config._attn_implementation)
    config.use_cache = False
    return batched(model(config), {"input_ids": tokens(length), **more}, *(outputs or ("logits",)))


def _language(name: str, config: str, model: str, **settings: Any) -> None:
    """A model with the names of settings that most share."""
    length, attention = settings.pop("length", LENGTH), settings.pop("attention", None)
    outputs = settings.pop("outputs", ("logits",))
    common = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def build() -> Case:
        made = getattr(hf, config)(**{**common, **settings})
        made._experts_implementation = "eager"  # grouped_mm has no float64
        more = {} if attention is None else {"attention": attention}
        return _text(made, getattr(hf, model), *outputs, length=length, **more)

    architecture(name, LIBRARY)(build)


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 1, "head_dim": 8}

_language("Llama", "LlamaConfig", "LlamaForCausalLM", **GROUPED)
_language("Mistral", "MistralConfig", "MistralForCausalLM", **GROUPED, sliding_window=4)
_language("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", num_key_value_heads=1)
_language("Qwen3", "Qwen3Config", "Qwen3ForCausalLM", **GROUPED)
_language("Gemma", "GemmaConfig", "GemmaForCausalLM", **GROUPED)
_language("Gemma 2", "Gemma2Config", "Gemma2ForCausalLM", **GROUPED)
_language("Phi", "PhiConfig", "PhiForCausalLM", embd_pdrop=0.0, resid_pdrop=0.0)
_language("Mixtral", "MixtralConfig", "MixtralForCausalLM", **GROUPED, num_local_experts=4)
_language("OLMoE", "OlmoeConfig", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2)
_language("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", hidden_dropout=0.0, attention_dropout=0.0)
_language("OPT", "OPTConfig", "OPTForCausalLM", ffn_dim=24, dropout=0.0, word_embed_proj_dim=16)
_language("Falcon", "FalconConfig", "FalconForCausalLM", hidden_dropout=0.0, attention_dropout=0.0)
_language("BLOOM", "BloomConfig", "BloomForCausalLM", n_layer=2, n_head=2, hidden_dropout=0.0, attention_dropout=0.0)
_language("BERT", "BertConfig", "BertForMaskedLM", **NO_DROPOUT)
_language("BERT, classification", "BertConfig", "BertForSequenceClassification", **NO_DROPOUT, classifier_dropout=0.0)
_language("RoBERTa", "RobertaConfig", "RobertaForMaskedLM", **NO_DROPOUT)
_language("ALBERT", "AlbertConfig", "AlbertForMaskedLM", **NO_DROPOUT, embedding_size=8)
_language("ELECTRA", "ElectraConfig", "ElectraForPreTraining", **NO_DROPOUT, embedding_size=8)
_language("MPNet", "MPNetConfig", "MPNetForMaskedLM", **NO_DROPOUT)
_language("FNet", "FNetConfig", "FNetForMaskedLM", hidden_dropout_prob=0.0)
_language("DeBERTa", "DebertaConfig", "DebertaForMaskedLM", **NO_DROPOUT, relative_attention=True,
          pos_att_type=["c2p", "p2c"])  # fmt: skip
_language("DeBERTa v2", "DebertaV2Config", "DebertaV2ForMaskedLM", **NO_DROPOUT, relative_attention=True,
          pos_att_type=["c2p", "p2c"])  # fmt: skip
_language("DeBERTa v3", "DebertaV2Config", "DebertaV2ForSequenceClassification", **NO_DROPOUT,
          relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=True, position_buckets=4,
          norm_rel_ebd="layer_norm", pooler_hidden_size=16)  # fmt: skip
_language("Longformer", "LongformerConfig", "LongformerForMaskedLM", **NO_DROPOUT, attention_window=4, length=8)
_language("BigBird", "BigBirdConfig", "BigBirdForMaskedLM", **NO_DROPOUT, attention_type="original_full")
_language("Mamba", "MambaConfig", "MambaForCausalLM", state_size=4)
_language("Mamba 2", "Mamba2Config", "Mamba2ForCausalLM", state_size=4, num_heads=4, head_dim=8, n_groups=1,
          chunk_size=4)  # fmt: skip
_language("RWKV", "RwkvConfig", "RwkvForCausalLM", attention_hidden_size=16, context_length=32)
_language("RecurrentGemma", "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", **GROUPED, lru_width=16,
          attention_window_size=4)  # fmt: skip


@architecture("GPT-2", LIBRARY)
def gpt2() -> Case:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return _text(config, hf.GPT2LMHeadModel)


@architecture("GPT-Neo", LIBRARY)
def gpt_neo() -> Case:
    config = hf.GPTNeoConfig(
        vocab_size=WORDS, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=16, window_size=4, resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return _text(config, hf.GPTNeoForCausalLM)


@architecture("DistilBERT", LIBRARY)
def distilbert() -> Case:
    config = hf.DistilBertConfig(
        vocab_size=WORDS, dim=16, hidden_dim=24, n_layers=2, n_heads=2, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return _text(config, hf.DistilBertForSequenceClassification)


@architecture("XLNet", LIBRARY)
def xlnet() -> Case:
    config = hf.XLNetConfig(vocab_size=WORDS, d_model=16, n_layer=2, n_head=2, d_inner=24, dropout=0.0)
    return _text(config, hf.XLNetLMHeadModel)


@architecture("Funnel", LIBRARY)
def funnel() -> Case:
    config = hf.FunnelConfig(
        vocab_size=WORDS, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=2, d_head=8, d_inner=24,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return _text(config, hf.FunnelForMaskedLM, length=8)


@architecture("T5", LIBRARY)
def t5() -> Case:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _text(config, hf.T5ForConditionalGeneration, decoder_input_ids=tokens(4).flip(1))


@architecture("Switch Transformers", LIBRARY)
def switch() -> Case:
    config = hf.SwitchTransformersConfig(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, num_heads=2, num_experts=3, dropout_rate=0.0, router_jitter_noise=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _text(config, hf.SwitchTransformersForConditionalGeneration, decoder_input_ids=tokens(4).flip(1))


@architecture("BART", LIBRARY)
def bart() -> Case:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16, dropout=0.0,
    )  # fmt: skip
    return _text(config, hf.BartForConditionalGeneration, decoder_input_ids=tokens(4).flip(1))


@architecture("Marian", LIBRARY)
def marian() -> Case:
    config = hf.MarianConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=16, dropout=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    return _text(config, hf.MarianMTModel, decoder_input_ids=tokens(4).flip(1))
