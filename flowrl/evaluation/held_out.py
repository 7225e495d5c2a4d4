"""Held-out evaluation: before and after are paired image by image.

The prompts, seeds and solver are the same every time. evaluation.json of a run holds one row a
setting (before, before with guidance, after ...), each with per-image values, means with 95%
bootstrap intervals that resample whole prompts (equal texts are one prompt), and the paired
difference of "after" to "before".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.data.given import records
from flowrl.data.prompts import Prompts, meta_rows
from flowrl.evaluation.answers import answers_about, joined
from flowrl.evaluation.domains import by_domain
from flowrl.policy import Cond, Policy
from flowrl.policy.load import as_policy
from flowrl.report.answers import Answers
from flowrl.rewards import RewardSet, RewardUnavailable, load_set, readings
from flowrl.rewards.core.domains import domains_of
from flowrl.rewards.core.reward_set import Spec
from flowrl.rollouts.generation import sample
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger, waiting
from flowrl.runtime.processes.world import ALONE, Alone, World
from flowrl.samplers import keys
from flowrl.types import Solver

SHOWN = 16  # images kept for the before/after grid
CHUNK = 256  # images sampled at a time
RECORDED = ("guidance", "steps", "solver", "rlg", "seed")  # settings of sampling that a row records
SIZE = ("height", "width")  # and these, where they are not those of training
NOTHING: Mapping[str, Any] = {}  # no features are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Readings of n images that were sampled in one setting."""

    values: dict[str, Tensor]  # reading -> (n,) fp32 on the CPU, NaN where scoring failed
    prompt: list[int]  # (n,) place of each image's prompt among the held-out prompts
    images: Tensor  # (k, *D) media of the images that `spread_rows` chooses
    nfe: int  # network rows an image, guidance branches included
    answers: Answers = field(default_factory=dict)  # answers of checklists about `images`
    # reading -> (n,) bool, images for which it was asked, where rewards state domains; else all
    asked: dict[str, Tensor] = field(default_factory=dict)

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

    steps: int  # number of ODE steps
    guidance: float | str  # scale of guidance, "none" or "pipeline"
    solver: Solver = "euler"  # solver of the ODE
    seed: int = 0  # seed of the noise
    rlg: float = 1.0  # weight of Reinforcement Learning Guidance (flowrl/rollouts/velocity.py)
    height: int | None = None  # height of the samples in pixels; None: that of training
    width: int | None = None  # their width
    micro: int = 64  # most network rows in a forward
    decode: int = 32  # most images decoded and scored at once
    # context in which the network samples; decoding and rewards run outside it, as in training
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    world: World | Alone = ALONE  # the processes that share the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Readings of n images that were sampled together."""

    values: dict[str, Tensor]  # reading -> (n,) fp32 on the CPU, NaN if scoring failed
    vectors: dict[str, Tensor]  # feature -> (n, d) fp32 on the CPU
    kept: dict[int, Tensor]  # number of an image that is shown -> (*D) on the CPU
    answers: Answers  # answers of checklists about the images that are shown
    calls: int  # network rows that sampling took


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Samples prompts and scores what comes out."""

    policy: Policy  # policy that samples, under its active view
    prompts: Prompts  # prompts that are sampled
    rewards: RewardSet  # rewards that score
    how: Sampling  # steps, guidance and other settings of sampling
    ledger: Ledger  # ledger that books the time

    @torch.no_grad()
    def scored(
        self,
        which: Sequence[int],
        noise: Tensor,
        shown: Mapping[int, int],
        features: Mapping[str, Callable[[Tensor], Tensor]] = NOTHING,
    ) -> Scored:
        """Sample prompts[i] for i in `which` from noise keys (n,), decode and score, by chunks.

        shown: place in `which` -> number of the image, where the image and answers of checklists
        are kept. features: functions of media (rows, *D) -> (rows, d).
        """
        calls, kept, answers = self.policy.calls, dict[int, Tensor](), []
        values: dict[str, Tensor] = {}
        vectors: dict[str, list[Tensor]] = {name: [] for name in features}
        x, sigma, whose = self._sampled([self.prompts[i] for i in which], noise)
        chunks = media_of(self.policy, x, sigma, whose, decode=self.how.decode, ledger=self.ledger)
        for rows, media in chunks:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                texts, context = meta_rows(self.prompts, list(which[rows]), media)
                found = readings(media, texts, self.rewards, context)
            # a reading that some chunk does not have (a dimension of other prompts) is NaN there
            for name, value in found.items():
                values.setdefault(name, torch.full((len(which),), math.nan))[rows] = value.cpu()
            for name, feature in features.items():
                vectors[name].append(feature(media).float().cpu())
            numbers = {
                i: shown[row] for i, row in enumerate(range(len(which))[rows]) if row in shown
            }
            kept |= {number: media[i].cpu() for i, number in numbers.items()}
            answers.append(answers_about(self.rewards, media, self.prompts, which[rows], numbers))
        return Scored(
            values=values,
            vectors={name: torch.cat(parts) for name, parts in vectors.items()},
            kept=kept,
            answers=joined(answers),
            calls=self.policy.calls - calls,
        )

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
        # equal prompts lie side by side, so that each is encoded once
        order = sorted(range(images), key=lambda i: which[i])
        own = order[images * world.rank // world.size : images * (world.rank + 1) // world.size]
        chunks = [own[start : start + CHUNK] for start in range(0, len(own), CHUNK)]
        with waiting(f"evaluate {images} images"), world.all_or_none(RewardUnavailable):
            made = [(numbers, self._images(numbers, which)) for numbers in chunks]
        values: dict[str, Tensor] = {}
        parts = [part for theirs in world.collect(made) for part in theirs]
        for numbers, part in parts:
            for name, value in part.values.items():
                values.setdefault(name, torch.full((images,), math.nan))[numbers] = value
        kept = {number: image for _, part in parts for number, image in part.kept.items()}
        asked: dict[str, Tensor] = {}
        if domains := domains_of(self.rewards, [self.prompts[i] for i in which]):
            values, asked = by_domain(values, domains, self.rewards)
        return Evaluation(
            values=values,
            asked=asked,
            prompt=which,
            images=torch.stack([kept[number] for number in sorted(kept)]),
            nfe=sum(part.calls for _, part in parts) // images,
            answers=joined(part.answers for _, part in parts),
        )

    def _images(self, numbers: list[int], which: list[int]) -> Scored:
        """Make the images of these numbers. which: the prompt of every image of the evaluation."""
        noise = keys.key(self.how.seed, "evaluation", torch.tensor(numbers))
        chosen = spread_rows(len(which), len(self.prompts))
        shown = {place: number for place, number in enumerate(numbers) if number in chosen}
        return self.scored([which[number] for number in numbers], noise, shown)


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
    height: int | None = None,
    width: int | None = None,
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
        height=height,
        width=width,
        micro=micro,
        decode=decode,
        autocast=autocast,
        world=world,
    )
    policy, prompts = as_policy(policy).sized(height, width), records(prompts)
    # rewards that compare the members of a group have no group here
    ledger, rewards = ledger or Ledger(policy.device), load_set(rewards).pointwise()
    rewards = rewards.beside(policy)
    policy.say_cut(prompt["prompt"] for prompt in prompts)
    for sentence in policy.unread([guidance], prompts[0]):
        logger.warning(sentence)
    evaluator = Evaluator(policy=policy, prompts=prompts, rewards=rewards, how=how, ledger=ledger)
    return evaluator.evaluation(images)


def settings_of(cfg: Config, **changes: Any) -> dict[str, Any]:
    """The keywords of `evaluate` (fields of Sampling) as a run's own evaluation has them; those of
    `changes` that are not None replace them."""
    own = {key: getattr(cfg.eval, key) for key in (*RECORDED, *SIZE)}
    own |= {"micro": cfg.batch.micro, "decode": cfg.batch.decode}
    return own | {key: value for key, value in changes.items() if value is not None}


def recorded(how: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of sampling that a row of evaluation.json records."""
    return {key: how[key] for key in (*RECORDED, *SIZE) if key in RECORDED or how[key]}


def spread_rows(images: int, prompts: int) -> list[int]:
    """Choose the images of the grid by their place, never by their score: spread evenly over the
    first pass through the prompts."""
    count = min(images, prompts)
    return sorted({round(i * (count - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
