"""Pretrain shapes-sd3 from nothing: a VAE, then text encoders and transformer by flow matching.

    python scripts/embedded/train_shapes.py vae    --work runs/shapes   # minutes on two cores
    python scripts/embedded/train_shapes.py flow   --work runs/shapes   # an hour: exact prompts
    python scripts/embedded/train_shapes.py faded  --work runs/shapes   # an hour: a third is pale
    python scripts/embedded/train_shapes.py read   --work runs/shapes   # an hour: words and places
    python scripts/embedded/train_shapes.py export --work runs/shapes   # to flowrl/shapes/weights

From the faded stage on the model has a habit that models trained on pictures from the web have: its
prompts say what is there, not how well it is drawn, so that without guidance it often draws pale.
That, and what it gets wrong, is the headroom of RL in the quickstart.

The read stage is for what the others do not learn: which word belongs to which, and relations. The
text encoders' pooled embedding has to name every clause of the prompt (a linear head and a
cross-entropy), most noise levels are high, where the layout is decided, and prompts of two coloured
shapes are frequent.

Every stage prints its loss, saves to --work every --save steps and goes on from there when it is
started again: on one thread of a CPU, an interrupted stage ends with the weights of an
uninterrupted one, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.shapes import build, prompts
from flowrl.shapes.scenes import COLORS, RELATIONS, SHAPES, render

# kept in the provenance
SETTINGS = ("seed", "batch", "time_mean", "flow_scenes", "lr")
SETTINGS += ("faded", "faded_scenes", "faded_lr", "faded_time_mean")
SETTINGS += ("read_scenes", "read_lr", "read_time_mean", "read_high", "read_weight", "shift")

BEFORE = {"faded": "flow", "read": "faded"}  # the stage whose average a stage starts from
BINDING = {
    "single_object": 0.04,
    "two_object": 0.06,
    "counting": 0.20,
    "colors": 0.05,
    "position": 0.35,
    "color_attr": 0.30,
}


def scenes(
    count: int,
    seed: int,
    folder: Path,
    faded: float = 0.0,
    shares: dict[str, float] = prompts.SHARES,
) -> tuple[Tensor, list[str]]:
    """`count` rendered scenes (count, 3, 64, 64) uint8 with their prompts; cached on disk.

    Tasks in `shares`. A share of `faded` of them is pale: 20 to 45% of the ink.
    """
    path = folder / f"scenes-{seed}-{count}-{faded:g}.pt"
    if path.exists():
        cached = torch.load(path, weights_only=True)
        return cached["images"], cached["text"]
    g = torch.Generator().manual_seed(seed)
    by_task = {t: [p for p in prompts.all_prompts() if p["task"] == t] for t in prompts.TASKS}
    weights = torch.tensor([shares[t] for t in prompts.TASKS])
    images, text = torch.empty(count, 3, 64, 64, dtype=torch.uint8), []
    # one generator for tasks, prompts and ink: the cache is a function of the seed
    drawn = torch.multinomial(weights, count, replacement=True, generator=g)
    for i, task in enumerate(drawn.tolist()):
        members = by_task[prompts.TASKS[task]]
        prompt = members[int(torch.randint(len(members), (1,), generator=g))]
        share, ink = torch.rand(2, generator=g).tolist()
        ink = 0.2 + 0.25 * ink if share < faded else 1.0
        picture = 1 - ink * (1 - render(prompts.scene(prompt, g)))
        images[i] = (picture * 255).round().to(torch.uint8)
        text.append(prompt["prompt"])
    torch.save({"images": images, "text": text}, path)
    return images, text


def learning_rate(step: int, steps: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then cosine to a hundredth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def descend(
    loss: Tensor, model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], rate: float
) -> None:
    """One step at a learning rate, with gradients clipped to norm 1."""
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


def train_vae(args: argparse.Namespace) -> None:
    images, _ = scenes(args.vae_scenes, 1, args.work, args.faded)
    torch.manual_seed(args.seed)
    model = build.vae().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    start = resume(args.work / "vae.pt", model=model, optimizer=optimizer)
    for step in range(start, args.vae_steps):
        g = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        rows = torch.randint(len(images), (args.vae_batch,), generator=g)
        x = images[rows].to(args.device).float() / 127.5 - 1
        posterior = model.encode(x).latent_dist
        error = model.decode(posterior.sample(generator=g)).sample - x
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = error.abs().mean() + error.square().mean() + 1e-3 * kl
        descend(loss, model, [optimizer], learning_rate(step, args.vae_steps, 2e-3))
        if step % 50 == 0:
            mse = error.square().mean().item()
            said = f"loss {loss.item():.4f} mse {mse:.5f} kl {kl.item():.3f}"
            print(f"vae {step} {said}", flush=True)
        if (step + 1) % args.save == 0 or step + 1 == args.vae_steps:
            save(args.work / "vae.pt", step + 1, model=model, optimizer=optimizer)


@torch.no_grad()
def latents(args: argparse.Namespace, vae: torch.nn.Module, stage: str) -> tuple[Tensor, list[str]]:
    """Normalised latents (N, 4, 16, 16) fp16 of a stage's scenes, and their prompts.

    The first stage fixes shift and scale.
    """
    if stage == "faded":
        images, text = scenes(args.faded_scenes, 3, args.work, args.faded)
    elif stage == "read":
        images, text = scenes(args.read_scenes, 4, args.work, args.faded, BINDING)
    else:
        images, text = scenes(args.flow_scenes, 2, args.work)
    path, norm = args.work / f"latents-{stage}.pt", args.work / "latents.json"
    if not path.exists():
        chunks = (chunk.to(args.device).float() / 127.5 - 1 for chunk in images.split(128))
        torch.save(torch.cat([vae.encode(x).latent_dist.mode().cpu() for x in chunks]), path)
    z = torch.load(path, weights_only=True)
    if not norm.exists():
        norm.write_text(json.dumps({"shift": z.mean().item(), "scale": 1 / z.std().item()}))
    norm = json.loads(norm.read_text())
    return ((z - norm["shift"]) * norm["scale"]).half(), text


class Flow(torch.nn.Module):
    """Text encoders and transformer as one module: velocity of noisy latents given token ids.

    The text is embedded as SD3's pipeline does.
    """

    def __init__(self, tok) -> None:
        super().__init__()
        self.text_encoder, self.text_encoder_2 = build.text_encoder(tok), build.text_encoder(tok)
        self.transformer = build.transformer()

    def forward(self, x: Tensor, sigma: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity (B, 4, 16, 16) and the text's pooled embedding (B, 128)."""
        encoders = (self.text_encoder, self.text_encoder_2)
        outs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
        tokens = torch.cat([o.hidden_states[-2] for o in outs], -1)
        tokens = torch.cat([tokens, torch.zeros_like(tokens)], 1)  # the place of SD3's absent T5
        pooled = torch.cat([o.text_embeds for o in outs], -1)
        velocity = self.transformer(
            hidden_states=x,
            timestep=1000 * sigma,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
        ).sample
        return velocity, pooled


