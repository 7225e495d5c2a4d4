"""Rollouts from files: a scored folder in place of the sampler, and reference images as members of
online groups.

For methods that read leaves alone: such a rollout is encoded media at sigma 0, and holds no
transition. A folder's prompts are distinct texts, each with the images that the list names for it;
`flowrl score` makes one, and any list with "file", "prompt" and "total" serves.

Nothing was sampled, so a group is what the folder has: prompts with fewer images than batch.group
give smaller groups. A reference image is scored on its own pixels, as every file is, while sampled
members are scored as the VAE decodes them; its leaf is what the VAE encodes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import types
from flowrl.data import Prompts
from flowrl.media import image_size, read_image
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, concat, score
from flowrl.samplers import keys
from flowrl.scoring import list_of, meta_of, read_list
from flowrl.types import MediaContext, Plan, PromptBatch, Rewards, Rollout

LARGEST = 3.4e38  # of fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One scored image. file: as the list names it, from the place of the list; it names the sample
    wherever the folder lies."""

    path: Path
    file: str
    total: float
    scores: dict[str, float]  # by reward; NaN where one of weight 0 failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A scored folder: distinct prompts, as flowrl.data has them, the items of each, and the
    weights that made the totals."""

    prompts: Prompts
    items: list[list[Item]]
    weights: dict[str, float]

    @property
    def smallest(self) -> int:
        """Fewest items of a prompt; a group of one has no baseline but itself."""
        return min(map(len, self.items))

    @property
    def singles(self) -> int:
        """Prompts with a single item, whose advantage is 0 in every method that compares within
        groups."""
        return sum(len(items) == 1 for items in self.items)

    @property
    def paths(self) -> list[Path]:
        return [item.path for items in self.items for item in items]


# ---------------------------------------------------------------------------
# the folder


def load(folder: str | Path) -> Dataset:
    """Read FOLDER/scores.jsonl, or the .jsonl list given.

    A prompt's meta is what all its lines agree on. A list without "scores" has one, "total", of
    weight 1. A missing list or image, a broken or repeated line, a number that is not finite, or
    other rewards than in the first line -> ValueError that names file and line.
    """
    path = list_of(Path(folder))
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; `flowrl score MEDIA... --prompt TEXT --reward NAME -o FOLDER`"
            " makes a folder with one"
        )
    prompts: dict[str, dict[str, Any]] = {}
    items: dict[str, list[Item]] = {}
    weights: dict[str, float] = {}
    seen: dict[tuple[str, str], str] = {}
    for where, entry in read_list(path):
        item, own, text = *_item(path.parent, where, entry), entry["prompt"]
        weights = weights or own
        if own != weights:
            raise ValueError(
                f"{where} has weights {own}, but the first line {weights}; score all media with the"
                " same rewards"
            )
        before = seen.setdefault((os.path.normpath(item.path), text), where)
        if before != where:
            raise ValueError(f'{where} repeats {before}: "{item.file}" for the prompt "{text}"')
        meta = meta_of(entry)
        agreed = prompts.setdefault(text, meta)
        prompts[text] = {
            key: value for key, value in agreed.items() if key in meta and meta[key] == value
        }
        items.setdefault(text, []).append(item)
    return Dataset(
        prompts=[{"prompt": text, **meta} for text, meta in prompts.items()],
        items=list(items.values()),
        weights=weights,
    )


def _item(folder: Path, where: str, entry: Mapping[str, Any]) -> tuple[Item, dict[str, float]]:
    """The image of a line, and the weights of its total: 1 for each score where none are stated."""
    path = folder / entry["file"]
    if not path.is_file():
        raise ValueError(f"{where} names {path}, which does not exist")
    total = _number(f'{where}: "total"', entry.get("total"))
    scores = _mapping(f'{where}: "scores"', entry.get("scores", {"total": total}))
    weights = _mapping(f'{where}: "weights"', entry.get("weights", dict.fromkeys(scores, 1.0)))
    weights = {
        label: _number(f'{where}: the weight of "{label}"', value)
        for label, value in weights.items()
    }
    if scores.keys() != weights.keys():
        raise ValueError(
            f"{where} has scores of {sorted(scores)}, but weights of {sorted(weights)}; give each"
            " score a weight"
        )
    unknown = {label for label, value in scores.items() if value is None and weights[label] == 0}
    raw = {
        label: math.nan if label in unknown else _number(f'{where}: the score "{label}"', value)
        for label, value in scores.items()
    }
    return Item(path=path, file=entry["file"], total=total, scores=raw), weights


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f'{what} is {value!r}, which should hold a number a reward, as in {{"jpeg": 1.0}}'
        )
    return value


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{what} is {value!r}, which should be a finite number")
    return float(value)


def gather(
    dataset: Dataset, batch: PromptBatch, group: int, *, seed: int, iteration: int
) -> list[list[Item]]:
    """`group` items of each prompt, drawn without replacement; all of them where there are fewer.

    A function of (seed, iteration, prompt id) and of the prompt's items: ids are places in
    dataset.prompts.
    """
    drawn = []
    for i in batch.ids.tolist():
        items = dataset.items[i]
        order = keys.permutation(keys.key(seed, "offline", iteration, i), len(items))
        drawn.append([items[place] for place in order[:group].tolist()])
    return drawn


# ---------------------------------------------------------------------------
# rollouts


def media_shape(policy: Policy) -> tuple[int, ...]:
    """Shape of one sample that the policy decodes: (3, H, W), or (F, 3, H, W) for a video."""
    with torch.no_grad():
        return tuple(
            policy.decode(torch.zeros(1, *policy.latent_shape, device=policy.device)).shape[1:]
        )


def check(policy: Policy, paths: Iterable[Path]) -> None:
    """At start-up: every file is an image of the size that the policy makes, judged by its head,
    else ValueError that names it."""
    shape = media_shape(policy)
    for path in paths:
        width, height = image_size(path)
        _check_shape(path, (3, height, width), shape)


def _check_shape(path: Path, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(
            f"{path} is an image, but the model makes videos of shape {shape} (frames, channels,"
            " height, width)"
        )
    if found != shape:
        size, expected = (f"{width}x{height}" for _, height, width in (found, shape))
        raise ValueError(
            f"{path} is {size} pixels, but the model makes {expected}; resize the image, or set"
            " model.pipeline.height and width"
        )


@torch.no_grad()
def _encoded(
    policy: Policy, paths: Sequence[Path], decode: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows of paths, media (n, 3, H, W), x0 (n, *L) fp32) in chunks of n <= decode; outside
    autocast, as decoding is."""
    shape = media_shape(policy)
    for start in range(0, len(paths), decode):
        rows = slice(start, min(start + decode, len(paths)))
        pictures = {path: read_image(path) for path in paths[rows]}
        for path, picture in pictures.items():
            _check_shape(path, tuple(picture.shape), shape)
        media = torch.stack([pictures[path] for path in paths[rows]]).to(policy.device)
        with torch.autocast(policy.device.type, enabled=False):
            x0 = policy.encode_media(media).float()
        assert x0.shape[1:] == policy.latent_shape, f"encode_media gave {tuple(x0.shape)}"
        yield rows, media, x0


