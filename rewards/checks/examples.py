"""Pictures and videos whose truth is known, to try rewards on: what they show, near misses,
attacks, mirror images, imperceptible copies.

Worlds: coloured shapes (flowrl.shapes, also moving ones for rewards of videos), written words for
text recognition, and files of the user's own with their prompts. A foil is a prompt that a picture
does not fulfil, different from its own in one attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.data import scored_folder
from flowrl.data.checklists import from_shapes
from flowrl.data.media import read_image
from flowrl.data.ocr import WORDS
from flowrl.rewards import Reward, load_set
from flowrl.rewards.checks.pictures import written
from flowrl.rewards.core import files as core_files
from flowrl.shapes import clip, verify
from flowrl.shapes.prompts import Prompt, all_prompts, find, scene
from flowrl.shapes.scenes import PIXELS, RELATIONS, Object, render
from flowrl.types import MediaContext, replace

# a round of eight; relations are the hardest, and come in four kinds
TASKS = (
    "position",
    "counting",
    "position",
    "color_attr",
    "counting",
    "position",
    "colors",
    "two_object",
)


MOST_FOILS = {"relation": 3}  # of one kind for a picture; of others 2


FRAMES = 8


DRIFT = 1.0  # px a frame


COLUMNS = frozenset(
    {"meta", "group", "source", "reference"}
)  # of MediaContext that pictures of ours can fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Foil:
    """A near miss. attribute: in what it differs; prompt, meta: what the picture does not show;
    media: a picture that shows it."""

    attribute: str
    prompt: str
    meta: dict[str, Any]
    media: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A picture (3, H, W) or video (F, 3, H, W), fp32 in [0, 1], with a prompt that it fulfils.

    mirrored: prompt and meta that its mirror image fulfils; None: that is not known. columns: its
    other columns of a MediaContext.
    """

    media: Tensor
    prompt: str
    meta: dict[str, Any]
    foils: tuple[Foil, ...] = ()
    mirrored: tuple[str, dict[str, Any]] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def under(self, prompt: str, meta: dict[str, Any]) -> Specimen:
        """The same picture with another prompt."""
        return replace(self, prompt=prompt, meta=meta)

    def mirror(self) -> Specimen:
        """Mirror image under the same prompt."""
        columns = {
            name: value.flip(-1) if value.ndim > 2 else value
            for name, value in self.columns.items()
        }
        return replace(self, media=self.media.flip(-1), columns=columns)


def context_of(specimens: Sequence[Specimen], device: torch.device | str = "cpu") -> MediaContext:
    """Their columns as a reward gets them."""
    columns = {
        name: torch.stack([s.columns[name] for s in specimens]).to(device)
        for name in specimens[0].columns
    }
    return MediaContext(meta=[s.meta for s in specimens], **columns)


def fits(reward: Reward, *, count: int | None = None, frames: int | None = None) -> list[Specimen]:
    """`count` specimens that suit a reward, by its name and by what it reads; ValueError where none
    of ours carry what it needs.

    frames: of videos; None: FRAMES of them for a reward of videos, and pictures for any other.
    """
    if frames is not None and (reward.name == "ocr" or reward.video == "no"):
        raise ValueError(
            f'frames={frames}: reward "{reward.name}" is tried on pictures; leave it out'
        )
    if reward.name == "ocr":
        return texts(6 if count is None else count)
    found = shapes(
        16 if count is None else count,
        frames=FRAMES if frames is None and _of_videos(reward) else frames,
    )
    instead = "give pictures of your own, with a metadata.jsonl whose lines carry what it reads"
    if missing := sorted(reward.needs - COLUMNS):
        raise ValueError(
            f'reward "{reward.name}" needs the context column "{missing[0]}", which no picture of'
            " ours has; check it in Python"
        )
    if unread := sorted(reward.reads - found[0].meta.keys()):
        raise ValueError(
            f'reward "{reward.name}" reads "{unread[0]}" of each prompt, which no prompt of ours'
            f" carries; {instead}"
        )
    for specimen in found:
        if complaint := reward.complaint({"prompt": specimen.prompt, **specimen.meta}):
            raise ValueError(
                f'reward "{reward.name}": the prompt "{specimen.prompt}" of the shapes world'
                f" {complaint}; {instead}"
            )
    return found


