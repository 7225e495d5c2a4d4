"""Classes that make another use of a model that has a case: its parts under another class."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import tiny
from tiny_parts import randomise, sd3_transformer, unet
from torch import nn

from zoo import flows, images, modular_parts, unets, videos, wans
from zoo.case import Case, picture
from zoo.images_parts import deep_vae
from zoo.videos_parts import siglip_vision
from zoo.wans_parts import wan_denoiser


def sibling(name: str | type, classic: Callable[[], Any], **others: Any) -> Any:
    """A pipeline by the name of its class with the components and the settings of another one, and
    others. Its VAE's weights are larger: a picture weighs more."""
    made, given = getattr(diffusers, name) if isinstance(name, str) else name, classic()
    settings = {key: value for key, value in given.config.items() if not key.startswith("_")}
    taken = inspect.signature(made.__init__).parameters
    parts = {**settings, **given.components, **others}
    if isinstance(parts.get("vae"), diffusers.AutoencoderKL) and "vae" not in others:
        randomise(parts["vae"], 9, 0.8)
    return made(**{key: part for key, part in parts.items() if key in taken})


def config_of(net: nn.Module, **changes: Any) -> dict[str, Any]:
    """The arguments that a network of diffusers was made of, with changes."""
    return {key: v for key, v in net.config.items() if not key.startswith("_")} | changes


def case(name: str, classic: Case, *conditions: dict[str, Any], **changes: Any) -> Case:
    """A case of the class with the parts and the call of another case. conditions: those of both
    prompts, left out where they are the other case's. changes: arguments that differ; None leaves
    one out."""
    call = {key: value for key, value in {**classic.call, **changes}.items() if value is not None}
    make = partial(sibling, name, classic.make)
    return Case(make=make, call=call, conditions=conditions or classic.conditions)


# ---------------------------------------------------------------------------
# conditions

PICTURES = flows.pictures()
MASKED = flows.MASKED
CLIPS = tuple({"video": [picture(10 * seed + i) for i in range(5)]} for seed in (1, 2))


def clips(frames: int, size: int = 16, name: str = "video") -> tuple[dict[str, Any], ...]:
    """A clip for each prompt, under the name that the pipeline gives it."""
    return tuple({name: [picture(30 * s + i, size) for i in range(frames)]} for s in (1, 2))


