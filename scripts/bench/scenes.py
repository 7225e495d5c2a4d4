"""Figures of the verifiers of small worlds: what is accepted and refused, and how long they take.

    python scripts/bench/scenes.py --scenes 2000 --seed 0 [--kinds pictures motions edits]
    python scripts/bench/scenes.py --world shapes --scenes 2000 --vae flowrl/shapes/weights
    python scripts/bench/scenes.py --vae FOLDER   # a pipeline's folder, or that of its autoencoder
    python scripts/bench/scenes.py --vae vae.pt   # a checkpoint of embedded/train_stickers.py

Sentences are drawn with equal shares of the tasks, and each is judged strictly: as drawn; through
the VAE (of an edit the result alone); and with one picture spoilt, which is the picture, a frame
that shows objects, or the result of the edit. Halved, mirrored and merged spoil its first object
alone, the others all of it. Pictures of other scenes are left out where they fit the sentence.
Coloured shapes are pale below half of the contrast, which their verifier counts as covered.
Milliseconds are those of the processor, on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.scenes import shapes
from flowrl.scenes.grammar import Edit, Motion, Picture, read
from flowrl.scenes.motions import verdict
from flowrl.scenes.stickers import prompts, verify
from flowrl.scenes.stickers import world as stickers
from flowrl.scenes.world import FoundScene, Placed, Scene, keyed, truth
from flowrl.shapes import prompts as shape_prompts
from flowrl.shapes import verify as shape_verify

WORLDS = {"stickers": stickers.STICKERS, "shapes": shapes.SHAPES}
KINDS: dict[str, dict[str, Any]] = {
    "stickers": {"pictures": prompts, "motions": stickers.MOTIONS, "edits": stickers.EDITS},
    "shapes": {"pictures": shape_prompts, "motions": shapes.MOTIONS, "edits": shapes.EDITS},
}
TOGETHER = 32  # sentences that are judged at once
# An object is nearly symmetric if the squared difference from its mirror image is at most this
# share of its squared difference from white.
SYMMETRIC = 0.12


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Scenes that a sentence describes, and how what is found in their pictures is judged."""

    scenes: tuple[Scene, ...]  # a picture; frames; or source and result
    judge: Callable[[Sequence[FoundScene]], bool]  # whether what is found is strictly right
    given: int = 0  # number of scenes that no model draws: the source of an edit
    spoilt: int  # place of the scene that is spoilt
    number: int  # of the sample, a seed
    find: Callable[[Scene], Any] = truth  # what is to be found in the picture of a scene

    @property
    def truth(self) -> list[Any]:
        """What is to be found."""
        return [self.find(scene) for scene in self.scenes]


