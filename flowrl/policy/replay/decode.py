"""Latents to media and back: one VAE call between an affine map of latents and one of pixels.

Both maps are read off the pipeline's own tail, so nothing is patched when media are decoded. A tail
of another form is run itself, a row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from flowrl.policy.replaced import LOCK, replaced
from flowrl.policy.replay.affine import BASE, patterns, solve
from flowrl.policy.replay.arguments import Affine, Cond
from flowrl.policy.replay.errors import Halt, UnreplayableError
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.pixels import Pixels, fit_pixels
from flowrl.policy.replay.probe import Prober, always
from flowrl.runtime.memory import ran_out

DECODING = "while media are decoded"


class Decoder:
    """media = after(vae.decode(before(latents))), clamped to [0, 1].

    latent: shape of one row of latents. own: the constant that `before` adds to the latents belongs
    to the prompt (a first frame). dtype: type in which the pipeline computes `before`.
    """

    def __init__(
        self,
        vae: Any,
        before: Affine,
        after: Pixels,
        latent: tuple[int, ...],
        own: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.vae, self.before, self.after = vae, before, after
        self.latent, self.own, self.dtype = latent, own, dtype

    def __call__(
        self, x: Tensor, cond: Cond | None = None, rows: Tensor | None = None, chunk: int = 16
    ) -> Tensor:
        """Decode pipeline latents (n, *L) fp32 -> media (n, ...) fp32 in [0, 1], differentiably,
        `chunk` rows at a time. cond, rows (n,): the prompts of the rows, for a decoder that is
        `own`."""
        media = []
        for k in range(0, len(x), chunk):
            part = x[k : k + chunk]
            constant, scale = _constant(self.before, part), None
            if self.own:
                assert cond is not None and cond.tails is not None and rows is not None
                own = cond.tails.to(x.device)[rows[k : k + chunk].to(x.device)]
                constant, scale = own[:, 0], own[:, 1]
            z = self.before(part, constant, scale=scale, dtype=self.dtype).to(self.vae.dtype)
            media.append(self.after(decoded(self.vae, z).float()).clamp(0, 1))
        return torch.cat(media)

    def encode(self, media: Tensor, chunk: int = 16) -> Tensor:
        """Invert both maps around vae.encode: media (n, ...) fp32 in [0, 1] -> pipeline latents (n,
        *L) fp32 of the posterior's mode."""
        if not self.before.invertible(torch.Size(self.latent).numel()):
            raise ValueError(
                "encode_media: the pipeline's decoding drops entries, so it has no inverse"
            )
        if tuple(media.shape[1:]) != self.after.media:
            raise ValueError(
                f"media of shape {tuple(media.shape[1:])} cannot be encoded; the pipeline makes"
                f" {self.after.media}"
            )
        return torch.cat([self._encode(part) for part in media.split(chunk)])

    def _encode(self, media: Tensor) -> Tensor:
        pixels = self.after.inverse(media.float())
        posterior = self.vae.encode(pixels.to(self.vae.dtype))
        if hasattr(posterior, "latent_dist"):
            z = posterior.latent_dist.mode().float()
        else:
            z = posterior.latents.float()
        return self.before.inverse(z, self.latent, _constant(self.before, z))

    def placed(self, mask: Tensor) -> Tensor:
        """Place a mask of media (1, 1, H, W) on the CPU among the latents, pooled to the VAE's grid
        and alike in all channels and frames -> (1, *L)."""
        z = self.before(torch.zeros(1, *self.latent))
        pooled = F.adaptive_avg_pool2d(mask, z.shape[-2:])[0, 0].expand_as(z)
        # the map of latents only moves and scales entries: what 0 and 1 become tells both
        ends = (torch.zeros_like(z), pooled, torch.ones_like(z))
        none, some, whole = (self.before.inverse(y, self.latent) for y in ends)
        return (some - none) / (whole - none)


def _constant(part: Affine, like: Tensor) -> Tensor | None:
    return None if part.const is None else part.const[0, :1].to(like.device, torch.float32)


