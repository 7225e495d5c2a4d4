"""Image pipelines of recent models: editing, distilled guidance, guiders, unusual schedules."""

from __future__ import annotations

from typing import Any

import diffusers
from tiny_parts import (
    clip_text,
    denoiser,
    image_vae,
    qwen_text,
    randomise,
    t5_text,
    tokenizer,
    wan_vae,
)

from zoo.case import Case, picture
from zoo.images_parts import (
    AllowAll,
    causal_text,
    deep_vae,
    deep_video_vae,
    gemma_text,
    hunyuan_vae,
    vision_processor,
    vision_text,
    vision_tokenizer,
)

SMALL = {"height": 16, "width": 16}
MEDIUM = {"height": 32, "width": 32}
LARGE = {"height": 64, "width": 64}
PICTURES = ({"image": picture(1)}, {"image": picture(2)})
PICTURES_32 = tuple({"image": picture(i, 128)} for i in (1, 2))


def flow(**config: Any):
    """The flow matching scheduler whose shift follows the number of tokens."""
    return diffusers.FlowMatchEulerDiscreteScheduler(
        **{"shift": 1.0, "use_dynamic_shifting": True, **config}
    )


def qwen_flow():
    return flow(base_shift=0.5, max_shift=0.9, shift_terminal=0.02, time_shift_type="exponential")


# ---------------------------------------------------------------------------
# Qwen


def qwen_edits(kind: str, vae: dict[str, Any], net: dict[str, Any]):
    """An editing pipeline of Qwen by the name of its class."""
    tok = vision_tokenizer()
    return getattr(diffusers, kind)(
        scheduler=qwen_flow(),
        vae=deep_video_vae("AutoencoderKLQwenImage", **vae),
        text_encoder=vision_text(tok),
        tokenizer=tok,
        processor=vision_processor(tok),
        transformer=denoiser(
            "QwenImageTransformer2DModel",
            patch_size=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
            **{"in_channels": 16, "out_channels": 4, **net},
        ),
    )


def qwen_edit():
    return qwen_edits("QwenImageEditPipeline", {"halvings": 5, "gain": 1.0}, {})


def qwen_edit_plus():
    return qwen_edits("QwenImageEditPlusPipeline", {"halvings": 5, "gain": 1.0}, {})


def qwen_layered():
    """Eight channels of latents, for four would be taken for those of an RGBA picture."""
    return qwen_edits(
        "QwenImageLayeredPipeline",
        {"halvings": 6, "channels": 8, "input_channels": 4},
        {
            "in_channels": 32,
            "out_channels": 8,
            "use_additional_t_cond": True,
            "use_layer3d_rope": True,
        },
    )


# ---------------------------------------------------------------------------
# CogView


def cogview3plus():
    tok = tokenizer("t5")
    return diffusers.CogView3PlusPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok),
        vae=image_vae(),
        transformer=denoiser(
            "CogView3PlusTransformer2DModel",
            in_channels=4,
            out_channels=4,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            pos_embed_max_size=8,
            sample_size=8,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            clip_sample=False,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=4.0,
            timestep_spacing="trailing",
        ),
    )


def cogview4():
    tok = tokenizer("t5", 64)
    return diffusers.CogView4Pipeline(
        tokenizer=tok,
        text_encoder=causal_text("GlmModel", tok),
        vae=image_vae(),
        transformer=denoiser(
            "CogView4Transformer2DModel",
            in_channels=4,
            out_channels=4,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            pos_embed_max_size=8,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
        scheduler=flow(base_shift=0.25, max_shift=0.75, time_shift_type="linear"),
    )


# ---------------------------------------------------------------------------
# HunyuanImage


def hunyuan(guider=None, **net: Any):
    """HunyuanImage 2.1 with short texts and without its second stream of text."""
    tok, t5 = tokenizer("qwen", 2048), tokenizer("t5")
    pipe = diffusers.HunyuanImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=hunyuan_vae(),
        text_encoder=qwen_text(tok),
        tokenizer=tok,
        text_encoder_2=t5_text(t5),
        tokenizer_2=t5,
        transformer=denoiser(
            "HunyuanImageTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_single_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=(1, 1),
            text_embed_dim=16,
            rope_axes_dim=(8, 8),
            **net,
        ),
        guider=guider,
    )
    pipe.tokenizer_max_length = 24
    return pipe


def hyimage():
    return hunyuan(guidance_embeds=True)


def hyimage_meanflow():
    return hunyuan(guidance_embeds=True, use_meanflow=True)


def hyimage_apg():
    """The guider that comes with HunyuanImage 2.1, which projects from the third step on here."""
    from diffusers.guiders import AdaptiveProjectedMixGuidance

    return hunyuan(AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2))


# ---------------------------------------------------------------------------
# one text encoder each


def prx():
    from diffusers.models import PRXTransformer2DModel
    from diffusers.pipelines.prx import PRXPipeline

    tok = tokenizer("t5")
    net = PRXTransformer2DModel(
        in_channels=4,
        patch_size=2,
        context_in_dim=16,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[8, 8],
    )
    return PRXPipeline(
        transformer=randomise(net, 25),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=gemma_text(tok),
        tokenizer=tok,
        vae=image_vae(0.4, 0.1),
        default_sample_size=16,
    )


