"""Video pipelines: Wan and its relatives, SkyReels, ChronoEdit, Kandinsky 5, Cosmos, Motif."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
from tiny_parts import clip_text, t5_text, tokenizer, wan_vae
from torch import nn

from zoo.case import Case, picture
from zoo.images import denoiser5, flow
from zoo.images_parts import AllowAll, vision_processor, vision_text, vision_tokenizer
from zoo.videos_parts import chat_tokenizer, hunyuan_vae
from zoo.wans_parts import (
    LOOKS,
    SEES,
    animate_denoiser,
    clip_vision,
    cosmos_denoiser,
    cosmos_vae,
    gemma2_text,
    motif_denoiser,
    patched_vae,
    vivid_vae,
    wan_denoiser,
)

SMALL = {"height": 16, "width": 16, "num_frames": 5}
TEXT = {**SMALL, "max_sequence_length": 12}
LOOKED = {**SMALL, "max_sequence_length": 512}  # what follows is taken for the picture
MEDIUM = {**TEXT, "height": 32, "width": 32}
PICTURES = tuple({"image": picture(seed)} for seed in (1, 2))


# ---------------------------------------------------------------------------
# Wan and its relatives


def wan(kind: str, net: nn.Module, vae: nn.Module | None = None, shift: float = 3.0, **parts: Any):
    """A pipeline of Wan's family by the name of its class."""
    tok = tokenizer("t5", 512)
    return getattr(diffusers, kind)(
        tokenizer=tok,
        text_encoder=t5_text(tok, umt5=True),
        vae=vae or wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
        transformer=net,
        **parts,
    )


def wan_i2v():
    return wan("WanImageToVideoPipeline", wan_denoiser(**LOOKS), **clip_vision())


def wan22_i2v():
    return wan(
        "WanImageToVideoPipeline",
        wan_denoiser(**SEES),
        transformer_2=wan_denoiser(seed=64, **SEES),
        boundary_ratio=0.9,
    )


def wan22_5b(kind: str = "WanPipeline"):
    return wan(kind, wan_denoiser(), patched_vae(), shift=5.0, expand_timesteps=True)


def wan_vace():
    """The control sees two latents and the 8 x 8 pixels of the mask."""
    net = wan_denoiser("WanVACETransformer3DModel", vace_layers=[0, 1], vace_in_channels=4 + 4 + 64)
    return wan("WanVACEPipeline", net, vivid_vae())


def wan_animate():
    return wan("WanAnimatePipeline", animate_denoiser(), **clip_vision())


def skyreels(kind: str = "SkyReelsV2Pipeline", **net: Any):
    return wan(kind, wan_denoiser("SkyReelsV2Transformer3DModel", **net), shift=8.0)


def skyreels_i2v():
    net = wan_denoiser("SkyReelsV2Transformer3DModel", **LOOKS)
    return wan("SkyReelsV2ImageToVideoPipeline", net, shift=5.0, **clip_vision())


def skyreels_df(**net: Any):
    return skyreels("SkyReelsV2DiffusionForcingPipeline", **net)


def chronoedit():
    net = wan_denoiser("ChronoEditTransformer3DModel", seed=70, **LOOKS)
    return wan("ChronoEditPipeline", net, shift=5.0, **clip_vision())


# ---------------------------------------------------------------------------
# Kandinsky 5


def kandinsky5(kind: str):
    """A video pipeline of Kandinsky 5 by the name of its class."""
    tok, clip = vision_tokenizer(), tokenizer("clip", 77)
    return getattr(diffusers, kind)(
        transformer=denoiser5(visual_cond=True),
        vae=hunyuan_vae(),
        text_encoder=vision_text(tok),
        tokenizer=vision_processor(tok, two_and_a_half=True),
        text_encoder_2=clip_text(clip),
        tokenizer_2=clip,
        scheduler=flow(shift=5.0, use_dynamic_shifting=False),
    )


# ---------------------------------------------------------------------------
# Cosmos


def cosmos1(kind: str = "CosmosTextToWorldPipeline", channels: int = 4):
    """A pipeline of Cosmos 1 by the name of its class, whose noise has a deviation of 80."""
    tok = tokenizer("t5")
    return getattr(diffusers, kind)(
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=cosmos_denoiser(channels, extra_pos_embed_type="learnable"),
        vae=cosmos_vae(),
        scheduler=diffusers.EDMEulerScheduler(
            sigma_min=0.002,
            sigma_max=80,
            sigma_data=0.5,
            sigma_schedule="karras",
            num_train_timesteps=1000,
            prediction_type="epsilon",
            final_sigmas_type="sigma_min",
        ),
        safety_checker=AllowAll(),
    )


def cosmos2_v2w():
    tok = tokenizer("t5")
    return diffusers.Cosmos2VideoToWorldPipeline(
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=cosmos_denoiser(5),
        vae=wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=AllowAll(),
    )


def cosmos25():
    tok = chat_tokenizer()
    return diffusers.Cosmos2_5_PredictBasePipeline(
        text_encoder=vision_text(tok),
        tokenizer=tok,
        transformer=cosmos_denoiser(
            5,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=2 * 16,
            encoder_hidden_states_channels=16,
        ),
        vae=wan_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            use_karras_sigmas=True,
            sigma_min=0.01,
            sigma_max=200.0,
        ),
        safety_checker=AllowAll(),
    )