class TailDecoder:
    """Decode by the pipeline's own tail, if it is not a VAE call between affine maps: by a stubbed
    run for each row, differentiable if the tail is."""

    def __init__(self, prober: Prober, steps: int) -> None:
        self.prober, self.steps = prober, steps

    def __call__(self, x: Tensor, cond: Cond | None = None, rows: Tensor | None = None) -> Tensor:
        """Decode pipeline latents (n, *L) fp32 -> media (n, ...) fp32 in [0, 1]."""
        items = [self.prober.record[0]] * len(x)
        if cond is not None and rows is not None:
            items = [cond.items[row] for row in rows.tolist()]
        grad = torch.is_grad_enabled() and x.requires_grad
        media = [
            tail(self.prober, self.steps, x[k : k + 1], [item], grad=grad)
            for k, item in enumerate(items)
        ]
        return torch.cat(media).clamp(0, 1)


def infer_decoder(prober: Prober, steps: int, shape: tuple[int, ...]) -> Decoder | TailDecoder:
    """Infer a decoder from the tail of the pipeline: probes show what vae.decode receives for
    chosen latents, and which media result from chosen VAE outputs."""
    vae = getattr(prober.runner.pipe, "vae", None)
    if vae is None or not hasattr(vae, "decode"):
        raise UnreplayableError(
            f"decode: {type(prober.runner.pipe).__name__} has no VAE with a decode method; give"
            " hints decode=fn(pipe, latents)"
        )
    try:
        return _affine_decoder(prober, steps, shape)
    except UnreplayableError:
        return TailDecoder(prober, steps)


def _affine_decoder(prober: Prober, steps: int, shape: tuple[int, ...]) -> Decoder:
    rows = prober.count + len(prober.runner.pad)
    probe = TailProbe(prober, steps, prober.rows(prober.count), rows)
    given = patterns(rows, shape)
    dtype = probe.received_for(given["zero"]).dtype
    received = _received(probe, given)
    before = solve(received, rows, shape, "decode: input of the VAE")
    const = before.const
    if const is not None and not torch.allclose(const, const[:1, :1].expand_as(const)):
        raise UnreplayableError("decode: input of the VAE has constants that differ between rows")
    after = fit_pixels(*probe.returned_for(torch.zeros(rows, *shape)))
    if after is None:
        raise UnreplayableError("decode: output of the pipeline is not that of its VAE in a line")
    decoder = Decoder(prober.runner.pipe.vae, before, after, shape, dtype=dtype)
    round_alike(decoder, prober, steps)
    if prober.runner.single and before.const is not None:
        constant, scale = tails(prober, steps, decoder, [prober.record[1]])[0]
        same = torch.allclose(constant, before.const[0, 0].to(constant))
        decoder.own = not same
        whole = before.scale.ndim == 0 or bool((before.scale != 0).all())
        if decoder.own and not whole and len(scale) == torch.Size(shape).numel():
            on = (before.scale != 0).expand(len(scale))
            if before.index is not None and not torch.equal(before.index[on], on.nonzero()[:, 0]):
                raise UnreplayableError("decode: masked latents whose places another mask shows")
            before.index = None  # a mask of the prompt: latents keep their places
    return decoder


def round_alike(decoder: Decoder, prober: Prober, steps: int) -> None:
    """Make the decoder round the latents' statistics in the way of a low-precision pipeline.

    There, the deviation and mean of each channel are tensors of low precision, and latents are
    multiplied by deviations, or divided by their inverses; or all is done in fp32. The decoder
    takes the way that gives most of the pipeline's own values. One scale for all channels is a
    number, which is exact.
    """
    before, dtype = decoder.before, decoder.dtype
    exact = dtype == torch.float32 or not before.scale.ndim or before.const is None
    if exact or decoder.own or before.blocks > 1:
        return
    scale, const = before.scale.to(dtype), before.const.to(dtype).to(before.const)
    divided = 1.0 / (1.0 / scale).to(before.scale)
    maps = [before, *(replace(before, scale=s.to(divided), const=const) for s in (scale, divided))]
    rows = prober.count + len(prober.runner.pad)
    x = patterns(rows, decoder.latent)["noise"] / BASE
    theirs = TailProbe(prober, steps, prober.rows(prober.count), rows).received_for(x).cpu()

    def apart(way: tuple[Affine, torch.dtype]) -> int:
        made = way[0](x, _constant(way[0], x), dtype=way[1])
        return int((made.to(theirs.dtype) != theirs).sum())

    ways = [(one, kind) for kind in (dtype, torch.float32) for one in maps]
    decoder.before, decoder.dtype = min(ways, key=apart)


