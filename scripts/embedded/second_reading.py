"""A second reading of coloured shapes, by a small network: a judge that no reward trains on.

    python scripts/embedded/second_reading.py train       # two hours on two cores
    flowrl train experiment=quickstart-unet reward=scripts/embedded/second_reading.py:second \\
        reward.second.weight=0 reward.shapes.reading=strict output=RUN  # of edits: second_edit
        # and shapes_edit; of videos: reward.shapes_motion.reading=partial
    python scripts/embedded/second_reading.py agree RUN   # both readings, before and after training

The verifier (flowrl/shapes/verify.py) labels components of one colour and compares them with ideal
shapes. The network has seen drawn scenes alone, blurred and noisy, whose objects are bent towards
other shapes, wavy, thin, cut, tinted or pale, and may touch. Half of them it has seen as the VAE of
shapes-wan decodes them from latents with errors; no denoiser has made any. Both follow the same
definitions of a colour and of a shape: which tint is still red, and how round a square may be. The
network has learned to see that; an unclear object has no name, and a picture with one is not right.

After another `train`, `flowrl evaluate RUN` reads a run again, and `--rlg 0` the model before it.
The weights beside this file had 28,000 steps with shapes of 7 to 23 px, 8,000 with 5 to 28 px
(`--done 28000 --steps 8000 --lr 1.5e-3`), 4,000 with those of this file (`--done 36000 --steps 4000
--lr 1e-3`), all of them in bf16 and without the VAE, and 10,500 as here (`--done 40000 --steps 1500
--lr 1e-3`, `--done 41500 --steps 9000 --lr 1.5e-3`).
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flowrl
from flowrl.runtime.store import run_folder
from flowrl.scenes import grammar, world
from flowrl.scenes import shapes as small
from flowrl.scenes.edits import Edits
from flowrl.scenes.motions import verdict
from flowrl.shapes import scenes, verify
from flowrl.types import MediaContext

WEIGHTS = Path(__file__).with_suffix(".safetensors")
SHAPES, COLORS = [*scenes.SHAPES], [*scenes.COLORS]
CELL = 4  # px a side of what one place of the network's answer stands for
SIDE = scenes.PIXELS // CELL
APART = 10  # px; of two centres that are nearer along both axes one is seen
COLUMNS = 5 + len(SHAPES)  # of a table of objects
FAR = 2.0  # largest margin that the network tells apart, of which -1 is nearly and 0 is exactly
WINDOW = 36  # px a side of what is drawn around an object
RADIUS = {  # shape -> a function of (u, v) that is at most 1 inside, in units of the half-size
    "circle": torch.hypot,
    "square": lambda u, v: torch.maximum(u.abs(), v.abs()),
    "triangle": lambda u, v: torch.maximum(v, 2 * u.abs() - v),
}
SCALE = "0 or 1: whether the second reading accepts the sample"
DECODED = 0.5  # share of the pictures that a VAE decodes
OFF, WAY = 0.8, 0.5  # largest error of its latents, in standard deviations, and way to others
FINE = 3  # points a side of a pixel that are drawn


class Reader(nn.Module):
    """Pictures (B, 3, 64, 64) in [0, 1] -> (B, 1 + 3 + 6 + 3, 16, 16): whether an object's centre
    is here (logit), by how much it is each of 3 shapes, 6 colours (logits), and where in the cell
    and how large."""

    def __init__(self, fine: int = 48, width: int = 80) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, fine, 5, stride=2, padding=2),
            nn.GroupNorm(8, fine),
            nn.SiLU(),
            nn.Conv2d(fine, fine, 3, padding=1),
            nn.GroupNorm(8, fine),
            nn.SiLU(),
            nn.Conv2d(fine, fine, 3, padding=1),
            nn.GroupNorm(8, fine),
            nn.SiLU(),
            nn.Conv2d(fine, width, 3, stride=2, padding=1),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(8, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
                nn.GroupNorm(8, width),
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=1),
            )
            for dilation in (1, 2, 1)
        )
        self.parts = [1, len(SHAPES), len(COLORS), 3]
        self.head = nn.Conv2d(width, sum(self.parts), 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.stem(1 - x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).split(self.parts, 1)


# ---------------------------------------------------------------------------
# drawn scenes


def placed(g: torch.Generator) -> list[world.Placed]:
    """Up to five objects, on the grid of the pictures or anywhere, as in edits and motions; in some
    pictures two that may touch."""
    count = int(torch.randint(6, (), generator=g))
    kinds = torch.randint(len(SHAPES) * len(COLORS), (count,), generator=g).tolist()
    named = [(SHAPES[k % 3], COLORS[k // 3]) for k in kinds]
    if count in (0, 5) or torch.rand((), generator=g) < 0.5:
        drawn = scenes.place(named, g)
        out = [world.Placed(f"{o.color} {o.shape}", o.x, o.y, 2 * o.size) for o in drawn]
    else:
        names = [f"{color} {shape}" for shape, color in named]
        out = [*world.place(names, small.SHAPES.sizes, g)]
    if count > 1 and torch.rand((), generator=g) < 0.4:
        out[1] = beside(out[0], out[1], g)
    return out


def beside(first: world.Placed, second: world.Placed, g: torch.Generator) -> world.Placed:
    """The second object, moved towards the first until both nearly touch, overlap a little, or
    leave a narrow gap. Two times in three it takes the first one's name, too."""
    reach, named = torch.rand(2, generator=g).tolist()
    way = math.hypot(second.x - first.x, second.y - first.y)
    share = min(1.0, (0.75 + 0.6 * reach) * (first.size + second.size) / 2 / way)
    x, y = (a + share * (b - a) for a, b in ((first.x, second.x), (first.y, second.y)))
    return replace(second, name=first.name if named < 2 / 3 else second.name, x=x, y=y)


