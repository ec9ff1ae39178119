"""Models of images and sound of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from architectures.cases import LENGTH, WORDS, Case, architecture, batched, normal, tokens

LIBRARY = "transformers"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}


def _images(name: str, config: str, model: str, *outputs: str, size: int = 16, **settings: Any) -> None:
    def build() -> Case:
        made = getattr(hf, config)(**settings)
        return batched(getattr(hf, model)(made), {"pixel_values": normal(3, size, size)}, *(outputs or ("logits",)))

    architecture(name, LIBRARY)(build)


PATCHES = {"image_size": 16, "patch_size": 8, **SMALL, **NO_DROPOUT}
WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
           "drop_path_rate": 0.0}  # fmt: skip

_images("ViT", "ViTConfig", "ViTForImageClassification", **PATCHES)
_images("DeiT", "DeiTConfig", "DeiTForImageClassification", **PATCHES)
_images("BEiT", "BeitConfig", "BeitForImageClassification", **PATCHES, use_relative_position_bias=True,
        drop_path_rate=0.0, out_indices=[0, 1])  # fmt: skip
_images("DINOv2", "Dinov2Config", "Dinov2ForImageClassification", **PATCHES)
_images("Swin", "SwinConfig", "SwinForImageClassification", **WINDOWS)
_images("Swin v2", "Swinv2Config", "Swinv2ForImageClassification", **WINDOWS)
_images("ConvNeXt", "ConvNextConfig", "ConvNextForImageClassification", **STAGES, num_stages=2, size=32)
_images("ConvNeXt v2", "ConvNextV2Config", "ConvNextV2ForImageClassification", **STAGES, num_stages=2, size=32)
_images("ResNet", "ResNetConfig", "ResNetForImageClassification", **STAGES, embedding_size=8, layer_type="basic")
_images("BiT", "BitConfig", "BitForImageClassification", depths=[1, 1], hidden_sizes=[8, 16], embedding_size=8,
        num_groups=2, size=32)  # fmt: skip
_images("RegNet", "RegNetConfig", "RegNetForImageClassification", **STAGES, embedding_size=8, groups_width=4)
_images("MobileNet v2", "MobileNetV2Config", "MobileNetV2ForImageClassification", depth_multiplier=0.1,
        classifier_dropout_prob=0.0, size=32)  # fmt: skip
_images("SegFormer", "SegformerConfig", "SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1],
        sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=8, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        **NO_DROPOUT)  # fmt: skip
_images("YOLOS", "YolosConfig", "YolosForObjectDetection", "logits", "pred_boxes",
        **{**PATCHES, "image_size": [16, 16]}, num_detection_tokens=3)  # fmt: skip


@architecture("DETR", LIBRARY)
def detr() -> Case:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=3, dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    return batched(hf.DetrForObjectDetection(config), {"pixel_values": normal(3, 32, 32)}, "logits", "pred_boxes")


def _clip_configs() -> dict[str, Any]:
    text = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, **SMALL}
    vision = {"image_size": 16, "patch_size": 8, **SMALL}
    return {"text_config": text, "vision_config": vision, "projection_dim": 8}


@architecture("CLIP", LIBRARY)
def clip() -> Case:
    """The embeddings: the contrastive logits would mix the samples."""
    inputs = {"input_ids": tokens(), "pixel_values": normal(3, 16, 16)}
    return batched(hf.CLIPModel(hf.CLIPConfig(**_clip_configs())), inputs, "text_embeds", "image_embeds")


@architecture("CLIP, contrastive", LIBRARY, mixes="its logits compare all samples")
def clip_contrastive() -> Case:
    inputs = {"input_ids": tokens(), "pixel_values": normal(3, 16, 16)}
    return batched(hf.CLIPModel(hf.CLIPConfig(**_clip_configs())), inputs, "logits_per_text")


@architecture("SigLIP", LIBRARY)
def siglip() -> Case:
    config = hf.SiglipConfig(**{k: v for k, v in _clip_configs().items() if k != "projection_dim"})
    inputs = {"input_ids": tokens(), "pixel_values": normal(3, 16, 16)}
    return batched(hf.SiglipModel(config), inputs, "text_embeds", "image_embeds")


@architecture("Whisper", LIBRARY)
def whisper() -> Case:
    config = hf.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=4, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=8,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, use_cache=False,
    )  # fmt: skip
    inputs = {"input_features": normal(4, 16), "decoder_input_ids": tokens()}
    return batched(hf.WhisperForConditionalGeneration(config), inputs, "logits")


def _speech(name: str, config: str, model: str) -> None:
    def build() -> Case:
        settings = {
            "vocab_size": WORDS, "conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (3, 2),
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False, "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, **SMALL,
        }  # fmt: skip
        return batched(getattr(hf, model)(getattr(hf, config)(**settings)), {"input_values": normal(64)}, "logits")

    architecture(name, LIBRARY)(build)


_speech("wav2vec 2.0", "Wav2Vec2Config", "Wav2Vec2ForCTC")
_speech("HuBERT", "HubertConfig", "HubertForCTC")


@architecture("Audio spectrogram transformer", LIBRARY)
def ast() -> Case:
    config = hf.ASTConfig(
        patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8, **SMALL, **NO_DROPOUT
    )
    return batched(hf.ASTForAudioClassification(config), {"input_values": normal(16, 8)}, "logits")


@architecture("PatchTST", LIBRARY)
def patch_tst() -> Case:
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=3, d_model=16,
        num_hidden_layers=2, num_attention_heads=2, ffn_dim=24, norm_type="layernorm", loss="mse", ff_dropout=0.0,
        attention_dropout=0.0, positional_dropout=0.0, path_dropout=0.0, head_dropout=0.0,
    )  # fmt: skip
    return batched(hf.PatchTSTForPrediction(config), {"past_values": normal(16, 2)}, "prediction_outputs")


@architecture("LLaVA", LIBRARY)
def llava() -> Case:
    """A language model whose first tokens are patches of an image."""
    text = hf.LlamaConfig(vocab_size=WORDS, **SMALL, num_key_value_heads=1, max_position_embeddings=32)
    vision = hf.CLIPVisionConfig(image_size=16, patch_size=8, **SMALL)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=3, image_seq_length=4)
    ids = torch.cat([torch.full((len(tokens()), 4), 3), tokens(LENGTH, first=4)], 1)
    inputs = {"input_ids": ids, "pixel_values": normal(3, 16, 16)}
    return batched(hf.LlavaForConditionalGeneration(config), inputs, "logits")
