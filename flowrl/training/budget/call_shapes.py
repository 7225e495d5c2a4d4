"""What a pipeline's call gives its networks, by shapes alone, of the pipelines of configs/model.

For all others this is inferred from the pipeline itself (flowrl/policy/pipeline.py), which needs
its weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowrl.training.budget.architecture import Architecture, class_of

Size = tuple[tuple[int, ...], torch.dtype | None]  # of one row; None: the networks' dtype
FP32 = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCall:
    """One call of the network in an iteration of the loop. blocks: copies of the batch in it (of
    guidance). rows: arguments with a row a prompt; shared: the others."""

    rows: dict[tuple[Any, ...], Size | list[Any]]
    shared: dict[tuple[Any, ...], Any]
    blocks: int = 1
    latents: str = "hidden_states"
    time: str = "t"
    scaled: str = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A text encoder: how many tokens of a prompt it reads, and whether all its layers answer."""

    part: str
    tokens: int
    hidden_states: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShapes:
    """latent: of one row as the sampler sees it; z: as the VAE gets it; image: what it makes of
    it; media: the pipeline's. axes: which axis of image each of media is. shifted: whether latents
    are shifted before the VAE."""

    pipeline: str
    network: str
    latent: tuple[int, ...]
    z: tuple[int, ...]
    image: tuple[int, ...]
    media: tuple[int, ...]
    calls: tuple[NetworkCall, ...]
    encoders: tuple[Encoder, ...]
    weights: tuple[float, ...]
    cond: int = 0
    rule: str = "linear"
    prediction: str = "flow"
    axes: tuple[int, ...] = (0, 1, 2)
    shifted: bool = False
    time_dtype: torch.dtype | None = FP32


@dataclass(slots=True)
class _Asked:
    """An architecture and the arguments of its pipeline's call, with the class's own defaults."""

    a: Architecture
    call: Mapping[str, Any]
    net: dict[str, Any] = field(default_factory=dict)
    vae: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        part = "unet" if "unet" in self.a.parts else "transformer"
        self.net, self.vae = self.a.config(part), self.a.config("vae")

    def get(self, name: str) -> Any:
        """An argument of the call, or its default."""
        parameters = inspect.signature(class_of(self.a.pipeline).__call__).parameters
        own = self.call.get(name)
        return parameters[name].default if own is None and name in parameters else own

    def guided(self, name: str = "guidance_scale") -> float | None:
        """The scale of classifier-free guidance, where it is on."""
        scale = float(self.get(name) or 0)
        return scale if scale > 1 else None

    def pixels(self, usual: int) -> tuple[int, int]:
        """Height and width of the media."""
        return int(self.get("height") or usual), int(self.get("width") or usual)

    def tokens(self, part: str) -> int:
        """The longest prompt that a text encoder of CLIP reads."""
        return int(self.a.config(part)["max_position_embeddings"])


def call_shapes(a: Architecture, call: Mapping[str, Any]) -> CallShapes:
    """The calls of a pipeline; ValueError for one that is not written down here."""
    if a.pipeline not in PIPELINES or "transformer_2" in a.parts:
        raise ValueError(
            f"flowrl budget knows the calls of {', '.join(PIPELINES)} with one denoiser, and"
            f" {a.source} is a {a.pipeline}"
        )
    return PIPELINES[a.pipeline](_Asked(a, call))


def _guidance(scale: float | None, *, cond: int) -> dict[str, Any]:
    """Weights of the branches of classifier-free guidance."""
    if scale is None:
        return {"weights": (1.0,), "cond": 0}
    pair = (scale, 1 - scale)
    return {"weights": pair if cond == 0 else pair[::-1], "cond": cond}


