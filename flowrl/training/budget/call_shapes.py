"""The arguments that the pipelines of configs/model give their networks, as shapes.

For all others they are inferred from the pipeline itself (flowrl/policy/pipeline.py), which needs
its weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from flowrl.training.budget.architecture import Architecture, class_of

# shape of one row, and dtype; None: the networks' dtype
Size = tuple[tuple[int, ...], torch.dtype | None]
Arguments = dict[tuple[Any, ...], Any]  # path of a call's argument -> a Size, or its value
FP32 = torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCall:
    """One call of the network at a denoising step."""

    rows: Arguments  # arguments with a row for each prompt
    shared: Arguments  # the other arguments, beside return_dict=False
    blocks: int = 1  # number of copies of the batch in the call: branches of guidance
    latents: str = "hidden_states"  # name of the argument that holds the latents
    listed: tuple[int, ...] = ()  # shape of a row's entry in a list of latents; (): no list
    timestep: str = "timestep"  # name of the argument that holds the time
    times: tuple[int, ...] = ()  # shape of a row's times; (): a row has one time
    appended: int = 0  # number of tokens of the prompt's picture, which follow those of the latents
    time: str = "t"  # rule of the time argument (flowrl/policy/replay/arguments.py)
    scaled: str = "1"  # rule by which latents are scaled (the same file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """The call of a text encoder for each prompt."""

    part: str  # name of the component
    tokens: int  # number of tokens of a prompt, padded
    # whether the states of all its layers are kept until it has finished
    hidden_states: bool = False
    joined: bool = False  # the text is the states of all layers side by side, not those of one


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShapes:
    """The arguments that a pipeline gives its networks; shapes are those of one row."""

    pipeline: str  # name of the pipeline's class
    network: str  # component that denoises
    latent: tuple[int, ...]  # shape of the sampler's latents
    z: tuple[int, ...]  # shape of the latents that the VAE gets
    image: tuple[int, ...]  # shape of the VAE's output
    media: tuple[int, ...]  # shape of the pipeline's output
    calls: tuple[NetworkCall, ...]  # network calls of a denoising step
    encoders: tuple[Encoder, ...]  # text encoders in the order in which the pipeline calls them
    weights: tuple[float, ...]  # weight of each branch of guidance
    cond: int = 0  # place of the conditional branch
    rule: str = "linear"  # rule that combines branches (flowrl/policy/replay/guidance.py)
    prediction: str = "flow"  # prediction of the network: "flow" or "epsilon"
    axes: tuple[int, ...] = (0, 1, 2)  # axis of image for each axis of media
    shifted: bool = True  # a constant is added to latents before the VAE
    time_dtype: torch.dtype | None = FP32  # dtype of the time argument; None: the networks'
    longest: bool = False  # texts of a call have the length of its longest one
    negative: bool = True  # guidance's other branch has a text of its own, which is encoded
    vocabulary: int = 0  # number of tokens of a masked generator; 0: latents are numbers


@dataclass(slots=True)
class _PipelineCall:
    """An architecture and the arguments of its pipeline's call, with the class's own defaults."""

    a: Architecture  # architecture of the pipeline
    call: Mapping[str, Any]  # arguments of the call that a config sets
    network: str = field(init=False)  # component that denoises
    net: dict[str, Any] = field(init=False)  # config of the denoising component
    vae: dict[str, Any] = field(init=False)  # config of the VAE

    def __post_init__(self) -> None:
        self.network = "unet" if "unet" in self.a.parts else "transformer"
        vae = "vqvae" if "vqvae" in self.a.parts else "vae"
        self.net, self.vae = self.a.config(self.network), self.a.config(vae)

    def shapes(self, **known: Any) -> CallShapes:
        """Make the CallShapes of this pipeline and network."""
        return CallShapes(pipeline=self.a.pipeline, network=self.network, **known)

    def get(self, name: str) -> Any:
        """Return an argument of the call, or its default."""
        parameters = inspect.signature(class_of(self.a.pipeline).__call__).parameters
        given = self.call.get(name)
        return parameters[name].default if given is None and name in parameters else given

    def guided(self, name: str = "guidance_scale") -> float | None:
        """Return the scale of classifier-free guidance, or None where it is off."""
        scale = float(self.get(name) or 0)
        return scale if scale > 1 else None

    def pixels(self, usual: int) -> tuple[int, int]:
        """Return height and width of the media."""
        height, width = int(self.get("height") or usual), int(self.get("width") or usual)
        if area := self.get("max_area"):  # FLUX.1 Kontext reads the ratio alone from both
            ratio = width / height
            height, width = round((area / ratio) ** 0.5), round((area * ratio) ** 0.5)
        return height, width

    def tokens(self, part: str) -> int:
        """Return the number of tokens in the longest prompt that a CLIP text encoder reads."""
        return int(self.a.config(part)["max_position_embeddings"])


def call_shapes(a: Architecture, call: Mapping[str, Any]) -> CallShapes:
    """Return the calls of a pipeline; ValueError if this file does not describe it."""
    if a.pipeline not in PIPELINES or "transformer_2" in a.parts:
        raise ValueError(
            f"flowrl budget knows the calls of {', '.join(PIPELINES)} with one denoiser, and"
            f" {a.source} is a {a.pipeline}"
        )
    return PIPELINES[a.pipeline](_PipelineCall(a, call))


def _guidance(scale: float | None, *, cond: int) -> dict[str, Any]:
    """Return weights of the branches of classifier-free guidance."""
    if scale is None:
        return {"weights": (1.0,), "cond": 0}
    pair = (scale, 1 - scale)
    return {"weights": pair if cond == 0 else pair[::-1], "cond": cond}


def _image(of: _PipelineCall, scale: int, usual: int) -> dict[str, Any]:
    """Return shapes of latents (C, h, w) that are equal for sampler and VAE."""
    height, width = of.pixels(usual)
    channels = of.vae["latent_channels"]
    z = (channels, height // scale, width // scale)
    image = (3, z[1] * scale, z[2] * scale)
    return {"latent": z, "z": z, "image": image, "media": image}


def _kl_scale(vae: Mapping[str, Any]) -> int:
    """Return how many pixels an AutoencoderKL has for each latent, along one axis."""
    return 2 ** (len(vae["block_out_channels"]) - 1)


def _sd3(of: _PipelineCall) -> CallShapes:
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
        shared={("joint_attention_kwargs",): None},
    )
    return of.shapes(
        calls=(call,),
        encoders=tuple(encoders),
        **_guidance(guided, cond=1),
        **_image(of, scale, of.net["sample_size"] * scale),
    )


PICTURE = 1024  # side of the square picture that a prompt is taken to bring, as pipelines resize it


def _tokens_of_picture(scale: int) -> int:
    """Count the patches of 2 x 2 latents in the prompt's picture."""
    return (PICTURE // (2 * scale)) ** 2


def _packed(of: _PipelineCall, scale: int, frames: bool) -> tuple[dict[str, Any], tuple[int, int]]:
    """Pack latents in patches of 2 x 2, (S, 4 C) -> shapes, (rows, columns of patches)."""
    height, width = of.pixels(128 * scale)
    h, w = height // (2 * scale), width // (2 * scale)
    channels = of.net["in_channels"] // 4
    flat, big = (channels, 2 * h, 2 * w), (3, 2 * h * scale, 2 * w * scale)
    z = (channels, 1, *flat[1:]) if frames else flat
    image = (3, 1, *big[1:]) if frames else big
    return {"latent": (h * w, 4 * channels), "z": z, "image": image, "media": big}, (h, w)


def _klein(of: _PipelineCall) -> CallShapes:
    """FLUX.2 klein: places of patches and tokens are of each row; there is no pooled text."""
    sizes, _ = _packed(of, _kl_scale(of.vae), frames=False)
    length, guided = int(of.get("max_sequence_length")), of.guided()
    rows: Arguments = {
        ("encoder_hidden_states",): ((length, of.net["joint_attention_dim"]), None),
        ("img_ids",): ((sizes["latent"][0], 4), torch.int64),
        ("txt_ids",): ((length, 4), torch.int64),
    }
    shared = {("guidance",): None, ("joint_attention_kwargs",): None}
    calls = (NetworkCall(rows=rows, shared=shared, time="t / 1000"),) * (2 if guided else 1)
    encoders = (Encoder(part="text_encoder", tokens=length, hidden_states=True),)
    sizes |= _guidance(guided, cond=0)
    return of.shapes(calls=calls, encoders=encoders, time_dtype=None, **sizes)


def _z_image(of: _PipelineCall) -> CallShapes:
    """Z-Image: lists with a tensor a row; guidance w stands for w + 1, and the output for -v."""
    sizes, length = _image(of, _kl_scale(of.vae), 1024), int(of.get("max_sequence_length"))
    scale, (channels, *places) = float(of.get("guidance_scale")), sizes["latent"]
    rows = {("cap_feats",): [((length, of.net["cap_feat_dim"]), None)]}
    taken = inspect.signature(class_of("ZImageTransformer2DModel").forward).parameters
    newer = "joint_attention_kwargs" in taken  # diffusers 0.42
    call = NetworkCall(
        blocks=2 if scale > 0 else 1,
        rows=rows,
        shared={("joint_attention_kwargs",): None} if newer else {},
        latents="x",
        listed=(channels, 1, *places),
        timestep="t",
        time="(1000 - t) / 1000",
    )
    encoders = (Encoder(part="text_encoder", tokens=length, hidden_states=True),)
    weights = (-scale - 1, scale) if scale > 0 else (-1.0,)
    return of.shapes(calls=(call,), encoders=encoders, weights=weights, **sizes)


def _sana(of: _PipelineCall) -> CallShapes:
    scale, guided = 2 ** (len(of.vae["encoder_block_out_channels"]) - 1), of.guided()
    length = int(of.get("max_sequence_length"))
    rows: Arguments = {
        ("encoder_hidden_states",): ((length, of.net["caption_channels"]), None),
        ("encoder_attention_mask",): ((length,), torch.int64),
    }
    call = NetworkCall(blocks=2 if guided else 1, rows=rows, shared={("attention_kwargs",): None})
    # an instruction of about 300 tokens goes before the prompt
    encoders = (Encoder(part="text_encoder", tokens=length + 300),)
    sizes = _image(of, scale, of.net["sample_size"] * scale) | _guidance(guided, cond=1)
    return of.shapes(calls=(call,), encoders=encoders, shifted=False, **sizes)


def _flux(of: _PipelineCall) -> CallShapes:
    """FLUX.1; Kontext reads a square picture behind the latents, of a size that it prefers."""
    scale = _kl_scale(of.vae)
    sizes, _ = _packed(of, scale, frames=False)
    picture = 0
    if of.a.pipeline == "FluxKontextPipeline":
        resized = of.get("_auto_resize")  # else the picture's own size, taken to be the output's
        picture = _tokens_of_picture(scale) if resized else sizes["latent"][0]
    if of.guided("true_cfg_scale") and of.call.get("negative_prompt") is not None:
        raise ValueError("flowrl budget does not know FLUX with true_cfg_scale above 1; leave it")
    length, patches = int(of.get("max_sequence_length")), sizes["latent"][0]
    rows: Arguments = {
        ("encoder_hidden_states",): ((length, of.net["joint_attention_dim"]), None),
        ("pooled_projections",): ((of.net["pooled_projection_dim"],), None),
    }
    if of.net["guidance_embeds"]:
        rows[("guidance",)] = ((), FP32)
    shared = {
        ("img_ids",): ((patches + picture, 3), None),
        ("txt_ids",): ((length, 3), None),
        ("joint_attention_kwargs",): {},
    }
    return of.shapes(
        calls=(NetworkCall(rows=rows, shared=shared, time="t / 1000", appended=picture),),
        encoders=(
            Encoder(part="text_encoder", tokens=of.tokens("text_encoder")),
            Encoder(part="text_encoder_2", tokens=length),
        ),
        time_dtype=None,
        **_guidance(None, cond=0),
        **sizes,
    )


EMPTY_QWEN = 6  # number of tokens of " " in Qwen-Image's template, after the dropped ones
# tokens at the template's begin, which the pipeline drops: of Qwen-Image, and of its editing models
TEMPLATE_QWEN = {False: 34, True: 64}
# tokens of "Picture 1: " and its two marks, and of the picture: 392 x 392 pixels, each 28 x 28
PICTURE_QWEN = 5 + 2 + 14**2


def _qwen(of: _PipelineCall) -> CallShapes:
    """Qwen-Image; its editing models read a picture behind the latents and one in the text. They
    take one prompt at a time, so that no text is padded and there is no mask."""
    # sizes: of the latents, of the text, and of the picture in both
    scale = 2 ** len(of.vae["temperal_downsample"])
    sizes, (h, w) = _packed(of, scale, frames=True)
    guided, edits = of.guided("true_cfg_scale"), of.a.pipeline == "QwenImageEditPlusPipeline"
    length, width = int(of.get("max_sequence_length")), of.net["joint_attention_dim"]
    side, seen = PICTURE // (2 * scale), PICTURE_QWEN if edits else 0

    def call(tokens: int, masked: bool) -> NetworkCall:
        rows: Arguments = {("encoder_hidden_states",): ((tokens + seen, width), None)}
        shared: Arguments = {("guidance",): None, ("attention_kwargs",): {}}
        if edits:
            shared[("img_shapes",)] = [[(1, h, w), (1, side, side)]]
        else:
            rows[("img_shapes",)] = [[(1, h, w)]]
        if masked:
            rows[("encoder_hidden_states_mask",)] = ((tokens,), torch.int64)
        else:
            shared[("encoder_hidden_states_mask",)] = None
        appended = _tokens_of_picture(scale) if edits else 0
        return NetworkCall(rows=rows, shared=shared, time="t / 1000", appended=appended)

    # one call for each branch of guidance, whose text is that of the negative prompt
    calls = [call(length, not edits), *([call(EMPTY_QWEN, False)] if guided else [])]
    text = Encoder(
        part="text_encoder", tokens=length + seen + TEMPLATE_QWEN[edits], hidden_states=True
    )
    return of.shapes(
        calls=tuple(calls),
        encoders=(text,),
        rule="norm" if guided else "linear",
        time_dtype=None,
        longest=not edits,
        **_guidance(guided, cond=0),
        **sizes,
    )


def _video(of: _PipelineCall, channels: int, usual: int) -> dict[str, Any]:
    """Return shapes of a video's latents (C, F, h, w), which are equal for sampler and VAE."""
    space, time = of.vae["scale_factor_spatial"], of.vae["scale_factor_temporal"]
    (height, width), frames = of.pixels(usual), int(of.get("num_frames"))
    down, across = (space * size for size in of.net["patch_size"][1:])
    height, width = height // down * down, width // across * across
    frames = max(1, (frames - 1) // time * time + 1)
    z = (channels, (frames - 1) // time + 1, height // space, width // space)
    image, media = (3, frames, height, width), (frames, 3, height, width)
    return {"latent": z, "z": z, "image": image, "media": media, "axes": (1, 0, 2, 3)}


def _wan(of: _PipelineCall) -> CallShapes:
    sizes = _video(of, of.net["in_channels"], 480)
    _, frames, h, w = sizes["latent"]
    length, guided = int(of.get("max_sequence_length")), of.guided()
    call = NetworkCall(
        rows={("encoder_hidden_states",): ((length, of.net["text_dim"]), None)},
        shared={("attention_kwargs",): None},
        # in Wan 2.2 5B each token has a time
        times=(frames * h * w // math.prod(of.net["patch_size"]),)
        if of.a.settings.get("expand_timesteps")
        else (),
    )
    return of.shapes(
        calls=(call,) * (2 if guided else 1),
        encoders=(Encoder(part="text_encoder", tokens=length),),
        **_guidance(guided, cond=0),
        **sizes,
    )


def _cosmos(of: _PipelineCall) -> CallShapes:
    """Cosmos-Predict 2.5: a time for each frame, and a mask of frames that are given, which is 0
    without a picture; guidance w stands for w + 1."""
    sizes = _video(of, of.net["in_channels"] - 1, 704)  # the mask is a channel of the network
    _, frames, h, w = sizes["latent"]
    length, scale = int(of.get("max_sequence_length")), of.guided()
    text = (length, of.net["crossattn_proj_in_channels"])
    call = NetworkCall(
        rows={
            ("encoder_hidden_states",): (text, None),
            ("condition_mask",): ((1, frames, h, w), None),
        },
        shared={("padding_mask",): ((1, 1, *sizes["image"][2:]), None)},
        times=(1, frames, 1, 1),
        time="sigma",
    )
    encoder = Encoder(part="text_encoder", tokens=length, hidden_states=True, joined=True)
    return of.shapes(
        calls=(call,) * (2 if scale else 1),
        encoders=(encoder,),
        **_guidance(scale and scale + 1, cond=0),
        **sizes,
    )


def _unet(of: _PipelineCall) -> CallShapes:
    """Stable Diffusion: a UNet that predicts noise and reads text through cross attention."""
    scale, guided, clip = _kl_scale(of.vae), of.guided(), of.tokens("text_encoder")
    parts = [part for part in ("text_encoder", "text_encoder_2") if part in of.a.parts]
    rows: Arguments = {("encoder_hidden_states",): ((clip, of.net["cross_attention_dim"]), None)}
    shared: Arguments = {("timestep_cond",): None, ("cross_attention_kwargs",): None}
    if xl := of.a.pipeline == "StableDiffusionXLPipeline":
        pooled = of.a.config("text_encoder_2")["projection_dim"]
        rows[("added_cond_kwargs", "text_embeds")] = ((pooled,), None)
        rows[("added_cond_kwargs", "time_ids")] = ((6,), None)
    else:
        shared[("added_cond_kwargs",)] = None
    call = NetworkCall(
        blocks=2 if guided else 1, rows=rows, shared=shared, latents="sample", scaled="1/r"
    )
    return of.shapes(
        calls=(call,),
        encoders=tuple(Encoder(part=part, tokens=clip, hidden_states=xl) for part in parts),
        prediction="epsilon",
        shifted=False,
        negative=not xl or of.call.get("negative_prompt") is not None,  # else SDXL's is zeros
        **_guidance(guided, cond=1),
        **_image(of, scale, of.net["sample_size"] * scale),
    )


def _amused(of: _PipelineCall) -> CallShapes:
    """aMUSEd: a grid of tokens; guidance of any scale but 1 is a second call."""
    scale, guided = _kl_scale(of.vae), float(of.get("guidance_scale"))
    sizes = _image(of, scale, of.net["sample_size"] * scale)
    tokens = of.tokens("text_encoder")
    encoder = Encoder(part="text_encoder", tokens=tokens, hidden_states=True)
    sizes["latent"] = sizes["latent"][1:]
    return of.shapes(
        calls=(NetworkCall(rows={}, shared={}),) * (1 if guided == 1 else 2),
        encoders=(encoder,),
        vocabulary=of.net["codebook_size"],
        **_guidance(None if guided == 1 else guided, cond=0),
        **sizes,
    )


PIPELINES: dict[str, Callable[[_PipelineCall], CallShapes]] = {
    "StableDiffusion3Pipeline": _sd3,
    "FluxPipeline": _flux,
    "FluxKontextPipeline": _flux,
    "Flux2KleinPipeline": _klein,
    "QwenImagePipeline": _qwen,
    "QwenImageEditPlusPipeline": _qwen,
    "ZImagePipeline": _z_image,
    "SanaPipeline": _sana,
    "WanPipeline": _wan,
    "Cosmos2_5_PredictBasePipeline": _cosmos,
    "StableDiffusionPipeline": _unet,
    "StableDiffusionXLPipeline": _unet,
    "AmusedPipeline": _amused,
}
