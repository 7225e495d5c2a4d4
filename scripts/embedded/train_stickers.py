"""Pretrain the models of stickers from nothing: a VAE, then a latent diffusion UNet.

    python scripts/embedded/train_stickers.py vae  --work runs/stickers   # minutes on two cores
    python scripts/embedded/train_stickers.py sd   --work runs/stickers   # hours: an epsilon UNet
    python scripts/embedded/train_stickers.py export-sd --work runs/stickers

The text encoder is trained with the network that it conditions. What its last token says has to
name every part of the prompt (a linear head and a cross-entropy), without which small models learn
late which word belongs to which. train_stickers_edit.py and train_stickers_wan.py train the other
two models with the same loops.

Every stage prints its loss, saves to --work every --save steps (latents every five minutes) and
goes on from there when it is started again. A batch is a function of (seed, step): on one thread of
a CPU, an interrupted stage ends with the weights of an uninterrupted one, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from torch import Tensor
from train_shapes import Progress, descend, finish, learning_rate, optimizers_of, resume, save
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from flowrl.scenes import grammar
from flowrl.scenes.stickers import prompts
from flowrl.scenes.stickers.scenes import BACKGROUNDS, OBJECTS, SIZES, render
from flowrl.scenes.world import Scene, place
from flowrl.shapes import build

TEXT_TOKENS = 16  # the longest prompt has 12 words
WIDTH = 96  # of the text encoder
CHUNK = 128  # pictures that are encoded at once
OF_A_MACHINE = ("stage", "work", "out", "device", "threads", "save")  # no part of the provenance

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
    return render(Scene(place([OBJECTS[k] for k in kinds], SIZES, generator), background))


def generator_of(args: argparse.Namespace, step: int) -> torch.Generator:
    """What a step draws its batch with."""
    return torch.Generator().manual_seed(args.seed * 1_000_003 + step)


def pictures(count: int, generator: torch.Generator) -> Tensor:
    """Drawn pictures (count, 3, 64, 64) in [-1, 1]."""
    return torch.stack([draw(generator) for _ in range(count)]) * 2 - 1


def edges(x: Tensor) -> Tensor:
    """Differences of neighbouring pixels, to the right and downwards, in one flat tensor."""
    return torch.cat([x.diff(dim=-1).flatten(), x.diff(dim=-2).flatten()])


def fit_autoencoder(
    args: argparse.Namespace,
    stage: str,
    make: Callable[[], torch.nn.Module],
    data: Callable[[int, torch.Generator], Tensor],
    decode: Callable[[Any, Tensor], Tensor] = lambda model, z: model.decode(z).sample,
    *,
    sample: Callable[[Any, torch.Generator], Tensor] = lambda said, g: said.sample(generator=g),
    muon: bool = False,
    steps: int | None = None,
) -> None:
    """Train the autoencoder that `make` makes on batches of `data(count, generator)`.

    Errors of pixels and of their differences, and a KL to the unit normal. sample: from what the
    encoder says to latents. muon: whether kernels are trained by Muon. steps: in all; None:
    args.vae_steps.
    """
    steps = steps or args.vae_steps
    torch.manual_seed(args.seed)
    model: Any = make().to(args.device)
    optimizers = optimizers_of_kernels(model, muon=muon)
    path = args.work / f"{stage}.pt"
    start = resume(path, model=model, **optimizers)
    for step in range(start, steps):
        g = generator_of(args, step)
        x = data(args.vae_batch, g).to(args.device)
        posterior = model.encode(x).latent_dist
        error = decode(model, sample(posterior, g)) - x
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = error.abs().mean() + error.square().mean() + edges(error).abs().mean()
        loss = loss + args.vae_kl * kl
        rate = learning_rate(step, steps, args.vae_lr)
        descend(loss, model, optimizers.values(), rate)
        if step % 50 == 0:
            mse = error.square().mean().item()
            said = f"loss {loss.item():.4f} mse {mse:.5f} kl {kl.item():.3f}"
            print(f"{stage} {step} {said}", flush=True)
        if (step + 1) % args.save == 0 or step + 1 == steps:
            save(path, step + 1, model=model, **optimizers)


def optimizers_of_kernels(
    model: torch.nn.Module, *, muon: bool
) -> dict[str, torch.optim.Optimizer]:
    """AdamW for all weights that are trained, or Muon for the kernels of convolutions and AdamW
    for the rest."""
    kernels, others = [], []
    for p in model.parameters():
        if not p.requires_grad:
            continue
        kernel = muon and p.ndim > 3 and min(p.flatten(1).shape) > 1
        (kernels if kernel else others).append(p)
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    out: dict[str, torch.optim.Optimizer] = {"optimizer": adamw}
    if kernels:
        out["muon"] = KernelMuon(kernels)
    return out


def train_vae(args: argparse.Namespace) -> None:
    fit_autoencoder(args, "vae", vae, pictures)


def words_of_the_world(language: grammar.Language = prompts.WORLD) -> list[str]:
    """Every word of its pictures, motions and edits, for all of its models."""
    grounds = " ".join(language.backgrounds)
    text = [*grammar.sentences(language), f"on a background {grounds}"]
    return sorted({word for sentence in text for word in sentence.split()})


def tokenizer() -> CLIPTokenizer:
    """One token a word."""
    return build.tokenizer(word_merges(words_of_the_world()), TEXT_TOKENS)


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


def unet(channels: int = 16) -> UNet2DConditionModel:
    """Two levels of 8 x 8 and 4 x 4, 2.8 M parameters; `channels` go in, the first 16 noisy."""
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=channels,
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

    def __init__(self, tok: CLIPTokenizer, channels: int = 16) -> None:
        super().__init__()
        self.text_encoder, self.unet = text_encoder(tok), unet(channels)

    def forward(self, x: Tensor, t: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The noise (B, 16, 8, 8) in x (B, channels, 8, 8), and the text's pooled state
        (B, WIDTH)."""
        text = self.text_encoder(ids)
        return self.unet(x, t, text.last_hidden_state).sample, text.pooler_output


