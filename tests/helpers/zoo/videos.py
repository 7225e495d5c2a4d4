"""Video pipelines: CogVideoX, LTX, Mochi, HunyuanVideo and its relatives, EasyAnimate."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch
from tiny_parts import MEAN, STD, clip_text, denoiser, qwen_text, randomise, t5_text, tokenizer
from torch import nn

from zoo.case import Case, picture
from zoo.videos_parts import (
    chat_tokenizer,
    clip_pictures,
    easyanimate_transformer,
    gemma3_text,
    hunyuan15_transformer,
    hunyuan15_vae,
    hunyuan_transformer,
    hunyuan_vae,
    llama_text,
    llava_text,
    llava_tokenizer,
    ltx2_connectors,
    ltx2_sound,
    ltx2_transformer,
    ltx2_vae,
    magvit_vae,
    mochi_transformer,
    mochi_vae,
    qwen_language,
    siglip_vision,
)

SIZE = {"height": 16, "width": 16}
TEXT = {**SIZE, "max_sequence_length": 12}
LTX_SHIFT = {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 1024,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "shift_terminal": 0.1,
}
PICTURES = tuple({"image": picture(seed)} for seed in (1, 2))


# ---------------------------------------------------------------------------
# CogVideoX


def cog_vae(seed: int = 31) -> nn.Module:
    """CogVideoX's VAE, four times smaller in space and in time."""
    net = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        sample_height=16,
        sample_width=16,
        scaling_factor=0.7,
    )
    return randomise(net, seed, 0.7)


def cog_transformer(channels: int = 4, seed: int = 32) -> nn.Module:
    return denoiser(
        "CogVideoXTransformer3DModel",
        seed,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=12,
        use_rotary_positional_embeddings=True,
    )


def cogvideox(name: str = "CogVideoXPipeline", channels: int = 4):
    """A pipeline of CogVideoX by the name of its class."""
    tok = tokenizer("t5")
    return getattr(diffusers, name)(
        tokenizer=tok,
        text_encoder=t5_text(tok),
        vae=cog_vae(),
        transformer=cog_transformer(channels),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            rescale_betas_zero_snr=True,
            snr_shift_scale=1.0,
            prediction_type="v_prediction",
            set_alpha_to_one=True,
            timestep_spacing="trailing",
        ),
    )


def cogvideox_i2v():
    return cogvideox("CogVideoXImageToVideoPipeline", 8)


# ---------------------------------------------------------------------------
# LTX


def ltx_vae(seed: int = 33, **changes: Any) -> nn.Module:
    """LTX's VAE, eight times smaller in space and four times in time, with uneven latents."""
    net = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=2,
        **changes,
    )
    net.latents_mean.copy_(torch.tensor(MEAN))
    net.latents_std.copy_(torch.tensor(STD))
    return randomise(net, seed, 0.7)


def ltx(name: str = "LTXPipeline", shift: bool = True, **vae: Any):
    """A pipeline of LTX by the name of its class."""
    tok = tokenizer("t5")
    net = denoiser(
        "LTXVideoTransformer3DModel",
        34,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        caption_channels=16,
    )
    return getattr(diffusers, name)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**(LTX_SHIFT if shift else {})),
        vae=ltx_vae(**vae),
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=net,
    )


def ltx2():
    tok = tokenizer("t5")
    return diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**LTX_SHIFT),
        vae=ltx2_vae(),
        text_encoder=gemma3_text(tok),
        tokenizer=tok,
        connectors=ltx2_connectors(),
        transformer=ltx2_transformer(),
        **ltx2_sound(),
    )


# ---------------------------------------------------------------------------
# Mochi


def mochi():
    tok = tokenizer("t5")
    return diffusers.MochiPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae=mochi_vae(),
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=mochi_transformer(),
    )


# ---------------------------------------------------------------------------
# HunyuanVideo


def hyvideo(name: str = "HunyuanVideoPipeline", net: nn.Module | None = None, **parts: Any):
    """A pipeline of HunyuanVideo without pictures in its texts, by the name of its class."""
    tok, clip = tokenizer("t5", 77), tokenizer("clip", 77)
    return getattr(diffusers, name)(
        text_encoder=llama_text(tok),
        tokenizer=tok,
        transformer=net or hunyuan_transformer(),
        vae=hunyuan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip_text(clip),
        tokenizer_2=clip,
        **parts,
    )


def hyvideo_i2v(kind: str, channels: int):
    """kind: how the denoiser is shown the picture."""
    tok, clip = llava_tokenizer(), tokenizer("clip", 77)
    return diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=llava_text(tok),
        tokenizer=tok,
        transformer=hunyuan_transformer(
            channels=channels,
            image_condition_type=kind,
            guidance_embeds=kind == "token_replace",
        ),
        vae=hunyuan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip_text(clip),
        tokenizer_2=clip,
        image_processor=clip_pictures(),
    )


def hyvideo_skyreels():
    return hyvideo("HunyuanSkyreelsImageToVideoPipeline", hunyuan_transformer(channels=8))


def framepack():
    net = hunyuan_transformer(
        "HunyuanVideoFramepackTransformer3DModel",
        has_image_proj=True,
        image_proj_dim=16,
        has_clean_x_embedder=True,
    )
    return hyvideo("HunyuanVideoFramepackPipeline", net, **siglip_vision())


