"""Networks beside the denoiser: ControlNets, which run in the loop, and adapters, which run before
it."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import tiny
from tiny_parts import flux_transformer, qwen_transformer, randomise, sd3_transformer, unet
from torch import nn

from zoo import flows
from zoo.case import Case
from zoo.siblings import (
    CONTROL,
    FLUX,
    PICTURES,
    USUAL,
    both,
    case,
    config_of,
    sibling,
)


def control(base: nn.Module, **config: Any) -> nn.Module:
    """A ControlNet of a UNet."""
    how = {"conditioning_embedding_out_channels": (8, 16), **config}
    return randomise(diffusers.ControlNetModel.from_unet(base, **how), 42)


def flux_control() -> nn.Module:
    return randomise(diffusers.FluxControlNetModel(**of(flux_transformer(), "FluxControlNetModel")))


def of(base: nn.Module, name: str, **changes: Any) -> dict[str, Any]:
    """Those arguments of a denoiser that a ControlNet by the name of its class takes."""
    taken = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {k: v for k, v in config_of(base).items() if k in taken} | changes


def sd3_control(**changes: Any) -> nn.Module:
    base = sd3_transformer()
    net = diffusers.SD3ControlNetModel(**of(base, "SD3ControlNetModel", **changes))
    return randomise(net, 43)


def qwen_control(**changes: Any) -> nn.Module:
    base = qwen_transformer()
    name = "QwenImageControlNetModel"
    return randomise(diffusers.QwenImageControlNetModel(**of(base, name, **changes)), 44)


def z_image_control(transformer: nn.Module) -> nn.Module:
    net = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return diffusers.ZImageControlNetModel.from_transformer(randomise(net, 45), transformer)


def z_image_controlled() -> Any:
    given = flows.z_image()
    return sibling(
        "ZImageControlNetPipeline", lambda: given, controlnet=z_image_control(given.transformer)
    )


def adapted(cross: int, **how: Any) -> nn.Module:
    """A UNet whose first blocks have attention, where they take what an adapter says."""
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    config = config_of(unet(cross, **how), down_block_types=down, up_block_types=up)
    return randomise(diffusers.UNet2DConditionModel(**config), 47)


def adapter(factor: int) -> nn.Module:
    net = diffusers.T2IAdapter(
        in_channels=3,
        channels=[16, 32],
        num_res_blocks=1,
        downscale_factor=factor,
    )
    return randomise(net, 46)


def swapped(pipe: Any, **parts: Any) -> Any:
    """The pipeline with other components."""
    pipe.register_modules(**parts)
    return pipe


def with_net(name: str, classic: Case, net: Any, key: str = "controlnet", *conditions: Any, **how):
    """A case of the class with the parts of another and one network more."""
    made = case(name, classic, *conditions, **how)

    def make() -> Any:
        return sibling(name, classic.make, **{key: net()})

    return Case(make=make, call=made.call, conditions=made.conditions)


SD15, SDXL = USUAL["sd15"], USUAL["sdxl"]
CHEAP = {"guidance_scale": 1.0}
CASES: dict[str, Case] = {
    "flux_controlnet": with_net(
        "FluxControlNetPipeline", FLUX, flux_control, "controlnet", *CONTROL
    ),
    "sd3_controlnet": with_net(
        "StableDiffusion3ControlNetPipeline",
        USUAL["sd3"],
        sd3_control,
        "controlnet",
        *CONTROL,
        **CHEAP,
    ),
    "qwen_controlnet": with_net(
        "QwenImageControlNetPipeline",
        USUAL["qwenimage"],
        qwen_control,
        "controlnet",
        *CONTROL,
        true_cfg_scale=1.0,
    ),
    "z_image_controlnet": Case(
        refused="diffusers 0.42 itself fails where its ControlNet keeps a gradient;"
        " use ZImagePipeline",
        make=z_image_controlled,
        call={**flows.CHAT, **CHEAP},
        conditions=CONTROL,
    ),
    "sd15_controlnet_img2img": with_net(
        "StableDiffusionControlNetImg2ImgPipeline",
        SD15,
        lambda: control(unet(16)),
        "controlnet",
        *both(PICTURES, CONTROL),
        **CHEAP,
    ),
    "sdxl_controlnet": with_net(
        "StableDiffusionXLControlNetPipeline",
        SDXL,
        lambda: control(unet(32, xl=True)),
        "controlnet",
        *PICTURES,
        **CHEAP,
    ),
    "sd15_adapter": with_net(
        "StableDiffusionAdapterPipeline",
        Case(make=lambda: swapped(tiny.sd15(), unet=adapted(16)), call=SD15.call),
        lambda: adapter(2),
        "adapter",
        *PICTURES,
    ),
    "sdxl_adapter": with_net(
        "StableDiffusionXLAdapterPipeline",
        Case(make=lambda: swapped(tiny.sdxl(), unet=adapted(32, xl=True)), call=SDXL.call),
        lambda: adapter(2),
        "adapter",
        *PICTURES,
    ),
}
