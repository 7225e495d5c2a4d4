"""Pictures and videos whose truth is known, to try rewards on, with their prompts and near misses.

Worlds: coloured shapes (flowrl.shapes, also moving ones for rewards of videos), written words for
text recognition, and files of the user's own with their prompts. A near miss is a prompt that a
picture does not fulfil, different from its own in one attribute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.data import conditions
from flowrl.data.checklists import from_shapes
from flowrl.data.media import read_image
from flowrl.data.ocr import WORDS
from flowrl.data.samples import Sample, collect
from flowrl.rewards import Reward, load_set
from flowrl.rewards.checks.pictures import written
from flowrl.rewards.core.files import with_meta
from flowrl.shapes import clip, verify
from flowrl.shapes.prompts import Prompt, all_prompts, find, scene
from flowrl.shapes.scenes import PIXELS, RELATIONS, Object, render
from flowrl.types import MediaContext

TASKS = (  # tasks of eight examples in turn; relations are the hardest, and come in four kinds
    "position",
    "counting",
    "position",
    "color_attr",
    "counting",
    "position",
    "colors",
    "two_object",
)
MOST_NEAR_MISSES = {"relation": 3}  # most near misses of a kind for each picture; other kinds: 2
FRAMES = 8
DRIFT = 1.0  # px by which a moving scene shifts in each frame
# Columns of a MediaContext that our own pictures can fill.
COLUMNS = frozenset({"meta", "group", "source", "reference"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """A prompt, close to that of a picture, that the picture does not fulfil."""

    attribute: str  # attribute that differs, as "colour" or "count"
    prompt: str  # prompt that the picture does not fulfil
    meta: dict[str, Any]  # meta of that prompt
    media: Tensor  # (3, H, W) or (F, 3, H, W), a picture or video that fulfils it


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A picture or video with a prompt that it fulfils."""

    media: Tensor  # (3, H, W) or (F, 3, H, W), fp32 in [0, 1]
    prompt: str  # prompt that the media fulfil
    meta: dict[str, Any]  # meta of the prompt, as a data file brings it
    near_misses: tuple[NearMiss, ...] = ()  # prompts that the media do not fulfil
    # prompt and meta that the mirror image fulfils; None: not known
    mirrored: tuple[str, dict[str, Any]] | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # other columns of its MediaContext

    def under(self, prompt: str, meta: dict[str, Any]) -> Example:
        """The same picture with another prompt."""
        return replace(self, prompt=prompt, meta=meta)

    def mirror(self) -> Example:
        """Mirror image under the same prompt."""
        columns = {
            name: value.flip(-1) if value.ndim > 2 else value
            for name, value in self.columns.items()
        }
        return replace(self, media=self.media.flip(-1), columns=columns)


def context_of(examples: Sequence[Example], device: torch.device | str = "cpu") -> MediaContext:
    """The context of examples, as a reward gets it."""
    columns = {
        name: torch.stack([s.columns[name] for s in examples]).to(device)
        for name in examples[0].columns
    }
    return MediaContext(meta=[s.meta for s in examples], **columns)


def fits(reward: Reward, *, count: int | None = None, frames: int | None = None) -> list[Example]:
    """`count` examples that suit a reward, by its name and its inputs; ValueError where no examples
    of ours carry the inputs that it needs.

    frames: frames of videos; None: FRAMES for a reward of videos, and pictures for any other.
    """
    if frames is not None and (reward.name == "ocr" or reward.video == "no"):
        raise ValueError(
            f'frames={frames}: reward "{reward.name}" is tried on pictures; leave it out'
        )
    if reward.name == "ocr":
        return texts(6 if count is None else count)
    if frames is None and _of_videos(reward):
        frames = FRAMES
    found = shapes(16 if count is None else count, frames=frames)
    _check_served(reward, found)
    return found


def _of_videos(reward: Any) -> bool:
    """Whether a reward takes nothing but videos, or pools their frames, or an inner reward does."""
    pools = getattr(reward, "name", "") == "video" or getattr(reward, "video", "") == "only"
    return pools or (hasattr(reward, "inner") and _of_videos(reward.inner))


