"""Modular pipelines: blocks with the components of the classic cases.

A case has the call and the conditions of the classic one, without the guidance scale, which the
guider holds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import tiny
from diffusers import modular_pipelines

from zoo import flows, images, modular_parts, newer, unets, videos, wans
from zoo.case import Case

# arguments whose place is the guider
SCALE = re.compile("_scale$|guidance_rescale$")


def of(blocks: str, classic: Callable[[], Any], **others: Any) -> Any:
    """Blocks by name with the components and the settings of a classic pipeline, and others."""
    pipe, given = getattr(modular_pipelines, blocks)().init_pipeline(), classic()
    taken = {own.name for own in pipe.blocks.expected_components}
    settings = {own.name for own in pipe.blocks.expected_configs}
    parts = {key: part for key, part in given.components.items() if part is not None}
    pipe.update_components(
        **{key: part for key, part in parts.items() if key in taken},
        **{key: value for key, value in given.config.items() if key in settings - taken},
        **others,
    )
    return pipe


def case(blocks: str, classic: Case, **changes: Any) -> Case:
    """The blocks in place of a classic case's pipeline. changes: arguments of the call that
    differ."""
    call = {key: value for key, value in classic.call.items() if not SCALE.search(key)}
    make = partial(of, blocks, classic.make)
    return Case(make=make, call={**call, **changes}, conditions=classic.conditions)


def wan22_vace() -> Any:
    """Two networks, each with a control."""
    pipe = of("Wan22VaceBlocks", wans.wan_vace, transformer_2=wans.wan_vace().transformer)
    pipe.update_components(boundary_ratio=0.9)
    return pipe


UNGUIDED = diffusers.ClassifierFreeGuidance(guidance_scale=1.0)
USUAL = {
    name: Case(make=partial(tiny.pipeline, name), call=tiny.CALLS[name]) for name in tiny.NAMES
}

CASES: dict[str, Case] = {
    "modular_sd3": case("StableDiffusion3AutoBlocks", USUAL["sd3"], negative_prompt=""),
    "modular_sdxl": case("StableDiffusionXLAutoBlocks", USUAL["sdxl"]),
    "modular_flux": case("FluxAutoBlocks", USUAL["flux"]),
    "modular_wan": case("WanBlocks", USUAL["wan21"]),
    "modular_wan22": case("Wan22Blocks", USUAL["wan22"]),
    "modular_qwenimage": case("QwenImageAutoBlocks", USUAL["qwenimage"]),
    "modular_sd3_img2img": case(
        "StableDiffusion3AutoBlocks", unets.CASES["sd3_img2img"], negative_prompt=""
    ),
    "modular_sdxl_img2img": case("StableDiffusionXLAutoBlocks", unets.CASES["sdxl_img2img"]),
    "modular_sdxl_inpaint": case(
        "StableDiffusionXLAutoBlocks",
        unets.CASES["sdxl_inpaint"],
        strength=0.9,
    ),
    "modular_flux_img2img": case("FluxAutoBlocks", flows.CASES["flux_img2img"]),
    "modular_flux_kontext": case("FluxKontextAutoBlocks", flows.CASES["flux_kontext"]),
    "modular_flux2": case("Flux2AutoBlocks", flows.CASES["flux2"]),
    "modular_flux2_edit": case("Flux2AutoBlocks", flows.CASES["flux2_edit"]),
    "modular_flux2_klein": case("Flux2KleinAutoBlocks", flows.CASES["flux2_klein"]),
    "modular_flux2_klein_base": case("Flux2KleinBaseAutoBlocks", flows.CASES["flux2_klein"]),
    "modular_z_image": case("ZImageAutoBlocks", flows.CASES["z_image"]),
    "modular_qwen_edit": case("QwenImageEditAutoBlocks", images.CASES["qwen_edit"]),
    "modular_qwen_edit_plus": case("QwenImageEditPlusAutoBlocks", images.CASES["qwen_edit_plus"]),
    "modular_wan_i2v": case("WanImage2VideoAutoBlocks", wans.CASES["wan_i2v"]),
    "modular_wan22_i2v": case("Wan22Image2VideoBlocks", wans.CASES["wan22_i2v"]),
    "modular_ltx": case("LTXAutoBlocks", videos.CASES["ltx"]),
    "modular_ltx_i2v": case("LTXAutoBlocks", videos.CASES["ltx_i2v"]),
    "modular_ltx2": case("LTX2AutoBlocks", videos.CASES["ltx2_cfg"]),
    "modular_krea2": Case(make=modular_parts.krea2, call=flows.CHAT),
    "modular_krea2_turbo": Case(
        make=partial(modular_parts.krea2, "Krea2TurboAutoBlocks"), call=flows.CHAT
    ),
    "modular_ernie_image": Case(make=modular_parts.ernie_image, call=flows.SIZE),
    "modular_anima": Case(make=modular_parts.anima, call=flows.CHAT),
    "modular_wan22_vace": dataclasses.replace(
        case("Wan22VaceBlocks", wans.CASES["wan_vace"]), make=wan22_vace
    ),
    "modular_hyvideo15": dataclasses.replace(
        case("HunyuanVideo15AutoBlocks", videos.CASES["hyvideo15_cfg"], negative_prompt="word"),
        refused="a step of flow_grpo has no gradient there, the cause is not known;"
        " use HunyuanVideo15Pipeline",
    ),
    "modular_ideogram4": Case(
        refused="it refuses the overlong prompt by which the length of texts is fixed;"
        " give its network as a module of your own",
        make=modular_parts.ideogram4,
        call={**flows.SIZE, "max_sequence_length": 64},
    ),
    "modular_qwenimage21": Case(
        make=partial(of, "QwenImage21AutoBlocks", newer.qwenimage21),
        call={"height": 64, "width": 64, "use_kv_cache": False, "negative_prompt": "a circle"},
    ),
    # without guidance, for the loop's own body runs in every call
    "modular_helios": dataclasses.replace(
        case("HeliosAutoBlocks", newer.CASES["helios"]),
        make=partial(of, "HeliosAutoBlocks", newer.helios, guider=UNGUIDED),
    ),
    "modular_echo": Case(
        refused="its loop has no scheduler, it moves the latents itself;"
        " give its network as a module of your own",
        make=partial(modular_parts.assembled, "EchoBlocks"),
    ),
}
