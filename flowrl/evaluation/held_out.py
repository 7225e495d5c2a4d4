"""Held-out evaluation: before and after are paired image by image.

The prompts, seeds and solver are the same every time. evaluation.json of a run holds one row a
setting (before, before with guidance, after ...), each with per-image values, means with 95%
bootstrap intervals that resample whole prompts (equal texts are one prompt), and the paired
difference of "after" to "before".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.data import conditions
from flowrl.data.given import records
from flowrl.data.prompts import Prompts, meta_rows
from flowrl.evaluation.answers import joined, told
from flowrl.policy import Cond, Policy
from flowrl.policy.load import as_policy
from flowrl.report.answers import Answers
from flowrl.rewards import RewardSet, RewardUnavailable, load_set, readings
from flowrl.rewards.core.reward_set import Spec
from flowrl.rollouts.generation import sample
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.processes.world import ALONE, Alone, World
from flowrl.samplers import keys
from flowrl.types import Solver

SHOWN = 16  # images kept for the before/after grid
CHUNK = 256  # images sampled at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Values of one setting: name -> (n,) fp32 CPU tensors.

    prompt: (n,) rows of the held-out prompts. images: those of `spread_rows`. answers: what
    checklists said about these (flowrl/report/answers.py).
    """

    values: dict[str, Tensor]
    prompt: list[int]
    images: Tensor
    nfe: int  # network rows an image, guidance branches included
    answers: Answers = field(default_factory=dict)

    def mean(self, name: str) -> float:
        return self.values[name].nanmean().item()

    def verdicts(self, rows: list[int]) -> dict[str, list[bool | None]]:
        """Right or wrong for some images, by every value that is only ever 0 or 1.

        None where it is missing.
        """
        out = {}
        for name, value in self.values.items():
            known = value[~value.isnan()]
            if len(known) and bool(((known == 0) | (known == 1)).all()):
                out[name] = [None if math.isnan(v) else v == 1 for v in value[rows].tolist()]
        return out

    def metrics(self) -> dict[str, float]:
        """eval/<name> of every value."""
        return {f"eval/{name}": self.mean(name) for name in self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How evaluation samples.

    rlg: weight of Reinforcement Learning Guidance (flowrl/rollouts/velocity.py); micro: most
    network rows in a forward; decode: most images decoded and scored at once; autocast: context of
    the sampling network; as in training, decoding and rewards run outside it; world: the processes
    that share the samples.
    """

    steps: int
    guidance: float | str
    solver: Solver = "euler"
    seed: int = 0
    rlg: float = 1.0
    micro: int = 64
    decode: int = 32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    world: World | Alone = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A chunk of images. rows: which of those asked for; values: reading -> (rows,) fp32 CPU."""

    rows: slice
    media: Tensor
    values: dict[str, Tensor]
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one process made of an evaluation. values: reading -> (images, their values); kept:
    image -> (*D), those of the grid; calls: network rows."""

    values: dict[str, tuple[list[int], Tensor]]
    kept: dict[int, Tensor]
    answers: Answers
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """A policy, prompts, and the rewards that judge what it makes of them."""

    policy: Policy
    prompts: Prompts
    rewards: RewardSet
    how: Sampling
    ledger: Ledger

    @torch.no_grad()
    def judged(
        self, which: Sequence[int], noise: Tensor, shown: Mapping[int, int]
    ) -> Iterator[Judged]:
        """Sample prompts[i] for i in `which` from noise keys (n,), decode and score, by chunks.

        shown: place in `which` -> number of the image, of those whose answers are kept.
        """
        x, sigma, whose = self._sampled([self.prompts[i] for i in which], noise)
        chunks = media_of(self.policy, x, sigma, whose, decode=self.how.decode, ledger=self.ledger)
        for rows, media in chunks:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                texts, context = meta_rows(self.prompts, list(which[rows]), media)
                scored = readings(media, texts, self.rewards, context)
            values = {name: value.float().cpu() for name, value in scored.items()}
            kept = {i: shown[row] for i, row in enumerate(range(len(which))[rows]) if row in shown}
            answers = told(self.rewards, media, self.prompts, which[rows], kept)
            yield Judged(rows=rows, media=media, values=values, answers=answers)

    def _sampled(
        self, prompts: Prompts, noise: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Cond, Tensor]]:
        """Final states (n, *L), their sigma (n,), and whose they are."""
        with self.how.autocast():
            return sample(
                self.policy,
                [prompt["prompt"] for prompt in prompts],
                noise,
                conditions=conditions.of(prompts),
                steps=self.how.steps,
                guidance=self.how.guidance,
                solver=self.how.solver,
                rlg=self.how.rlg,
                micro=self.how.micro,
                ledger=self.ledger,
            )

    def evaluation(self, images: int) -> Evaluation:
        """`images` images, prompt i % P for image i; each process makes a part of them."""
        world = self.how.world
        which = [i % len(self.prompts) for i in range(images)]
        # equal prompts together: each is encoded once
        order = sorted(range(images), key=lambda i: which[i])
        own = order[images * world.rank // world.size : images * (world.rank + 1) // world.size]
        with world.all_or_none(RewardUnavailable):
            made = self._made(own, which, images)
        parts = world.collect(made)
        values: dict[str, Tensor] = {}
        for part in parts:
            for name, (members, value) in part.values.items():
                values.setdefault(name, torch.full((images,), float("nan")))[members] = value
        kept = {i: image for part in parts for i, image in part.kept.items()}
        return Evaluation(
            values=values,
            prompt=which,
            images=torch.stack([kept[i] for i in sorted(kept)]),
            nfe=sum(part.calls for part in parts) // images,
            answers=joined(part.answers for part in parts),
        )

    @torch.no_grad()
    def _made(self, own: list[int], which: list[int], images: int) -> Made:
        """The images `own` of an evaluation, a chunk at a time."""
        calls, chosen = self.policy.calls, spread_rows(images, len(self.prompts))
        found: dict[str, tuple[list[int], list[Tensor]]] = {}
        kept: dict[int, Tensor] = {}
        answers: list[Answers] = []
        for start in range(0, len(own), CHUNK):
            rows = own[start : start + CHUNK]
            noise = keys.key(self.how.seed, "evaluation", torch.tensor(rows))
            shown = {place: i for place, i in enumerate(rows) if i in chosen}
            for part in self.judged([which[i] for i in rows], noise, shown):
                members = rows[part.rows]
                for name, value in part.values.items():
                    at, several = found.setdefault(name, ([], []))
                    at += members
                    several.append(value)
                kept |= {i: part.media[row].cpu() for row, i in enumerate(members) if i in chosen}
                answers.append(part.answers)
        return Made(
            values={name: (at, torch.cat(several)) for name, (at, several) in found.items()},
            kept=kept,
            answers=joined(answers),
            calls=self.policy.calls - calls,
        )


def evaluate(
    policy: Any,
    prompts: Any,
    rewards: Spec | RewardSet,
    *,
    images: int,
    steps: int,
    guidance: float | str = "none",
    seed: int = 0,
    solver: Solver = "euler",
    rlg: float = 1.0,
    micro: int = 64,
    decode: int = 32,
    ledger: Ledger | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    world: World | Alone = ALONE,
) -> Evaluation:
    """Sample and score `images` images, prompt i % P for image i.

    policy: a Policy, or what load_policy takes. prompts: texts, or records {"prompt": text,
    **meta}. rewards: see load_set, or one or more functions. Image i's noise is a function of
    (seed, i) only. See Sampling. Rewards that compare the members of a group say nothing about a
    model's level and are left out.
    """
    how = Sampling(
        steps=steps,
        guidance=guidance,
        solver=solver,
        seed=seed,
        rlg=rlg,
        micro=micro,
        decode=decode,
        autocast=autocast,
        world=world,
    )
    policy, prompts = as_policy(policy), records(prompts)
    ledger, rewards = ledger or Ledger(policy.device), load_set(rewards).pointwise()
    rewards = rewards.beside(policy)
    policy.say_cut(prompt["prompt"] for prompt in prompts)
    policy.say_unread([guidance], prompts[0])
    evaluator = Evaluator(policy=policy, prompts=prompts, rewards=rewards, how=how, ledger=ledger)
    return evaluator.evaluation(images)


def spread_rows(images: int, prompts: int) -> list[int]:
    """Images of the grid, spread evenly over the first pass through the prompts.

    Chosen by place, never by score.
    """
    count = min(images, prompts)
    return sorted({round(i * (count - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