def hyvideo15(name: str = "HunyuanVideo15Pipeline", guidance: float = 1.0, **parts: Any):
    """A pipeline of HunyuanVideo 1.5 by the name of its class, with a template of few words."""
    tok, glyphs = chat_tokenizer(), tokenizer("t5")
    pipe = getattr(diffusers, name)(
        text_encoder=qwen_language(tok),
        tokenizer=tok,
        transformer=hunyuan15_transformer(),
        vae=hunyuan15_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=t5_text(glyphs),
        tokenizer_2=glyphs,
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance),
        **parts,
    )
    pipe.system_message = "Describe the image"
    pipe.prompt_template_encode_start_idx = 11
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 16, 8
    pipe.vision_num_semantic_tokens = 4
    return pipe


def hyvideo15_i2v():
    return hyvideo15("HunyuanVideo15ImageToVideoPipeline", 3.0, **siglip_vision())


# ---------------------------------------------------------------------------
# EasyAnimate


def easyanimate():
    tok = chat_tokenizer()
    return diffusers.EasyAnimatePipeline(
        vae=magvit_vae(),
        text_encoder=qwen_text(tok),
        tokenizer=tok,
        transformer=easyanimate_transformer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


# ---------------------------------------------------------------------------

COG = {**TEXT, "num_frames": 9}  # three frames of latents: two would decode to eight
LTX = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 12}
LTX2 = {
    **LTX,
    "guidance_scale": 3.0,
    "guidance_rescale": 0.7,
    "audio_guidance_scale": 7.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
}
HY = {**LTX, "prompt_template": {"template": "Describe the image: {}", "crop_start": 4}}
HY_I2V = {
    **LTX,
    "max_sequence_length": 16,
    "prompt_template": {
        "template": (
            "<|start_header_id|>system<|end_header_id|><image>Describe the image<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>{}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>"
        ),
        "crop_start": 11,
        "image_emb_start": 3,
        "image_emb_end": 7,
        "image_emb_len": 4,
    },
}
FRAMEPACK = {**HY, "latent_window_size": 2}
HY15 = {"height": 32, "width": 32, "num_frames": 5}
CASES: dict[str, Case] = {
    "cogvideox": Case(make=cogvideox, call=COG),
    "cogvideox_dynamic": Case(make=cogvideox, call={**COG, "use_dynamic_cfg": True}),
    "cogvideox_i2v": Case(make=cogvideox_i2v, call=COG, conditions=PICTURES),
    "ltx": Case(make=ltx, call=LTX),
    "ltx_i2v": Case(make=partial(ltx, "LTXImageToVideoPipeline"), call=LTX, conditions=PICTURES),
    # one prompt at a time: every prompt of a call sees every picture
    "ltx_condition": Case(
        refused="it draws fresh noise for the conditioning frames in each step;"
        " use LTXImageToVideoPipeline",
        make=partial(ltx, "LTXConditionPipeline", shift=False, timestep_conditioning=True),
        call={**LTX, "decode_timestep": 0.05, "decode_noise_scale": 0.025},
        conditions=PICTURES,
    ),
    "ltx2": Case(
        make=ltx2,
        call={
            **LTX2,
            "guidance_scale": 1.0,
            "guidance_rescale": 0.0,
            "audio_guidance_scale": 1.0,
            "audio_guidance_rescale": 0.0,
        },
    ),
    "ltx2_cfg": Case(make=ltx2, call=LTX2),
    "ltx2_stg": Case(
        make=ltx2,
        call={
            **LTX2,
            "stg_scale": 1.0,
            "modality_scale": 3.0,
            "audio_stg_scale": 1.0,
            "audio_modality_scale": 3.0,
            "spatio_temporal_guidance_blocks": [1],
        },
    ),
    "mochi": Case(make=mochi, call={**LTX, "num_frames": 7}),
    "hyvideo": Case(make=hyvideo, call=HY),
    "hyvideo_cfg": Case(
        make=hyvideo, call={**HY, "true_cfg_scale": 3.0, "negative_prompt": "a red circle"}
    ),
    "hyvideo_i2v": Case(
        make=partial(hyvideo_i2v, "latent_concat", 9),
        call={**HY_I2V, "num_frames": 9},  # the first four are dropped
        conditions=PICTURES,
    ),
    "hyvideo_i2v_replace": Case(
        make=partial(hyvideo_i2v, "token_replace", 4), call=HY_I2V, conditions=PICTURES
    ),
    "hyvideo_skyreels": Case(
        make=hyvideo_skyreels, call={**HY, "negative_prompt": "a red circle"}, conditions=PICTURES
    ),
    "framepack": Case(make=framepack, call=FRAMEPACK, conditions=PICTURES),
    "framepack_windows": Case(
        refused="it runs a loop for each window; ask for the num_frames of one",
        make=framepack,
        call={**FRAMEPACK, "num_frames": 9},
        conditions=PICTURES,
    ),
    # one prompt at a time, here and in the next two: the VAE decodes only one video
    "hyvideo15": Case(make=hyvideo15, call=HY15),
    "hyvideo15_cfg": Case(make=partial(hyvideo15, guidance=3.0), call=HY15),
    "hyvideo15_i2v": Case(make=hyvideo15_i2v, call={"num_frames": 5}, conditions=PICTURES),
    "easyanimate": Case(
        make=easyanimate, call={**HY15, "guidance_scale": 3.0, "negative_prompt": "a red circle"}
    ),
}
