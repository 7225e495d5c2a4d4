"""Rollouts from files: a scored folder in place of the sampler, and reference images as members of
online groups.

They serve methods that read leaves alone: such a rollout is encoded media at sigma 0, and holds no
transition. A folder's prompts are distinct texts, each with the images that the list names for it;
`flowrl score` makes one, and any list with "file", "prompt" and "total" serves.

Nothing was sampled, so a group is what the folder has: prompts with fewer images than batch.group
give smaller groups. A reference image is scored on its own pixels, as every file is, while sampled
members are scored as the VAE decodes them; its leaf is what the VAE encodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop, resize

from flowrl.config.sampling import Crop
from flowrl.data import conditions
from flowrl.data.media import (
    from_pil,
    has_frames,
    header,
    image_size,
    media_kind,
    read_frames,
    read_image,
)
from flowrl.data.prompts import reference_of, select
from flowrl.data.scored_dataset import ScoredImage, gather
from flowrl.data.stored import PictureCell
from flowrl.policy import Policy
from flowrl.policy.replay.decode import Decoder
from flowrl.rewards import RewardSet, concat, score
from flowrl.rollouts.join import of_leaves
from flowrl.rollouts.latent_cache import LatentCache
from flowrl.rollouts.records import Drawn, Source
from flowrl.samplers import keys
from flowrl.types import Plan, PromptBatch, Rewards, Rollout

# policy -> shape of its media, because finding it takes a decoding
SHAPES: WeakKeyDictionary[Policy, tuple[int, ...]] = WeakKeyDictionary()


def media_shape(policy: Policy) -> tuple[int, ...]:
    """Shape of one sample that the policy decodes: (3, H, W), (F, 3, H, W) of a video, or (*D)."""
    if policy not in SHAPES:
        with torch.no_grad():
            empty = torch.zeros(1, *policy.latent_shape, device=policy.device)
            SHAPES[policy] = tuple(policy.decode(empty).shape[1:])
    return SHAPES[policy]


def check(policy: Policy, paths: Sequence[Path | PictureCell], crop: Crop = "none") -> None:
    """Check at start-up, by their headers, that the model makes what every file holds; raise
    ValueError that names one which does not fit, and where the model has no way back to x0."""
    if not paths:
        return
    shape = media_shape(policy)
    kind = media_kind((1, *shape))
    if kind != "arrays":
        policy.encode_media(torch.zeros(1, *shape, device=policy.device))
    for path in paths:
        moves = not isinstance(path, PictureCell) and has_frames(path)
        if kind == "arrays" or moves != (kind == "videos"):
            found = "a video" if moves else "an image"
            axes = " (frames, channels, height, width)" if kind == "videos" else ""
            raise ValueError(
                f"{path} is {found}, but the model makes {kind} of shape {shape}{axes}"
            )
        if kind == "videos" and isinstance(path, Path):
            known = header(path)
            _check_frames(path, known.frames, shape, stride_of(policy))
            size = known.size
        else:
            size = path.header().size if isinstance(path, PictureCell) else image_size(path)
        if crop == "none":
            _check_shape(path, (*shape[:-2], *size[::-1]), shape)


def stride_of(policy: Policy) -> int:
    """Frames of a video that the policy's VAE folds into one: it takes stride * k + 1 of them."""
    pipe = getattr(policy, "pipe", None)
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return next((int(n) for name in names if (n := getattr(pipe, name, None))), 1)


def _check_frames(path: Path, found: int, shape: tuple[int, ...], stride: int) -> None:
    if found < shape[0]:
        fitting = [str(n) for n in range(1, found + 1, stride)][-3:]
        raise ValueError(
            f"{path} has {found} frames, but the model makes {shape[0]}; leave it out, or set"
            f" model.pipeline.num_frames to {' or '.join(fitting)} ({stride} k + 1) or less"
        )


