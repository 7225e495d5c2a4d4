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
    """What n images of one setting were found to be."""

    values: dict[str, Tensor]  # name -> (n,) fp32 on the CPU, NaN where it failed
    prompt: list[int]  # (n,), places in the held-out prompts
    images: Tensor  # (k, *D), media of the images of `spread_rows`
    nfe: int  # network rows an image, guidance branches included
    answers: Answers = field(default_factory=dict)  # of checklists, about `images`

    def mean(self, name: str) -> float:
        return self.values[name].nanmean().item()

    def verdicts(self, rows: list[int]) -> dict[str, list[bool | None]]:
        """Right or wrong for some images, by every value that is only ever 0 or 1; None where it is
        missing."""
        out = {}
        for name, value in self.values.items():
            known = value[~value.isnan()]
            if len(known) and bool(((known == 0) | (known == 1)).all()):
                out[name] = [None if math.isnan(v) else v == 1 for v in value[rows].tolist()]
        return out

    def metrics(self) -> dict[str, float]:
        """The means as metrics, eval/<name>."""
        return {f"eval/{name}": self.mean(name) for name in self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How evaluation samples."""

    steps: int  # ODE steps
    guidance: float | str  # a scale, "none" or "pipeline"
    solver: Solver = "euler"  # of the ODE
    seed: int = 0  # of the noise
    rlg: float = 1.0  # weight of Reinforcement Learning Guidance (flowrl/rollouts/velocity.py)
    micro: int = 64  # most network rows in a forward
    decode: int = 32  # most images decoded and scored at once
    # context of the sampling network; as in training, decoding and rewards run outside it
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    world: World | Alone = ALONE  # the processes that share the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A chunk of images with their scores."""

    rows: slice  # which of the images that were asked for
    media: Tensor  # (rows, *D)
    values: dict[str, Tensor]  # reading -> (rows,) fp32 on the CPU
    answers: Answers  # of checklists, about the images that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one process made of an evaluation."""

    values: dict[str, tuple[list[int], Tensor]]  # reading -> (numbers of images, their values)
    kept: dict[int, Tensor]  # number of an image of the grid -> (*D)
    answers: Answers  # of checklists, about the images of the grid
    calls: int  # network rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Samples prompts and scores what comes out."""

    policy: Policy  # under the view that is active
    prompts: Prompts  # that are sampled
    rewards: RewardSet  # that score
    how: Sampling  # steps, guidance and the like
    ledger: Ledger  # books the time

    @torch.no_grad()
    def judged(
        self, which: Sequence[int], noise: Tensor, shown: Mapping[int, int]
    ) -> Iterator[Judged]:
        """Sample prompts[i] for i in `which` from noise keys (n,), decode and score, by chunks.

        shown: place in `which` -> number of the image, where answers of checklists are kept.
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
        """Sample prompts from noise keys (n,) -> final states (n, *L), their sigma (n,), and the
        conditions with each state's row of them."""
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
        """Evaluate `images` images, prompt i % P for image i; each process makes a part of them."""
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
        """Make the images `own`, a chunk at a time. which: the prompt of every image."""
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
    # rewards that compare the members of a group have no group here
    ledger, rewards = ledger or Ledger(policy.device), load_set(rewards).pointwise()
    rewards = rewards.beside(policy)
    policy.say_cut(prompt["prompt"] for prompt in prompts)
    policy.say_unread([guidance], prompts[0])
    evaluator = Evaluator(policy=policy, prompts=prompts, rewards=rewards, how=how, ledger=ledger)
    return evaluator.evaluation(images)


def spread_rows(images: int, prompts: int) -> list[int]:
    """Choose the images of the grid by their place, never by their score: spread evenly over the
    first pass through the prompts."""
    count = min(images, prompts)
    return sorted({round(i * (count - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
