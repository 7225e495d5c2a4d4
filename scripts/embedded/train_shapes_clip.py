"""Pretrain the tiny CLIP of the shapes world, and measure it; resumable.

    python scripts/embedded/train_shapes_clip.py train  --work runs/shapes-clip  # 15 min, one core
    python scripts/embedded/train_shapes_clip.py export --work runs/shapes-clip  # for open_clip
    python scripts/embedded/train_shapes_clip.py evaluate  # held-out retrieval, the verifier's view

A batch holds groups of near prompts (one attribute apart, flowrl.shapes.clip.near_misses), each
with a picture of its own, so that telling red from blue, two from three, left from right is what
lowers the loss (hard negatives: NegCLIP, arXiv:2210.01936). Prompts that happen to be true of
another's picture are not its negatives. Held-out combinations are left out, pictures and prompts.
Pictures are shifted, faded, tinted, blurred and made noisy, a little, since the ones that the
reward will see are drawn by a model.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

import open_clip
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from train_shapes import Progress, descend, finish, learning_rate, resume, save

import flowrl
from flowrl.data.media import to_pil
from flowrl.rewards.core.pictures import cropped, normalized
from flowrl.shapes import build, clip, prompts, verify
from flowrl.shapes.agreement import box
from flowrl.shapes.scenes import PIXELS, render

CONTEXT = 16  # tokens; the world's own prompts have 10 at most, with the two at the ends
GROUP = 4  # a prompt and three near misses
# of groups; relations are learned last
SHARES = {
    "single_object": 0.02,
    "two_object": 0.04,
    "counting": 0.16,
    "colors": 0.04,
    "position": 0.54,
    "color_attr": 0.20,
}
# A residual network, on pictures enlarged so that its last map, 3 x 3, has a place for each cell of
# the world.
MODEL = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 96, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
    "text_cfg": {
        "context_length": CONTEXT,
        "width": 128,
        "heads": 4,
        "layers": 2,
        "hf_tokenizer_name": "in this folder",
    },
}
PREPROCESS = {
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
    "fill_color": 255,
}


T = TypeVar("T")


class Scenes:
    """Pictures (N, 3, 64, 64) uint8 of training prompts, and which prompts are true of each.

    Cached on disk.
    """

    def __init__(self, count: int, seed: int, folder: Path):
        self.all = prompts.all_prompts()
        self.number = {p["prompt"]: i for i, p in enumerate(self.all)}
        path = folder / f"scenes-{seed}-{count}.pt"
        if not path.exists():
            torch.save(self._draw(count, seed), path)
        data = torch.load(path, weights_only=True)
        self.images, self.true = data["images"], data["true"]  # true: (N, prompts) bool
        self.pool: dict[int, list[int]] = defaultdict(list)  # prompt -> pictures drawn for it
        for row, n in enumerate(data["drawn"].tolist()):
            self.pool[n].append(row)
        self.anchors = {
            t: [n for n in self.pool if self.all[n]["task"] == t] for t in prompts.TASKS
        }
        self.near_misses = {n: self._near_misses(n) for n in self.pool}

    def _draw(self, count: int, seed: int) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        known = [(n, p["task"]) for n, p in enumerate(self.all) if not prompts.held_out(p)]
        train = {t: [n for n, task in known if task == t] for t in prompts.TASKS}
        shares = torch.tensor([SHARES[t] for t in prompts.TASKS])
        tasks = torch.multinomial(shares, count, replacement=True, generator=g)
        images = torch.empty(count, 3, PIXELS, PIXELS, dtype=torch.uint8)
        true = torch.zeros(count, len(self.all), dtype=torch.bool)
        drawn = torch.empty(count, dtype=torch.int64)
        for i, task in enumerate(tasks.tolist()):
            members = train[prompts.TASKS[task]]
            drawn[i] = members[int(torch.randint(len(members), (), generator=g))]
            objects = prompts.scene(self.all[drawn[i]], g)
            images[i] = (render(objects) * 255).round().to(torch.uint8)
            true[i, [self.number[p["prompt"]] for p in clip.truths(objects)]] = True
        return {"images": images, "true": true, "drawn": drawn}

    def _near_misses(self, n: int) -> list[list[int]]:
        """Numbers of a prompt's near misses that are in training, by kind."""
        kinds = clip.near_misses(self.all[n]).values()
        numbers = [[self.number[p["prompt"]] for p in kind] for kind in kinds]
        found = [[number for number in kind if number in self.pool] for kind in numbers]
        return [kind for kind in found if kind]

    def batch(self, groups: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures (B, 3, 64, 64) in [0, 1], numbers of their prompts (B,), and a table (B, B).

        Its entry (i, j): prompt j is true of picture i.
        """
        shares = torch.tensor([SHARES[t] for t in prompts.TASKS])
        chosen = []
        for task in torch.multinomial(shares, groups, replacement=True, generator=g).tolist():
            anchor = _one(self.anchors[prompts.TASKS[task]], g)
            kinds = self.near_misses[anchor] or [[anchor]]
            chosen += [anchor] + [_one(_one(kinds, g), g) for _ in range(GROUP - 1)]
        rows = torch.tensor([_one(self.pool[n], g) for n in chosen])
        numbers = torch.tensor(chosen)
        return self.images[rows].float() / 255, numbers, self.true[rows][:, numbers]


def _one(items: list[T], g: torch.Generator) -> T:
    return items[int(torch.randint(len(items), (), generator=g))]


def worn(x: Tensor, g: torch.Generator) -> Tensor:
    """x (B, 3, 64, 64) in [0, 1], a little worse.

    Shifted by up to 2 px, and half of them faded, tinted, blurred, blotched, noisy.
    """
    x, b = shifted(x, g), len(x)

    def some(*shape: int) -> Tensor:
        """U(0, 1), and 0 for half of the pictures."""
        strength = torch.rand(b, *shape, generator=g)
        return strength * (torch.rand(b, *(1 for _ in shape), generator=g) < 0.5)

    soft = (some(1, 1, 1) > 0.3).float()
    x = soft * box(x) + (1 - soft) * x
    x = 1 - (1 - x) * (1 - 0.5 * some(1, 1, 1)) * (1 - 0.3 * some(3, 1, 1))
    blotches = F.interpolate(torch.randn(b, 3, 16, 16, generator=g), PIXELS, mode="bilinear")
    x = x + 0.15 * some(1, 1, 1) * blotches
    x = x + 0.1 * some(1, 1, 1) * torch.randn(x.shape, generator=g)
    return x.clamp(0, 1)


def shifted(x: Tensor, g: torch.Generator) -> Tensor:
    """Each picture by up to 2 px in both directions, white beyond its edge."""
    shifts = torch.randint(-2, 3, (len(x), 2), generator=g).tolist()
    padded = F.pad(x, (2, 2, 2, 2), value=1.0)
    rows = [
        picture[:, 2 + dy : 2 + dy + PIXELS, 2 + dx : 2 + dx + PIXELS]
        for picture, (dy, dx) in zip(padded, shifts, strict=True)
    ]
    return torch.stack(rows)


def contrast(image: Tensor, text: Tensor, scale: Tensor, true: Tensor) -> Tensor:
    """InfoNCE both ways (CLIP, arXiv:2103.00020) of unit vectors (B, d).

    Prompts that are true of a picture are not its negatives.
    """
    logits = scale * image @ text.T
    logits = logits.masked_fill(true & ~torch.eye(len(true), dtype=torch.bool), -torch.inf)
    target = torch.arange(len(true))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def config(tok) -> dict:
    return MODEL | {"text_cfg": MODEL["text_cfg"] | {"vocab_size": len(tok)}}


def pixels(x: Tensor) -> Tensor:
    """(B, 3, 64, 64) in [0, 1] -> the network's input, as PREPROCESS says."""
    whole = cropped(x, MODEL["vision_cfg"]["image_size"])
    return normalized(whole, PREPROCESS["mean"], PREPROCESS["std"])


def train(args: argparse.Namespace) -> None:
    scenes = Scenes(args.scenes, 1, args.work)
    tok = build.tokenizer()
    texts = [p["prompt"] for p in scenes.all]
    ids = tok(texts, padding="max_length", max_length=CONTEXT, return_tensors="pt").input_ids
    torch.manual_seed(args.seed)
    model = open_clip.model.CLIP(**config(tok))
    # as large as the features: where a thing is counts from the start
    model.visual.attnpool.positional_embedding.data *= 8
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05
    )
    start = resume(args.work / "clip.pt", model=model, optimizer=optimizer)
    progress = Progress("clip", start, decay=0.98)
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        x, numbers, true = scenes.batch(args.groups, g)
        distinct, place = numbers.unique(return_inverse=True)
        image = model.encode_image(pixels(worn(x, g)), normalize=True)
        text = model.encode_text(ids[distinct], normalize=True)[place]
        loss = contrast(image, text, model.logit_scale.exp().clamp(max=100), true)
        descend(loss, model, [optimizer], learning_rate(step, args.steps, args.lr, warmup=100))
        progress(step, loss)
        if (step + 1) % args.save == 0 or step + 1 == args.steps:
            save(args.work / "clip.pt", step + 1, model=model, optimizer=optimizer)