def _check_served(reward: Reward, shapes: Sequence[Example]) -> None:
    """Raise ValueError unless examples of the shapes world carry all that a reward reads."""
    instead = "give pictures of your own, with a metadata.jsonl whose lines carry what it reads"
    if missing := sorted(reward.needs - COLUMNS):
        raise ValueError(
            f'reward "{reward.name}" needs the context column "{missing[0]}", which none of our'
            " pictures has; check it in Python"
        )
    if unread := sorted(reward.reads - shapes[0].meta.keys()):
        raise ValueError(
            f'reward "{reward.name}" reads "{unread[0]}" of each prompt, which none of our prompts'
            f" carries; {instead}"
        )
    for example in shapes:
        if complaint := reward.complaint({"prompt": example.prompt, **example.meta}):
            raise ValueError(
                f'reward "{reward.name}": the prompt "{example.prompt}" of the shapes world'
                f" {complaint}; {instead}"
            )


def shapes(count: int = 16, *, seed: int = 0, frames: int | None = None) -> list[Example]:
    """Scenes of random prompts of all tasks, 64 x 64; with `frames`, videos in which the whole
    scene drifts to the right."""
    _check_count(count)
    generator = torch.Generator().manual_seed(seed)
    return [_scene(_prompt(i, generator), generator, frames) for i in range(count)]


def _check_count(count: int) -> None:
    if count < 2:
        raise ValueError(f"count={count}: a reward is compared over pictures; use at least 2")


def _prompt(i: int, generator: torch.Generator) -> Prompt:
    """A random prompt of the i-th task; relations take turns."""
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


def _scene(prompt: Prompt, generator: torch.Generator, frames: int | None) -> Example:
    objects = scene(prompt, generator)
    near_misses = _near_misses(prompt, objects, generator, frames)
    media, mirrored = _drawn(objects, frames), _mirrored(prompt)
    source = near_misses[0].media  # picture from which an edit could have started
    return Example(
        media=media,
        prompt=prompt["prompt"],
        meta=_meta(prompt),
        near_misses=near_misses,
        mirrored=(mirrored["prompt"], _meta(mirrored)),
        columns={"source": source if frames is None else source[0], "reference": media},
    )


def _near_misses(
    prompt: Prompt, objects: list[Object], generator: torch.Generator, frames: int | None
) -> tuple[NearMiss, ...]:
    """Prompts that the objects do not show, with pictures that show neither the prompt nor another
    near miss."""
    chosen = _close_prompts(prompt, objects, generator)
    out = []
    # Swaps come first: of two prompts that say the same, the one that is tried first is dropped.
    for kind, close in sorted(chosen, key=lambda pair: pair[0] != "swap"):
        others = [prompt, *(p for _, p in chosen if p is not close)]
        shown = _scene_without(others, close, generator)
        if shown is None:  # another near miss says the same in other words
            chosen.remove((kind, close))
            continue
        media = _drawn(shown, frames)
        miss = NearMiss(attribute=kind, prompt=close["prompt"], meta=_meta(close), media=media)
        out.append(miss)
    return tuple(out)


def _close_prompts(
    prompt: Prompt, objects: list[Object], generator: torch.Generator
) -> list[tuple[str, Prompt]]:
    """A few prompts of each kind that differ from `prompt` in one attribute, and that the objects
    do not show."""
    chosen: list[tuple[str, Prompt]] = []
    for kind, members in clip.near_misses(prompt).items():
        false = [p for p in members if not _shows(objects, p)]
        order = torch.randperm(len(false), generator=generator).tolist()
        chosen += [(kind, false[place]) for place in order[: MOST_NEAR_MISSES.get(kind, 2)]]
    return chosen


def _meta(prompt: Prompt) -> dict[str, Any]:
    rest = {key: value for key, value in prompt.items() if key != "prompt"}
    return rest | {"checklist": from_shapes(prompt)}


def _shows(objects: list[Object], prompt: Prompt) -> bool:
    found = [verify.FoundShape(o.shape, o.color, o.x, o.y, 2 * o.size, 2 * o.size) for o in objects]
    return verify.strict(found, prompt["include"])