class Reading(torch.nn.Linear):
    """What a pooled embedding says of a prompt: shape, colour and count of the clause that is named
    first and of the other, and their relation; each may be absent."""

    PARTS = (
        (None, *SHAPES),
        (None, *COLORS),
        (1, *prompts.NUMBERS),
        (None, *SHAPES),
        (None, *COLORS),
        (None, *RELATIONS),
    )

    def __init__(self) -> None:
        super().__init__(build.WIDTH, sum(map(len, self.PARTS)))

    def labels(self, text: list[str]) -> Tensor:
        """(N, 6): the indices in PARTS of what prompts say."""
        known = {t: self._label(prompts.find(t)) for t in set(text)}
        return torch.tensor([known[t] for t in text])

    @staticmethod
    def said(prompt: prompts.Prompt) -> list[Any]:
        """What each part of a prompt is."""
        clauses = prompt["include"]
        first, other = clauses[0], clauses[1] if len(clauses) > 1 else {}
        said = [first["shape"], first["color"], first["count"]]
        return [*said, other.get("shape"), other.get("color"), other.get("position", [None])[0]]

    def _label(self, prompt: prompts.Prompt) -> list[int]:
        said = self.said(prompt)
        return [part.index(word) for part, word in zip(self.PARTS, said, strict=True)]

    def loss(self, pooled: Tensor, labels: Tensor) -> Tensor:
        """Sum of the parts' cross-entropies."""
        logits = self(pooled).split([len(part) for part in self.PARTS], 1)
        losses = (F.cross_entropy(one, labels[:, i]) for i, one in enumerate(logits))
        return sum(losses, torch.zeros(()))


