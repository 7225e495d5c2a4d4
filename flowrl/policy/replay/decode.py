"""Latents to media and back: one VAE call between two affine maps.

Both maps are read off the pipeline's own tail, so nothing is patched when media are decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import patterns, solve
from flowrl.policy.replay.arguments import Affine
from flowrl.policy.replay.probe import RECORD, Prober
from flowrl.policy.replay.record import UnreplayableError, replaced


class Decoder:
    """media = after(vae.decode(before(latents))), clamped to [0, 1].

    latent, image: shapes of one row of latents and of one row of the VAE's output.
    """

    def __init__(
        self,
        vae: Any,
        before: Affine,
        after: Affine,
        latent: tuple[int, ...],
        image: tuple[int, ...],
    ) -> None:
        self.vae, self.before, self.after = vae, before, after
        self.latent, self.image = latent, image

    def __call__(self, x: Tensor, chunk: int = 16) -> Tensor:
        """Pipeline latents (n, *L) fp32 -> media (n, ...) fp32 in [0, 1]; differentiable; `chunk`
        rows at a time."""
        media = []
        for part in x.split(chunk):
            z = self.before(part, _constant(self.before, part)).to(self.vae.dtype)
            out = self.vae.decode(z, return_dict=False)[0].float()
            media.append(self.after(out, _constant(self.after, out)).clamp(0, 1))
        return torch.cat(media)

    def encode(self, media: Tensor, chunk: int = 16) -> Tensor:
        """Both maps inverted around vae.encode: media (n, ...) fp32 in [0, 1] -> pipeline latents
        (n, *L) fp32 of the posterior's mode."""
        for part, shape in ((self.before, self.latent), (self.after, self.image)):
            if not part.invertible(torch.Size(shape).numel()):
                raise ValueError(
                    "encode_media: the pipeline's decoding drops entries, so it has no inverse"
                )
        if tuple(media.shape[1:]) != tuple(self.after.shape):
            raise ValueError(
                f"media of shape {tuple(media.shape[1:])} cannot be encoded; the pipeline makes"
                f" {tuple(self.after.shape)}"
            )
        return torch.cat([self._encode(part) for part in media.split(chunk)])

    def _encode(self, media: Tensor) -> Tensor:
        pixels = self.after.inverse(media.float(), self.image, _constant(self.after, media))
        posterior = self.vae.encode(pixels.to(self.vae.dtype))
        if hasattr(posterior, "latent_dist"):
            z = posterior.latent_dist.mode().float()
        else:
            z = posterior.latents.float()
        return self.before.inverse(z, self.latent, _constant(self.before, z))


def _constant(part: Affine, like: Tensor) -> Tensor | None:
    return None if part.const is None else part.const[0, :1].to(like.device, torch.float32)


def infer_decoder(prober: Prober, steps: int, shape: tuple[int, ...]) -> Decoder:
    """Probe the tail of the pipeline: what vae.decode receives for chosen latents, and what becomes
    of chosen VAE outputs."""
    vae = getattr(prober.runner.pipe, "vae", None)
    if vae is None or not hasattr(vae, "decode"):
        raise UnreplayableError(
            f"decode: {type(prober.runner.pipe).__name__} has no VAE with a decode method; give"
            " hints decode=fn(pipe, latents)"
        )
    rows = len(RECORD) + len(prober.runner.pad)
    probe = TailProbe(prober, steps, rows, shape)
    seen = {"zero": probe.run("zero")}
    image = probe.image
    for key in {**patterns(1, shape), **patterns(1, image)}:
        if key not in seen:
            seen[key] = probe.run(key)
    received = {key: seen[key][0] for key in patterns(1, shape)}
    returned = {key: torch.as_tensor(seen[key][1]) for key in patterns(1, image)}
    before = solve(received, rows, shape, "decode: input of the VAE")
    after = solve(returned, rows, image, "decode: output of the pipeline")
    after.scale = after.scale * 64  # its patterns were 1/64 of the others
    _check_constants(before, "input of the VAE")
    _check_constants(after, "output of the pipeline")
    return Decoder(vae, before, after, shape, image)


def _check_constants(part: Affine, what: str) -> None:
    """UnreplayableError where a map adds other constants to other rows."""
    const = part.const
    if const is not None and not torch.allclose(const, const[:1, :1].expand_as(const)):
        raise UnreplayableError(
            f"decode: {what} has constants that differ between rows; give hints decode=fn(pipe,"
            " latents)"
        )


@dataclass(eq=False)
class TailProbe:
    """Stubbed runs of a pipeline to its media, with patterns in place of what the VAE decodes."""

    prober: Prober
    steps: int
    rows: int
    latent: tuple[int, ...]
    image: tuple[int, ...] = ()  # shape of one row of the VAE's output, known after a run
    received: list[Tensor] = field(default_factory=list)

    def run(self, key: str) -> tuple[Tensor, Any]:
        """(what vae.decode received, what the pipeline returned) with the pattern `key` in the
        latents and in the VAE's output."""
        self.received.clear()
        x = patterns(self.rows, self.latent)[_same(key, self.latent)]
        with replaced(self.prober.runner.pipe.vae, "decode", partial(self._decode, key)):
            self.prober.run(RECORD, self.steps, latents=lambda j: x, output_type="pt")
        if len(self.received) != 1:
            raise UnreplayableError(
                f"decode: the pipeline called vae.decode {len(self.received)} times, and one call"
                " can be replayed"
            )
        return self.received[0], self.prober.result

    def _decode(
        self, key: str, z: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any
    ) -> Any:
        """In place of vae.decode."""
        vae = self.prober.runner.pipe.vae
        if not self.image:
            real = type(vae).decode(vae, z.to(vae.dtype), *args, return_dict=False, **kwargs)[0]
            if len(real) != self.rows:
                raise UnreplayableError(
                    f"decode: the VAE returned {len(real)} rows for {self.rows} prompts"
                )
            self.image = tuple(real.shape[1:])
        self.received.append(z)
        image = patterns(self.rows, self.image, unit=1 / 64)[_same(key, self.image)].to(z)
        if not return_dict:
            return (image,)
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=image)


def _same(key: str, shape: tuple[int, ...]) -> str:
    """Smaller tensors have fewer digits: repeat their first."""
    return key if key in patterns(1, shape) else "digit0"


def tail(prober: Prober, steps: int, x: Tensor) -> Tensor:
    """The pipeline's own decoding of its latents x (P, *L), for the self-check."""
    vae = prober.runner.pipe.vae
    rows = x.shape[0]
    full = torch.cat([x, x[:1].expand(len(prober.runner.pad), *x.shape[1:])])

    def cast(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        return type(vae).decode(vae, z.to(vae.dtype), *args, **kwargs)

    with replaced(vae, "decode", cast):
        prober.run(RECORD[:rows], steps, latents=lambda j: full, output_type="pt")
    return torch.as_tensor(prober.result).float()[:rows]