# ---------------------------------------------------------------------------
# Motif


def motif_video():
    tok = tokenizer("t5")
    return diffusers.MotifVideoPipeline(
        scheduler=flow(),
        vae=wan_vae(),
        text_encoder=gemma2_text(tok),
        tokenizer=tok,
        transformer=motif_denoiser(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=3.0),
    )


# ---------------------------------------------------------------------------
# cases

CLIPS = tuple(
    {"video": [picture(10 * seed + i) for i in range(5)], "mask": [picture(0).convert("L")] * 5}
    for seed in (1, 2)
)
FACES = tuple(
    {
        "image": picture(seed),
        "pose_video": [picture(10 * seed + i) for i in range(5)],
        "face_video": [picture(20 * seed + i) for i in range(5)],
    }
    for seed in (1, 2)
)
REFERENCES = tuple({"reference_images": [picture(seed)]} for seed in (1, 2))
VACE = {**TEXT, "conditioning_scale": 3.0}
ANIMATE = {
    "height": 16,
    "width": 16,
    "segment_frame_length": 5,
    "max_sequence_length": 512,
    "guidance_scale": 3.0,
}
GUIDED = {"guidance_scale": 3.0, "negative_prompt": "a red circle"}
K5 = {**GUIDED, "height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 24}
COSMOS25 = {**MEDIUM, **GUIDED, "max_sequence_length": 32}
CASES: dict[str, Case] = {
    "wan_i2v": Case(make=wan_i2v, call=LOOKED, conditions=PICTURES),
    "wan22_i2v": Case(make=wan22_i2v, call=TEXT, conditions=PICTURES),
    "wan22_5b": Case(make=wan22_5b, call=MEDIUM),
    "wan22_5b_i2v": Case(
        make=partial(wan22_5b, "WanImageToVideoPipeline"), call=MEDIUM, conditions=PICTURES
    ),
    "wan_vace": Case(make=wan_vace, call=VACE, conditions=CLIPS),  # one prompt at a time
    # one prompt at a time
    "wan_vace_reference": Case(make=wan_vace, call=VACE, conditions=REFERENCES),
    "skyreels": Case(make=skyreels, call=TEXT),
    "skyreels_i2v": Case(make=skyreels_i2v, call=LOOKED, conditions=PICTURES),
    "skyreels_df": Case(
        refused="the frames of one call are at several noise levels; use SkyReelsV2Pipeline",
        make=skyreels_df,
        call=TEXT,
    ),
    # one prompt at a time: the frame rates of the rows are added to the wrong axis
    "skyreels_df_fps": Case(
        refused="the frames of one call are at several noise levels; use SkyReelsV2Pipeline",
        make=partial(skyreels_df, inject_sample_info=True),
        call=TEXT,
    ),
    "skyreels_df_async": Case(
        refused="the frames of one call are at several noise levels; use SkyReelsV2Pipeline",
        make=skyreels_df,
        call={**TEXT, "num_frames": 9, "ar_step": 1},
    ),
    # one prompt at a time, both of Kandinsky: the padding after a shorter text is not masked
    "kandinsky5_t2v": Case(make=partial(kandinsky5, "Kandinsky5T2VPipeline"), call=K5),
    # 17 frames, for the fifth of the latents and later ones rescale the first four
    "kandinsky5_i2v": Case(
        make=partial(kandinsky5, "Kandinsky5I2VPipeline"),
        call={**K5, "num_frames": 17},
        conditions=PICTURES,
    ),
    "cosmos1": Case(
        refused="its step is no Euler step of the prediction that its network makes;"
        " use Cosmos2_5_PredictBasePipeline",
        make=cosmos1,
        call={**TEXT, **GUIDED},
    ),
    "cosmos1_v2w": Case(
        refused="its conditioning frames are noised by each step's own sigma;"
        " use Cosmos2VideoToWorldPipeline",
        make=partial(cosmos1, "CosmosVideoToWorldPipeline", 5),
        call={**TEXT, **GUIDED},
        conditions=PICTURES,
    ),
    "cosmos2_v2w": Case(make=cosmos2_v2w, call={**MEDIUM, **GUIDED}, conditions=PICTURES),
    "cosmos25": Case(make=cosmos25, call=COSMOS25),
    "cosmos25_image": Case(make=cosmos25, call=COSMOS25, conditions=PICTURES),
    "motif_video": Case(make=motif_video, call=MEDIUM),
    "chronoedit": Case(make=chronoedit, call=LOOKED, conditions=PICTURES),
    "chronoedit_reasoning": Case(
        refused="a second loop on fewer frames follows the first;"
        " leave enable_temporal_reasoning out",
        make=chronoedit,
        call={
            **LOOKED,
            "num_frames": 9,
            "enable_temporal_reasoning": True,
            "num_temporal_reasoning_steps": 2,
        },
        conditions=PICTURES,
    ),
    "wan_animate": Case(make=wan_animate, call=ANIMATE, conditions=FACES),
    "wan_animate_segments": Case(
        refused="it runs a loop for each segment; give a video that is no longer than one",
        make=wan_animate,
        call=ANIMATE,
        conditions=tuple(
            {k: (2 * v)[:9] if k.endswith("video") else v for k, v in given.items()}
            for given in FACES
        ),
    ),
}
