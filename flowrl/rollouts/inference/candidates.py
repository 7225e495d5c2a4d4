"""Samples that compete for their prompts: made, decoded and scored; the best of each is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.data.conditions import Conditions, context_of
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, score
from flowrl.rewards.core.score import say_problem
from flowrl.rollouts.generation import encoded, path_of, sample
from flowrl.rollouts.roll_out import noise_of, velocity_of
from flowrl.rollouts.scorer import media_of
from flowrl.rollouts.velocity import passes
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys, tree
from flowrl.samplers.common.forest import NodeKeys
from flowrl.samplers.plan import nfe
from flowrl.types import MediaContext, Plan, Rollout, Solver


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """P prompts, and how a policy samples them; see flowrl.generate."""

    policy: Policy  # policy that samples
    texts: list[str]  # (P,) prompts
    seeds: Tensor  # (P,) int64 seed of each one's noise
    places: Tensor  # (P,) int64 number of each one in the list that it is of
    # (P,) arguments of the pipeline's call; None: there are none
    conditions: list[Conditions] | None = None
    # (P,) values that rewards read beside the text; None: none
    meta: Sequence[dict[str, Any]] | None = None
    steps: int = 28  # ODE steps
    guidance: float | str = "pipeline"  # scale of guidance, "none" or "pipeline"
    rlg: float = 1.0  # weight of Reinforcement Learning Guidance
    solver: Solver = "euler"  # solver of the ODE
    micro: int = 64  # most network rows in a forward
    decode: int = 16  # most images decoded and scored at once

    @cached_property
    def path(self) -> Plan:
        """The plan by which one sample is made."""
        return path_of(self.policy, self.steps, self.solver)

    @cached_property
    def unit(self) -> int:
        """Network calls of one state: the branches of guidance, times two with RLG."""
        return self.policy.branches(self.guidance) * passes(self.rlg)

    @property
    def cost(self) -> int:
        """Network calls of one sample."""
        return nfe(self.path) * self.unit

    def names(self, whose: Tensor, which: Tensor) -> Tensor:
        """Keys (n,) of the noise of candidates `which` (n,) of prompts `whose` (n,); candidate 0 is
        the sample that is made without a search."""
        return keys.key(self.seeds[whose], "generate", self.places[whose], which)

    def pictures(self, whose: Sequence[int], texts: Sequence[str]) -> Tensor:
        """Sample texts in the place of those of prompts `whose` -> media (n, *D), each from the
        noise of its prompt's candidate 0."""
        prompts = torch.tensor(list(whose))
        own = self.conditions
        ledger = Ledger(self.policy.device)
        x, sigma, rows = sample(
            self.policy,
            texts,
            self.names(prompts, torch.zeros_like(prompts)),
            steps=self.steps,
            guidance=self.guidance,
            conditions=None if own is None else [own[p] for p in whose],
            solver=self.solver,
            rlg=self.rlg,
            micro=self.micro,
            ledger=ledger,
        )
        chunks = media_of(self.policy, x, sigma, rows, decode=self.decode, ledger=ledger)
        return torch.cat([media for _, media in chunks])

    def context(self, whose: Sequence[int], media: Tensor) -> MediaContext | None:
        """Context that rewards read beside the media of these prompts and their texts."""
        return context_of([self.meta[p] for p in whose], media) if self.meta else None

    def scores(self, media: Tensor, whose: Sequence[int], rewards: RewardSet) -> Tensor:
        """Score media (n, *D) of prompts `whose` -> (n,) fp32 on the CPU, -inf if it failed."""
        texts = [self.texts[p] for p in whose]
        scored = score(media, texts, rewards, self.context(whose, media))
        say_problem(scored)
        return scored.total.nan_to_num(-torch.inf).cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSamples:
    """The best sample of each prompt."""

    media: Tensor  # (P, *D) best sample of each prompt
    score: Tensor  # (P,) score of the best sample; -inf where scoring failed
    first: Tensor  # (P,) score of the first candidate; -inf where scoring failed
    candidates: int  # samples of all prompts together
    calls: int  # network calls of all prompts together

    def said(self) -> str:
        """Say in one sentence what a search came to."""
        each, known = len(self.score), self.first.isfinite()
        gain = ""
        if bool(known.any()):
            means = (float(value[known].mean()) for value in (self.first, self.score))
            gain = "; mean score {:.4g} of the first, {:.4g} of the best".format(*means)
        lost = int((~self.score.isfinite()).sum())
        failed = f"; none could be scored for {lost} prompts, which keep the first" if lost else ""
        return (
            f"{self.candidates / each:g} candidates and {self.calls / each:g} network calls a"
            f" prompt{gain}{failed}"
        )