def bria():
    tok = tokenizer("t5")
    return diffusers.BriaPipeline(
        transformer=denoiser(
            "BriaTransformer2DModel",
            patch_size=1,
            in_channels=16,
            num_single_layers=1,
            joint_attention_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        scheduler=flow(),
        vae=image_vae(0.4, 0.1),
        text_encoder=t5_text(tok),
        tokenizer=tok,
    )


def bria_fibo():
    tok = tokenizer("t5", 64)
    return diffusers.BriaFiboPipeline(
        transformer=denoiser(
            "BriaFiboTransformer2DModel",
            patch_size=1,
            in_channels=4,
            num_single_layers=1,
            joint_attention_dim=32,
            text_encoder_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        scheduler=flow(),
        vae=deep_video_vae("AutoencoderKLWan", 4),
        # the pipeline writes the token 128000 for an empty prompt
        text_encoder=causal_text("SmolLM3ForCausalLM", tok, vocab_size=128_001),
        tokenizer=tok,
    )


def longcat_image():
    tok = vision_tokenizer()
    pipe = diffusers.LongCatImagePipeline(
        scheduler=flow(),
        vae=deep_vae(2, channels=16),
        text_encoder=vision_text(tok),
        tokenizer=tok,
        text_processor=vision_processor(tok),
        transformer=denoiser(
            "LongCatImageTransformer2DModel",
            in_channels=64,
            num_single_layers=1,
            joint_attention_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
    )
    pipe.tokenizer_max_length = 24
    return pipe


# ---------------------------------------------------------------------------
# Kandinsky 5, Cosmos


def kandinsky5(kind: str, pictures: bool = False):
    """An image pipeline of Kandinsky 5 by the name of its class, which may make 32 x 32 pixels."""
    tok, clip = vision_tokenizer(), tokenizer("clip", 77)
    pipe = getattr(diffusers, kind)(
        transformer=denoiser5(visual_cond=pictures),
        vae=deep_vae(4, shift_factor=None),
        text_encoder=vision_text(tok),
        tokenizer=vision_processor(tok, two_and_a_half=True),
        text_encoder_2=clip_text(clip),
        tokenizer_2=clip,
        scheduler=flow(shift=3.0, use_dynamic_shifting=False),
    )
    pipe.resolutions = [(32, 32)]
    pipe.prompt_template_encode_start_idx = 40  # 41 in diffusers 0.40, whose template has a typo
    return pipe


def denoiser5(**config: Any):
    net = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=16,
        time_dim=16,
        patch_size=(1, 2, 2),
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        **config,
    )
    return randomise(net, 25)


def kandinsky5_t2i():
    return kandinsky5("Kandinsky5T2IPipeline")


def kandinsky5_i2i():
    return kandinsky5("Kandinsky5I2IPipeline", pictures=True)


def cosmos2_t2i():
    tok = tokenizer("t5")
    return diffusers.Cosmos2TextToImagePipeline(
        text_encoder=t5_text(tok),
        tokenizer=tok,
        transformer=denoiser(
            "CosmosTransformer3DModel",
            in_channels=4,
            out_channels=4,
            mlp_ratio=2,
            text_embed_dim=16,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            extra_pos_embed_type=None,
        ),
        vae=wan_vae(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        safety_checker=AllowAll(),
    )


# ---------------------------------------------------------------------------

QWEN_CALL = {"height": 128, "width": 128, "true_cfg_scale": 3.0, "negative_prompt": "word"}
CASES: dict[str, Case] = {
    "qwen_edit": Case(make=qwen_edit, call=QWEN_CALL, conditions=PICTURES),
    "qwen_edit_plus": Case(  # one prompt at a time
        make=qwen_edit_plus, call=QWEN_CALL, conditions=PICTURES
    ),
    "qwen_layered": Case(
        refused="diffusers 0.42 itself fails where it gives latents; use QwenImageEditPipeline",
        make=qwen_layered,
        call={"layers": 2, "true_cfg_scale": 3.0, "negative_prompt": "word"},
        conditions=tuple({"image": picture(i).convert("RGBA")} for i in (1, 2)),
    ),
    "cogview3plus": Case(make=cogview3plus, call={**SMALL, "max_sequence_length": 12}),
    "cogview4": Case(make=cogview4, call=SMALL),
    "hyimage": Case(make=hyimage, call=SMALL),
    "hyimage_meanflow": Case(
        refused="the network is told the next noise level, which a single velocity does not name;"
        " use the weights that are not distilled",
        make=hyimage_meanflow,
        call=SMALL,
    ),
    "hyimage_apg": Case(
        refused="its guidance keeps a running mean over the steps;"
        " give it a guider without momentum",
        make=hyimage_apg,
        call=SMALL,
    ),
    "prx": Case(  # one prompt at a time
        make=prx, call={**SMALL, "use_resolution_binning": False}
    ),
    "bria": Case(make=bria, call={**SMALL, "max_sequence_length": 12}),
    "bria_fibo": Case(
        make=bria_fibo, call={**LARGE, "negative_prompt": "word", "max_sequence_length": 12}
    ),
    "longcat_image": Case(make=longcat_image, call={**SMALL, "enable_prompt_rewrite": False}),
    "kandinsky5_t2i": Case(make=kandinsky5_t2i, call=MEDIUM),
    "kandinsky5_i2i": Case(make=kandinsky5_i2i, call=MEDIUM, conditions=PICTURES_32),
    "cosmos2_t2i": Case(
        make=cosmos2_t2i,
        call={**MEDIUM, "max_sequence_length": 12, "negative_prompt": "word"},
    ),
}
