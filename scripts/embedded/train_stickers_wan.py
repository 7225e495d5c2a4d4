"""Pretrain stickers-wan, which draws videos of 9 frames of 64 x 64 px: a video VAE, then a Wan
transformer by flow matching. With --world shapes, coloured shapes move.

    python scripts/embedded/train_stickers_wan.py wan-vae     --work runs/stickers   # an hour
    python scripts/embedded/train_stickers_wan.py wan-decoder --work runs/stickers   # 20 minutes
    python scripts/embedded/train_stickers_wan.py wan         --work runs/stickers   # hours
    python scripts/embedded/train_stickers_wan.py export-wan  --work runs/stickers

Where checkpoints are lost, `restore-wan` makes them from the weights that ship. Stages save and go
on as those of train_stickers.py do, and the text encoder is trained with the transformer as there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from train_shapes import resume, save
from train_stickers import (
    NOTO,
    WHITE,
    Batches,
    Reading,
    Stages,
    add_denoiser,
    add_vae,
    encoded,
    fit,
    fit_autoencoder,
    parser,
    remember,
    run,
    words_of_the_world,
    write,
)
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flowrl.scenes import grammar, shapes
from flowrl.scenes.motions import Motions
from flowrl.scenes.stickers.prompts import WORLD
from flowrl.scenes.stickers.world import MOTIONS
from flowrl.scenes.world import SmallWorld

FRAMES = 9
TEXT_WIDTH = 64
PADDED = 512  # tokens to which WanPipeline pads a text unless it is told otherwise
WORLDS = {"stickers": MOTIONS, "shapes": shapes.MOTIONS}
OFF = 0.4  # standard deviations by which latents of the decoder's training are off, at most
SHIFT = 3.0  # of the exported scheduler's noise levels


def wan_vae(mean: Sequence[float] = (0.0,) * 16, std: Sequence[float] = (1.0,) * 16) -> Any:
    """9 frames of 64 x 64 px to 16 channels of 3 x 8 x 8, 0.70 M parameters.

    Pixels come in patches of 2 x 2 and blocks have shortcuts of means, as in Wan 2.2: a quarter of
    the places in the costliest layers, and a way for what is seen past all of them.
    """
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=list(mean),
        latents_std=list(std),
        in_channels=12,
        out_channels=12,
        patch_size=2,
        is_residual=True,
        scale_factor_temporal=4,
        scale_factor_spatial=8,
    )


def motion_sentences(count: int, g: torch.Generator, plain: float, world: SmallWorld) -> list[str]:
    """Drawn motions; a share of `plain`, or all where the world has one, names no background."""
    sentences, grounds = grammar.sentences(world.language), world.language.backgrounds
    known = [one for one in sentences.values() if isinstance(one, grammar.Motion)]
    out = []
    for place, white, color in torch.rand(count, 3, generator=g).tolist():
        motion = known[int(place * len(known))]
        named = white >= plain and grounds
        ground = grounds[int(color * len(grounds))] if named else None
        out.append(grammar.text(grammar.Motion(motion.thing, motion.verb, ground)))
    return out


def video(text: str, seed: int, motions: Motions) -> Tensor:
    """A motion's video (3, 9, 64, 64) in [-1, 1], a function of text and seed."""
    scenes = motions.frames(text, seed, FRAMES)
    return torch.stack([motions.world.render(scene) for scene in scenes], 1) * 2 - 1


def videos(count: int, g: torch.Generator, motions: Motions = MOTIONS) -> Tensor:
    """Drawn videos (count, 3, 9, 64, 64) in [-1, 1]."""
    text = motion_sentences(count, g, WHITE, motions.world)
    seeds = torch.randint(2**31, (count,), generator=g).tolist()
    return torch.stack([video(*row, motions) for row in zip(text, seeds, strict=True)])


@torch.no_grad()
def fresh_vae() -> Any:
    """Start with convolutions that keep the variance, without biases, and with little noise.

    These networks never subtract a mean: from torch's own start the latents are biases and the
    posterior's noise, and 250 steps taught the decoder nothing.
    """
    model = wan_vae()
    for part in model.modules():
        if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d):
            part.weight.mul_(3**0.5)  # torch draws a third of 1 / (number of inputs)
            part.bias.zero_()
    model.quant_conv.bias[16:] = -4.0  # logarithms of the posterior's variances
    return model


