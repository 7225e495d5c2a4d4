"""Flow matching over images: Flux and its relatives, HiDream, Z-Image, Ovis, OmniGen."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import tiny
import torch
import transformers
from tiny_parts import (
    TOWER,
    clip_text,
    denoiser,
    flux_transformer,
    image_vae,
    randomise,
    t5_text,
    tokenizer,
)
from torch import nn

from zoo.case import Case, picture
from zoo.images_parts import deep_vae

SIZE = {"height": 16, "width": 16}
TEXT = {**SIZE, "max_sequence_length": 12}
CHAT = {**SIZE, "max_sequence_length": 24}
CHAT_TEMPLATE = (
    "{% for m in messages if m.role == 'user' %}<|im_start|>user\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a causal language model of two layers
DECODER = {
    **TOWER,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


# ---------------------------------------------------------------------------
# parts


def chat_tokenizer():
    """Qwen's tokenizer with a template that keeps what the user says."""
    tok = tokenizer("qwen", 2048)
    tok.chat_template = CHAT_TEMPLATE
    return tok


def qwen3_text(tok, *, head: bool = False, seed: int = 21) -> nn.Module:
    """A Qwen3, with its language head where the pipeline expects one."""
    config = transformers.Qwen3Config(vocab_size=len(tok), **DECODER)
    return randomise(
        (transformers.Qwen3ForCausalLM if head else transformers.Qwen3Model)(config), seed
    )


def llama_text(tok, seed: int = 22) -> nn.Module:
    """A Llama that can return its attention maps, as HiDream asks."""
    config = transformers.LlamaConfig(vocab_size=len(tok), attn_implementation="eager", **DECODER)
    return randomise(transformers.LlamaForCausalLM(config), seed)


def mistral3_text(tok, seed: int = 23) -> nn.Module:
    """A Mistral 3 with a vision tower that no prompt uses."""
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 32,
        "patch_size": 8,
    }
    text = {"model_type": "mistral", "vocab_size": len(tok), **DECODER}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=2
    )
    return randomise(transformers.Mistral3ForConditionalGeneration(config), seed)


def flux2_transformer(*, guidance: bool, seed: int = 24) -> nn.Module:
    """Flux 2's denoiser over three layers of a text encoder of width 16."""
    return denoiser(
        "Flux2Transformer2DModel",
        seed,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=3 * 16,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def flux2_vae(seed: int = 25) -> nn.Module:
    """Flux 2's VAE, whose latents are normalised by the statistics of a batch norm."""
    net = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    net.bn.running_mean.copy_(torch.linspace(-0.3, 0.3, 16))
    net.bn.running_var.copy_(torch.linspace(0.7, 1.3, 16))
    return randomise(net, seed, 0.8)


def dynamic_shift():
    """The schedule of Flux."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


# ---------------------------------------------------------------------------
# pipelines


def chroma():
    tok = tokenizer("t5")
    net = denoiser(
        "ChromaTransformer2DModel",
        27,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=32,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    return diffusers.ChromaPipeline(
        scheduler=dynamic_shift(),
        vae=image_vae(0.4, 0.1),
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=net,
    )


def hidream_transformer() -> nn.Module:
    """HiDream's denoiser with three experts, for latents of 8x8."""
    net = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[16, 16],
        text_emb_dim=32,
        num_routed_experts=3,
        num_activated_experts=2,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(8, 8),
        llama_layers=[0, 1],
    )
    return randomise(net, 28)


def hidream():
    clip, t5, llama = tokenizer(), tokenizer("t5"), tokenizer()
    pipe = diffusers.HiDreamImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(0.4, 0.1),
        text_encoder=clip_text(clip, True),
        tokenizer=clip,
        text_encoder_2=clip_text(clip, True, seed=12),
        tokenizer_2=clip,
        text_encoder_3=t5_text(t5),
        tokenizer_3=t5,
        text_encoder_4=llama_text(llama),
        tokenizer_4=llama,
        transformer=hidream_transformer(),
    )
    pipe.default_sample_size = 8  # sizes are scaled to the area that this names
    return pipe