def _of_videos(reward: Any) -> bool:
    """Whether it takes nothing but videos, or pools the frames of one, itself or in what it is made
    of."""
    pools = getattr(reward, "name", "") == "video" or getattr(reward, "video", "") == "only"
    return pools or (hasattr(reward, "inner") and _of_videos(reward.inner))


def shapes(count: int = 16, *, seed: int = 0, frames: int | None = None) -> list[Specimen]:
    """Scenes of random prompts of all tasks, 64 x 64; with `frames`, videos in which the whole
    scene drifts to the right."""
    _check_count(count)
    generator = torch.Generator().manual_seed(seed)
    return [_scene(_prompt(i, generator), generator, frames) for i in range(count)]


def _check_count(count: int) -> None:
    if count < 2:
        raise ValueError(f"count={count}: a reward is compared over pictures; use at least 2")


def _prompt(i: int, generator: torch.Generator) -> Prompt:
    """A random prompt of the i-th task; every relation in turn."""
    task = TASKS[i % len(TASKS)]
    members = _by_task()[task]
    if task == "position":
        before = sum(TASKS[j % len(TASKS)] == "position" for j in range(i))
        relation = list(RELATIONS)[before % len(RELATIONS)]
        members = [p for p in members if p["include"][1]["position"][0] == relation]
    return members[int(torch.randint(len(members), (), generator=generator))]


@cache
def _by_task() -> dict[str, list[Prompt]]:
    return {task: [p for p in all_prompts() if p["task"] == task] for task in TASKS}


def _scene(prompt: Prompt, generator: torch.Generator, frames: int | None) -> Specimen:
    objects = scene(prompt, generator)
    foils = _foils(prompt, objects, generator, frames)
    media, source, mirrored = (
        _drawn(objects, frames),
        foils[0].media,
        _mirrored(prompt),
    )  # source: what an edit could have started from
    return Specimen(
        media=media,
        prompt=prompt["prompt"],
        meta=_meta(prompt),
        foils=foils,
        mirrored=(mirrored["prompt"], _meta(mirrored)),
        columns={"source": source if frames is None else source[0], "reference": media},
    )


def _foils(
    prompt: Prompt, objects: list[Object], generator: torch.Generator, frames: int | None
) -> tuple[Foil, ...]:
    """Prompts that the objects do not show, with pictures that show neither the prompt nor another
    foil."""
    chosen: list[tuple[str, Prompt]] = []
    for kind, members in clip.foils(prompt).items():
        false = [p for p in members if not _shows(objects, p)]
        order = torch.randperm(len(false), generator=generator).tolist()
        chosen += [(kind, false[place]) for place in order[: MOST_FOILS.get(kind, 2)]]
    out = []
    for kind, foil in sorted(
        chosen, key=lambda pair: pair[0] != "swap"
    ):  # of two equal ones, the first that is tried is dropped
        others = [prompt, *(p for _, p in chosen if p is not foil)]
        shown = _scene_without(others, foil, generator)
        if shown is None:  # another foil says the same in other words
            chosen.remove((kind, foil))
        else:
            out.append(
                Foil(
                    attribute=kind,
                    prompt=foil["prompt"],
                    meta=_meta(foil),
                    media=_drawn(shown, frames),
                )
            )
    return tuple(out)


def _meta(prompt: Prompt) -> dict[str, Any]:
    return {key: value for key, value in prompt.items() if key != "prompt"} | {
        "checklist": from_shapes(prompt)
    }