@torch.no_grad()
def rollout(
    policy: Policy,
    batch: PromptBatch,
    items: Sequence[Sequence[Item]],
    plan: Plan,
    *,
    weights: dict[str, float],
    decode: int = 32,
) -> tuple[Rollout, Rewards]:
    """Items of each prompt (of `gather`) as a rollout of leaves, and their rewards as the folder
    states them; `plan` gives noise levels.

    A leaf's key is a function of its file's name and prompt, so that what a loss draws for it
    depends on neither batch nor process.
    """
    flat = [(row, item) for row, group in enumerate(items) for item in group]
    x0 = torch.cat([x0 for _, _, x0 in _encoded(policy, [item.path for _, item in flat], decode)])
    device = x0.device
    group = torch.tensor([row for row, _ in flat], device=device)
    names = [keys.key("offline", item.file, batch.text[row]) for row, item in flat]
    index, real = (
        torch.empty(0, dtype=torch.int64, device=device),
        torch.empty(0, dtype=torch.float64, device=device),
    )
    made = Rollout(
        states=x0,
        prompt=group,
        state_sigma=torch.zeros(len(flat), dtype=torch.float64, device=device),
        src=index,
        dst=index,
        parent=index,
        edge=index,
        sigma=real,
        sigma_next=real,
        eta=real,
        noise_key=index,
        log_prob=None,
        trained=index.bool(),
        leaf=torch.arange(len(flat), device=device),
        leaf_edge=torch.full_like(group, -1),
        leaf_key=torch.tensor(names, device=device),
        group=group,
        tree=torch.arange(len(flat), device=device),
        plan=plan,
        nfe=0,
        cond=policy.encode(batch.text),
        guidance="none",
    )
    raw = {
        label: torch.tensor(
            [item.scores[label] for _, item in flat], dtype=torch.float32, device=device
        )
        for label in weights
    }
    total = torch.tensor([item.total for _, item in flat], dtype=torch.float32, device=device)
    return made, Rewards(raw=raw, weights=dict(weights), total=total, valid=total.isfinite())