def drawn(count: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(pictures (count, 3, 64, 64), a row (picture, x, y, size, colour, by how much it is each
    shape) of each object). Three in ten are of other sizes, as what grows, down to crumbs."""
    rows = [
        (i, o.x, o.y, o.size, SHAPES.index(shape), COLORS.index(color))
        for i in range(count)
        for o in placed(g)
        for color, shape in [o.name.split()]
    ]
    picture, given = torch.tensor(rows).split([1, 5], 1)
    picture = picture[:, 0].long()
    other = some((0.3,), len(given), g)[0, :, 0, 0]
    given[:, 2] *= torch.where(other, 0.15 + 1.25 * torch.rand(len(given), generator=g), 1.0)
    corner = (given[:, :2] - WINDOW / 2).floor()
    line = corner[..., None] + (torch.arange(WINDOW * FINE) + 0.5) / FINE  # (N, 2, points)
    u, v = ((line - given[:, :2, None]) / given[:, 2, None, None] * 2).unbind(1)
    u, v = torch.broadcast_tensors(u[:, None, :], v[:, :, None])
    cover = F.avg_pool2d(bent(u, v, given[:, 3].long(), g)[:, None].float(), FINE)
    middle = slice(FINE // 2, None, FINE)
    away = cover * inked(u[:, middle, middle], v[:, middle, middle], given[:, 4].long(), g)
    width = torch.rand(count, 1, 1, 1, generator=g)[picture]
    cover, away = blurred(cover, width), blurred(away, width)
    room = torch.zeros(count, 3, *[scenes.PIXELS + 2 * WINDOW] * 2)
    for i, (x, y), share, ink in zip(picture, corner.long().tolist(), cover, away, strict=True):
        at = room[i, :, y + WINDOW : y + 2 * WINDOW, x + WINDOW : x + 2 * WINDOW]
        at.copy_(at * (1 - share) + ink)
    ink = room[..., WINDOW:-WINDOW, WINDOW:-WINDOW]
    clean, half = 1 - ink, int(DECODED * count)
    clean = torch.cat([decoded(clean[:half], g), clean[half:]])
    noise = torch.rand(count, 1, 1, 1, generator=g) * torch.randn(ink.shape, generator=g)
    pictures = (clean + 0.03 * noise).clamp(0, 1)
    return pictures, table_of(pictures)


@functools.cache
def wan_vae() -> Any:
    # training alone needs it, and a reward has this file, too
    from diffusers import AutoencoderKLWan

    folder = Path(verify.__file__).parent / "wan"
    return AutoencoderKLWan.from_pretrained(folder, subfolder="vae", dtype=torch.float32)


@torch.no_grad()
def decoded(pictures: Tensor, g: torch.Generator) -> Tensor:
    """Decode the latents of pictures (B, 3, 64, 64), noisy and half of them on the way to another
    picture's: a denoiser's latents have errors, too."""
    vae = wan_vae()
    z = vae.encode(pictures[:, :, None] * 2 - 1).latent_dist.mode()
    noise, way = torch.rand(2, len(z), 1, 1, 1, 1, generator=g)
    noise = OFF * noise * z.std((0, 2, 3, 4), keepdim=True) * torch.randn(z.shape, generator=g)
    way = WAY * way * some((0.5,), len(z), g)[0, ..., None, None]
    return vae.decode(torch.lerp(z, z.roll(1, 0), way) + noise).sample[:, :, 0] / 2 + 0.5


def blurred(x: Tensor, width: Tensor) -> Tensor:
    """Blurred by up to a pixel, for widths up to 1."""
    return torch.lerp(x, F.avg_pool2d(x, 3, stride=1, padding=1), 0.7 * width)


def some(shares: tuple[float, ...], count: int, g: torch.Generator) -> Tensor:
    """Which of so many objects, (len(shares), count, 1, 1) bool, each true in its share of them."""
    return torch.rand(len(shares), count, 1, 1, generator=g) < torch.tensor(shares).view(
        -1, 1, 1, 1
    )


def bent(u: Tensor, v: Tensor, shape: Tensor, g: torch.Generator) -> Tensor:
    """Points (N, P, P) inside of shapes, most of which are on the way to another shape, wavy, thin
    or cut."""
    odd = some((0.4, 0.3, 0.3, 0.1, 0.5), len(u), g)
    way, wave, flat, where = torch.rand(4, len(u), 1, 1, generator=g)
    turn, phase = 6.2832 * torch.rand(2, len(u), 1, 1, generator=g)
    folds = torch.randint(2, 6, (len(u), 1, 1), generator=g)
    thin = 1 - 0.4 * flat * odd[2]
    u, v = torch.where(odd[4], u / thin, u), torch.where(odd[4], v, v / thin)
    radii = torch.stack([RADIUS[s](u, v) for s in SHAPES])
    each = torch.arange(len(u))
    other = (shape + torch.randint(1, len(SHAPES), shape.shape, generator=g)) % len(SHAPES)
    radius = torch.lerp(radii[shape, each], radii[other, each], way * odd[0])
    radius = radius + 0.2 * wave * odd[1] * (folds * torch.atan2(v, u) + phase).cos()
    kept = u * turn.cos() + v * turn.sin() < torch.where(odd[3], 1.2 * where, 2.0)
    return (radius <= 1) & kept


def inked(u: Tensor, v: Tensor, color: Tensor, g: torch.Generator) -> Tensor:
    """How far from white (N, 3, P, P) each point is: of a colour or a tint, full or pale, evenly or
    less on one side."""
    n = len(u)
    toward = 1 - torch.tensor([*scenes.COLORS.values()])
    turn = 6.2832 * torch.rand(2, n, 1, 1, generator=g)
    along = ((u * turn.cos() + v * turn.sin() + 1.2) / 2.4).clamp(0, 1)  # (2, N, P, P)
    tinted, pale, uneven = some((0.3, 0.3, 0.5), n, g)
    mixed, least = torch.rand(2, n, 1, 1, generator=g)
    other = (color + torch.randint(1, len(COLORS), color.shape, generator=g)) % len(COLORS)
    share = 0.8 * mixed * tinted * torch.where(uneven, along[0], 1.0)
    full = 1 - pale * (0.9 - 0.8 * least) * torch.where(uneven, along[1], 1.0)
    own, foreign = toward[color][:, :, None, None], toward[other][:, :, None, None]
    return full[:, None] * torch.lerp(own, foreign, share[:, None])


def table_of(pictures: Tensor) -> Tensor:
    """What the world calls each object of pictures (B, 3, 64, 64): rows (picture, x, y, size,
    colour, its margin of each shape in units of what is nearly enough). Objects whose centres are
    nearer than the network tells apart are none, and neither is ink that is too pale to have a
    colour, whose colour is no number of one."""
    rows, shapes = [], verify.detect(pictures)
    for i, found in enumerate(shapes):
        for o in found:
            close = [p for p in found if max(abs(p.x - o.x), abs(p.y - o.y)) < APART]
            margins = [m / verify.SLACK if len(close) == 1 else -FAR for m in o.margins]
            rows.append((i, o.x, o.y, max(o.width, o.height), COLORS.index(o.color), *margins))
    pale = small.outside(pictures, shapes)
    if pale.any():
        own, masks = verify.objects(verify.components(pale))
        for i, o in zip(own.tolist(), verify.recognise(masks, [""] * len(masks)), strict=True):
            rows.append((i, o.x, o.y, max(o.width, o.height), -1, *[-FAR] * len(SHAPES)))
    return torch.tensor(rows).view(-1, COLUMNS)


def loss_of(answer: tuple[Tensor, ...], table: Tensor) -> Tensor:
    """Of centres everywhere, and of what is said at the objects' own places."""
    center, shape, color, where = answer
    picture, x, y, size, hue = table[:, :5].T
    column, row = (x / CELL).long().clamp(0, SIDE - 1), (y / CELL).long().clamp(0, SIDE - 1)
    at = picture.long(), slice(None), row, column
    asked = torch.zeros_like(center)
    asked[at] = 1.0
    margins = table[:, 5:].clamp(-FAR, FAR)
    named = margins.amax(1) >= -1
    place = torch.stack([x / CELL - column, y / CELL - row, size / CELL], 1)
    return (
        F.binary_cross_entropy_with_logits(center, asked, pos_weight=torch.tensor(8.0)) * 20
        + 3 * F.smooth_l1_loss(shape[at], margins, beta=0.1)
        + F.cross_entropy(color[at][named], hue[named].long())
        + 4 * (where[at] - place)[named].abs().mean()
    )


def batch(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """What a step is trained on, a function of the seed and the step."""
    return drawn(args.batch, torch.Generator().manual_seed(args.seed * 1_000_003 + step))


def train(args: argparse.Namespace) -> None:
    # a reward is loaded from its file alone
    from train_shapes import descend, learning_rate
    from train_stickers import optimizers_of_kernels

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = Second().model if args.done else Reader()
    model = model.to(memory_format=torch.channels_last)
    optimizers = optimizers_of_kernels(model, muon=True).values()
    steps, own = range(args.done, args.done + args.steps), functools.partial(batch, args)
    # a process of its own draws
    batches = DataLoader(steps, batch_size=None, num_workers=1, collate_fn=own)
    for step, (x, table) in enumerate(batches):
        loss = loss_of(model(x.contiguous(memory_format=torch.channels_last)), table)
        descend(loss, model, optimizers, learning_rate(step, args.steps, args.lr))
        if step % 200 == 0:
            print(f"{step} loss {loss.item():.4f}", flush=True)
    model = model.to(memory_format=torch.contiguous_format).half()
    said = {"made_by": f"scripts/embedded/{Path(__file__).name}", "steps": str(steps.stop)}
    save_file(model.state_dict(), WEIGHTS, said)


# ---------------------------------------------------------------------------
# reading


def named(
    place: tuple[int, int],
    margins: list[float],
    color: list[float],
    where: list[float],
) -> world.FoundObject:
    """An object from what the network says at a place."""
    hue = COLORS[color.index(max(color))]
    best = margins.index(max(margins))
    name = f"{hue} {SHAPES[best]}" if margins[best] > 0 else None
    like = tuple(f"{hue} {s}" for s, margin in zip(SHAPES, margins, strict=True) if margin > -1)
    (row, column), (x, y, size) = place, where
    # a box has whole pixels, and its centre halves of them
    x, y = (round(2 * CELL * v) / 2 for v in (column + x, row + y))
    return world.FoundObject(name, x, y, float(round(CELL * size)), like)


class Second:
    """The network's reading of the world of shapes."""

    def __init__(self) -> None:
        self.model = Reader()
        self.model.load_state_dict({k: w.float() for k, w in load_file(WEIGHTS).items()})

    @torch.no_grad()
    def detect(self, images: Tensor) -> list[world.FoundScene]:
        """(B, 3, 64, 64) in [0, 1] -> what each shows; an unclear object has no name."""
        out = []
        for some in images.split(256):
            center, *said = self.model(some)
            # of centres at most two cells apart one is seen; it has learned no name (APART)
            peak = (center == F.max_pool2d(center, 5, 1, 2)) & (center > 0)
            for i in range(len(some)):
                rows, columns = peak[i, 0].nonzero().T
                at = [part[i, :, rows, columns] for part in said]
                places = zip(rows.tolist(), columns.tolist(), strict=True)
                objects = (named(*o) for o in zip(places, *(a.T.tolist() for a in at), strict=True))
                out.append(world.FoundScene(tuple(objects), "white"))
        return out

    def strict(self, media: Tensor, texts: Sequence[str], context: MediaContext) -> list[bool]:
        """Whether each medium is as its prompt asks: a picture, an edit or a video."""
        language = small.SHAPES.language
        if context.meta and "include" in context.meta[0]:
            pairs = zip(self.detect(media), context.meta, strict=True)
            return [verify.strict(listed(found), row["include"]) for found, row in pairs]
        if media.ndim == 5:
            asked = [grammar.read(text, language, grammar.Motion) for text in texts]
            found, frames = self.detect(media.flatten(0, 1)), media.shape[1]
            videos = [found[i : i + frames] for i in range(0, len(found), frames)]
            said = [verdict(*row) for row in zip(videos, asked, strict=True)]
        else:
            edits = Edits(replace(small.SHAPES, detect=self.detect))
            asked = [grammar.read(text, language, grammar.Edit) for text in texts]
            # the sources are drawn, and the verifier reads what is drawn without an error
            assert context.source is not None
            triples = zip(small.detect(context.source), self.detect(media), asked, strict=True)
            said = [edits.verdict(*triple) for triple in triples]
        return [one["strict"] == 1 for one in said]


def listed(found: world.FoundScene) -> list[verify.FoundShape]:
    out = []
    for o in found.objects:
        color, shape = o.name.split() if o.name else ("", None)
        out.append(verify.FoundShape(shape, color, o.x, o.y, o.size, o.size))
    return out


@functools.cache
def reader() -> Second:
    return Second()


@flowrl.reward(scale=SCALE, needs=("meta",), range=(0.0, 1.0))
def second(media: Tensor, prompts: list[str], context: MediaContext) -> Tensor:
    """The reading of pictures and videos as a reward to be looked at: give it the weight 0."""
    right = reader().strict(media.cpu(), prompts, context)
    return torch.tensor(right, dtype=torch.float32)


@flowrl.reward(scale=SCALE, needs=("source",), range=(0.0, 1.0))
def second_edit(media: Tensor, prompts: list[str], context: MediaContext) -> Tensor:
    """The same for edits."""
    right = reader().strict(media.cpu(), prompts, context)
    return torch.tensor(right, dtype=torch.float32)


def agree(args: argparse.Namespace) -> None:
    """Print both readings of a run's held-out samples, and how often they say the same."""
    for folder in args.runs:
        try:
            rows = run_folder.read_evaluation(folder).get("rows", [])
        except ValueError as error:
            raise SystemExit(str(error)) from error
        read = {key for row in rows for key in row["values"]}
        keys = sorted(key for key in read if key.endswith("/strict") or "second" in key)
        if len(keys) != 2:
            raise SystemExit(
                f"{folder / run_folder.EVALUATION} should have two readings, and has"
                f" {', '.join(keys) or 'none'}; train with the words of `second_reading.py -h`"
            )
        for row in rows:
            other, first = (row["values"][key] for key in keys)
            same = statistics.mean(float(a == b) for a, b in zip(first, other, strict=True))
            shares = [statistics.mean(values) for values in (first, other)]
            print(
                f"{folder} {row['name']}: verifier {shares[0]:.3f}, network {shares[1]:.3f},"
                f" same verdict on {same:.3f} of {len(first)}"
            )


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["train", "agree"])
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--steps", type=int, default=28_000)
    parser.add_argument("--done", type=int, default=0, help="steps of the weights to go on from")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.what == "agree" and not given.runs:
        parser.error("agree needs the folder of a run")
    {"train": train, "agree": agree}[given.what](given)