def drawn(world: str, kind: str, count: int, seed: int) -> Iterator[Drawn]:
    """Draw sentences of a kind, with equal shares of the tasks."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for row in KINDS[world][kind].all_prompts():
        tasks[row["task"]].append(row["prompt"])
    choice = random.Random(seed)
    for number in range(seed * count, (seed + 1) * count):
        prompt = choice.choice(list(tasks.values())[number % len(tasks)])
        yield described(world, kind, prompt, number)


def described(world: str, kind: str, prompt: str, number: int) -> Drawn:
    """Draw the scenes of a sentence."""
    language, source = WORLDS[world].language, KINDS[world][kind]
    if source is shape_prompts:
        return of_shapes(prompt, number)
    if kind == "pictures":
        asked = read(prompt, language, Picture)
        scenes = (source.scene(prompt, number),)
        judge = lambda found: verify.strict(found[0], asked)  # noqa: E731
        return Drawn(scenes=scenes, judge=judge, spoilt=0, number=number)
    if kind == "motions":
        motion = read(prompt, language, Motion)
        video = source.frames(prompt, number)
        # An end of the video: emptied at another frame, objects may appear later, or disappear
        # earlier, which is right as well.
        place = -1 if motion.verb == "appears" else 0
        shown = [i for i, scene in enumerate(video) if scene.objects]
        judge = lambda found: verdict(list(found), motion)["strict"] == 1  # noqa: E731
        return Drawn(scenes=video, judge=judge, spoilt=shown[place], number=number)
    edit = read(prompt, language, Edit)
    judge = lambda found: source.verdict(found[0], found[1], edit)["strict"] == 1  # noqa: E731
    scenes = source.pair(prompt, number)
    return Drawn(scenes=scenes, judge=judge, given=1, spoilt=1, number=number)


def of_shapes(prompt: str, number: int) -> Drawn:
    """Draw a picture of coloured shapes, which has a verifier of its own."""
    asked = shape_prompts.find(prompt)
    placed = tuple(
        Placed(f"{o.color} {o.shape}", o.x, o.y, 2 * o.size)
        for o in shape_prompts.scene(asked, keyed(number, prompt))
    )
    judge = lambda found: shape_verify.strict(found[0], asked["include"])  # noqa: E731
    return Drawn(scenes=(Scene(placed),), judge=judge, spoilt=0, number=number, find=shapes_in)


def shapes_in(scene: Scene) -> list[shape_verify.FoundShape]:
    """What the verifier of coloured shapes is to find."""
    named = ((o.name.split(), o) for o in scene.objects)
    return [
        shape_verify.FoundShape(shape, color, o.x, o.y, o.size, o.size)
        for (color, shape), o in named
    ]


@cache
def symmetric(world: str) -> list[str]:
    """Objects that are nearly their own mirror images."""
    out = []
    for noun in WORLDS[world].language.nouns:
        less = WORLDS[world].render(Scene((Placed(noun, 32.0, 32.0, 56),))) - 1
        apart = (less - less.flip(-1)).square().sum() / less.square().sum()
        out += [noun] * bool(apart <= SYMMETRIC)
    return out


def tile(image: Tensor, placed: Placed) -> Tensor:
    """The part of (3, 64, 64) where an object lies, to be read or written."""
    (x, y), size = placed.corner, round(placed.size)
    return image[:, y : y + size, x : x + size]


@dataclass(frozen=True, slots=True)
class Spoiler:
    """Ways to spoil the picture of a scene; None where a way changes nothing."""

    world: str  # a name of WORLDS
    pale: float  # contrast of pale pictures

    @property
    def ways(self) -> dict[str, Callable[[Scene, int], Tensor | None]]:
        """By name; the second argument is the number of the sample."""
        return {
            "blurred: means of 3 x 3 px": lambda scene, _: F.avg_pool2d(
                self.render(scene)[None], 3, 1, 1, count_include_pad=False
            )[0],
            f"pale: {self.pale:.0%} of the contrast": lambda scene, _: torch.lerp(
                self.empty(scene), self.render(scene), self.pale
            ),
            "halved": lambda scene, _: self.halved(scene),
            "mirrored, of asymmetric objects": lambda scene, _: self.mirrored(scene),
            "merged with another object": lambda scene, _: self.merged(scene),
            "noise of 0.15": self.noisy,
            "empty": lambda scene, _: self.empty(scene),
        }

    def render(self, scene: Scene) -> Tensor:
        return WORLDS[self.world].render(scene)

    def empty(self, scene: Scene) -> Tensor:
        """The background alone."""
        return self.render(replace(scene, objects=()))

    def halved(self, scene: Scene) -> Tensor:
        """Draw the left half of the first object."""
        image = self.render(scene)
        own = tile(image, scene.objects[0])
        own[:, :, own.shape[2] // 2 :] = self.empty(scene)[:, :1, :1]
        return image

    def mirrored(self, scene: Scene) -> Tensor | None:
        """Draw the mirror image of the first object; None where it is nearly the same."""
        if scene.objects[0].name in symmetric(self.world):
            return None
        image = self.render(scene)
        own = tile(image, scene.objects[0])
        own.copy_(own.flip(2).clone())
        return image

    def merged(self, scene: Scene) -> Tensor:
        """Draw another object over a part of the first one, half a tile to the right."""
        first, nouns = scene.objects[0], WORLDS[self.world].language.nouns
        other = nouns[(nouns.index(first.name) + 7) % len(nouns)]
        over = replace(first, name=other, x=first.x + first.size // 2)
        return self.render(replace(scene, objects=(*scene.objects, over)))

    def noisy(self, scene: Scene, number: int) -> Tensor:
        image = self.render(scene)
        noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(number))
        return (image + 0.15 * noise).clamp(0, 1)


SPOILERS = {"stickers": Spoiler("stickers", 0.6), "shapes": Spoiler("shapes", 0.4)}


def orders(own: list[FoundScene], one: Drawn) -> dict[str, list[FoundScene]]:
    """Findings of an edit or of a video put together in wrong ways."""
    if one.given:
        return {"a copy of the source": [own[0], own[0]]}
    if len(own) == 1:
        return {}
    return {"reversed": own[::-1], "a still": [own[one.spoilt]] * len(own)}


class Reader:
    """The verifier of a kind, and the time that it takes."""

    def __init__(self, world: str, kind: str) -> None:
        own = KINDS[world][kind] is shape_prompts
        self.detect: Any = shape_verify.detect if own else WORLDS[world].detect
        self.seconds, self.pictures = 0.0, 0

    def __call__(self, images: Tensor) -> list[Any]:
        began = time.process_time()
        found = self.detect(images)
        self.seconds += time.process_time() - began
        self.pictures += len(images)
        return found


def measure(
    world: str, kind: str, count: int, seed: int, through: Callable[..., Tensor] | None
) -> dict[str, str]:
    """Judge sentences of a kind -> figures by name."""
    rows: dict[str, list[bool]] = defaultdict(list)
    every, reader = list(drawn(world, kind, count, seed)), Reader(world, kind)
    for start in range(0, count, TOGETHER):
        part = every[start : start + TOGETHER]
        images = torch.stack([WORLDS[world].render(scene) for one in part for scene in one.scenes])
        size = len(part[0].scenes)
        found = split(reader(images), size)
        rows["accepted as drawn"] += [one.judge(f) for one, f in zip(part, found, strict=True)]
        if through is not None:
            video = size if kind == "motions" else 1
            made = split(reader(through(images, video)), size)
            for one, source, f in zip(part, found, made, strict=True):
                rows["accepted through the VAE"].append(
                    one.judge(source[: one.given] + f[one.given :])
                )
        refuse(rows, part, found, reader, SPOILERS[world])
    out = {name: f"{sum(kept) / len(kept):.2%} of {len(kept)}" for name, kept in rows.items()}
    return out | {"ms a picture": f"{1e3 * reader.seconds / reader.pictures:.1f}"}


def split(found: list[FoundScene], size: int) -> list[list[FoundScene]]:
    return [found[i : i + size] for i in range(0, len(found), size)]


def refuse(
    rows: dict[str, list[bool]],
    part: list[Drawn],
    found: list[list[FoundScene]],
    reader: Reader,
    spoiler: Spoiler,
) -> None:
    """Spoil pictures in every way, and book whether they are refused."""
    for name, spoil in spoiler.ways.items():
        spoilt = [spoil(one.scenes[one.spoilt], one.number) for one in part]
        judged = [i for i, image in enumerate(spoilt) if image is not None]
        images = [image for image in spoilt if image is not None]
        seen = reader(torch.stack(images)) if images else []
        for i, scene in zip(judged, seen, strict=True):
            place = part[i].spoilt
            wrong = [*found[i][:place], scene, *found[i][place + 1 :]]
            rows[f"refused: {name}"].append(not part[i].judge(wrong))
    for i, one in enumerate(part):
        other = (i + 1) % len(part)
        fits = one.judge(one.truth[: one.given] + part[other].truth[one.given :])
        wrong = found[i][: one.given] + found[other][one.given :]
        if not fits:
            rows["refused: another scene"].append(not one.judge(wrong))
        for name, order in orders(found[i], one).items():
            rows[f"refused: {name}"].append(not one.judge(order))


def autoencoder(path: Path) -> Callable[..., Tensor]:
    """The round trip of pictures (B, 3, 64, 64) in [0, 1] through a VAE, one of videos (Wan's) or a
    VQ autoencoder. Its second argument is the number of frames that follow each other in a
    video."""
    if path.suffix == ".pt":
        sys.path.append(str(Path(__file__).parents[1] / "embedded"))
        from train_stickers import vae

        model = vae()
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    else:
        own = next(place for place in (path / "vae", path / "vqvae", path) if place.is_dir())
        kind = json.loads((own / "config.json").read_text())["_class_name"]
        model = getattr(diffusers, kind).from_pretrained(own)
    model = model.float().eval()
    videos, tokens = isinstance(model, diffusers.AutoencoderKLWan), hasattr(model, "quantize")

    @torch.no_grad()
    def through(images: Tensor, frames: int = 1) -> Tensor:
        made = []
        for some in images.split(16 * frames):
            x = some if tokens else some * 2 - 1  # aMUSEd's pictures are not normalised
            x = x.unflatten(0, (-1, frames)).transpose(1, 2) if videos else x
            code = model.encode(x)
            y = model.decode(code.latents if tokens else code.latent_dist.mode()).sample
            y = y.transpose(1, 2).flatten(0, 1) if videos else y
            made.append(y if tokens else y / 2 + 0.5)
        return torch.cat(made).clamp(0, 1)

    return through


def main(words: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--scenes", type=int, default=2000, help="sentences of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=list(WORLDS), default="stickers")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS["stickers"]))
    parser.add_argument("--vae", type=Path, help="a folder, or a checkpoint of train_stickers.py")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    through = autoencoder(args.vae) if args.vae else None
    kinds = args.kinds or list(KINDS[args.world])
    found = {kind: measure(args.world, kind, args.scenes, args.seed, through) for kind in kinds}
    print(f"nearly symmetric: {', '.join(symmetric(args.world))}\n")
    print(f"| | {' | '.join(found)} |\n|-{'|-' * len(found)}|")
    for name in dict.fromkeys(name for rows in found.values() for name in rows):
        print(f"| {name} | {' | '.join(rows.get(name, '') for rows in found.values())} |")


if __name__ == "__main__":
    main()