def _shows(objects: list[Object], prompt: Prompt) -> bool:
    found = [verify.Found(o.shape, o.color, o.x, o.y, 2 * o.size, 2 * o.size) for o in objects]
    return verify.strict(found, prompt["include"])


def _scene_without(
    others: list[Prompt], prompt: Prompt, generator: torch.Generator
) -> list[Object] | None:
    """A scene of the prompt that shows none of the others (a thing to the upper left is above and
    left of another); None: there is none."""
    for _ in range(50):
        objects = scene(prompt, generator)
        if not any(_shows(objects, other) for other in others):
            return objects
    return None


def _mirrored(prompt: Prompt) -> Prompt:
    """What the mirror image of its pictures shows."""
    opposite = {"left of": "right of", "right of": "left of"}
    relation = next(
        (clause["position"][0] for clause in prompt["include"] if "position" in clause), None
    )
    return (
        find(prompt["prompt"].replace(relation, opposite[relation]))
        if relation in opposite
        else prompt
    )


def _drawn(objects: list[Object], frames: int | None) -> Tensor:
    if frames is None:
        return render(objects)
    middle = PIXELS / 2
    small = [
        replace(
            o, x=middle + 0.8 * (o.x - middle), y=middle + 0.8 * (o.y - middle), size=0.8 * o.size
        )
        for o in objects
    ]
    drift = [(t - (frames - 1) / 2) * DRIFT for t in range(frames)]
    return torch.stack([render([replace(o, x=o.x + d) for o in small]) for d in drift])


def texts(count: int = 6, *, seed: int = 0, side: int = 192) -> list[Specimen]:
    """Words in black on white, with other words and words with one other letter as foils."""
    _check_count(count)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(WORDS), generator=generator).tolist()
    out = []
    for i in range(count):
        word, other = WORDS[order[i % len(WORDS)]], WORDS[order[(i + 1) % len(WORDS)]]
        foils = tuple(
            Foil(
                attribute=kind,
                prompt=_sign(text),
                meta={"text": text},
                media=written(text, side, side),
            )
            for kind, text in (("word", other), ("letter", _misspelt(word, generator)))
        )
        out.append(
            Specimen(
                media=written(word, side, side),
                prompt=_sign(word),
                meta={"text": word},
                foils=foils,
            )
        )
    return out


def _sign(text: str) -> str:
    return f'a white sign that says "{text}"'


def _misspelt(word: str, generator: torch.Generator) -> str:
    """The word with another letter in its middle."""
    middle = len(word) // 2
    others = [c for c in "aeioubdkmrstz" if c != word[middle]]
    return (
        word[:middle]
        + others[int(torch.randint(len(others), (), generator=generator))]
        + word[middle + 1 :]
    )


def files(
    reward: Reward,
    media: Sequence[Path],
    *,
    prompt: str | None = None,
    prompts: Path | None = None,
    most: int = 16,
) -> list[Specimen]:
    """At most `most` images of the user's own, evenly out of all; their prompts as for `flowrl
    score`. Foils: prompts of other files."""
    _check_count(most)
    samples = core_files.with_meta(
        scored_folder.collect(media, prompt=prompt, prompts=prompts),
        load_set({reward.name: reward}),
        columns=("meta", "group"),
    )
    samples = (
        [samples[i * len(samples) // most] for i in range(most)] if len(samples) > most else samples
    )
    pictures = [read_image(sample.path) for sample in samples]
    out = []
    for i, sample in enumerate(samples):
        others = [
            j
            for step in range(1, len(samples))
            if samples[j := (i + step) % len(samples)].prompt != sample.prompt
        ][:4]
        foils = tuple(
            Foil(
                attribute="other file",
                prompt=samples[j].prompt,
                meta=samples[j].meta,
                media=pictures[j],
            )
            for j in others
        )
        out.append(Specimen(media=pictures[i], prompt=sample.prompt, meta=sample.meta, foils=foils))
    return out
