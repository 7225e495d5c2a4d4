"""Pretrain the models of stickers from nothing: a VAE, then a latent diffusion UNet.

    python scripts/embedded/train_stickers.py vae  --work runs/stickers   # minutes on two cores
    python scripts/embedded/train_stickers.py sd   --work runs/stickers   # hours: an epsilon UNet
    python scripts/embedded/train_stickers.py export-sd --work runs/stickers

The text encoder is trained with the network that it conditions. What its last token says has to
name every part of the prompt (a linear head and a cross-entropy), without which small models learn
late which word belongs to which.

Every stage prints its loss, saves to --work every --save steps and goes on from there when it is
started again. A batch is a function of (seed, step): on one thread of a CPU, an interrupted stage
ends with the weights of an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from train_shapes import Progress, descend, finish, learning_rate, optimizers_of, resume, save
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from flowrl.scenes import grammar
from flowrl.scenes.stickers import prompts
from flowrl.scenes.stickers.scenes import BACKGROUNDS, OBJECTS, StickerScene, place, render
from flowrl.shapes import build

TEXT_TOKENS = 16  # the longest prompt has 12 words
WIDTH = 96  # of the text encoder
SETTINGS = ("seed", "batch", "scenes", "lr", "read_weight", "vae_kl", "vae_lr", "vae_batch")

OBJECT_SHARES = (0.35, 0.35, 0.15, 0.15)  # pictures of one, two, three and four objects
SHARES = {"single_object": 0.15, "two_object": 0.2, "counting": 0.2, "position": 0.3}
SHARES["background"] = 0.15
PAIRS_ON_COLOR = 0.2  # share of the prompts of two objects that name a background
WHITE = 0.4  # share of pictures on white; the other backgrounds are equally frequent


def vae() -> AutoencoderKL:
    """64 x 64 px to 16 channels of 8 x 8, 1.7 M parameters."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 96),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
    )


def draw(generator: torch.Generator) -> Tensor:
    """A picture (3, 64, 64) in [0, 1] of one to four objects, drawn independently of any prompt."""
    shares = torch.tensor(OBJECT_SHARES)
    count = 1 + int(torch.multinomial(shares, 1, generator=generator))
    kinds = torch.randint(len(OBJECTS), (count,), generator=generator).tolist()
    white, other = torch.rand(2, generator=generator).tolist()
    names = list(BACKGROUNDS)
    background = names[0] if white < WHITE else names[1 + int(other * (len(names) - 1))]
    return render(StickerScene(place([OBJECTS[k] for k in kinds], generator), background))


def pictures(seed: int, step: int, count: int) -> tuple[Tensor, torch.Generator]:
    """Pictures (count, 3, 64, 64) in [-1, 1] of a step, and the generator that drew them."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.stack([draw(generator) for _ in range(count)]) * 2 - 1, generator


def edges(x: Tensor) -> Tensor:
    """Differences of neighbouring pixels, to the right and downwards, in one flat tensor."""
    return torch.cat([x.diff(dim=-1).flatten(), x.diff(dim=-2).flatten()])


def train_vae(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = vae().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    start = resume(args.work / "vae.pt", model=model, optimizer=optimizer)
    for step in range(start, args.vae_steps):
        x, g = pictures(args.seed, step, args.vae_batch)
        posterior = model.encode(x.to(args.device)).latent_dist
        error = model.decode(posterior.sample(generator=g)).sample - x.to(args.device)
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = error.abs().mean() + error.square().mean() + edges(error).abs().mean()
        loss = loss + args.vae_kl * kl
        descend(loss, model, [optimizer], learning_rate(step, args.vae_steps, args.vae_lr))
        if step % 50 == 0:
            mse = error.square().mean().item()
            said = f"loss {loss.item():.4f} mse {mse:.5f} kl {kl.item():.3f}"
            print(f"vae {step} {said}", flush=True)
        if (step + 1) % args.save == 0 or step + 1 == args.vae_steps:
            save(args.work / "vae.pt", step + 1, model=model, optimizer=optimizer)


def tokenizer() -> CLIPTokenizer:
    """One token a word of the world: pictures, motions and edits, for all of its models."""
    grounds = " ".join(prompts.WORLD.backgrounds)
    text = [*grammar.sentences(prompts.WORLD), f"on a background {grounds}"]
    words = sorted({word for sentence in text for word in sentence.split()})
    return build.tokenizer(word_merges(words), TEXT_TOKENS)


def word_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges of byte pairs that make each word one token, a function of the words' order.

    A trainer of byte pairs breaks ties anew in each call. Here a word is read with the merges that
    there are, and where none is left, its first pair becomes the next one. Later merges rank behind
    earlier ones, so that no word before is read in another way.
    """
    rank: dict[tuple[str, str], int] = {}
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda pair: rank.get(pair, len(rank)))
            rank.setdefault(pair, len(rank))
            joined: list[str] = []
            for part in parts:
                if joined and (joined[-1], part) == pair:
                    part = joined.pop() + part
                joined.append(part)
            parts = joined
    return list(rank)


