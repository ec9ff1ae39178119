"""Models of diffusers, with random weights."""

from __future__ import annotations

import diffusers
import torch

from architectures.cases import Case, N, architecture, batched, normal

LIBRARY = "diffusers"
TIMES = torch.arange(1, N + 1) * 7


@architecture("UNet2D", LIBRARY)
def unet() -> Case:
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip
    return batched(model, {"sample": normal(3, 8, 8), "timestep": TIMES}, "sample")


@architecture("UNet2D, conditional", LIBRARY)
def conditional_unet() -> Case:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=6, attention_head_dim=2,
    )  # fmt: skip
    inputs = {"sample": normal(3, 8, 8), "timestep": TIMES, "encoder_hidden_states": normal(4, 6)}
    return batched(model, inputs, "sample")


@architecture("DiT", LIBRARY)
def dit() -> Case:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=8,
        norm_num_groups=1, num_embeds_ada_norm=10,
    )  # fmt: skip
    for module in model.modules():  # labels are dropped at random
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    inputs = {"hidden_states": normal(3, 8, 8), "timestep": TIMES, "class_labels": torch.arange(N) % 4}
    return batched(model, inputs, "sample")


@architecture("PixArt", LIBRARY)
def pixart() -> Case:
    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=8,
        cross_attention_dim=16, caption_channels=6, norm_num_groups=1, use_additional_conditions=False,
    )  # fmt: skip
    inputs = {"hidden_states": normal(3, 8, 8), "timestep": TIMES, "encoder_hidden_states": normal(4, 6)}
    inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    return batched(model, inputs, "sample")


@architecture("Stable Diffusion 3", LIBRARY)
def sd3() -> Case:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=3, out_channels=3, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=16, pooled_projection_dim=10,
        pos_embed_max_size=8,
    )  # fmt: skip
    inputs = {
        "hidden_states": normal(3, 8, 8), "timestep": TIMES, "encoder_hidden_states": normal(4, 6),
        "pooled_projections": normal(10),
    }  # fmt: skip
    return batched(model, inputs, "sample")


@architecture("Flux", LIBRARY)
def flux() -> Case:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, pooled_projection_dim=10, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    inputs = {
        "hidden_states": normal(9, 4), "encoder_hidden_states": normal(4, 6), "pooled_projections": normal(10),
        "timestep": TIMES / 50.0,
    }  # fmt: skip
    case = batched(model, inputs, "sample")
    positions = {"img_ids": torch.rand(9, 3), "txt_ids": torch.zeros(4, 3)}  # the same for all samples
    case.batch, case.ones = {**inputs, **positions}, [{**one, **positions} for one in case.ones]
    return case


@architecture("VAE", LIBRARY)
def vae() -> Case:
    model = diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(8, 16), latent_channels=2, norm_num_groups=2, sample_size=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return batched(model, {"sample": normal(3, 8, 8)}, "sample")


@architecture("VQ-VAE", LIBRARY)
def vqvae() -> Case:
    model = diffusers.VQModel(
        in_channels=3, out_channels=3, block_out_channels=(8, 16), latent_channels=2, norm_num_groups=2, sample_size=8,
        num_vq_embeddings=12, down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return batched(model, {"sample": normal(3, 8, 8)}, "sample")