def export(args: argparse.Namespace) -> None:
    """Write open_clip's local-dir layout: config, fp16 weights, tokenizer; and provenance."""
    tok = build.tokenizer()
    model = open_clip.model.CLIP(**config(tok))
    steps = resume(args.work / "clip.pt", model=model)
    args.out.mkdir(parents=True, exist_ok=True)
    tok.model_max_length = CONTEXT
    tok.save_pretrained(args.out)
    layout = {"model_cfg": config(tok), "preprocess_cfg": PREPROCESS}
    (args.out / "open_clip_config.json").write_text(json.dumps(layout, indent=2) + "\n")
    halves = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_file(halves, str(args.out / "open_clip_model.safetensors"))
    provenance = {
        "made_by": "scripts/embedded/train_shapes_clip.py",
        "license": "Apache-2.0",
        "data": "rendered by flowrl.shapes.scenes; no other data",
        "held_out_combinations": "neither pictures nor prompts",
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "settings": {k: getattr(args, k) for k in ("seed", "groups", "scenes", "lr")},
        "open_clip": open_clip.__version__,
    }
    finish(args.out, provenance)


class Judge:
    """The exported model, loaded as any user of open_clip would."""

    def __init__(self, folder: Path):
        source = f"local-dir:{folder}"
        self.model, _, self.preprocess = open_clip.create_model_and_transforms(source)
        self.model.eval()
        self.tokenizer = open_clip.get_tokenizer(source)

    @torch.no_grad()
    def image(self, x: Tensor) -> Tensor:
        parts = (torch.stack([self.preprocess(p) for p in to_pil(part)]) for part in x.split(128))
        return torch.cat([self.model.encode_image(part, normalize=True) for part in parts])

    @torch.no_grad()
    def text(self, texts: list[str]) -> Tensor:
        parts = self.tokenizer(texts).split(256)
        return torch.cat([self.model.encode_text(part, normalize=True) for part in parts])


