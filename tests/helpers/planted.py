"""Rewards with one fault each, for tests of the reward checks, and verifiers to plant them in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowrl import rewards
from flowrl.rewards.checks import check as reward_checks
from flowrl.rewards.checks import examples
from flowrl.rewards.checks.examples import Example
from flowrl.rewards.checks.subject import Subject
from flowrl.rewards.core.reward import FunctionReward, Reward
from flowrl.rewards.geneval import Geneval
from flowrl.rewards.geneval import Settings as GenevalSettings
from flowrl.rewards.networks.detector import DetectedObject
from flowrl.shapes import verify
from flowrl.types import MediaContext

SHAPES = rewards.load("shapes", reading="partial")


def planted(function, **attributes):
    """A reward of any function (media, prompts, context) with any attributes."""
    reward = FunctionReward(function, "planted")
    for name, value in attributes.items():
        setattr(reward, name, value)
    return reward


def reading_clauses(function):
    """A reward that reads the clauses of each prompt."""
    return planted(function, needs=frozenset({"meta"}), reads=frozenset({"include"}))


def brightness(media, prompts=None, context=None):
    return media.flatten(1).mean(1)


def shapes_of(edit, media, prompts, context):
    """The shapes reward where every clause is edited."""
    metas = [
        meta | {"include": [edit(clause) for clause in meta["include"]]} for meta in context.meta
    ]
    return SHAPES(media, prompts, MediaContext(meta=metas))


def check(reward, examples, **options):
    """Findings of a check by name."""
    return {f.name: f for f in reward_checks.check(reward, examples, **options)}


def tried(one, reward, examples):
    """Findings of one of the checks."""
    return one(Subject(reward, examples, "cpu"))


# --- twelve faults, as functions of a verifier with scores in [0, 1] and what it is given

Ask = Callable[[Tensor, list[str], list[dict]], Tensor]


def constant(ask: Ask, media, prompts, metas):
    return torch.full((len(media),), 0.5)


def batch_dependent(ask: Ask, media, prompts, metas):
    scores = ask(media, prompts, metas)
    return (scores + scores.mean()) / 2


def uint8_scale(ask: Ask, media, prompts, metas):
    """It takes [0, 1] for bytes."""
    return ask(media / 255, prompts, metas)


def mirrored(ask: Ask, media, prompts, metas):
    return ask(media.flip(-1), prompts, metas)


def sign(ask: Ask, media, prompts, metas):
    return 1 - ask(media, prompts, metas)


def noise(ask: Ask, media, prompts, metas):
    return (ask(media, prompts, metas) + 0.2 * torch.randn(len(media))).clamp(0, 1)


def nan_on_blank(ask: Ask, media, prompts, metas):
    """As a division by the picture's own deviation."""
    return ask(media, prompts, metas).masked_fill(media.flatten(1).std(1) < 1e-6, math.nan)


def off_by_one(ask: Ask, media, prompts, metas):
    """Each picture under the prompt of its neighbour in the batch."""
    return ask(media, prompts[1:] + prompts[:1], metas[1:] + metas[:1])


def first_prompt_for_all(ask: Ask, media, prompts, metas):
    return ask(media, prompts[:1] * len(media), metas[:1] * len(media))


def channels_swapped(ask: Ask, media, prompts, metas):
    return ask(media[:, [2, 1, 0]], prompts, metas)


def prompt_ignored(kept: dict, ask: Ask, media, prompts, metas):
    """All pictures of all batches under the first prompt of all."""
    prompt, meta = kept.setdefault("first", (prompts[0], metas[0]))
    return ask(media, [prompt] * len(media), [meta] * len(media))


def stale_cache(kept: dict, ask: Ask, media, prompts, metas):
    """Scores are kept by prompt alone."""
    fresh = ask(media, prompts, metas)
    return torch.stack([kept.setdefault(p, s) for p, s in zip(prompts, fresh, strict=True)])


FAULTS: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "constant": lambda: constant,
    "prompt ignored": lambda: partial(prompt_ignored, {}),
    "batch dependent": lambda: batch_dependent,
    "uint8 scale": lambda: uint8_scale,
    "mirrored": lambda: mirrored,
    "sign": lambda: sign,
    "noise": lambda: noise,
    "NaN on blank": lambda: nan_on_blank,
    "off by one": lambda: off_by_one,
    "first prompt for all": lambda: first_prompt_for_all,
    "stale cache": lambda: partial(stale_cache, {}),
    "colour channels swapped": lambda: channels_swapped,
}


def faulty(inner: Reward, fault: str) -> Reward:
    """A verifier with one fault; it declares what the sound one declares."""
    spoil = FAULTS[fault]()

    def ask(media, prompts, metas):
        return inner(media, prompts, MediaContext(meta=metas))

    def call(media, prompts, context):
        return spoil(ask, media, prompts, context.meta)

    names = ("needs", "reads", "reads_prompt", "verifies", "range", "scale", "video", "quality")
    return planted(call, **{name: getattr(inner, name) for name in names})


# --- verifiers that read prompts, and run without a network or files


class ShapesGeneval(Geneval):
    """GenEval's own arithmetic on pictures of shapes, found by the verifier of shapes in place of a
    detector: a circle is a sports ball, a square a book, a triangle a kite."""

    CLASSES = {"circle": "sports ball", "square": "book", "triangle": "kite"}

    def __init__(self, reading: str) -> None:
        Reward.__init__(self, GenevalSettings(reading=reading))
        self.range = (-math.inf if reading == "partial" else 0.0, 1.0)
        if reading == "official":
            self.verifies = self.verifies - {"count"}

    def detect(self, frames, metas):
        out = []
        for objects in verify.detect(frames):
            found: dict[str, list[DetectedObject]] = {}
            for o in objects:
                if o.shape is not None:
                    box = (o.x - o.width / 2, o.y - o.height / 2)
                    box += (o.x + o.width / 2, o.y + o.height / 2)
                    found.setdefault(self.CLASSES[o.shape], []).append(
                        DetectedObject(box, 0.99, o.color)
                    )
            out.append(found)
        return out

    @classmethod
    def meta(cls, meta):
        """The clauses of a prompt of shapes as GenEval writes them."""
        include = [
            {"class": cls.CLASSES[clause["shape"]]}
            | {key: value for key, value in clause.items() if key != "shape" and value}
            for clause in meta["include"]
        ]
        return {"include": include, "tag": meta["task"]}

    @classmethod
    def examples(cls, count: int) -> list[Example]:
        """Pictures of shapes under prompts that name no shape twice, as GenEval's name no class."""
        return [
            replace(
                s,
                meta=cls.meta(s.meta),
                near_misses=tuple(
                    replace(miss, meta=cls.meta(miss.meta))
                    for miss in s.near_misses
                    if names_each_shape_once(miss.meta)
                ),
                mirrored=(s.mirrored[0], cls.meta(s.mirrored[1])),
            )
            for s in examples.shapes(2 * count)
            if names_each_shape_once(s.meta)
        ][:count]


def names_each_shape_once(meta):
    shapes = [clause["shape"] for clause in meta["include"]]
    return len(set(shapes)) == len(shapes)


def verifiers(count: int) -> dict[str, tuple[Reward, list[Example]]]:
    """Three rewards that read prompts, each with `count` pictures whose truth is known."""
    return {
        "shapes": (rewards.load("shapes"), examples.shapes(count)),
        "checklist": (rewards.load("checklist"), examples.shapes(count)),
        "geneval": (ShapesGeneval("partial_fixed"), ShapesGeneval.examples(count)),
    }