def _scene_without(
    others: list[Prompt], prompt: Prompt, generator: torch.Generator
) -> list[Object] | None:
    """A scene of the prompt that shows none of the others (a thing to the upper left of another is
    both above it and left of it); None: no such scene was found."""
    for _ in range(50):
        objects = scene(prompt, generator)
        if not any(_shows(objects, other) for other in others):
            return objects
    return None


def _mirrored(prompt: Prompt) -> Prompt:
    """The prompt that the mirror images of a prompt's pictures show."""
    opposite = {"left of": "right of", "right of": "left of"}
    relations = [clause["position"][0] for clause in prompt["include"] if "position" in clause]
    if not relations or relations[0] not in opposite:
        return prompt
    return find(prompt["prompt"].replace(relations[0], opposite[relations[0]]))


def _drawn(objects: list[Object], frames: int | None) -> Tensor:
    """A picture of the objects; with `frames`, a video in which they drift to the right."""
    if frames is None:
        return render(objects)
    small = [_shrunk(o) for o in objects]
    drift = [(t - (frames - 1) / 2) * DRIFT for t in range(frames)]
    return torch.stack([render([replace(o, x=o.x + d) for o in small]) for d in drift])


def _shrunk(o: Object) -> Object:
    """An object of a scene that is drawn at 0.8 of its size, around its middle."""
    middle = PIXELS / 2
    x, y = middle + 0.8 * (o.x - middle), middle + 0.8 * (o.y - middle)
    return replace(o, x=x, y=y, size=0.8 * o.size)


def texts(count: int = 6, *, seed: int = 0, side: int = 192) -> list[Example]:
    """Words in black on white; near misses are other words, and words with one other letter."""
    _check_count(count)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(WORDS), generator=generator).tolist()
    out = []
    for i in range(count):
        word, other = WORDS[order[i % len(WORDS)]], WORDS[order[(i + 1) % len(WORDS)]]
        wrong = {"word": other, "letter": _misspelt(word, generator)}
        near_misses = tuple(
            NearMiss(attribute=kind, **_sign(text, side)) for kind, text in wrong.items()
        )
        out.append(Example(**_sign(word, side), near_misses=near_misses))
    return out


def _sign(text: str, side: int) -> dict[str, Any]:
    """Picture, prompt and meta of a written text."""
    prompt = f'a white sign that says "{text}"'
    return {"media": written(text, side, side), "prompt": prompt, "meta": {"text": text}}


def _misspelt(word: str, generator: torch.Generator) -> str:
    """The word with another letter in its middle."""
    middle = len(word) // 2
    others = [c for c in "aeioubdkmrstz" if c != word[middle]]
    letter = others[int(torch.randint(len(others), (), generator=generator))]
    return word[:middle] + letter + word[middle + 1 :]


def files(
    reward: Reward,
    media: Sequence[Path],
    *,
    prompt: str | None = None,
    prompts: Path | None = None,
    most: int = 16,
) -> list[Example]:
    """At most `most` images of the user's own, spread evenly over all; their prompts are given as
    for `flowrl score`.

    Near misses: up to four files with other prompts.
    """
    _check_count(most)
    collected = collect(media, prompt=prompt, prompts=prompts)
    own = load_set({reward.name: reward})
    samples = with_meta(collected, own, columns=("meta", "group"))
    if len(samples) > most:
        samples = [samples[i * len(samples) // most] for i in range(most)]
    shown = conditions.has_source([sample.meta for sample in samples])
    every = [_of_file(sample, shown) for sample in samples]
    return [replace(s, near_misses=_other_files(every, i)) for i, s in enumerate(every)]


def _of_file(sample: Sample, shown: bool) -> Example:
    """An image of the user's own. shown: whether its meta names the picture before an edit."""
    media, columns = read_image(sample.path), {}
    if shown:
        columns["source"] = conditions.context_of([sample.meta], media[None]).source[0]
    return Example(media=media, prompt=sample.prompt, meta=sample.meta, columns=columns)


def _other_files(every: list[Example], i: int) -> tuple[NearMiss, ...]:
    """The next four files after number i whose prompts differ from its prompt; the first file
    follows the last."""
    following = every[i + 1 :] + every[:i]
    others = [s for s in following if s.prompt != every[i].prompt][:4]
    return tuple(
        NearMiss(attribute="other file", prompt=s.prompt, meta=s.meta, media=s.media)
        for s in others
    )
