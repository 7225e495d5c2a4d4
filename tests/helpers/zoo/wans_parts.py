"""Networks and encoders of the video pipelines of wans.py."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tiny_parts import MEAN, STD, TOWER, denoiser, randomise, wan_vae
from torch import nn

# ---------------------------------------------------------------------------
# Wan and its relatives

WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 64,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
SEES = {"in_channels": 12}  # latents, those of the picture, a mask of four frames
LOOKS = {**SEES, "image_dim": 16, "added_kv_proj_dim": 24}  # and what an image encoder says of it


def wan_denoiser(name: str = "WanTransformer3DModel", seed: int = 61, **config: Any) -> nn.Module:
    """A transformer of Wan's family by the name of its class."""
    return randomise(getattr(diffusers, name)(**{**WAN, **config}), seed)


def clip_vision(seed: int = 62) -> dict[str, Any]:
    """(image_encoder, image_processor) that see a picture as five tokens."""
    config = transformers.CLIPVisionConfig(
        **TOWER,
        projection_dim=16,
        image_size=16,
        patch_size=8,
    )
    return {
        "image_encoder": randomise(transformers.CLIPVisionModel(config), seed),
        "image_processor": transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    }


def animate_denoiser(seed: int = 71) -> nn.Module:
    """Wan Animate's transformer, whose motion encoder sees faces of 16 x 16 pixels."""
    return wan_denoiser(
        "WanAnimateTransformer3DModel",
        seed,
        **LOOKS,
        latent_channels=4,
        motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )


def patched_vae(seed: int = 63) -> nn.Module:
    """The VAE of Wan 2.2 5B, of residual blocks over patches of pixels; eight times smaller."""
    net = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=MEAN,
        latents_std=STD,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
    )
    return randomise(net, seed, 0.7)


def vivid_vae(seed: int = 65) -> nn.Module:
    """Wan's VAE that tells pictures well apart, for a control that weighs little."""
    net = wan_vae()
    randomise(net.encoder, seed, 2.0)
    return net


# ---------------------------------------------------------------------------
# Cosmos


def cosmos_vae(frames: int = 4, seed: int = 66) -> nn.Module:
    """The VAE of Cosmos 1, four times smaller; its latents have statistics for each frame."""
    net = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=16,
        num_layers=1,
        patch_size=4,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        latents_mean=[m + 0.05 * i for m in MEAN for i in range(frames)],
        latents_std=[s - 0.05 * i for s in STD for i in range(frames)],
    )
    randomise(net, seed, 0.7)
    randomise(net.encoder, seed, 1.5)
    for p in net.decoder.conv_out.parameters():
        p.mul_(0.4)  # or most pixels would be black or white
    return net


def cosmos_denoiser(channels: int, seed: int = 67, **config: Any) -> nn.Module:
    """channels: those of the latents, and one more where a mask tells the given frames."""
    net = diffusers.CosmosTransformer3DModel(
        **{
            "in_channels": channels,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 2,
            "mlp_ratio": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (4, 16, 16),
            "extra_pos_embed_type": None,
            **config,
        }
    )
    return randomise(net, seed)


# ---------------------------------------------------------------------------
# Motif


def gemma2_text(tok, seed: int = 68) -> nn.Module:
    """The encoder half of T5Gemma 2 with a vision tower that no prompt uses."""
    text = {
        **TOWER,
        "vocab_size": len(tok),
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "dropout_rate": 0.0,  # read by the network, unknown to its configuration
    }
    vision = {"model_type": "siglip_vision_model", **TOWER, "image_size": 16, "patch_size": 8}
    config = transformers.T5Gemma2EncoderConfig(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=2
    )
    return randomise(transformers.T5Gemma2Encoder(config), seed)


def motif_denoiser(seed: int = 69) -> nn.Module:
    """Motif's transformer of all four kinds of blocks."""
    return denoiser(
        "MotifVideoTransformer3DModel",
        seed,
        in_channels=9,
        out_channels=4,
        num_layers=1,
        num_single_layers=2,
        num_decoder_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        enable_text_cross_attention_dual=True,
        enable_text_cross_attention_single=True,
    )