class Candidates:
    """Samples the prompts of `request` again and again; `best` and `score` hold the best so far."""

    def __init__(self, request: SampleRequest, rewards: RewardSet) -> None:
        policy = request.policy
        self.request, self.rewards = request, rewards.beside(policy)
        self.ledger = Ledger(policy.device)
        self.cond, self.rows = encoded(policy, request.texts, request.conditions)
        self.velocity = velocity_of(
            policy, self.cond, guidance=request.guidance, ledger=self.ledger, rlg=request.rlg
        )
        self.best: list[Tensor | None] = [None] * len(request.texts)
        self.score = torch.full((len(request.texts),), -torch.inf)
        self.first = self.score.clone()
        self.made, self.calls = 0, policy.calls

    def noise(self, names: Tensor) -> Tensor:
        """Noise (n, *L) of candidates by their keys (n,), as `generation.sample` makes it."""
        zero = torch.zeros_like(names)
        roots = NodeKeys(self.request.path, zero, names, zero, 0).noise_root
        return noise_of(self.request.policy)(roots.flatten())

    def start(self, noise: Tensor, whose: Tensor) -> Tensor:
        """Noise (n, *L) -> the states from which samples of these prompts start."""
        sigma = self.request.path.sigma.max().item()
        return self.request.policy.start(noise, sigma=sigma, cond=self.cond, rows=self.rows[whose])

    def grow(self, path: Plan, x: Tensor, whose: Tensor, names: Tensor) -> Rollout:
        """Follow a copy of a plan from each state x (n, *L), for prompts `whose` (n,).

        names: (n,) keys of the noise on their way, all different: equal ones would share it.
        """
        request = self.request
        return tree.grow(
            self.velocity,
            noise_of(request.policy),
            path,
            shape=request.policy.latent_shape,
            rows=self.rows[whose],
            prompt_keys=names,
            copies=torch.zeros_like(names),
            init=lambda noise, rows: x,
            micro=request.policy.states(request.micro, request.guidance),
        )

    def offer(self, grown: Rollout, whose: Tensor) -> Tensor:
        """Score the leaves of a rollout, of prompts `whose` (n,) -> (n,) fp32 on the CPU, -inf: it
        failed. The first candidate of a prompt is kept, and then whatever scores higher."""
        request, scores = self.request, []
        sigma = grown.state_sigma[grown.leaf]
        chunks = media_of(
            request.policy,
            grown.leaves,
            sigma,
            (self.cond, self.rows[whose]),
            decode=request.decode,
            ledger=self.ledger,
        )
        for rows, media in chunks:
            members = whose[rows].tolist()
            scores.append(request.scores(media, members, self.rewards))
            for p, item, value in zip(members, media, scores[-1], strict=True):
                if self.best[p] is None:
                    self.first[p] = value
                if self.best[p] is None or value > self.score[p]:
                    self.best[p], self.score[p] = item.clone(), value
        self.made += len(whose)
        return torch.cat(scores)

    def found(self) -> BestSamples:
        """The best samples so far, and the network calls that they took."""
        media = [item for item in self.best if item is not None]
        return BestSamples(
            media=torch.stack(media),
            score=self.score,
            first=self.first,
            candidates=self.made,
            calls=self.request.policy.calls - self.calls,
        )