class Reading(torch.nn.Linear):
    """What a pooled state says of a sentence, part by part."""

    def __init__(
        self,
        parts: Sequence[Sequence[object]],  # what each part can be
        say: Callable[[str], Sequence[object]],  # a sentence to what each part is
        width: int = WIDTH,  # of the pooled state
    ) -> None:
        super().__init__(width, sum(map(len, parts)))
        self.parts, self.say = parts, say

    def labels(self, text: Sequence[str]) -> Tensor:
        """(N, parts): the indices in `parts` of what sentences say."""
        known = {one: self._label(one) for one in set(text)}
        return torch.tensor([known[one] for one in text])

    def _label(self, text: str) -> list[int]:
        return [part.index(word) for part, word in zip(self.parts, self.say(text), strict=True)]

    def loss(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """Sum of the parts' cross-entropies; a label of -100 does not count."""
        logits = self(pooled).split([len(part) for part in self.parts], 1)
        losses = (F.cross_entropy(one, labels[:, i]) for i, one in enumerate(logits))
        return sum(losses, torch.zeros(()))


def picture_words(text: str) -> tuple[object, ...]:
    """Both objects of a picture, how many of the first, how they are joined, the background."""
    said = grammar.read(text, prompts.WORLD, grammar.Picture)
    first, *others = said.things
    other = others[0].noun if others else None
    return first.noun, other, first.count, said.join, said.background


def picture_reading() -> Reading:
    nouns, counts = OBJECTS, tuple(grammar.NUMBERS)
    parts = (nouns, (None, *nouns), counts, (None, *grammar.JOINS), (None, *BACKGROUNDS))
    return Reading(parts, picture_words)


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
def encoded(path: Path, total: int, encode: Callable[[Sequence[int]], Tensor]) -> Tensor:
    """Latents (total, ...) fp32 that `encode` gives for rows; `path` keeps those that are done."""
    done = torch.load(path, weights_only=True) if path.exists() else []
    saved = time.time()
    for first in range(len(done) * CHUNK, total, CHUNK):
        done.append(encode(range(first, min(first + CHUNK, total))).cpu())
        if time.time() - saved > 300 or first + CHUNK >= total:
            temporary = path.with_suffix(".tmp")
            torch.save(done, temporary)
            temporary.replace(path)
            saved = time.time()
            print(f"{path.stem}: {min(first + CHUNK, total)} of {total}", flush=True)
    return torch.cat(done)


def encoder(args: argparse.Namespace) -> Callable[[Sequence[Scene]], Tensor]:
    """Scenes to latents (N, 16, 8, 8): the posterior's mode, as pipelines take it."""
    model = vae().to(args.device).eval()
    resume(args.work / "vae.pt", model=model)

    def encode(scenes: Sequence[Scene]) -> Tensor:
        x = torch.stack([render(one) for one in scenes]) * 2 - 1
        return model.encode(x.to(args.device)).latent_dist.mode()

    return encode


def latents(args: argparse.Namespace) -> dict[str, Any]:
    """Latents "z" (N, 16, 8, 8) fp16 of unit variance of drawn scenes, their prompts "text", and
    what they were multiplied with, "scale"; cached."""
    path = args.work / f"latents-{args.scenes}.pt"
    if not path.exists():
        text, encode = sentences_of(args.scenes, args.seed), encoder(args)
        every = encoded(
            path.with_suffix(".part"),
            len(text),
            lambda rows: encode([prompts.scene(text[row], row) for row in rows]),
        )
        scale = 1 / every.std().item()
        torch.save({"z": (every * scale).half(), "text": text, "scale": scale}, path)
    return torch.load(path, weights_only=True)


def levels(count: int, g: torch.Generator) -> Tensor:
    """(count,) noise levels in [0, 1], where 1 is noise alone. High ones, where the layout is
    decided, are more frequent: 1 - u^1.5."""
    return 1 - torch.rand(count, generator=g) ** 1.5


class Batches:
    """Batches of noisy latents: each is a function of (seed, step)."""

    tokens = TEXT_TOKENS  # to which texts are padded

    def __init__(
        self,
        args: argparse.Namespace,
        tok: Any,
        reading: Reading,
        z: Tensor,  # (N, ...) fp16 of unit variance: what is to be drawn
        text: Sequence[str],  # N
    ) -> None:
        pad = {"padding": "max_length", "max_length": self.tokens, "return_tensors": "pt"}
        self.ids, self.empty = tok(text, **pad).input_ids, tok([""], **pad).input_ids
        self.args, self.z, self.labels = args, z, reading.labels(text)
        self.alphas = scheduler().alphas_cumprod

    def __call__(self, step: int) -> list[Tensor]:
        """(x_t, t, target, tokens, labels), a tenth of them without their prompt, which have the
        label -100."""
        count, g = self.args.batch, generator_of(self.args, step)
        rows = torch.randint(len(self.z), (count,), generator=g)
        x0, eps = self.z[rows].float(), torch.randn(count, *self.z.shape[1:], generator=g)
        x, t, target = self.noisy(x0, eps, levels(count, g))
        u = torch.rand(count, generator=g)
        dropped = (u < 0.1)[:, None]
        tokens = torch.where(dropped, self.empty, self.ids[rows])
        labels = torch.where(dropped, -100, self.labels[rows])
        out = (self.seen(x, rows, u), t, target, tokens, labels)
        return [tensor.to(self.args.device) for tensor in out]

    def noisy(self, x0: Tensor, eps: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the network sees of x0, its time, and what it has to say: here the noise."""
        t = (len(self.alphas) * level).long().clamp(max=len(self.alphas) - 1)
        alpha = self.alphas[t][:, None, None, None]
        return alpha.sqrt() * x0 + (1 - alpha).sqrt() * eps, t, eps

    def seen(self, x: Tensor, rows: Tensor, u: Tensor) -> Tensor:
        """x and what else the network sees; u (B,) in [0, 1) is below 0.1 where it sees no
        prompt."""
        return x


class Muon(torch.optim.Muon):
    """torch's Muon with Newton-Schulz iterations in fp32.

    torch's own are bf16. On a CPU without bf16 arithmetic they take 1.07 s of a step here, as long
    as the network itself; these take 0.07 s.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("momentum_buffer", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - momentum)
                ahead = p.grad.lerp(mean, momentum).flatten(1)
                update = orthogonal(ahead, *group["ns_coefficients"])
                p.mul_(1 - rate * group["weight_decay"])
                scale = rate * 0.2 * max(update.shape) ** 0.5  # as match_rms_adamw
                p.add_(update.view_as(p), alpha=-scale)


class KernelMuon(Muon):
    """Muon for kernels of convolutions, which torch's refuses: a kernel is the matrix of its
    outputs by all that each of them reads."""

    def __init__(self, kernels: Sequence[Tensor]) -> None:
        defaults = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0}
        defaults |= {"ns_coefficients": (3.4445, -4.775, 2.0315)}
        torch.optim.Optimizer.__init__(self, kernels, defaults)


def orthogonal(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """Bring a matrix's singular values near 1: five quintic Newton-Schulz iterations
    (https://kellerjordan.github.io/posts/muon/)."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def fit(
    args: argparse.Namespace,
    stage: str,
    model: torch.nn.Module,
    reading: Reading,
    batches: Batches,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> None:
    """Train a denoiser and what reads its text; "ema" is the denoiser's average."""
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizers = optimizers_of(model, muon=True, kind=Muon)
    optimizers["reader"] = torch.optim.AdamW(reading.parameters())
    parts = {"model": model, "ema": ema, "reading": reading} | optimizers
    path = args.work / f"{stage}.pt"
    start = resume(path, **parts)
    trained, progress = torch.nn.ModuleList([model, reading]), Progress(stage, start, decay=0.99)
    for step in range(start, args.steps):
        x, t, target, tokens, labels = batches(step)
        predicted, pooled = model(x, t, tokens)
        loss = loss_of(predicted, target)
        progress(step, loss)
        loss = loss + args.read_weight * reading.loss(pooled, labels)
        descend(loss, trained, optimizers.values(), learning_rate(step, args.steps, args.lr))
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        if (step + 1) % args.save == 0 or step + 1 == args.steps:
            save(path, step + 1, **parts)


def train_sd(args: argparse.Namespace) -> None:
    tok, data = tokenizer(), latents(args)
    torch.manual_seed(args.seed)
    model, reading = Denoiser(tok).to(args.device), picture_reading().to(args.device)
    fit(args, "sd", model, reading, Batches(args, tok, reading, data["z"], data["text"]))


def export_sd(args: argparse.Namespace) -> None:
    export_stable(args, StableDiffusionPipeline, Denoiser(tokenizer()), "sd", __file__)


def export_stable(
    args: argparse.Namespace, kind: Any, model: Denoiser, stage: str, script: str
) -> None:
    """Write a stage's averaged weights as a pipeline of Stable Diffusion's family."""
    autoencoder = vae()
    vae_steps = resume(args.work / "vae.pt", model=autoencoder)
    steps = resume(args.work / f"{stage}.pt", ema=model)
    autoencoder.register_to_config(scaling_factor=latents(args)["scale"])
    pipe = kind(
        vae=autoencoder.half(),
        unet=model.unet.half(),
        text_encoder=model.text_encoder.half(),
        tokenizer=tokenizer(),
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    write(args, pipe, script, vae_steps=vae_steps, steps=steps)


def remember(args: argparse.Namespace) -> dict[str, Any]:
    """Note for the next provenance how the weights in --out were made -> their provenance."""
    known = json.loads((Path(args.out) / "provenance.json").read_text())
    said = f"Until step {known['steps']} the settings were {json.dumps(known['settings'])}."
    history = [*known.get("history", []), f"{said} Optimizers started anew from these weights."]
    (args.work / "history.json").write_text(json.dumps(history))
    return known


NOTO = "rendered by flowrl.scenes.stickers from Noto Emoji's pictures; no other data"


def write(
    args: argparse.Namespace, pipe: DiffusionPipeline, script: str, data: str = NOTO, **steps: int
) -> None:
    """Write a pipeline whose weights are fp16 to --out, with provenance beside it."""
    pipe.save_pretrained(args.out)
    sizes = {
        name: sum(p.numel() for p in part.parameters())
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
    }
    provenance = {
        "made_by": f"scripts/embedded/{Path(script).name}",
        "license": "Apache-2.0",
        "data": data,
        **steps,
        "settings": {k: v for k, v in vars(args).items() if k not in OF_A_MACHINE},
        "parameters": sizes,
    }
    earlier = args.work / "history.json"  # of weights that were restored
    if earlier.exists():
        provenance["history"] = json.loads(earlier.read_text())
    finish(Path(args.out), provenance)


Stages = dict[str, Callable[[argparse.Namespace], None]]


def parser(doc: str, stages: Stages, out: str) -> argparse.ArgumentParser:
    """What all scripts of stickers share."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    add = made.add_argument
    add("stage", choices=list(stages))
    add("--work", type=Path, default=Path("runs/stickers"), help="where checkpoints lie")
    add("--out", default=out, help="where export writes the pipeline")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--save", type=int, default=250, help="steps between checkpoints")
    return made


def add_vae(made: argparse.ArgumentParser, **defaults: float) -> None:
    add = made.add_argument
    add("--vae-steps", type=int)
    add("--vae-batch", type=int)
    add("--vae-lr", type=float, default=2e-3, help="peak learning rate")
    add("--vae-kl", type=float, default=5e-4, help="weight of the KL to the unit normal")
    made.set_defaults(**defaults)


def add_denoiser(made: argparse.ArgumentParser, **defaults: float) -> None:
    add = made.add_argument
    add("--scenes", type=int, default=40_000, help="drawn scenes, whose latents are kept")
    add("--steps", type=int)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=1.5e-3, help="peak learning rate")
    add("--read-weight", type=float, default=0.1, help="of the loss of reading")
    made.set_defaults(**defaults)


def run(made: argparse.ArgumentParser, stages: Stages, words: list[str] | None) -> None:
    """Run the stage that the words of a command line name."""
    args = made.parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    stages[args.stage](args)


STAGES: Stages = {"vae": train_vae, "sd": train_sd, "export-sd": export_sd}


def arguments() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", STAGES, "flowrl/scenes/stickers/sd")
    add_vae(made, vae_steps=6000, vae_batch=8)
    add_denoiser(made, steps=16_000)
    return made


def main(words: list[str] | None = None) -> None:
    run(arguments(), STAGES, words)


if __name__ == "__main__":
    main()
