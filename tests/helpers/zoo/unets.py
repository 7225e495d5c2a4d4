"""Epsilon and v prediction: Stable Diffusion's UNets, and the transformers that came after."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import tiny
import transformers
from tiny_parts import denoiser, image_vae, randomise, t5_text, tokenizer, unet, wan_vae

from zoo.case import Case, picture
from zoo.images_parts import causal_text, deep_vae
from zoo.unets_parts import (
    allegro_vae,
    bert_text,
    clip_eyes,
    dc_vae,
    glm_text,
    glm_tokenizer,
    svd_unet,
    svd_vae,
)

SIZE = {"height": 16, "width": 16}
PICTURES = ({"image": picture(1)}, {"image": picture(2)})
MASKED = tuple(
    {**given, "mask_image": picture(seed).convert("L")}
    for given, seed in zip(PICTURES, (3, 4), strict=True)
)
# the training noise of Stable Diffusion
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


# ---------------------------------------------------------------------------
# Stable Diffusion


def stable(base: str, name: str, channels: int = 4, **changes: Any):
    """A pipeline by the name of its class from the parts of tiny's base, whose UNet sees that many
    channels."""
    parts = {k: v for k, v in getattr(tiny, base)().components.items() if v is not None}
    if base == "sd15":
        parts |= {"safety_checker": None, "requires_safety_checker": False}
        parts["feature_extractor"] = None
    if base == "sdxl":
        parts["add_watermarker"] = False
    randomise(parts["vae"], 9, 0.8)  # a picture weighs more
    if channels != 4:
        config = {k: v for k, v in parts["unet"].config.items() if not k.startswith("_")}
        net = diffusers.UNet2DConditionModel(**config | {"in_channels": channels})
        parts["unet"] = randomise(net, 41)
    return getattr(diffusers, name)(**parts | changes)


def sd2_v():
    return tiny.sd15(
        diffusers.DDIMScheduler(
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
            **BETAS,
        )
    )


def pix2pix():
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1, **BETAS)
    return stable("sd15", "StableDiffusionInstructPix2PixPipeline", 8, scheduler=scheduler)


def sd15_controlnet():
    net = diffusers.ControlNetModel.from_unet(unet(16), conditioning_embedding_out_channels=(8, 16))
    return stable("sd15", "StableDiffusionControlNetPipeline", controlnet=randomise(net, 42))


def kolors():
    # diffusers hides the class where sentencepiece, which this tokenizer does without, is missing
    from diffusers.pipelines.kolors.pipeline_kolors import KolorsPipeline

    tok = glm_tokenizer()
    config = {k: v for k, v in unet(32, xl=True).config.items() if not k.startswith("_")}
    config |= {"encoder_hid_dim": 16, "encoder_hid_dim_type": "text_proj"}
    return KolorsPipeline(
        vae=image_vae(),
        text_encoder=glm_text(tok),
        tokenizer=tok,
        unet=randomise(diffusers.UNet2DConditionModel(**config), 43),
        scheduler=diffusers.EulerDiscreteScheduler(
            num_train_timesteps=1100,
            timestep_spacing="leading",
            steps_offset=1,
            **{**BETAS, "beta_end": 0.014},
        ),
    )


def animatediff():
    parts = {name: getattr(tiny.sd15(), name) for name in ("vae", "text_encoder", "tokenizer")}
    adapter = diffusers.MotionAdapter(
        block_out_channels=(16, 32),
        motion_layers_per_block=1,
        motion_norm_num_groups=8,
        motion_num_attention_heads=2,
        motion_max_seq_length=8,
    )
    return diffusers.AnimateDiffPipeline(
        **parts,
        unet=unet(16),
        motion_adapter=randomise(adapter, 44),
        scheduler=diffusers.DDIMScheduler(
            beta_schedule="linear", clip_sample=False, steps_offset=1
        ),
    )


def svd():
    return diffusers.StableVideoDiffusionPipeline(
        vae=svd_vae(),
        image_encoder=clip_eyes(),
        unet=svd_unet(),
        scheduler=diffusers.EulerDiscreteScheduler(
            prediction_type="v_prediction",
            timestep_type="continuous",
            timestep_spacing="leading",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            steps_offset=1,
            **BETAS,
        ),
        feature_extractor=transformers.CLIPImageProcessor(),
    )


# ---------------------------------------------------------------------------
# transformers that predict noise


def pixart(name: str, sample_size: int = 8):
    """A pipeline of PixArt by the name of its class."""
    tok = tokenizer("t5")
    return getattr(diffusers, name)(
        tokenizer=tok,
        text_encoder=t5_text(tok),
        vae=image_vae(),
        transformer=denoiser(
            "PixArtTransformer2DModel",
            num_attention_heads=3,
            cross_attention_dim=48,
            in_channels=4,
            out_channels=8,
            caption_channels=16,
            sample_size=sample_size,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02),
    )


def pixart_alpha():
    """As at 1024 pixels, where the network is told the size of the picture."""
    return pixart("PixArtAlphaPipeline", sample_size=128)


def pixart_sigma():
    return pixart("PixArtSigmaPipeline")


def hunyuandit():
    tok, t5 = tokenizer("clip", 77), tokenizer("t5", 256)
    return diffusers.HunyuanDiTPipeline(
        vae=image_vae(),
        text_encoder=bert_text(tok),
        tokenizer=tok,
        text_encoder_2=t5_text(t5),
        tokenizer_2=t5,
        transformer=denoiser(
            "HunyuanDiT2DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=32,
            cross_attention_dim=16,
            cross_attention_dim_t5=16,
            pooled_projection_dim=16,
        ),
        scheduler=diffusers.DDPMScheduler(
            beta_start=0.00085,
            beta_end=0.03,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            clip_sample=False,
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def latte():
    tok = tokenizer("t5")
    return diffusers.LattePipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok),
        vae=image_vae(),
        transformer=denoiser(
            "LatteTransformer3DModel",
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            caption_channels=16,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            video_length=4,
        ),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


def allegro():
    tok = tokenizer("t5")
    return diffusers.AllegroPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok),
        vae=allegro_vae(),
        transformer=denoiser(
            "AllegroTransformer3DModel",
            attention_head_dim=24,
            in_channels=4,
            out_channels=4,
            cross_attention_dim=48,
            sample_height=4,
            sample_width=4,
            sample_frames=2,
            caption_channels=16,
        ),
        scheduler=diffusers.EulerAncestralDiscreteScheduler(),
    )


# ---------------------------------------------------------------------------
# transformers that predict velocity


def flow_solver(shift: float = 3.0):
    return diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def sana_like(name: str, net: str, vae: Any, scheduler: Any, **changes: Any):
    """A pipeline of Sana by the name of its class, and of its network."""
    tok = tokenizer("t5", 512)
    return getattr(diffusers, name)(
        tokenizer=tok,
        text_encoder=causal_text("Gemma2Model", tok),
        vae=vae,
        transformer=denoiser(
            net,
            in_channels=4,
            out_channels=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=16,
            sample_size=8,
            **changes,
        ),
        scheduler=scheduler,
    )


def sana():
    return sana_like("SanaPipeline", "SanaTransformer2DModel", dc_vae(), flow_solver())


def sana_sprint():
    return sana_like(
        "SanaSprintPipeline",
        "SanaTransformer2DModel",
        dc_vae(),
        diffusers.SCMScheduler(),
        guidance_embeds=True,
        qk_norm="rms_norm_across_heads",
    )


def sana_video():
    return sana_like(
        "SanaVideoPipeline", "SanaVideoTransformer3DModel", wan_vae(), flow_solver(8.0)
    )


def auraflow():
    tok = tokenizer("t5")
    net = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pos_embed_max_size=16,
    )
    return diffusers.AuraFlowPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok, umt5=True),
        vae=image_vae(),
        transformer=randomise(net, 45),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def lumina_next():
    tok = tokenizer("t5")
    net = diffusers.LuminaNextDiT2DModel(
        sample_size=4,
        hidden_size=32,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=16,
        num_layers=2,
        num_attention_heads=2,
    )
    return diffusers.LuminaPipeline(
        transformer=randomise(net, 46),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=deep_vae(shift_factor=None),
        text_encoder=causal_text("GemmaModel", tok),
        tokenizer=tok,
    )


def lumina2():
    tok = tokenizer("t5", 64)
    net = diffusers.Lumina2Transformer2DModel(
        sample_size=4,
        in_channels=4,
        hidden_size=32,
        num_refiner_layers=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(8, 4, 4),
        axes_lens=(64, 8, 8),
        cap_feat_dim=16,
        num_layers=2,
        num_attention_heads=2,
    )
    return diffusers.Lumina2Pipeline(
        transformer=randomise(net, 47),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=deep_vae(),
        text_encoder=causal_text("Gemma2Model", tok),
        tokenizer=tok,
    )


# ---------------------------------------------------------------------------
# cases

TEXT = {**SIZE, "max_sequence_length": 12}
CAPTION = {**TEXT, "clean_caption": False, "use_resolution_binning": False}
MEDIUM = {"height": 32, "width": 32, "max_sequence_length": 12}
SANA = {**MEDIUM, "use_resolution_binning": False}
CASES: dict[str, Case] = {
    "sd15_rescale": Case(make=tiny.sd15, call={**SIZE, "guidance_rescale": 0.7}),
    "sd2_v": Case(make=sd2_v, call=SIZE),
    "sd15_img2img": Case(
        make=partial(stable, "sd15", "StableDiffusionImg2ImgPipeline"), conditions=PICTURES
    ),
    "sd15_inpaint": Case(
        make=partial(stable, "sd15", "StableDiffusionInpaintPipeline", 9),
        call=SIZE,
        conditions=MASKED,
    ),
    "sd15_controlnet": Case(
        make=sd15_controlnet, call={**SIZE, "guidance_scale": 1.0}, conditions=PICTURES
    ),
    "pix2pix": Case(make=pix2pix, conditions=PICTURES),
    "sdxl_img2img": Case(
        make=partial(stable, "sdxl", "StableDiffusionXLImg2ImgPipeline"),
        call={"strength": 0.8},
        conditions=PICTURES,
    ),
    "sdxl_inpaint": Case(
        make=partial(stable, "sdxl", "StableDiffusionXLInpaintPipeline"),
        call=SIZE,
        conditions=MASKED,
    ),
    "sdxl_pix2pix": Case(
        make=partial(stable, "sdxl", "StableDiffusionXLInstructPix2PixPipeline", 8),
        call=SIZE,
        conditions=PICTURES,
    ),
    "sd3_img2img": Case(
        make=partial(stable, "sd3", "StableDiffusion3Img2ImgPipeline"),
        call=SIZE,
        conditions=PICTURES,
    ),
    "kolors": Case(make=kolors, call=TEXT),
    "animatediff": Case(make=animatediff, call={**SIZE, "num_frames": 4}),
    "svd": Case(
        make=svd,
        call={**SIZE, "num_frames": 4, "decode_chunk_size": 4},
        conditions=PICTURES,
        prompts=False,
    ),
    "pixart_sigma": Case(make=pixart_sigma, call=CAPTION),
    "pixart_alpha": Case(make=pixart_alpha, call=CAPTION),
    "sana": Case(make=sana, call=SANA),
    "sana_sprint": Case(
        make=sana_sprint,
        call={**SANA, "intermediate_timesteps": None},
    ),
    "sana_video": Case(make=sana_video, call={**SANA, "frames": 5}),
    "auraflow": Case(make=auraflow, call=TEXT),
    "lumina_next": Case(make=lumina_next, call={**MEDIUM, "clean_caption": False}),
    "lumina2": Case(make=lumina2, call={**MEDIUM, "max_sequence_length": 48}),
    "hunyuandit": Case(make=hunyuandit, call={**SIZE, "use_resolution_binning": False}),
    # one prompt at a time: its padding is cut off when alone, zeroed in company
    "latte": Case(make=latte, call={**SIZE, "video_length": 4, "clean_caption": False}),
    "allegro": Case(make=allegro, call={**TEXT, "num_frames": 8, "clean_caption": False}),
}