def flux_like(name: str, extra_channels: int = 0):
    """A pipeline of Flux's parts, whose denoiser may see more channels than it predicts."""
    parts = {k: v for k, v in tiny.flux().components.items() if v is not None}
    randomise(parts["vae"], 9, 0.8)  # a picture weighs more
    if extra_channels:
        config = {k: v for k, v in flux_transformer().config.items() if not k.startswith("_")}
        config |= {"in_channels": 16 + extra_channels, "out_channels": 16}
        parts["transformer"] = randomise(diffusers.FluxTransformer2DModel(**config), 29)
    return getattr(diffusers, name)(**parts)


def flux2():
    tok = chat_tokenizer()
    return diffusers.Flux2Pipeline(
        scheduler=dynamic_shift(),
        vae=flux2_vae(),
        text_encoder=mistral3_text(tok),
        tokenizer=tok,
        transformer=flux2_transformer(guidance=True),
    )


def flux2_klein():
    tok = chat_tokenizer()
    return diffusers.Flux2KleinPipeline(
        scheduler=dynamic_shift(),
        vae=flux2_vae(),
        text_encoder=qwen3_text(tok, head=True),
        tokenizer=tok,
        transformer=flux2_transformer(guidance=False),
    )


def z_image():
    tok = chat_tokenizer()
    net = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(0.4, 0.1),
        text_encoder=qwen3_text(tok),
        tokenizer=tok,
        transformer=randomise(net, 30),
    )


def ovis_image():
    tok = chat_tokenizer()
    net = denoiser(
        "OvisImageTransformer2DModel",
        31,
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.OvisImagePipeline(
        scheduler=dynamic_shift(),
        vae=image_vae(0.4, 0.1),
        text_encoder=qwen3_text(tok),
        tokenizer=tok,
        transformer=net,
    )


def omnigen():
    tok = tokenizer("t5", 2048)
    net = diffusers.OmniGenTransformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_key_value_heads=2,
        intermediate_size=32,
        pad_token_id=0,
        vocab_size=len(tok),
        rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        pos_embed_max_size=8,
        time_step_dim=32,
        num_layers=2,
        num_attention_heads=2,
    )
    return diffusers.OmniGenPipeline(
        transformer=randomise(net, 32),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            invert_sigmas=True, num_train_timesteps=1
        ),
        vae=deep_vae(seed=26, gain=0.7, scaling_factor=0.5, shift_factor=None, force_upcast=True),
        tokenizer=tok,
    )


# ---------------------------------------------------------------------------
# cases


def pictures(name: str = "image", size: int = 16) -> tuple[dict[str, Any], ...]:
    """A picture for each prompt, under the name the pipeline gives it."""
    return {name: picture(1, size)}, {name: picture(2, size)}


MASKED = tuple(
    {**given, "mask_image": picture(seed).convert("L")}
    for given, seed in zip(pictures(), (3, 4), strict=True)
)
FLUX2 = {**CHAT, "text_encoder_out_layers": (0, 1, 2)}
CASES: dict[str, Case] = {
    "chroma": Case(make=chroma, call=TEXT),
    "hidream": Case(make=hidream, call=TEXT),
    "flux_cfg": Case(
        make=tiny.flux,
        call={**TEXT, "true_cfg_scale": 3.0, "negative_prompt": "a red circle"},
    ),
    "flux_kontext": Case(
        make=partial(flux_like, "FluxKontextPipeline"),
        call={**TEXT, "max_area": 256, "_auto_resize": False},
        conditions=pictures(),
    ),
    "flux_fill": Case(
        make=partial(flux_like, "FluxFillPipeline", 32), call=TEXT, conditions=MASKED
    ),
    "flux_control": Case(
        make=partial(flux_like, "FluxControlPipeline", 16),
        call=TEXT,
        conditions=pictures("control_image"),
    ),
    "flux_img2img": Case(
        make=partial(flux_like, "FluxImg2ImgPipeline"), call=TEXT, conditions=pictures()
    ),
    "flux2": Case(make=flux2, call=FLUX2),
    # one prompt at a time: every prompt of a call sees every picture
    "flux2_edit": Case(make=flux2, call=FLUX2, conditions=pictures(size=64)),
    "flux2_klein": Case(make=flux2_klein, call=FLUX2),
    "z_image": Case(make=z_image, call=CHAT),
    "z_image_norm": Case(make=z_image, call={**CHAT, "cfg_normalization": True}),
    "ovis_image": Case(make=ovis_image, call=TEXT),
    # one prompt at a time: all rows take the rotary positions of the first
    "omnigen": Case(make=omnigen, call={"height": 32, "width": 32}),
}