def optimizers_of(
    model: torch.nn.Module, *, muon: bool, kind: type[torch.optim.Muon] = torch.optim.Muon
) -> dict[str, torch.optim.Optimizer]:
    """AdamW for all weights, or Muon for the matrices of the blocks and AdamW for the rest."""
    parts: dict[str, list[Tensor]] = {"optimizer": [], "muon": []}
    for name, parameter in model.named_parameters():
        block = re.search(
            r"transformer_(blocks|layers)|encoder\.(layers|block)|transformer\.blocks", name
        )
        parts["muon" if muon and block and parameter.ndim == 2 else "optimizer"].append(parameter)
    adamw = torch.optim.AdamW(parts["optimizer"], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)
    out: dict[str, torch.optim.Optimizer] = {"optimizer": adamw}
    if muon:
        out["muon"] = kind(
            parts["muon"], lr=1e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
    return out


class Batches:
    """Flow-matching batches of a stage: each is a function of (seed, step)."""

    def __init__(self, args: argparse.Namespace, stage: str, tok: Any):
        vae = build.vae().to(args.device).eval()
        resume(args.work / "vae.pt", model=vae)
        self.z, text = latents(args, vae, stage)
        pad = {"padding": "max_length", "max_length": build.TEXT_TOKENS, "return_tensors": "pt"}
        self.ids, self.empty = tok(text, **pad).input_ids, tok([""], **pad).input_ids
        self.labels = Reading().labels(text)
        self.args, self.stage = args, stage

    def noise_levels(self, step: int, g: torch.Generator) -> Tensor:
        """(B,): logit-normal; in the first two thirds of the read stage mostly high."""
        levels = torch.randn(self.args.batch, generator=g) + setting(
            self.args, self.stage, "time_mean"
        )
        sigma = torch.sigmoid(levels)
        if self.stage == "read" and step < self.args.read_steps * 2 / 3:
            high, level = torch.rand(2, self.args.batch, generator=g)
            sigma = torch.where(high < self.args.read_high, 0.7 + 0.3 * level, sigma)
        return sigma

    def __call__(self, step: int) -> list[Tensor]:
        """(x0, eps, sigma, tokens, labels), a tenth of them without their prompt, which have the
        label -100."""
        count, g = self.args.batch, torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        rows = torch.randint(len(self.z), (count,), generator=g)
        x0, eps = self.z[rows].float(), torch.randn(count, 4, 16, 16, generator=g)
        sigma = self.noise_levels(step, g)
        dropped = torch.rand(count, 1, generator=g) < 0.1
        tokens = torch.where(dropped, self.empty, self.ids[rows])
        labels = torch.where(dropped, -100, self.labels[rows])
        return [t.to(self.args.device) for t in (x0, eps, sigma, tokens, labels)]


def setting(args: argparse.Namespace, stage: str, name: str) -> float:
    """A stage's own value, or the flow stage's."""
    return getattr(args, f"{stage}_{name}", None) or getattr(args, name)


def train_flow(args: argparse.Namespace, stage: str = "flow") -> None:
    """One of the stages flow, faded and read; each starts from the average of the one before."""
    steps, peak = getattr(args, f"{stage}_steps"), setting(args, stage, "lr")
    tok = build.tokenizer()
    batches = Batches(args, stage, tok)
    torch.manual_seed(args.seed)
    model = Flow(tok).to(args.device)
    if stage in BEFORE:
        resume(args.work / f"{BEFORE[stage]}.pt", ema=model)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizers = optimizers_of(model, muon=stage in BEFORE)
    parts = {"model": model, "ema": ema} | optimizers
    reading = Reading().to(args.device)
    trained = torch.nn.ModuleList([model, reading] if stage == "read" else [model])
    if stage == "read":
        parts["reading"] = reading
        parts["reader"] = optimizers["reader"] = torch.optim.AdamW(reading.parameters())
    # an interrupted stage goes on; else it starts from the average of the stage before
    start = resume(args.work / f"{stage}.pt", **parts)
    run = torch.compile(model) if args.compile else model
    progress = Progress(stage, start, decay=0.99)
    for step in range(start, steps):
        x0, eps, sigma, tokens, labels = batches(step)
        s = sigma[:, None, None, None]
        velocity, pooled = run((1 - s) * x0 + s * eps, sigma, tokens)
        loss = F.mse_loss(velocity, eps - x0)
        if stage == "read":
            loss = loss + args.read_weight * reading.loss(pooled, labels)
        descend(loss, trained, optimizers.values(), learning_rate(step, steps, peak))
        decay = min(0.999, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - decay)
        progress(step, loss)
        if (step + 1) % args.save == 0 or step + 1 == steps:
            save(args.work / f"{stage}.pt", step + 1, **parts)


class Progress:
    """Prints an average of the loss, and the pace, every 50 steps."""

    def __init__(self, stage: str, start: int, decay: float):
        self.stage, self.start, self.decay = stage, start, decay
        self.began, self.average = time.time(), 0.0

    def __call__(self, step: int, loss: Tensor) -> None:
        now = loss.item()
        if step > self.start:
            now = self.decay * self.average + (1 - self.decay) * now
        self.average = now
        if step % 50 == 0:
            pace = (time.time() - self.began) / (step - self.start + 1)
            print(f"{self.stage} {step} loss {self.average:.4f} {pace:.3f} s/step", flush=True)


def export(args: argparse.Namespace) -> None:
    """Write the EMA weights as a diffusers pipeline in fp16, with provenance beside it."""
    tok = build.tokenizer()
    vae, flow = build.vae(), Flow(tok)
    # each stage's average replaces that of the one before: the last one is exported
    vae_steps = resume(args.work / "vae.pt", model=vae)
    flow_steps = resume(args.work / "flow.pt", ema=flow)
    faded_steps = resume(args.work / "faded.pt", ema=flow)
    read_steps = resume(args.work / "read.pt", ema=flow)
    norm = json.loads((args.work / "latents.json").read_text())
    vae.register_to_config(shift_factor=norm["shift"], scaling_factor=norm["scale"])
    parts = {
        "vae": vae,
        "transformer": flow.transformer,
        "text_encoder": flow.text_encoder,
        "text_encoder_2": flow.text_encoder_2,
    }
    pipe = build.pipeline({k: v.half() for k, v in parts.items()}, tok, shift=args.shift)
    pipe.save_pretrained(args.out)
    provenance = {
        "made_by": "scripts/embedded/train_shapes.py",
        "license": "Apache-2.0",
        "data": "rendered by flowrl.shapes.scenes; no other data",
        "vae_steps": vae_steps,
        "flow_steps": flow_steps,
        "faded_steps": faded_steps,
        "read_steps": read_steps,
        "settings": {k: getattr(args, k) for k in SETTINGS},
        "parameters": {k: sum(p.numel() for p in v.parameters()) for k, v in parts.items()},
    }
    finish(Path(args.out), provenance)


def finish(folder: Path, provenance: dict[str, Any]) -> None:
    """Write provenance.json beside exported weights, and say how large they are. A part that was
    loaded from a folder does not say from which."""
    for file in folder.rglob("config.json"):
        config = json.loads(file.read_text())
        if config.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(config, indent=2) + "\n")
    provenance |= {"torch": torch.__version__, "machine": platform.machine()}
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"wrote {folder}: {size / 1e6:.2f} MB")