def tails(prober: Prober, steps: int, decoder: Decoder, items: Sequence[PromptItem]) -> Tensor:
    """Find the constant that the pipeline adds to the latents of each prompt before it decodes
    them, and the scale with which it takes them: (P, 2, D) fp32."""
    out = []
    for item in items:
        probe = TailProbe(prober, steps, [item], 1)
        latents = torch.zeros(1, *decoder.latent)
        both = _received(probe, {"zero": latents, "one": latents + 1})
        zero, one = (value.float().reshape(-1) for value in both.values())
        out.append(torch.stack([zero, one - zero]))
    return torch.stack(out)


def _received(probe: TailProbe, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what vae.decode receives for each of these latents, in fp32; or in the pipeline's own
    type, if a network of the tail takes no other."""
    try:
        return {key: probe.received_for(x, exact=True) for key, x in given.items()}
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UnreplayableError) or ran_out(error):
            raise  # a run in another type would fail in the same way
        return {key: probe.received_for(x) for key, x in given.items()}


@dataclass(eq=False)
class TailProbe:
    """Stubbed runs of a pipeline to its VAE, or to its media with noise in place of the VAE's
    output."""

    prober: Prober  # runs the pipeline
    steps: int  # number of steps of each run
    items: Sequence[PromptItem]  # prompts of each run
    rows: int  # number of rows of each run, with those that fix the text length
    # inputs of vae.decode in the newest run, call by call
    received: list[Tensor] = field(default_factory=list)
    image: tuple[int, ...] = ()  # shape of one row of the VAE's output; (): it was not made yet
    noise: Tensor | None = None  # (rows, *image) in [0, 1), the VAE's output in a run to media

    def received_for(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """Return what vae.decode receives for latents x (rows, *L). exact: in fp32, if the pipeline
        computes in the type of its latents, so that its operations on them are not rounded."""
        self.noise = None
        self._run(x, exact)
        return torch.cat(self.received)

    def returned_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (noise (rows, *image), the media (rows, ...) that the pipeline makes of it)."""
        image = self._image(self.received_for(x))
        generator = torch.Generator().manual_seed(0)
        self.noise = torch.rand(self.rows, *image, generator=generator)
        self._run(x)
        return self.noise, media_of(self.prober.result).float().cpu()

    def _run(self, x: Tensor, exact: bool = False) -> None:
        self.received.clear()
        how: dict[str, Any] = {"latents": always(x), "output_type": "pt", "unseen": True}
        vae = self.prober.runner.pipe.vae
        precision = in_fp32(vae) if exact else nullcontext()
        with LOCK, replaced(vae, decode=self._decode), precision:
            self.prober.run(self.items, self.steps, exact=exact, **how)
        if sum(map(len, self.received)) != self.rows:
            raise UnreplayableError(
                f"decode: the pipeline called vae.decode for {[len(z) for z in self.received]} rows"
                f" of {self.rows}"
            )

    def _decode(self, z: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Stand in for vae.decode, which is called for some of the rows."""
        first = sum(map(len, self.received))
        more = [*args, *(v for k, v in kwargs.items() if k != "generator")]
        if first + len(z) > self.rows or any(v is not None for v in more):
            raise UnreplayableError(
                f"decode: the VAE is given {first + len(z)} rows for {self.rows} media, or more"
                " than latents"
            )
        self.received.append(z)
        if self.noise is not None:
            image = self.noise[first : first + len(z)].to(z.device)
        elif first + len(z) == self.rows:
            raise Halt
        else:
            image = z.new_zeros(len(z), *self._image(z))
        return _output(image) if return_dict else (image,)

    @torch.no_grad()
    def _image(self, z: Tensor) -> tuple[int, ...]:
        if not self.image:
            vae = self.prober.runner.pipe.vae
            one = type(vae).decode(vae, z[:1].to(vae.dtype), return_dict=False)[0]
            if len(one) != 1:
                raise UnreplayableError(f"decode: the VAE returned {len(one)} rows for one")
            self.image = tuple(one.shape[1:])
        return self.image


@contextmanager
def in_fp32(vae: Any) -> Iterator[None]:
    """Hold a VAE of one narrow type in fp32: pipelines convert their latents to its type first."""
    kinds = {p.dtype for p in vae.parameters()} if isinstance(vae, nn.Module) else set()
    kind = kinds.pop() if len(kinds) == 1 else torch.float32
    if kind == torch.float32:
        yield
        return
    nn.Module.to(vae, torch.float32)  # nn.Module's, because diffusers' own `to` warns
    try:
        yield
    finally:
        nn.Module.to(vae, kind)


def _output(sample: Tensor) -> Any:
    from diffusers.models.autoencoders.vae import DecoderOutput

    return DecoderOutput(sample=sample)


def decoded(vae: Any, z: Tensor, *args: Any, decode: Any = None, **kwargs: Any) -> Tensor:
    """Return vae.decode(z), computed row by row if the VAE takes no batch."""
    decode = decode or vae.decode
    try:
        return decode(z, *args, return_dict=False, **kwargs)[0]
    except RuntimeError as error:
        if len(z) == 1 or ran_out(error):
            raise
    return torch.cat([decode(row, *args, return_dict=False, **kwargs)[0] for row in z.split(1)])


def media_of(result: Any) -> Tensor:
    """Return a pipeline's media as one tensor; some pipelines return a list."""
    if isinstance(result, list | tuple):
        return torch.stack([torch.as_tensor(media) for media in result])
    return torch.as_tensor(result)


def tail(
    prober: Prober, steps: int, x: Tensor, items: Sequence[PromptItem], *, grad: bool = False
) -> Tensor:
    """Decode latents x (P, *L) by the pipeline itself -> media (P, ...)."""
    made = []
    for group, part in zip(prober.apart(items), _like(prober, x), strict=True):
        vae = prober.runner.pipe.vae
        full = torch.cat([part, part[:1].expand(len(prober.runner.pad), *x.shape[1:])])

        def cast(
            z: Tensor,
            *args: Any,
            return_dict: bool = True,
            vae: Any = vae,
            rows: int = len(full),
            **kwargs: Any,
        ) -> Any:
            own = partial(type(vae).decode, vae)
            # one row's media at a time, to save memory
            each = z.split(1) if len(z) == rows else [z]
            # _same: tensors that the VAE saves need no clone
            with saved_tensors_hooks(_same, _same):
                out = [decoded(vae, v.to(vae.dtype), *args, decode=own, **kwargs) for v in each]
            out = torch.cat(out)
            return _output(out) if return_dict else (out,)

        # clone: some tails edit latents in place after sums whose gradient needs the old values
        with LOCK, replaced(vae, decode=cast), saved_tensors_hooks(Tensor.clone, _same):
            how: dict[str, Any] = {"output_type": "pt", "grad": grad, "doing": DECODING}
            prober.run(group, steps, latents=always(full), **how)
        made.append(media_of(prober.result).float()[: len(group)])
    return torch.cat(made)


def _same(x: Tensor) -> Tensor:
    return x


def _like(prober: Prober, x: Tensor) -> list[Tensor]:
    """Split x into one part for each run that its rows take."""
    return list(x.split(1)) if prober.runner.single else [x]
