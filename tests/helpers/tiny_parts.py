"""Parts of tiny pipelines: tokenizers and text encoders, denoisers, VAEs, with redrawn weights."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

WORDS = (
    "one two three four a red blue green yellow purple circle square triangle circles squares"
    " triangles left right of above below and the photo image system user assistant describe by"
    " detailing color shape size texture quantity text spatial relationships objects"
)


# most text and picture encoders
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def randomise(module: nn.Module, seed: int = 0, gain: float = 1.0) -> nn.Module:
    """Redraw every parameter: matrices with variance gain^2 / fan_in, vectors near one (scales) or
    zero (biases, tables)."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim >= 2:
            p.data = (
                gain * noise
                if "embed" in name and "proj" not in name and p.ndim == 2 and p.shape[0] > 64
                else gain * noise / math.sqrt(p[0].numel())
            )
        else:
            p.data = 0.1 * noise + (1.0 if name.endswith("weight") else 0.0)
    return module.eval().requires_grad_(False)


# ---------------------------------------------------------------------------
# text


def tokenizer(kind: str = "clip", length: int = 12):
    """A word-level tokenizer with the special tokens of CLIP, T5 or Qwen; each word of the toy
    world (and Qwen's template) is one token."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    bos, eos, pad, unk = {
        "clip": ("<|startoftext|>", "<|endoftext|>", "<|endoftext|>", "<unk>"),
        "t5": (None, "</s>", "<pad>", "<unk>"),
        "qwen": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"),
    }[kind]
    words = WORDS.split()
    specials = [s for s in dict.fromkeys((pad, eos, bos, unk)) if s]
    vocab = {
        w: i
        for i, w in enumerate(
            [*specials, *words, "background", "Describe", ",", ":", ".", "\n", "word"]
        )
    }
    tok = Tokenizer(models.WordLevel(vocab, unk_token=unk))
    tok.pre_tokenizer = (
        pre_tokenizers.Split(Regex(r" +|\n|[,.:]"), "isolated")
        if kind == "qwen"
        else pre_tokenizers.Whitespace()
    )
    if (
        kind == "qwen"
    ):  # drop blanks, keep line breaks: Qwen's template counts 34 tokens before the prompt
        from tokenizers import normalizers

        tok.normalizer = normalizers.Replace(" ", "\u0001")
        tok.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split("\u0001", "removed"),
                pre_tokenizers.Split(Regex(r"\n|[,.:]"), "isolated"),
            ]
        )
    elif kind == "clip":
        tok.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}", special_tokens=[(bos, vocab[bos]), (eos, vocab[eos])]
        )
    else:
        tok.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, vocab[eos])]
        )
    named = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unk}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok, model_max_length=length, **{k: v for k, v in named.items() if v}
    )


def clip_text(tok, projection: bool = False, seed: int = 1, width: int = 16) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=len(tok),
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=tok.model_max_length,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=1,
    )
    return randomise(
        (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(
            config
        ),
        seed,
    )


def t5_text(tok, umt5: bool = False, seed: int = 2, width: int = 16) -> nn.Module:
    sizes = {
        "d_model": width,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": len(tok),
    }
    return randomise(
        transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
        if umt5
        else transformers.T5EncoderModel(transformers.T5Config(**sizes)),
        seed,
    )


def qwen_text(tok, seed: int = 3) -> nn.Module:
    rope = {
        "mrope_section": [1, 1, 2],
        "rope_type": "default",
        "type": "default",
        "rope_theta": 1e6,
    }
    text = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": len(tok),
        "rope_scaling": rope,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    return randomise(
        transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ),
        seed,
    )


# ---------------------------------------------------------------------------
# denoisers


def denoiser(name: str, seed: int = 25, **config: Any) -> nn.Module:
    """A transformer of diffusers by the name of its class, two heads of 16."""
    heads = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
    return randomise(getattr(diffusers, name)(**{**heads, **config}), seed)


def unet(cross: int, *, xl: bool = False, seed: int = 4) -> nn.Module:
    extra = (
        {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 16 + 6 * 8,
            "use_linear_projection": True,
        }
        if xl
        else {}
    )
    net = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=cross,
        **extra,
    )
    return randomise(net, seed)


def sd3_transformer(seed: int = 5) -> nn.Module:
    return denoiser(
        "SD3Transformer2DModel",
        seed,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )


def flux_transformer(seed: int = 6) -> nn.Module:
    return denoiser(
        "FluxTransformer2DModel",
        seed,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def qwen_transformer(seed: int = 7) -> nn.Module:
    return denoiser(
        "QwenImageTransformer2DModel",
        seed,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def wan_transformer(seed: int = 8) -> nn.Module:
    return denoiser(
        "WanTransformer3DModel",
        seed,
        patch_size=(1, 2, 2),
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=64,
        ffn_dim=32,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


# ---------------------------------------------------------------------------
# VAEs


def image_vae(scaling: float = 0.5, shift: float | None = None, seed: int = 9) -> nn.Module:
    net = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=scaling,
        shift_factor=shift,
        force_upcast=False,
    )
    return randomise(net, seed, 0.5)


MEAN, STD = [0.1, -0.2, 0.3, 0.0], [0.9, 1.2, 1.0, 0.8]  # of video latents, by channel


def qwen_vae(seed: int = 10) -> nn.Module:
    net = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=MEAN,
        latents_std=STD,
    )
    return randomise(net, seed, 0.7)


def wan_vae(seed: int = 11) -> nn.Module:
    net = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=MEAN,
        latents_std=STD,
    )
    return randomise(net, seed, 0.7)