def both(*given: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """The conditions of several kinds together."""
    return tuple(
        {k: v for own in each for k, v in own.items()} for each in zip(*given, strict=True)
    )


# ---------------------------------------------------------------------------
# denoisers that see more than their latents


def sd3_inpaint():
    """Sixteen channels of latents, which the pipeline asks for."""
    net = config_of(sd3_transformer(), in_channels=16, out_channels=16)
    net = randomise(diffusers.SD3Transformer2DModel(**net), 90)
    vae = deep_vae(2, channels=16)
    return sibling("StableDiffusion3InpaintPipeline", tiny.sd3, transformer=net, vae=vae)


def lucy():
    """Wan's transformer, which sees the latents of the clip beside its own."""
    return sibling("LucyEditPipeline", tiny.wan21, transformer=wan_denoiser(in_channels=8))


def cogview4_control():
    given = images.cogview4()
    net = type(given.transformer)(**config_of(given.transformer, in_channels=8))
    return sibling("CogView4ControlPipeline", lambda: given, transformer=randomise(net, 91))


def easyanimate(name: str, channels: int):
    given = videos.easyanimate()
    net = type(given.transformer)(**config_of(given.transformer, in_channels=channels))
    return sibling(name, lambda: given, transformer=randomise(net, 92))


def latent_consistency(name: str):
    """Stable Diffusion whose UNet is told the scale of guidance."""
    net = diffusers.UNet2DConditionModel(**config_of(unet(16), time_cond_proj_dim=8))
    scheduler = diffusers.LCMScheduler(clip_sample=False, **unets.BETAS)
    return sibling(name, tiny.sd15, unet=randomise(net, 93), scheduler=scheduler)


def upscale():
    """A picture of a quarter of the size, noised, is shown to the UNet."""
    config = config_of(unet(16), in_channels=7, num_class_embeds=1000)
    return sibling(
        "StableDiffusionUpscalePipeline",
        tiny.sd15,
        unet=randomise(diffusers.UNet2DConditionModel(**config), 94),
        low_res_scheduler=diffusers.DDPMScheduler(**unets.BETAS),
        vae=deep_vae(3, shift_factor=None),
    )


def motif_i2v():
    """Its text encoder looks at the picture as well."""
    given, processor = wans.motif_video(), siglip_vision()["feature_extractor"]
    net = type(given.transformer)(**config_of(given.transformer, image_embed_dim=16))
    processor.size = {"height": 16, "width": 16}
    return sibling(
        "MotifVideoImage2VideoPipeline",
        lambda: given,
        transformer=randomise(net, 89),
        feature_extractor=processor,
    )


def animatediff_sdxl():
    parts = {key: part for key, part in tiny.sdxl().components.items() if part is not None}
    adapter = diffusers.MotionAdapter(**config_of(unets.animatediff().motion_adapter))
    adapter = randomise(adapter, 95)
    taken = inspect.signature(diffusers.AnimateDiffSDXLPipeline.__init__).parameters
    parts = {key: part for key, part in parts.items() if key in taken}
    return diffusers.AnimateDiffSDXLPipeline(**parts, motion_adapter=adapter)


def kolors(name: str):
    from diffusers.pipelines.kolors import pipeline_kolors_img2img as hidden

    return sibling(getattr(hidden, name), unets.kolors)


PERTURBED = "its loop changes the network's attention; use the class without PAG"
CONTROL = flows.pictures("control_image")
USUAL = {
    name: Case(make=partial(tiny.pipeline, name), call=tiny.CALLS[name]) for name in tiny.NAMES
}
FLUX, FLOW, IMAGE, UNET = USUAL["flux"], flows.CASES, images.CASES, unets.CASES
VIDEO, WAN = videos.CASES, wans.CASES
CASES: dict[str, Case] = {
    "flux_inpaint": case("FluxInpaintPipeline", FLUX, *MASKED),
    "flux_control_img2img": case(
        "FluxControlImg2ImgPipeline", FLOW["flux_control"], *both(PICTURES, CONTROL)
    ),
    "flux_control_inpaint": dataclasses.replace(
        case("FluxControlInpaintPipeline", FLOW["flux_control"], *both(MASKED, CONTROL)),
        refused="a mask hides latents that lie between other channels;"
        " use FluxControlPipeline or FluxFillPipeline",
    ),
    "flux_kontext_inpaint": case("FluxKontextInpaintPipeline", FLOW["flux_kontext"], *MASKED),
    "chroma_img2img": case("ChromaImg2ImgPipeline", FLOW["chroma"], *PICTURES),
    "chroma_inpaint": dataclasses.replace(
        case("ChromaInpaintPipeline", FLOW["chroma"], *MASKED),
        refused="diffusers 0.42 itself fails, it reads a setting that Chroma does not have;"
        " use ChromaImg2ImgPipeline",
    ),
    "flux2_klein_kv": case("Flux2KleinKVPipeline", FLOW["flux2_klein"]),
    "z_image_img2img": case("ZImageImg2ImgPipeline", FLOW["z_image"], *PICTURES),
    "z_image_inpaint": case("ZImageInpaintPipeline", FLOW["z_image"], *MASKED),
    "qwen_img2img": case("QwenImageImg2ImgPipeline", USUAL["qwenimage"], *PICTURES),
    "qwen_inpaint": case("QwenImageInpaintPipeline", USUAL["qwenimage"], *MASKED),
    "sd3_inpaint": Case(make=sd3_inpaint, call=flows.SIZE, conditions=MASKED),
    "wan_v2v": case("WanVideoToVideoPipeline", USUAL["wan21"], *clips(5), num_frames=None),
    "cogvideox_v2v": case(
        "CogVideoXVideoToVideoPipeline", VIDEO["cogvideox"], *clips(9), num_frames=None
    ),
    "cogvideox_fun": case(
        "CogVideoXFunControlPipeline",
        VIDEO["cogvideox_i2v"],
        *clips(9, name="control_video"),
        num_frames=None,
    ),
    "ltx2_i2v": case("LTX2ImageToVideoPipeline", VIDEO["ltx2"], *flows.pictures(size=32)),
    "krea2": Case(make=partial(sibling, "Krea2Pipeline", modular_parts.krea2), call=flows.CHAT),
    "ernie_image": Case(
        make=partial(sibling, "ErnieImagePipeline", modular_parts.ernie_image),
        call={**flows.SIZE, "use_pe": False},
    ),
    "ideogram4": Case(
        refused="it refuses the overlong prompt by which the length of texts is fixed;"
        " give its network as a module of your own",
        make=partial(sibling, "Ideogram4Pipeline", modular_parts.ideogram4),
        call={
            **flows.SIZE,
            "max_sequence_length": 64,
            "guidance_scale": 5.0,
            "guidance_schedule": None,
        },
    ),
    "sd15_pag": dataclasses.replace(
        case("StableDiffusionPAGPipeline", USUAL["sd15"]), refused=PERTURBED
    ),
    "sd3_pag": dataclasses.replace(
        case("StableDiffusion3PAGPipeline", USUAL["sd3"]), refused=PERTURBED
    ),
    "animatediff_v2v": case(
        "AnimateDiffVideoToVideoPipeline", UNET["animatediff"], *clips(4), num_frames=None
    ),
    "lucy_edit": Case(make=lucy, call=USUAL["wan21"].call, conditions=clips(5)),
    "cogview4_control": Case(make=cogview4_control, call=flows.SIZE, conditions=CONTROL),
    "easyanimate_control": Case(
        refused="diffusers 0.42 itself fails, it encodes texts with an argument that is gone;"
        " use EasyAnimatePipeline",
        make=partial(easyanimate, "EasyAnimateControlPipeline", 12),
        call=VIDEO["easyanimate"].call,
        conditions=clips(5, 32, "control_video"),
    ),
    "easyanimate_inpaint": Case(
        refused="diffusers 0.42 itself fails, it encodes texts with an argument that is gone;"
        " use EasyAnimatePipeline",
        make=partial(easyanimate, "EasyAnimateInpaintPipeline", 9),
        call=VIDEO["easyanimate"].call,
        conditions=clips(5, 32),
    ),
    "motif_i2v": Case(
        make=motif_i2v, call=WAN["motif_video"].call, conditions=flows.pictures(size=32)
    ),
    "sana_i2v": case("SanaImageToVideoPipeline", UNET["sana_video"], *flows.pictures(size=32)),
    "sana_sprint_img2img": Case(
        make=partial(sibling, "SanaSprintImg2ImgPipeline", unets.sana_sprint),
        call=UNET["sana_sprint"].call,
        conditions=flows.pictures(size=32),
    ),
    "kolors_img2img": Case(
        make=partial(kolors, "KolorsImg2ImgPipeline"),
        call={**UNET["kolors"].call, "strength": 0.8},
        conditions=PICTURES,
    ),
    "sd15_upscale": Case(make=upscale, conditions=flows.pictures(size=8)),
    "lcm": Case(
        make=partial(latent_consistency, "LatentConsistencyModelPipeline"), call=flows.SIZE
    ),
    "lcm_img2img": Case(
        make=partial(latent_consistency, "LatentConsistencyModelImg2ImgPipeline"),
        conditions=PICTURES,
    ),
    "animatediff_sdxl": Case(make=animatediff_sdxl, call={**flows.SIZE, "num_frames": 4}),
}