def retrieval(
    judge: Judge, count: int, seed: int = 0
) -> tuple[dict[str, list[bool]], dict[str, list[float]]]:
    """`count` held-out scenes of each task, each with its prompt and all false near misses.

    Near misses may be held out or not. -> task -> whether the true prompt is nearer than every near
    miss; kind of near miss -> share of those that are further, a scene.
    """
    g = torch.Generator().manual_seed(seed)
    every = prompts.all_prompts()
    number = {p["prompt"]: i for i, p in enumerate(every)}
    text = judge.text([p["prompt"] for p in every])
    best, beaten = defaultdict(list), defaultdict(list)
    for task in prompts.TASKS:
        members = [p for p in every if p["task"] == task and prompts.held_out(p)]
        chosen = _some(members, count, g)
        objects = [prompts.scene(p, g) for p in chosen]
        cosines = judge.image(torch.stack([render(o) for o in objects])) @ text.T
        for prompt, scene, row in zip(chosen, objects, cosines, strict=True):
            true = {p["prompt"] for p in clip.truths(scene)}
            own, nearer = row[number[prompt["prompt"]]], []
            for kind, near_misses in clip.near_misses(prompt).items():
                wrong = [number[p["prompt"]] for p in near_misses if p["prompt"] not in true]
                if wrong:
                    nearer += (row[wrong] >= own).tolist()
                    beaten[kind].append(float((row[wrong] < own).float().mean()))
            best[task].append(not any(nearer))
    return best, beaten