def unclamped(model: Any, z: Tensor) -> Tensor:
    """Decode to what the VAE clamps to [-1, 1]: a clamped pixel has no gradient, and an untrained
    decoder would stay white where a video is not."""
    said: list[Tensor] = []
    hook = model.decoder.register_forward_hook(lambda *call: said.append(call[-1]))
    model.decode(z)
    hook.remove()
    return unpatchify(torch.cat(said, 2), model.config.patch_size)


def train_wan_vae(args: argparse.Namespace) -> None:
    data = partial(videos, motions=WORLDS[args.world])
    # with AdamW a loss of 0.28 takes 250 steps in place of 100
    fit_autoencoder(args, "wan-vae", fresh_vae, data, unclamped, muon=True)


def train_wan_decoder(args: argparse.Namespace) -> None:
    """Train the decoder on: it draws sharp shapes from latents that are a little off, as those of
    a denoiser are. The encoder and so the latents stay as they are."""

    def make() -> Any:
        model = wan_vae()
        resume(args.work / "wan-vae.pt", model=model)
        model.encoder.requires_grad_(False)
        model.quant_conv.requires_grad_(False)
        return model

    def off(said: Any, g: torch.Generator) -> Tensor:
        z = said.mode()
        share = OFF * torch.rand(len(z), 1, 1, 1, 1, generator=g)
        return z + share * z.std((0, 2, 3, 4), keepdim=True) * torch.randn(z.shape, generator=g)

    data = partial(videos, motions=WORLDS[args.world])
    how = {"sample": off, "muon": True, "steps": args.decoder_steps}
    fit_autoencoder(args, "wan-decoder", make, data, unclamped, **how)


def wan_tokenizer(language: grammar.Language = WORLD) -> PreTrainedTokenizerFast:
    """One token a word, and T5's special tokens."""
    pad, end, unknown = "<pad>", "</s>", "<unk>"
    words = [pad, end, unknown, *words_of_the_world(language)]
    tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=unknown))
    tok.normalizer, tok.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tok.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, words.index(end))]
    )
    named = {"pad_token": pad, "eos_token": end, "unk_token": unknown}
    return PreTrainedTokenizerFast(tokenizer_object=tok, model_max_length=PADDED, **named)


