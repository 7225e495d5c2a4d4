"""aMUSEd's pipeline (arXiv:2401.01808) as a policy of tokens: a masked generator of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.tokens import TokenPolicy

CLASS = "AmusedPipeline"
OTHERS = ("AmusedImg2ImgPipeline", "AmusedInpaintPipeline", "LLaDA2Pipeline")
CALL = {"height": None, "width": None, "guidance_scale": 10.0, "negative_prompt": ""}
AESTHETIC = 6  # the score that the pipeline asks for, of 10


class AmusedLogits(nn.Module):
    """aMUSEd's transformer as f(tokens (n, h, w), cond (n, d)) -> logits (n, h, w, V).

    cond: the text's pooled state, and behind it the hidden states of its tokens. micro: width and
    height in pixels, place of the crop, aesthetic score.
    """

    def __init__(self, transformer: Any, micro: Sequence[int]) -> None:
        super().__init__()
        self.transformer, self.micro = transformer, tuple(micro)

    def forward(self, tokens: Tensor, cond: Tensor) -> Tensor:
        sizes = self.transformer.config
        pooled, hidden = cond[:, : sizes.cond_embed_dim], cond[:, sizes.cond_embed_dim :]
        hidden = hidden.unflatten(1, (-1, sizes.encoder_hidden_size))
        micro = cond.new_tensor(self.micro).expand(len(tokens), -1)
        return self.transformer(tokens, hidden, pooled, micro).movedim(1, -1)


def amused_policy(pipe: Any, lora: Any, call: Mapping[str, Any]) -> TokenPolicy:
    """Make the policy of an AmusedPipeline, whose transformer is trained.

    call: height, width, guidance_scale and negative_prompt, which mean what they do in the
    pipeline's own call. Its sampler, which chooses places by confidence and draws again what it
    masks, is the one of algorithm.sde=confidence.
    """

    @torch.no_grad()
    def cond(texts: list[str]) -> Tensor:
        """P texts -> (P, d), as AmusedLogits takes them."""
        tok, encoder = pipe.tokenizer, pipe.text_encoder
        how = {"padding": "max_length", "truncation": True, "max_length": tok.model_max_length}
        return read(encoder, tok(texts, return_tensors="pt", **how).input_ids.to(encoder.device))

    own = TokenPolicy(**arguments(pipe, call), cond=cond, lora=lora)
    own.masking = pipe.scheduler.config.masking_schedule
    return own


def beyond(name: str | None) -> str:
    """The sentence of another pipeline of diffusers that makes tokens; "" of all others."""
    if name not in OTHERS:
        return ""
    return (
        f"{name} makes tokens, and of such pipelines {CLASS} alone becomes a policy; wrap its"
        " network in a module f(tokens, cond) -> logits (docs/masked.md)"
    )


def read(encoder: Any, ids: Tensor) -> Tensor:
    """Encode tokens of texts (P, length) -> (P, d), as AmusedLogits takes them."""
    text = encoder(ids, output_hidden_states=True)
    return torch.cat([text.text_embeds, text.hidden_states[-2].flatten(1)], 1)


def arguments(pipe: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of TokenPolicy for an AmusedPipeline, without those of its texts."""
    # sizes: of a picture in pixels, of its grid in tokens
    if unknown := sorted(call.keys() - CALL.keys()):
        raise ValueError(
            f"model.pipeline.{unknown[0]} is no argument that {CLASS} has as a policy; allowed are"
            f" {', '.join(CALL)}"
        )
    call = {**CALL, **call}
    scale, side = pipe.vae_scale_factor, pipe.transformer.config.sample_size * pipe.vae_scale_factor
    height, width = call["height"] or side, call["width"] or side
    if height % scale or width % scale:
        raise ValueError(
            f"model.pipeline: height={height} and width={width} should be multiples of {scale},"
            " the size of a token in pixels"
        )
    shape = (height // scale, width // scale)
    channels = pipe.vqvae.config.latent_channels
    if pipe.vqvae.dtype == torch.float16 and pipe.vqvae.config.force_upcast:
        pipe.vqvae.float()  # as the pipeline does before it decodes

    def decode(tokens: Tensor) -> Tensor:
        """(n, h, w) int64 -> pictures (n, 3, H, W) in [0, 1]."""
        sizes = (len(tokens), *shape, channels)
        made = pipe.vqvae.decode(tokens, force_not_quantize=True, shape=sizes).sample
        return made.float().clamp(0, 1)

    return {
        "module": AmusedLogits(pipe.transformer, (width, height, 0, 0, AESTHETIC)),
        "shape": shape,
        "mask": pipe.scheduler.config.mask_token_id,
        "decode": decode,
        "empty": call["negative_prompt"],
        "scale": max(call["guidance_scale"], 1.0),  # up to 1 the pipeline does not guide
    }


def check_plain(
    parts: Sequence[str], quantize: str, encoding: object, hints: Mapping[str, Any]
) -> None:
    """ValueError for an argument of load_policy that these policies do not have."""
    given = {
        "train.parts": [*parts] != ["denoiser"],
        "model.quantize": quantize != "none",
        "model.encoders": encoding is not None,
        "model.hints": bool(hints),
    }
    for name, wanted in given.items():
        if wanted:
            raise ValueError(
                f"{name}: of {CLASS} the transformer alone is trained, unquantised, and its text"
                f" encoder stays beside it; leave {name} out"
            )
