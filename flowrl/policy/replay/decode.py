"""Latents to media and back: one VAE call between two affine maps, read off the pipeline's own
tail, so nothing is patched when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.affine import Affine, patterns, solve
from flowrl.policy.replay.probe import RECORD, Prober
from flowrl.policy.replay.record import UnreplayableError, replaced


class Decoder:
    """media = after(vae.decode(before(latents))), clamped to [0, 1]; encode inverts both maps
    around vae.encode's mode."""

    def __init__(
        self,
        vae: Any,
        before: Affine,
        after: Affine,
        latent: tuple[int, ...],
        image: tuple[int, ...],
    ) -> None:
        self.vae, self.before, self.after = vae, before, after
        self.latent, self.image = (
            latent,
            image,
        )  # shapes of one row of latents, and of one row of the VAE's output

    def __call__(self, x: Tensor, chunk: int = 16) -> Tensor:
        """Pipeline latents (n, *L) fp32 -> media (n, ...) fp32 in [0, 1]; differentiable; `chunk`
        rows at a time."""
        return torch.cat([self._decode(part) for part in x.split(chunk)])

    def _decode(self, x: Tensor) -> Tensor:
        z = self.before(x, _constant(self.before, x)).to(self.vae.dtype)
        out = self.vae.decode(z, return_dict=False)[0].float()
        return self.after(out, _constant(self.after, out)).clamp(0, 1)

    def encode(self, media: Tensor, chunk: int = 16) -> Tensor:
        """media (n, ...) fp32 in [0, 1] -> pipeline latents (n, *L) fp32 of the posterior's
        mode."""
        for part, numel in (
            (self.before, torch.Size(self.latent).numel()),
            (self.after, torch.Size(self.image).numel()),
        ):
            if not part.invertible(numel):
                raise ValueError(
                    "encode_media: the pipeline's decoding drops entries, so it has no inverse"
                )
        return torch.cat([self._encode(part) for part in media.split(chunk)])

    def _encode(self, media: Tensor) -> Tensor:
        if tuple(media.shape[1:]) != tuple(self.after.shape):
            raise ValueError(
                f"media of shape {tuple(media.shape[1:])} cannot be encoded; the pipeline makes"
                f" {tuple(self.after.shape)}"
            )
        pixels = self.after.inverse(media.float(), self.image, _constant(self.after, media)).to(
            self.vae.dtype
        )
        posterior = self.vae.encode(pixels)
        z = (
            posterior.latent_dist.mode() if hasattr(posterior, "latent_dist") else posterior.latents
        ).float()
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
    real, seen, sizes = type(vae).decode, {}, {}

    def run(key: str) -> None:
        """One stubbed run with the pattern `key` in the latents and in the VAE's output."""
        done = []

        def decode(z, *args, return_dict=True, **kwargs):
            if "image" not in sizes:
                sizes["image"] = tuple(
                    real(vae, z.to(vae.dtype), *args, return_dict=False, **kwargs)[0].shape
                )
            done.append(z)
            if sizes["image"][0] != rows:
                raise UnreplayableError(
                    f"decode: the VAE returned {sizes['image'][0]} rows for {rows} prompts"
                )
            image = patterns(rows, sizes["image"][1:], unit=1 / 64)[
                _same(key, sizes["image"][1:])
            ].to(z)
            if not return_dict:
                return (image,)
            from diffusers.models.autoencoders.vae import DecoderOutput

            return DecoderOutput(sample=image)

        x = patterns(rows, shape)[_same(key, shape)]
        with replaced(vae, "decode", decode):
            prober.run(RECORD, steps, latents=lambda j: x, output_type="pt")
        if len(done) != 1:
            raise UnreplayableError(
                f"decode: the pipeline called vae.decode {len(done)} times, and one call can be"
                " replayed"
            )
        seen[key] = (done[0], prober.result)

    run("zero")
    for key in {**patterns(1, shape), **patterns(1, sizes["image"][1:])}:
        run(key)
    before = solve(
        {k: seen[k][0] for k in patterns(1, shape)}, rows, shape, "decode: input of the VAE"
    )
    image = sizes["image"][1:]
    after = solve(
        {k: torch.as_tensor(seen[k][1]) for k in patterns(1, image)},
        rows,
        image,
        "decode: output of the pipeline",
    )
    after.scale = after.scale * 64  # its patterns were 1/64 of the others
    for what, part in (("input of the VAE", before), ("output of the pipeline", after)):
        if part.const is not None and not torch.allclose(
            part.const, part.const[:1, :1].expand_as(part.const)
        ):
            raise UnreplayableError(
                f"decode: {what} has constants that differ between rows; give hints decode=fn(pipe,"
                " latents)"
            )
    return Decoder(vae, before, after, shape, image)


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