def _check_shape(path: Path | PictureCell, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if found != shape:
        size, expected = (f"{s[-1]}x{s[-2]}" for s in (found, shape))
        raise ValueError(
            f"{path} is {size} pixels, but the model makes {expected}; resize it, set"
            " data.crop=center, or set model.pipeline.height and width"
        )


def read_fitting(
    path: Path | PictureCell, shape: tuple[int, ...], crop: Crop, stride: int = 1
) -> Tensor:
    """Read a file as media of this shape. A video gives its first frames, and one with fewer is
    refused. crop="center": the file is resized until it covers the shape, and its middle taken.
    stride: see `stride_of`."""
    if isinstance(path, PictureCell):
        media = from_pil(path.picture())[0]
    elif len(shape) == 3:
        media = read_image(path)
    else:
        media = read_frames(path)[: shape[0]]
        _check_frames(path, len(media), shape, stride)
    wanted = shape[-2:]
    if crop == "center" and media.shape[-2:] != wanted:
        sides = list(zip(media.shape[-2:], wanted, strict=True))
        scale = max(own / side for side, own in sides)
        size = [max(round(side * scale), own) for side, own in sides]
        media = center_crop(resize(media, size, antialias=True), list(wanted)).clamp(0, 1)
    _check_shape(path, tuple(media.shape), shape)
    return media


@torch.no_grad()
def encoded(policy: Policy, media: Tensor) -> Tensor:
    """Encode media (n, *D) -> x0 (n, *L) fp32, outside autocast, as media are decoded. Each is
    encoded alone, because a row's last bits depend on how many rows are computed with it."""
    with torch.autocast(policy.device.type, enabled=False):
        x0 = torch.cat([policy.encode_media(one[None]).float() for one in media])
    assert x0.shape[1:] == policy.latent_shape, f"encode_media gave {tuple(x0.shape)}"
    return x0


def latents(
    policy: Policy,
    paths: Sequence[Path | PictureCell],
    crop: Crop = "none",
    cache: LatentCache | None = None,
) -> Tensor:
    """Encode files -> x0 (n, *L) fp32, or read from the cache what was encoded before."""
    shape, stride = media_shape(policy), stride_of(policy)

    def latent(path: Path | PictureCell) -> Tensor:
        name = cache.name(path) if cache else ""
        found: Tensor | None = cache.get(name) if cache else None
        if found is None:
            media = read_fitting(path, shape, crop, stride).to(policy.device)
            found = encoded(policy, media[None])[0]
            if cache:
                cache.put(name, found)
        return found.to(policy.device)

    known = {path: latent(path) for path in dict.fromkeys(paths)}
    return torch.stack([known[path] for path in paths])


def mask_weight(policy: Policy, item: ScoredImage) -> Tensor:
    """Weights (*L) of errors of a file, fp32, mean 1: its mask's grey at each latent, or 1."""
    ones, decoder = torch.ones(policy.latent_shape), getattr(policy, "decoder", None)
    if item.mask is None:
        return ones
    # as the picture is fitted; in steps of 1/255, so that white stays 1 when it is resized
    shape = (3, *media_shape(policy)[-2:])
    grey = read_fitting(item.mask, shape, "center").mean(0, keepdim=True)
    grey = (255 * grey).round() / 255  # (1, H, W)
    own = decoder.placed(grey[None])[0] if isinstance(decoder, Decoder) else ones * grey
    if not own.any():
        raise ValueError(
            f"the mask {item.mask} has no white where the model sees {item.path}, of which"
            " data.crop=center takes the middle; leave the pair out"
        )
    return (own / own.double().mean()).float()


@torch.no_grad()
def rollout(
    policy: Policy,
    batch: PromptBatch,
    items: Sequence[Sequence[ScoredImage]],
    plan: Plan,
    *,
    weights: dict[str, float],
    crop: Crop = "none",
    cache: LatentCache | None = None,
    dropout: bool = False,
) -> tuple[Rollout, Rewards]:
    """Make a rollout of files, and their rewards as the folder states them.

    items: the files of each prompt, by `gather`. plan: gives the noise levels. dropout: cond gets a
    second row of each prompt, P further on, with the same conditions and an empty text.

    A leaf's key is a function of its file's name and prompt, so that what a loss draws for it
    depends on neither batch nor process.
    """
    # Files of all prompts in one list, each with the place of its prompt.
    flat = [(row, item) for row, group in enumerate(items) for item in group]
    paths = [item.path for _, item in flat]
    x0 = latents(policy, paths, crop, cache)
    device = x0.device
    group = torch.tensor([row for row, _ in flat], device=device)
    names = [keys.key("offline", item.file, batch.text[row]) for row, item in flat]
    texts, metas = list(batch.text), list(batch.meta)
    if dropout:
        texts, metas = texts + [""] * len(texts), metas * 2
    cond = policy.encode(texts, conditions.of(metas))
    made = of_leaves(x0, torch.tensor(names, device=device), group, plan, cond)
    raw = {
        label: torch.tensor(
            [item.scores[label] for _, item in flat], dtype=torch.float32, device=device
        )
        for label in weights
    }
    total, weight = (
        torch.tensor([getattr(item, name) for _, item in flat], dtype=torch.float32, device=device)
        for name in ("total", "weight")
    )
    if not weights:  # media and pairs have no scores
        made = dataclasses.replace(made, stated={"label": total, "weight": weight})
    if any(item.mask for _, item in flat):
        mask = torch.stack([mask_weight(policy, item) for _, item in flat])
        made.stated["mask"] = mask.to(device)
    return made, Rewards(raw=raw, weights=dict(weights), total=total, valid=total.isfinite())


def with_domains(rewards: Rewards) -> Rewards:
    """Name the domain of each sample by the rewards that its total has."""
    there = {k: ~value.isnan() for k, value in rewards.raw.items() if rewards.weights[k]}
    rows = range(len(rewards.total))
    domain = ["+".join(k for k, known in there.items() if known[i]) for i in rows]
    return dataclasses.replace(rewards, domain=domain)


@torch.no_grad()
def add_references(
    policy: Policy,
    rollout: Rollout,
    batch: PromptBatch,
    rewards: Rewards,
    reward_set: RewardSet,
    *,
    decode: int = 32,
) -> tuple[Rollout, Rewards]:
    """Add a leaf, after all others, to the group of each prompt whose meta has "reference", the
    path of an image.

    It is scored with reward_set like every member, on the image's own pixels. Leaves that are there
    stay as they are.
    """
    found = [
        (row, path)
        for row, meta in enumerate(batch.meta)
        if (path := reference_of(batch.text[row], meta)) is not None
    ]
    if not found:
        return rollout, rewards
    if "group" in reward_set.needs:
        raise ValueError(
            "a reward that compares the members of a group cannot judge a reference image, which is"
            " scored alone; drop one"
        )
    parts, states = [rewards], [rollout.states]
    shape = media_shape(policy)
    for start in range(0, len(found), decode):
        chunk = found[start : start + decode]
        members = [row for row, _ in chunk]
        media = torch.stack([read_fitting(path, shape, "none") for _, path in chunk])
        media = media.to(policy.device)
        context = conditions.context_of([batch.meta[row] for row in members], media)
        parts.append(score(media, [batch.text[row] for row in members], reward_set, context))
        states.append(encoded(policy, media).to(rollout.states.device))
    like = rollout.group
    group = torch.tensor([row for row, _ in found]).to(like)
    number = torch.arange(len(found)).to(like)
    names = torch.tensor(
        [keys.key("reference", path.as_posix(), batch.text[row]) for row, path in found]
    ).to(like)
    more = dataclasses.replace(
        rollout,
        states=torch.cat(states),
        state_sigma=torch.cat(
            [rollout.state_sigma, torch.zeros(len(found)).to(rollout.state_sigma)]
        ),
        prompt=torch.cat([rollout.prompt, group]),
        leaf=torch.cat([rollout.leaf, len(rollout.states) + number]),
        leaf_edge=torch.cat([rollout.leaf_edge, torch.full_like(group, -1)]),
        leaf_key=torch.cat([rollout.leaf_key, names]),
        start_key=None,  # samples from files did not begin with noise
        group=torch.cat([rollout.group, group]),
        tree=torch.cat([rollout.tree, rollout.tree.max() + 1 + number]),
    )
    return more, concat(parts)


def read(source: Source, iteration: int, plan: Plan, ids: Tensor) -> Drawn:
    """Read files of a scored folder in place of samples."""
    cfg, dataset = source.cfg, source.dataset
    assert dataset is not None
    batch = select(source.prompts, ids)
    items = gather(dataset, batch, cfg.batch.group, seed=cfg.seed, iteration=iteration)
    with source.ledger.phase("rollout"), source.autocast():
        made, rewards = rollout(
            source.policy,
            batch,
            items,
            plan,
            weights=dataset.weights,
            crop=cfg.data.crop,
            cache=source.latents,
            dropout=bool(cfg.algorithm.get("prompt_dropout")),
        )
    rewards = with_domains(rewards) if dataset.mixed else rewards
    return Drawn(batch=batch, rollout=made, rewards=rewards, shown=torch.empty(0))


def with_references(source: Source, drawn: Drawn) -> Drawn:
    """Add the images that prompts name to their groups."""
    rollout, rewards = add_references(
        source.policy,
        drawn.rollout,
        drawn.batch,
        drawn.rewards,
        source.rewards,
        decode=source.cfg.batch.decode,
    )
    return dataclasses.replace(drawn, rollout=rollout, rewards=rewards)