def references(prompts: Prompts) -> list[Path]:
    """Reference images that prompts name, each once, for `check`."""
    return list(
        dict.fromkeys(
            path for prompt in prompts if (path := _reference(prompt["prompt"], prompt)) is not None
        )
    )


def _reference(text: str, meta: Mapping[str, Any]) -> Path | None:
    path = meta.get("reference")
    if path is not None and (not isinstance(path, str) or not path):
        raise ValueError(
            f'the prompt "{text}" has reference={path!r}, which should be the path of an image'
        )
    return None if path is None else Path(path)


@torch.no_grad()
def with_references(
    policy: Policy,
    rollout: Rollout,
    batch: PromptBatch,
    rewards: Rewards,
    reward_set: RewardSet,
    *,
    decode: int = 32,
) -> tuple[Rollout, Rewards]:
    """One more leaf, after all others, in the group of each prompt whose meta has "reference": the
    path of an image.

    It is scored with reward_set as every member, on the image's own pixels. Other prompts' leaves
    are as they were.
    """
    found = [
        (row, path)
        for row, meta in enumerate(batch.meta)
        if (path := _reference(batch.text[row], meta)) is not None
    ]
    if not found:
        return rollout, rewards
    if "group" in reward_set.needs:
        raise ValueError(
            "a reward that compares the members of a group cannot judge a reference image, which is"
            " scored alone; drop one"
        )
    parts, states = [rewards], [rollout.states]
    for rows, media, x0 in _encoded(policy, [path for _, path in found], decode):
        members = [row for row, _ in found[rows]]
        context = MediaContext(meta=[batch.meta[row] for row in members])
        parts.append(score(media, [batch.text[row] for row in members], reward_set, context))
        states.append(x0)
    like = rollout.group
    group = torch.tensor([row for row, _ in found]).to(like)
    number = torch.arange(len(found)).to(like)
    names = torch.tensor(
        [keys.key("reference", path.as_posix(), batch.text[row]) for row, path in found]
    ).to(like)
    more = types.replace(
        rollout,
        states=torch.cat(states),
        state_sigma=torch.cat(
            [rollout.state_sigma, torch.zeros(len(found)).to(rollout.state_sigma)]
        ),
        prompt=torch.cat([rollout.prompt, group]),
        leaf=torch.cat([rollout.leaf, len(rollout.states) + number]),
        leaf_edge=torch.cat([rollout.leaf_edge, torch.full_like(group, -1)]),
        leaf_key=torch.cat([rollout.leaf_key, names]),
        group=torch.cat([rollout.group, group]),
        tree=torch.cat([rollout.tree, rollout.tree.max() + 1 + number]),
    )
    return more, concat(parts)
