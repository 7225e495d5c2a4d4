"""Networks, encoders and processors of the image pipelines of images.py."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import transformers
from tiny_parts import MEAN, STD, TOWER, qwen_text, randomise, tokenizer
from torch import nn

# ---------------------------------------------------------------------------
# text


def vision_tokenizer(length: int = 2048):
    """The Qwen tokenizer with marks of images, which cuts brackets and 's off as Qwen's own does:
    the pipelines count the tokens of their templates."""
    from tokenizers import Regex, pre_tokenizers

    tok = tokenizer("qwen", length)
    tok.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\u0001", "removed"),
            pre_tokenizers.Split(Regex(r"\(|\),?|'s|\n|[,.:]"), "isolated"),
        ]
    )
    marks = ("vision_start", "vision_end", "image_pad", "video_pad")
    tok.add_tokens([f"<|{mark}|>" for mark in marks], special_tokens=True)
    return tok


def vision_text(tok, seed: int = 3) -> nn.Module:
    """The Qwen text encoder that looks at pictures where the tokenizer's marks are."""
    net = qwen_text(tok, seed)
    for name, mark in (
        ("image_token_id", "image_pad"),
        ("video_token_id", "video_pad"),
        ("vision_start_token_id", "vision_start"),
        ("vision_end_token_id", "vision_end"),
    ):
        setattr(net.config, name, tok.convert_tokens_to_ids(f"<|{mark}|>"))
    return net


def vision_processor(tok, two_and_a_half: bool = False):
    """A processor that shrinks pictures to four tokens; two_and_a_half: the class of Qwen2.5."""
    made = transformers.Qwen2_5_VLProcessor if two_and_a_half else transformers.Qwen2VLProcessor
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    return made(
        image_processor=transformers.Qwen2VLImageProcessor(size=size),
        tokenizer=tok,
        video_processor=transformers.Qwen2VLVideoProcessor(size=size),
    )


def causal_text(name: str, tok, seed: int = 21, **changes: Any) -> nn.Module:
    """A decoder of transformers by the name of its class, width 16."""
    net = getattr(transformers, name)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": len(tok),
        "pad_token_id": tok.pad_token_id,
        "eos_token_id": tok.eos_token_id,
        "bos_token_id": tok.eos_token_id,
    }
    return randomise(net(net.config_class(**{**sizes, **changes})), seed)


def gemma_text(tok, seed: int = 22) -> nn.Module:
    """The encoder half of T5Gemma."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    half = {
        "vocab_size": len(tok),
        **TOWER,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
    }
    config = transformers.T5GemmaConfig(
        encoder=transformers.T5GemmaModuleConfig(**half),
        decoder=transformers.T5GemmaModuleConfig(**half),
        vocab_size=len(tok),
    )
    return randomise(T5GemmaEncoder(config.encoder), seed)


# ---------------------------------------------------------------------------
# VAEs and denoisers


def deep_vae(
    blocks: int = 4, channels: int = 4, seed: int = 23, gain: float = 0.5, **changes: Any
) -> nn.Module:
    """An image VAE that shrinks 2^(blocks - 1) times."""
    net = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=32,
        **{"scaling_factor": 0.4, "shift_factor": 0.1, "force_upcast": False, **changes},
    )
    return randomise(net, seed, gain)


def hunyuan_vae(seed: int = 26) -> nn.Module:
    net = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=16,
        scaling_factor=0.5,
    )
    return randomise(net, seed, 0.5)


def deep_video_vae(
    name: str, halvings: int, seed: int = 24, channels: int = 4, gain: float = 0.7, **changes: Any
) -> nn.Module:
    """A VAE of Wan's family by the name of its class, which shrinks 2^halvings times."""
    net = getattr(diffusers, name)(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1] * (halvings + 1),
        num_res_blocks=1,
        temperal_downsample=[False] * halvings,
        latents_mean=MEAN * (channels // 4),
        latents_std=STD * (channels // 4),
        **changes,
    )
    return randomise(net, seed, gain)


class AllowAll:
    """What Cosmos pipelines ask before and after, without the downloads: everything passes."""

    def to(self, *_: Any) -> AllowAll:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, video: np.ndarray) -> np.ndarray:
        return video