def save(path: Path, step: int, **parts) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step} | {k: v.state_dict() for k, v in parts.items()}, temporary)
    temporary.replace(path)


def resume(path: Path, **parts) -> int:
    """Load the named parts from a file, if it is there, and return the step it was saved at. What
    the file does not hold, as the optimizers of weights that were restored, starts anew."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        if name in state or name in ("model", "ema"):
            part.load_state_dict(state[name])
    return state["step"]


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = out.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("stage", choices=["vae", "flow", "faded", "read", "export", "all"])
    add("--work", type=Path, default=Path("runs/shapes"), help="where data and checkpoints lie")
    add("--out", default="flowrl/shapes/weights", help="where export writes the pipeline")
    add("--device", default=device)
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--save", type=int, default=250, help="steps between checkpoints")
    add("--compile", action="store_true")
    add("--shift", type=float, default=3.0, help="timestep shift of the exported scheduler")
    add_vae(add)
    add_flow(add)
    return out


def add_vae(add: Callable[..., object]) -> None:
    add("--vae-steps", type=int, default=3300)
    add("--vae-batch", type=int, default=16)
    add("--vae-scenes", type=int, default=8000)


def add_flow(add: Callable[..., object]) -> None:
    add("--flow-steps", type=int, default=6500)
    add("--flow-scenes", type=int, default=60000)
    add("--batch", type=int, default=64)
    add("--lr", type=float, default=1.5e-3, help="peak learning rate of the flow stage")
    add("--time-mean", type=float, default=0.3, help="mean of the logit-normal over sigma")
    add("--faded-steps", type=int, default=4500)
    add("--faded-scenes", type=int, default=40000)
    add("--faded-lr", type=float, default=1.5e-3)
    add("--faded-time-mean", type=float, default=0.8)
    add("--faded", type=float, default=0.35, help="share of pale pictures")
    add("--read-steps", type=int, default=6000)
    add("--read-scenes", type=int, default=80000)
    add("--read-lr", type=float, default=1.2e-3)
    add("--read-time-mean", type=float, default=0.3)
    add("--read-high", type=float, default=0.75, help="share of noise levels from 0.7 to 1")
    add("--read-weight", type=float, default=0.1, help="of the loss of reading")


def main(words: list[str] | None = None) -> None:
    args = parser().parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    stages = {
        "vae": train_vae,
        "flow": train_flow,
        "faded": partial(train_flow, stage="faded"),
        "read": partial(train_flow, stage="read"),
        "export": export,
    }
    for stage in stages if args.stage == "all" else [args.stage]:
        stages[stage](args)


if __name__ == "__main__":
    main()