class WanDenoiser(torch.nn.Module):
    """Text encoder and transformer as one module; the text is embedded as WanPipeline does."""

    def __init__(self, tok: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.pad = tok.pad_token_id
        self.text_encoder = UMT5EncoderModel(
            UMT5Config(
                vocab_size=len(tok),
                d_model=TEXT_WIDTH,
                d_kv=16,
                d_ff=2 * TEXT_WIDTH,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=tok.pad_token_id,
                eos_token_id=tok.eos_token_id,
            )
        )
        self.transformer = WanTransformer3DModel(
            patch_size=(1, 1, 1),
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
            rope_max_seq_len=32,
        )

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The velocity of x (B, 16, 3, 8, 8), and the state (B, TEXT_WIDTH) of the text's end.

        The encoder does not see what pads ids (B, tokens): the transformer sees zeros there.
        """
        lengths = (ids != self.pad).sum(1)
        words = ids[:, : int(lengths.max())]
        known = words != self.pad
        text = self.text_encoder(words, known).last_hidden_state * known[..., None]
        ends = text[torch.arange(len(text)), lengths - 1]
        padded = F.pad(text, (0, 0, 0, ids.shape[1] - words.shape[1]))
        return self.transformer(x, t, padded).sample, ends


def motion_reading(language: grammar.Language = WORLD) -> Reading:
    """What moves, how many, how, and on which background."""

    def words(text: str) -> tuple[object, ...]:
        said = grammar.read(text, language, grammar.Motion)
        return said.thing.noun, said.thing.count, said.verb, said.background

    parts = (language.nouns, (1, 2), grammar.MOTIONS, (None, *language.backgrounds))
    return Reading(parts, words, TEXT_WIDTH)


@torch.no_grad()
def wan_latents(args: argparse.Namespace) -> dict[str, Any]:
    """Latents "z" (N, 16, 3, 8, 8) fp16 of drawn motions, their sentences "text", and what was
    subtracted and divided by in each channel, "mean" and "std"; cached."""
    path = args.work / f"wan-latents-{args.scenes}.pt"
    if not path.exists():
        model, motions = wan_vae().to(args.device).eval(), WORLDS[args.world]
        resume(args.work / "wan-vae.pt", model=model)
        g = torch.Generator().manual_seed(args.seed + 3)
        text = motion_sentences(args.scenes, g, args.plain, motions.world)

        def encode(rows: Sequence[int]) -> Tensor:
            x = torch.stack([video(text[row], row, motions) for row in rows])
            return model.encode(x.to(args.device)).latent_dist.mode()

        every = encoded(path.with_suffix(".part"), len(text), encode)
        std, mean = torch.std_mean(every, (0, 2, 3, 4), keepdim=True)
        out = {"mean": mean.flatten().tolist(), "std": std.flatten().tolist()}
        torch.save({"z": ((every - mean) / std).half(), "text": text} | out, path)
    return torch.load(path, weights_only=True)


class WanBatches(Batches):
    """Batches of flow matching."""

    def __call__(self, step: int) -> list[Tensor]:
        """(x, t, velocity, tokens, labels). Texts of each eighth step are as long as WanPipeline
        pads them: the transformer, which looks at the zeros too, has to know them in both
        numbers."""
        x, t, target, tokens, labels = super().__call__(step)
        if step % 8 == 0:
            tokens = F.pad(tokens, (0, PADDED - tokens.shape[1]))  # 0 is the token of padding
        return [x, t, target, tokens, labels]

    def noisy(self, x0: Tensor, eps: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sigma = level[:, None, None, None, None]
        return (1 - sigma) * x0 + sigma * eps, 1000 * level, eps - x0


def train_wan(args: argparse.Namespace) -> None:
    language = WORLDS[args.world].world.language
    tok, data = wan_tokenizer(language), wan_latents(args)
    torch.manual_seed(args.seed)
    model, reading = WanDenoiser(tok).to(args.device), motion_reading(language).to(args.device)
    fit(args, "wan", model, reading, WanBatches(args, tok, reading, data["z"], data["text"]))


def export_wan(args: argparse.Namespace) -> None:
    """Write the averaged weights as a WanPipeline."""
    data, tok = wan_latents(args), wan_tokenizer(WORLDS[args.world].world.language)
    autoencoder, model = wan_vae(data["mean"], data["std"]), WanDenoiser(tok)
    vae_steps = resume(args.work / "wan-vae.pt", model=autoencoder)
    decoder_steps = resume(args.work / "wan-decoder.pt", model=autoencoder)
    steps = resume(args.work / "wan.pt", ema=model)
    pipe = WanPipeline(
        vae=autoencoder.half(),
        transformer=model.transformer.half(),
        text_encoder=model.text_encoder.half(),
        tokenizer=tok,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
        ),
    )
    drawn = "rendered by flowrl.shapes.scenes; no other data"
    source = NOTO if args.world == "stickers" else drawn
    counted = {"vae_steps": vae_steps, "decoder_steps": decoder_steps, "steps": steps}
    write(args, pipe, __file__, source, **counted)


def restore_wan(args: argparse.Namespace) -> None:
    """Write checkpoints of what --out holds: weights alone, so that optimizers start anew."""
    pipe = WanPipeline.from_pretrained(args.out, dtype=torch.float32)
    known = remember(args)
    model = WanDenoiser(wan_tokenizer(WORLDS[args.world].world.language))
    model.transformer.load_state_dict(pipe.transformer.state_dict())
    model.text_encoder.load_state_dict(pipe.text_encoder.state_dict())
    save(args.work / "wan-vae.pt", known["vae_steps"], model=pipe.vae)
    if decoder_steps := known.get("decoder_steps"):
        save(args.work / "wan-decoder.pt", decoder_steps, model=pipe.vae)
    save(args.work / "wan.pt", known["steps"], model=model, ema=model)


STAGES: Stages = {
    "wan-vae": train_wan_vae,
    "wan-decoder": train_wan_decoder,
    "wan": train_wan,
    "export-wan": export_wan,
    "restore-wan": restore_wan,
}


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", STAGES, "flowrl/scenes/stickers/wan")
    add_vae(made, vae_steps=2000, vae_batch=4, vae_lr=3e-3)
    add_denoiser(made, steps=10_000, batch=32, scenes=12_000)
    made.add_argument("--decoder-steps", type=int, default=7000)
    made.add_argument("--world", choices=list(WORLDS), default="stickers")
    made.add_argument("--plain", type=float, default=0.7, help="share of motions on white")
    return made


def main(words: list[str] | None = None) -> None:
    run(arguments(), STAGES, words)


if __name__ == "__main__":
    main()