def _image(of: _Asked, scale: int, usual: int) -> dict[str, Any]:
    """Latents (C, h, w) that the sampler sees as the VAE does."""
    height, width = of.pixels(usual)
    channels = of.vae["latent_channels"]
    z = (channels, height // scale, width // scale)
    image = (3, z[1] * scale, z[2] * scale)
    return {"latent": z, "z": z, "image": image, "media": image}


def _kl_scale(vae: Mapping[str, Any]) -> int:
    """Pixels a latent, of an AutoencoderKL."""
    return 2 ** (len(vae["block_out_channels"]) - 1)


def _sd3(of: _Asked) -> CallShapes:
    scale, guided = _kl_scale(of.vae), of.guided()
    clips = [part for part in ("text_encoder", "text_encoder_2") if part in of.a.parts]
    clip, t5 = of.tokens("text_encoder"), int(of.get("max_sequence_length"))
    encoders = [Encoder(part=part, tokens=clip, hidden_states=True) for part in clips]
    if "text_encoder_3" in of.a.parts:
        encoders.append(Encoder(part="text_encoder_3", tokens=t5))
    call = NetworkCall(
        blocks=2 if guided else 1,
        rows={
            ("encoder_hidden_states",): ((clip + t5, of.net["joint_attention_dim"]), None),
            ("pooled_projections",): ((of.net["pooled_projection_dim"],), None),
        },
        shared={("joint_attention_kwargs",): None, ("return_dict",): False},
    )
    return CallShapes(
        pipeline=of.a.pipeline,
        network="transformer",
        calls=(call,),
        encoders=tuple(encoders),
        shifted=True,
        **_guidance(guided, cond=1),
        **_image(of, scale, of.net["sample_size"] * scale),
    )


def _packed(of: _Asked, scale: int, frames: bool) -> tuple[dict[str, Any], tuple[int, int]]:
    """Latents in patches of 2 x 2, (S, 4 C) -> shapes, (rows, columns of patches)."""
    height, width = of.pixels(128 * scale)
    h, w = height // (2 * scale), width // (2 * scale)
    channels = of.net["in_channels"] // 4
    flat, big = (channels, 2 * h, 2 * w), (3, 2 * h * scale, 2 * w * scale)
    z = (channels, 1, *flat[1:]) if frames else flat
    image = (3, 1, *big[1:]) if frames else big
    return {"latent": (h * w, 4 * channels), "z": z, "image": image, "media": big}, (h, w)


def _flux(of: _Asked) -> CallShapes:
    sizes, _ = _packed(of, _kl_scale(of.vae), frames=False)
    if of.guided("true_cfg_scale") and of.call.get("negative_prompt") is not None:
        raise ValueError("flowrl budget does not know FLUX with true_cfg_scale above 1; leave it")
    length, patches = int(of.get("max_sequence_length")), sizes["latent"][0]
    rows: dict[tuple[Any, ...], Size | list[Any]] = {
        ("encoder_hidden_states",): ((length, of.net["joint_attention_dim"]), None),
        ("pooled_projections",): ((of.net["pooled_projection_dim"],), None),
    }
    if of.net["guidance_embeds"]:
        rows[("guidance",)] = ((), FP32)
    shared = {
        ("img_ids",): ((patches, 3), None),
        ("txt_ids",): ((length, 3), None),
        ("joint_attention_kwargs",): {},
        ("return_dict",): False,
    }
    return CallShapes(
        pipeline=of.a.pipeline,
        network="transformer",
        calls=(NetworkCall(rows=rows, shared=shared, time="t / 1000"),),
        encoders=(
            Encoder(part="text_encoder", tokens=of.tokens("text_encoder")),
            Encoder(part="text_encoder_2", tokens=length),
        ),
        shifted=True,
        time_dtype=None,
        **_guidance(None, cond=0),
        **sizes,
    )


EMPTY_QWEN = 6  # tokens of " " in Qwen-Image's template, after those that it drops
TEMPLATE_QWEN = 34  # tokens of the template, which are dropped


def _qwen(of: _Asked) -> CallShapes:
    scale = 2 ** len(of.vae["temperal_downsample"])
    sizes, (h, w) = _packed(of, scale, frames=True)
    guided = of.guided("true_cfg_scale")
    length, width = int(of.get("max_sequence_length")), of.net["joint_attention_dim"]

    def call(tokens: int, masked: bool) -> NetworkCall:
        rows: dict[tuple[Any, ...], Size | list[Any]] = {
            ("encoder_hidden_states",): ((tokens, width), None),
            ("img_shapes",): [[(1, h, w)]],
        }
        shared: dict[tuple[Any, ...], Any] = {
            ("guidance",): None,
            ("attention_kwargs",): {},
            ("return_dict",): False,
        }
        if masked:
            rows[("encoder_hidden_states_mask",)] = ((tokens,), torch.int64)
        else:
            shared[("encoder_hidden_states_mask",)] = None
        return NetworkCall(rows=rows, shared=shared, time="t / 1000")

    calls = [call(length, True), *([call(EMPTY_QWEN, False)] if guided else [])]
    return CallShapes(
        pipeline=of.a.pipeline,
        network="transformer",
        calls=tuple(calls),
        encoders=(Encoder(part="text_encoder", tokens=length + TEMPLATE_QWEN, hidden_states=True),),
        rule="norm" if guided else "linear",
        shifted=True,
        time_dtype=None,
        **_guidance(guided, cond=0),
        **sizes,
    )


def _wan(of: _Asked) -> CallShapes:
    space, time = of.vae["scale_factor_spatial"], of.vae["scale_factor_temporal"]
    (height, width), frames = of.pixels(480), int(of.get("num_frames"))
    down, across = (space * size for size in of.net["patch_size"][1:])
    height, width = height // down * down, width // across * across
    frames = max(1, (frames - 1) // time * time + 1)
    z = (of.net["in_channels"], (frames - 1) // time + 1, height // space, width // space)
    length, guided = int(of.get("max_sequence_length")), of.guided()
    call = NetworkCall(
        rows={("encoder_hidden_states",): ((length, of.net["text_dim"]), None)},
        shared={("attention_kwargs",): None, ("return_dict",): False},
    )
    return CallShapes(
        pipeline=of.a.pipeline,
        network="transformer",
        latent=z,
        z=z,
        image=(3, frames, height, width),
        media=(frames, 3, height, width),
        axes=(1, 0, 2, 3),
        calls=(call,) * (2 if guided else 1),
        encoders=(Encoder(part="text_encoder", tokens=length),),
        shifted=True,
        **_guidance(guided, cond=0),
    )


def _unet(of: _Asked, width: int, more: dict[tuple[Any, ...], Size | list[Any]]) -> CallShapes:
    """Stable Diffusion: a UNet that predicts noise and reads text through cross attention."""
    scale, guided, clip = _kl_scale(of.vae), of.guided(), of.tokens("text_encoder")
    parts = [part for part in ("text_encoder", "text_encoder_2") if part in of.a.parts]
    shared: dict[tuple[Any, ...], Any] = {
        ("timestep_cond",): None,
        ("cross_attention_kwargs",): None,
        ("return_dict",): False,
    }
    if not more:
        shared[("added_cond_kwargs",)] = None
    call = NetworkCall(
        blocks=2 if guided else 1,
        rows={("encoder_hidden_states",): ((clip, width), None), **more},
        shared=shared,
        latents="sample",
        scaled="1/r",
    )
    xl = len(parts) > 1
    return CallShapes(
        pipeline=of.a.pipeline,
        network="unet",
        calls=(call,),
        encoders=tuple(Encoder(part=part, tokens=clip, hidden_states=xl) for part in parts),
        prediction="epsilon",
        **_guidance(guided, cond=1),
        **_image(of, scale, of.net["sample_size"] * scale),
    )


def _sd15(of: _Asked) -> CallShapes:
    return _unet(of, of.net["cross_attention_dim"], {})


def _sdxl(of: _Asked) -> CallShapes:
    pooled = of.a.config("text_encoder_2")["projection_dim"]
    added: dict[tuple[Any, ...], Size | list[Any]] = {
        ("added_cond_kwargs", "text_embeds"): ((pooled,), None),
        ("added_cond_kwargs", "time_ids"): ((6,), None),
    }
    return _unet(of, of.net["cross_attention_dim"], added)


PIPELINES: dict[str, Callable[[_Asked], CallShapes]] = {
    "StableDiffusion3Pipeline": _sd3,
    "FluxPipeline": _flux,
    "QwenImagePipeline": _qwen,
    "WanPipeline": _wan,
    "StableDiffusionPipeline": _sd15,
    "StableDiffusionXLPipeline": _sdxl,
}
