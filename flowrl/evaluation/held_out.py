"""Held-out evaluation: the same prompts, seeds and solver every time, so that before and after are
paired image by image.

evaluation.json of a run holds one row a setting (before, before with guidance, after ...), each
with per-image values, means with 95% bootstrap intervals that resample whole prompts (equal texts
are one prompt), and the paired difference of "after" to "before".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl.data.prompts import Prompts
from flowrl.evaluation.answers import joined, told
from flowrl.policy import Policy
from flowrl.report.answers import Answers
from flowrl.rewards import RewardSet, readings
from flowrl.rollouts.generation import Solver, sample
from flowrl.rollouts.velocity import media_of, meta_rows
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys

SHOWN = 16  # images kept for the before/after grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Values of one setting: name -> (n,) fp32 CPU tensors; prompt (n,) row of the held-out
    prompts; images: the first ones;
    answers: what checklists said about those (flowrl/report/answers.py)."""

    values: dict[str, Tensor]
    prompt: list[int]
    images: Tensor
    nfe: int  # network rows an image, guidance branches included
    answers: Answers = field(default_factory=dict)

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
        """eval/<name> of every value."""
        return {f"eval/{name}": self.mean(name) for name in self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How evaluation samples. micro: most network rows in a forward; decode: most images decoded
    and scored at once; autocast: context of the sampling network; as in training, decoding and
    rewards run outside it."""

    steps: int
    guidance: float | str
    solver: Solver = "euler"
    seed: int = 0
    micro: int = 64
    decode: int = 32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@torch.no_grad()
def judged(
    policy: Policy,
    prompts: Prompts,
    which: Sequence[int],
    noise: Tensor,
    rewards: RewardSet,
    how: Sampling,
    ledger: Ledger,
) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
    """Sample prompts[i] for i in `which` from noise keys (n,), decode and score, chunk by chunk ->
    (rows, media, readings)."""
    with how.autocast():
        x, sigma = sample(
            policy,
            [prompts[i]["prompt"] for i in which],
            noise,
            steps=how.steps,
            guidance=how.guidance,
            solver=how.solver,
            micro=how.micro,
            ledger=ledger,
        )
    for rows, pictures in media_of(policy, x, sigma, decode=how.decode, ledger=ledger):
        with ledger.phase("reward"), ledger.work("reward"):
            shown, context = meta_rows(prompts, list(which[rows]))
            scored = readings(pictures, shown, rewards, context)
        yield rows, pictures, {name: value.float().cpu() for name, value in scored.items()}


@torch.no_grad()
def evaluate(
    policy: Policy,
    prompts: Prompts,
    rewards: RewardSet,
    *,
    images: int,
    steps: int,
    guidance: float | str = "none",
    seed: int = 0,
    solver: Solver = "euler",
    micro: int = 64,
    decode: int = 32,
    ledger: Ledger | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Evaluation:
    """Sample and score `images` images, prompt i % P for image i; image i's noise is a function of
    (seed, i) only. See Sampling.

    Rewards that compare the members of a group say nothing about a model's level and are left out.
    """
    how = Sampling(
        steps=steps,
        guidance=guidance,
        solver=solver,
        seed=seed,
        micro=micro,
        decode=decode,
        autocast=autocast,
    )
    ledger, rewards = ledger or Ledger(policy.device), rewards.pointwise()
    number = torch.arange(images)
    which = (number % len(prompts)).tolist()
    order = sorted(range(images), key=lambda i: which[i])  # equal prompts together: encoded once
    noise = keys.key(seed, "evaluation", number)
    calls, values, kept, answers = policy.calls, {}, {}, []
    chosen = spread_rows(images, len(prompts))
    for start in range(0, images, 256):
        rows = order[start : start + 256]
        for chunk, pictures, scored in judged(
            policy, prompts, [which[i] for i in rows], noise[rows], rewards, how, ledger
        ):
            members = rows[chunk]
            for name, value in scored.items():
                values.setdefault(name, torch.full((images,), float("nan")))[members] = value
            shown = {row: i for row, i in enumerate(members) if i in chosen}
            kept |= {i: pictures[row].cpu() for row, i in shown.items()}
            answers.append(told(rewards, pictures, prompts, [which[i] for i in members], shown))
    grid = torch.stack([kept[i] for i in sorted(kept)])
    nfe, said = (policy.calls - calls) // images, joined(answers)
    return Evaluation(values=values, prompt=which, images=grid, nfe=nfe, answers=said)


def spread_rows(images: int, prompts: int) -> list[int]:
    """Images of the grid: spread evenly over the first pass through the prompts; chosen by place,
    never by score."""
    count = min(images, prompts)
    return sorted({round(i * (count - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})