def _some(members: list[T], count: int, g: torch.Generator) -> list[T]:
    """`count` of them: each in turn where there are fewer, else drawn."""
    if len(members) < count:
        return [members[i % len(members)] for i in range(count)]
    return [_one(members, g) for _ in range(count)]


def roc_area(value: Tensor, positive: Tensor) -> float:
    """P(a positive's value exceeds a negative's), ties half."""
    gap = value[positive][:, None] - value[~positive][None]
    return float(((gap > 0) + 0.5 * (gap == 0)).mean())


def evaluate(args: argparse.Namespace) -> None:
    judge = Judge(args.out)
    best, beaten = retrieval(judge, args.count)
    print(
        f"held-out scenes, {args.count} a task; the true prompt is nearer than every prompt that"
        " differs in one attribute:"
    )
    print("  " + ", ".join(f"{task} {sum(x) / len(x):.1%}" for task, x in best.items()))
    print(
        "than one of them, by attribute: "
        + ", ".join(f"{kind} {sum(x) / len(x):.1%}" for kind, x in beaten.items())
    )
    agreement(judge, args.generated)


def agreement(judge: Judge, count: int) -> None:
    """How well the cosine tells the pictures of shapes-sd3 that the verifier calls right."""
    policy = flowrl.load_policy("shapes-sd3")
    chosen = prompts.eval_prompts(count)
    texts = [p["prompt"] for p in chosen]
    text = judge.text(texts)
    for guidance in ("none", "pipeline"):
        pictures = flowrl.generate(policy, texts, steps=8, guidance=guidance)
        cosine = (judge.image(pictures) * text).sum(-1)
        found = zip(verify.detect(pictures), chosen, strict=True)
        right = torch.tensor([verify.strict(objects, p["include"]) for objects, p in found])
        print(
            f"{len(chosen)} pictures of shapes-sd3, guidance {guidance}: {right.float().mean():.1%}"
            f" strictly right; cosine {cosine[right].mean():.3f} where right,"
            f" {cosine[~right].mean():.3f} where wrong; area under ROC"
            f" {roc_area(cosine, right):.3f}"
        )


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = out.add_argument
    work = Path("runs/shapes-clip")
    add("stage", choices=["train", "export", "evaluate", "all"])
    add("--work", type=Path, default=work, help="where scenes and checkpoints lie")
    add("--out", type=Path, default=clip.FOLDER, help="where export writes and evaluate reads")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--scenes", type=int, default=24000)
    add("--groups", type=int, default=24, help=f"in a batch; a group has {GROUP} pictures")
    add("--steps", type=int, default=1600)
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--save", type=int, default=100, help="steps between checkpoints")
    add("--count", type=int, default=200, help="held-out scenes of each task in evaluate")
    add("--generated", type=int, default=256, help="pictures of shapes-sd3, for each guidance")
    return out


def main(words: list[str] | None = None) -> None:
    args = parser().parse_args(words)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    stages = {"train": train, "export": export, "evaluate": evaluate}
    for stage in stages if args.stage == "all" else [args.stage]:
        stages[stage](args)


if __name__ == "__main__":
    main()