def text_encoder(tok: CLIPTokenizer) -> CLIPTextModel:
    """A three-layer CLIP text encoder."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tok),
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=TEXT_TOKENS,
            hidden_act="gelu",
            bos_token_id=tok.bos_token_id,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
        )
    )


def unet() -> UNet2DConditionModel:
    """Two levels of 8 x 8 and 4 x 4, 2.8 M parameters."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=16,
        out_channels=16,
        block_out_channels=(64, 96),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        cross_attention_dim=WIDTH,
        attention_head_dim=(2, 3),  # diffusers' name for the number of heads
        norm_num_groups=16,
    )


def scheduler() -> DDIMScheduler:
    """That of Stable Diffusion 1.5."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


class Denoiser(torch.nn.Module):
    """Text encoder and UNet as one module."""

    def __init__(self, tok: CLIPTokenizer) -> None:
        super().__init__()
        self.text_encoder, self.unet = text_encoder(tok), unet()

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The noise in x (B, 16, 8, 8), and the text's pooled state (B, WIDTH)."""
        text = self.text_encoder(ids)
        return self.unet(x, t, text.last_hidden_state).sample, text.pooler_output


class Reading(torch.nn.Linear):
    """What a pooled state says of a prompt: both objects, how many of the first, how they are
    joined, and the background; each may be absent."""

    PARTS = (
        OBJECTS,
        (None, *OBJECTS),
        tuple(grammar.NUMBERS),
        (None, *grammar.JOINS),
        (None, *BACKGROUNDS),
    )

    def __init__(self) -> None:
        super().__init__(WIDTH, sum(map(len, self.PARTS)))

    def labels(self, text: Sequence[str]) -> Tensor:
        """(N, 5): the indices in PARTS of what prompts say."""
        known = {one: self._label(one) for one in set(text)}
        return torch.tensor([known[one] for one in text])

    def _label(self, text: str) -> list[int]:
        said = grammar.read(text, prompts.WORLD, grammar.Picture)
        first, *others = said.things
        other = others[0].noun if others else None
        words = (first.noun, other, first.count, said.join, said.background)
        return [part.index(word) for part, word in zip(self.PARTS, words, strict=True)]

    def loss(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """Sum of the parts' cross-entropies; a label of -100 does not count."""
        logits = self(pooled).split([len(part) for part in self.PARTS], 1)
        losses = (F.cross_entropy(one, labels[:, i]) for i, one in enumerate(logits))
        return sum(losses, torch.zeros(()))


def sentences_of(count: int, seed: int) -> list[str]:
    """Drawn prompts, the tasks in SHARES' proportions; some of two objects name a background,
    which those of the lists do not."""
    g = torch.Generator().manual_seed(seed + 1)
    by_task = {t: [p for p in prompts.all_prompts() if p["task"] == t] for t in SHARES}
    tasks = torch.multinomial(torch.tensor([*SHARES.values()]), count, True, generator=g).tolist()
    out = []
    for task in (list(SHARES)[t] for t in tasks):
        row, coloured, color = torch.rand(3, generator=g).tolist()
        text = by_task[task][int(row * len(by_task[task]))]["prompt"]
        if task in ("two_object", "position") and coloured < PAIRS_ON_COLOR:
            said = grammar.read(text, prompts.WORLD, grammar.Picture)
            colors = prompts.WORLD.backgrounds
            text = grammar.text(replace(said, background=colors[int(color * len(colors))]))
        out.append(text)
    return out


@torch.no_grad()
def latents(args: argparse.Namespace) -> tuple[Tensor, list[str]]:
    """Latents (N, 16, 8, 8) fp16 of unit variance of drawn scenes, and their prompts; cached."""
    path = args.work / f"latents-{args.scenes}.pt"
    if not path.exists():
        model = vae().to(args.device).eval()
        resume(args.work / "vae.pt", model=model)
        text = sentences_of(args.scenes, args.seed)
        z = []
        for first in range(0, len(text), 128):
            rows = range(first, min(first + 128, len(text)))
            x = torch.stack([render(prompts.scene(text[row], row)) for row in rows]) * 2 - 1
            z.append(model.encode(x.to(args.device)).latent_dist.mode().cpu())
        every = torch.cat(z)
        scale = 1 / every.std().item()
        torch.save({"z": (every * scale).half(), "text": text, "scale": scale}, path)
    cached = torch.load(path, weights_only=True)
    return cached["z"], cached["text"]


class Batches:
    """Batches of noisy latents: each is a function of (seed, step)."""

    def __init__(self, args: argparse.Namespace, tok: CLIPTokenizer):
        self.args = args
        self.z, text = latents(args)
        pad = {"padding": "max_length", "max_length": TEXT_TOKENS, "return_tensors": "pt"}
        self.ids, self.empty = tok(text, **pad).input_ids, tok([""], **pad).input_ids
        self.labels = Reading().labels(text)
        self.alphas = scheduler().alphas_cumprod

    def __call__(self, step: int) -> list[Tensor]:
        """(x_t, t, eps, tokens, labels), a tenth of them without their prompt, which have the
        label -100.

        High noise levels, where the layout is decided, are more frequent: t = T (1 - u^1.5).
        """
        count, g = self.args.batch, torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        rows = torch.randint(len(self.z), (count,), generator=g)
        x0, eps = self.z[rows].float(), torch.randn(count, *self.z.shape[1:], generator=g)
        t = (len(self.alphas) * (1 - torch.rand(count, generator=g) ** 1.5)).long()
        t = t.clamp(max=len(self.alphas) - 1)
        dropped = torch.rand(count, 1, generator=g) < 0.1
        tokens = torch.where(dropped, self.empty, self.ids[rows])
        labels = torch.where(dropped, -100, self.labels[rows])
        alpha = self.alphas[t][:, None, None, None]
        x = alpha.sqrt() * x0 + (1 - alpha).sqrt() * eps
        return [tensor.to(self.args.device) for tensor in (x, t, eps, tokens, labels)]


def train_sd(args: argparse.Namespace) -> None:
    tok = tokenizer()
    batches = Batches(args, tok)
    torch.manual_seed(args.seed)
    model, reading = Denoiser(tok).to(args.device), Reading().to(args.device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizers = optimizers_of(model, muon=True)
    optimizers["reader"] = torch.optim.AdamW(reading.parameters())
    parts = {"model": model, "ema": ema, "reading": reading} | optimizers
    start = resume(args.work / "sd.pt", **parts)
    trained, progress = torch.nn.ModuleList([model, reading]), Progress("sd", start, decay=0.99)
    for step in range(start, args.steps):
        x, t, eps, tokens, labels = batches(step)
        noise, pooled = model(x, t, tokens)
        loss = F.mse_loss(noise, eps)
        progress(step, loss)
        loss = loss + args.read_weight * reading.loss(pooled, labels)
        descend(loss, trained, optimizers.values(), learning_rate(step, args.steps, args.lr))
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        if (step + 1) % args.save == 0 or step + 1 == args.steps:
            save(args.work / "sd.pt", step + 1, **parts)


def export_sd(args: argparse.Namespace) -> None:
    """Write the averaged weights as a diffusers pipeline in fp16, with provenance beside it."""
    tok, autoencoder = tokenizer(), vae()
    vae_steps = resume(args.work / "vae.pt", model=autoencoder)
    model = Denoiser(tok)
    steps = resume(args.work / "sd.pt", ema=model)
    scale = torch.load(args.work / f"latents-{args.scenes}.pt", weights_only=True)["scale"]
    autoencoder.register_to_config(scaling_factor=scale)
    parts = {"vae": autoencoder, "unet": model.unet, "text_encoder": model.text_encoder}
    pipe = StableDiffusionPipeline(
        **{name: part.half() for name, part in parts.items()},
        tokenizer=tok,
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(args.out)
    provenance = {
        "made_by": "scripts/embedded/train_stickers.py",
        "license": "Apache-2.0",
        "data": "rendered by flowrl.scenes.stickers from Noto Emoji's pictures; no other data",
        "vae_steps": vae_steps,
        "steps": steps,
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "parameters": {k: sum(p.numel() for p in v.parameters()) for k, v in parts.items()},
    }
    finish(Path(args.out), provenance)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = out.add_argument
    add("stage", choices=list(STAGES))
    add("--work", type=Path, default=Path("runs/stickers"), help="where checkpoints lie")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--save", type=int, default=250, help="steps between checkpoints")
    add_vae(add)
    add_sd(add)
    return out


def add_vae(add: Callable[..., object]) -> None:
    add("--vae-steps", type=int, default=6000)
    add("--vae-batch", type=int, default=8)
    add("--vae-lr", type=float, default=2e-3, help="peak learning rate")
    add("--vae-kl", type=float, default=5e-4, help="weight of the KL to the unit normal")


def add_sd(add: Callable[..., object]) -> None:
    add("--out", default="flowrl/scenes/stickers/sd", help="where export-sd writes the pipeline")
    add("--scenes", type=int, default=40_000, help="drawn scenes, whose latents are kept")
    add("--steps", type=int, default=16_000)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=1.5e-3, help="peak learning rate")
    add("--read-weight", type=float, default=0.1, help="of the loss of reading")


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "vae": train_vae,
    "sd": train_sd,
    "export-sd": export_sd,
}


def main(words: list[str] | None = None) -> None:
    args = parser().parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    STAGES[args.stage](args)


if __name__ == "__main__":
    main()
