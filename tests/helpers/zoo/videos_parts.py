"""Networks and encoders of the video pipelines of videos.py."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import MEAN, STD, TOWER, denoiser, randomise, tokenizer
from torch import nn

# ---------------------------------------------------------------------------
# LTX 2


def gemma3_text(tok, seed: int = 41) -> nn.Module:
    """A Gemma 3 of two layers with a vision tower that no prompt uses."""
    config = transformers.Gemma3Config(
        text_config={**TOWER, "vocab_size": len(tok), "num_key_value_heads": 2, "head_dim": 8},
        vision_config={**TOWER, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=2,
    )
    return randomise(transformers.Gemma3ForConditionalGeneration(config), seed)


def ltx2_connectors(seed: int = 42) -> nn.Module:
    """What makes the texts of video and of sound from the three layers of gemma3_text."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    sizes |= {"num_learnable_registers": 4}
    net = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        connector_rope_base_seq_len=32,
        **{f"{kind}_connector_{k}": v for kind in ("video", "audio") for k, v in sizes.items()},
    )
    return randomise(net, seed)


def ltx2_transformer(seed: int = 43) -> nn.Module:
    return denoiser(
        "LTX2VideoTransformer3DModel",
        seed,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        vae_scale_factors=(4, 8, 8),
        base_height=32,
        base_width=32,
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        caption_channels=16,
    )


def ltx2_vae(seed: int = 44) -> nn.Module:
    """LTX 2's VAE, eight times smaller in space and four times in time, with uneven latents."""
    net = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTX2VideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("spatiotemporal",) * 2,
        upsample_type=("spatiotemporal",) * 2,
        upsample_residual=(True, True),
        upsample_factor=(1, 1),
        patch_size=2,
    )
    net.latents_mean.copy_(torch.tensor(MEAN))
    net.latents_std.copy_(torch.tensor(STD))
    return randomise(net, seed, 0.7)


def ltx2_sound(seed: int = 45) -> dict[str, nn.Module]:
    """The VAE and the vocoder of the sound, of two channels with sixteen bins each."""
    from diffusers.pipelines.ltx2 import LTX2Vocoder

    vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=8,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=2,
        resolution=32,
        mel_bins=16,
    )
    vae.latents_mean.copy_(torch.linspace(-0.2, 0.2, 8))
    vae.latents_std.copy_(torch.linspace(0.8, 1.2, 8))
    vocoder = LTX2Vocoder(
        in_channels=32,
        hidden_channels=16,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    return {"audio_vae": randomise(vae, seed, 0.7), "vocoder": randomise(vocoder, seed + 1)}


# ---------------------------------------------------------------------------
# Mochi


def mochi_vae(seed: int = 47) -> nn.Module:
    """Mochi's VAE, eight times smaller in space and six times in time: its pipeline knows no
    other."""
    net = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        latent_channels=12,
        layers_per_block=(1,) * 5,
        latents_mean=MEAN * 3,
        latents_std=STD * 3,
    )
    return randomise(net, seed, 0.7)


def mochi_transformer(seed: int = 48) -> nn.Module:
    return denoiser(
        "MochiTransformer3DModel",
        seed,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=16,
        time_embed_dim=32,
        max_sequence_length=12,
    )


# ---------------------------------------------------------------------------
# HunyuanVideo

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def llama_text(tok, seed: int = 51) -> nn.Module:
    return randomise(
        transformers.LlamaModel(transformers.LlamaConfig(vocab_size=len(tok), **LLAMA)), seed
    )


def llava_tokenizer():
    """A tokenizer with Llama's marks of turns and LLaVA's mark of a picture."""
    tok = tokenizer("t5", 256)
    marks = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>")
    tok.add_tokens(list(marks), special_tokens=True)
    return tok


def llava_text(tok, seed: int = 52) -> nn.Module:
    """A LLaVA that sees a picture of 16x16 as four tokens."""
    vision = transformers.CLIPVisionConfig(
        **TOWER,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(vocab_size=len(tok), **LLAMA),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        pad_token_id=0,
    )
    return randomise(transformers.LlavaForConditionalGeneration(config), seed)


def clip_pictures(size: int = 16):
    """What makes pictures ready for encoders of CLIP's kind."""
    return transformers.CLIPImageProcessor(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )


def hunyuan_vae(seed: int = 53) -> nn.Module:
    """HunyuanVideo's VAE, eight times smaller in space and four times in time."""
    net = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.6,
    )
    return randomise(net, seed, 0.7)


def hunyuan_transformer(
    name: str = "HunyuanVideoTransformer3DModel", channels: int = 4, seed: int = 54, **changes: Any
) -> nn.Module:
    """HunyuanVideo's denoiser, or a relative of it by the name of its class."""
    net = getattr(diffusers, name)(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
        **changes,
    )
    return randomise(net, seed)


# ---------------------------------------------------------------------------
# HunyuanVideo 1.5


def chat_tokenizer():
    """Qwen's tokenizer with a plain template: a turn begins with three tokens and ends with two."""
    tok = tokenizer("qwen", 2048)
    tok.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tok


def qwen_language(tok, seed: int = 55) -> nn.Module:
    """The language half of a Qwen2.5-VL."""
    sizes = {k: v for k, v in LLAMA.items() if k != "head_dim"}
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e6}
    config = transformers.Qwen2_5_VLTextConfig(vocab_size=len(tok), rope_scaling=rope, **sizes)
    return randomise(transformers.Qwen2_5_VLTextModel(config), seed)


def hunyuan15_vae(seed: int = 56) -> nn.Module:
    """HunyuanVideo 1.5's VAE, eight times smaller in space and four times in time."""
    net = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        scaling_factor=0.8,
    )
    return randomise(net, seed, 0.7)


def hunyuan15_transformer(seed: int = 57) -> nn.Module:
    """HunyuanVideo 1.5's denoiser; the projection of its second text is made narrower, for no
    setting does."""
    net = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        target_size=32,
    )
    net.context_embedder_2 = type(net.context_embedder_2)(16, 32, 32)
    return randomise(net, seed)


def siglip_vision(size: int = 16, seed: int = 58) -> dict[str, Any]:
    """(image_encoder, feature_extractor) that see a picture as four tokens."""
    config = transformers.SiglipVisionConfig(
        **TOWER,
        image_size=size,
        patch_size=size // 2,
    )
    return {
        "image_encoder": randomise(transformers.SiglipVisionModel(config), seed),
        "feature_extractor": transformers.SiglipImageProcessor(
            size={"height": size, "width": size}
        ),
    }


# ---------------------------------------------------------------------------
# EasyAnimate


def magvit_vae(seed: int = 59) -> nn.Module:
    """EasyAnimate's VAE, eight times smaller in space and four times in time."""
    net = diffusers.AutoencoderKLMagvit(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        scaling_factor=0.7,
    )
    return randomise(net, seed, 0.7)


def easyanimate_transformer(seed: int = 60) -> nn.Module:
    return denoiser(
        "EasyAnimateTransformer3DModel",
        seed,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        mmdit_layers=1,
        time_embed_dim=16,
        add_norm_text_encoder=True,
        text_embed_dim=16,
    )
