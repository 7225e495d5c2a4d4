"""Prompts x group -> Rollout: encode once and grow the plan's forest; apart from it, turn leaves
into scored media, chunk by chunk."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from flowrl import types
from flowrl.ledger import Ledger
from flowrl.policy import Cond, Policy
from flowrl.rewards import RewardSet, concat, score
from flowrl.samplers import keys, tree
from flowrl.types import MediaContext, Plan, PromptBatch, Rewards, Rollout

SHOWN = 8  # samples whose media are kept, for the log

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def velocity_of(policy: Policy, cond: Cond, *, guidance: float | str, ledger: Ledger) -> Velocity:
    """velocity(x, sigma, rows) of the policy for an engine that samples; its time, FLOPs and
    network rows are booked."""

    @torch.no_grad()
    def velocity(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        before = policy.calls
        with ledger.work("network", rows=len(x)):
            v = policy.velocity(x, sigma, cond, rows, guidance=guidance)
        ledger.add_nfe("rollout", policy.calls - before)
        return v

    return velocity


def rows_of(micro: int, policy: Policy, guidance: float | str) -> int:
    """States that fit into a forward of at most `micro` network rows."""
    return max(1, micro // policy.branches(guidance))


@torch.no_grad()
def roll_out(
    policy: Policy,
    batch: PromptBatch,
    plan: Plan,
    *,
    group: int,
    guidance: float | str,
    seed: int,
    iteration: int,
    micro: int,
    ledger: Ledger,
    round_: int = 0,
) -> Rollout:
    """Grow group / plan.leaves copies of the plan for each prompt; noise is a function of (seed,
    iteration, prompt id, node path).

    Leaves are data at sigma 0, as decode takes them, even where the schedule ends above it. round_:
    how often these prompts were rolled out in this iteration before; the copies are others each
    time.
    """
    cond, copies = policy.encode(batch.text), group // plan.leaves
    rows = torch.arange(len(batch)).repeat_interleave(copies)
    numbers = round_ * copies + torch.arange(copies).repeat(len(batch))
    prompt_keys = keys.key(seed, "rollout", iteration, batch.ids)
    grown = tree.grow(
        velocity_of(policy, cond, guidance=guidance, ledger=ledger),
        noise_of(policy),
        plan,
        shape=policy.latent_shape,
        rows=rows,
        prompt_keys=prompt_keys[rows],
        copies=numbers,
        shared_key=keys.key(seed, "shared", iteration),
        init=init_of(policy, plan),
        micro=rows_of(micro, policy, guidance),
    )
    return types.replace(_with_clean_leaves(policy, grown), cond=cond, guidance=guidance)


def _with_clean_leaves(policy: Policy, grown: Rollout) -> Rollout:
    """Where final states lie above sigma 0, what decode makes of them becomes states of its own;
    transitions keep theirs."""
    end = grown.state_sigma[grown.leaf]
    if not bool(end.any()):
        return grown
    return types.replace(
        grown,
        states=torch.cat([grown.states, policy.clean(grown.leaves, end)]),
        state_sigma=torch.cat([grown.state_sigma, torch.zeros_like(end)]),
        prompt=torch.cat([grown.prompt, grown.prompt[grown.leaf]]),
        leaf=torch.arange(len(grown.leaf), device=grown.leaf.device) + len(grown.states),
    )


def init_of(policy: Policy, plan: Plan) -> Callable[[Tensor], Tensor]:
    """Standard normal noise -> states at the plan's first sigma."""
    return functools.partial(policy.init, sigma=plan.sigma.max().item())


def noise_of(policy: Policy) -> Callable[[Tensor], Tensor]:
    """Standard normal latents by key."""
    return lambda k: keys.gaussian(k, policy.latent_shape, policy.device)


@torch.no_grad()
def media_of(
    policy: Policy, x: Tensor, sigma: Tensor, *, decode: int, ledger: Ledger
) -> Iterator[tuple[slice, Tensor]]:
    """Decode (B, *L) final states at sigma (B,), the same for all, in chunks of `decode` -> (rows,
    media)."""
    assert bool((sigma == sigma[0]).all())
    for i in range(0, len(x), decode):
        rows = slice(i, min(i + decode, len(x)))
        with ledger.phase("decode"), ledger.work("vae"):
            media = policy.decode(x[rows], float(sigma[0]))
        yield rows, media


def decode_into(
    scorer: Scorer,
    policy: Policy,
    rollout: Rollout,
    batch: PromptBatch,
    *,
    decode: int,
    ledger: Ledger,
) -> Tensor:
    """Decode all leaves and hand them to the scorer, which drops them, chunk by chunk -> the first
    chunks, SHOWN samples or more."""
    first: list[Tensor] = []
    for rows, media in media_of(
        policy, rollout.leaves, rollout.state_sigma[rollout.leaf], decode=decode, ledger=ledger
    ):
        scorer.add(media, batch, rollout.group[rows])
        first += [media.cpu()] if sum(map(len, first)) < SHOWN else []
    scorer.finish_groups()
    return torch.cat(first)


class Scorer:
    """Scores decoded media in the order they come: at once, or with overlap in a thread of its own,
    while the caller samples on.

    A reward that compares the members of a group sees whole groups: media come group by group, and
    those of an unfinished one wait. Results are the same with and without overlap; time/reward is
    what the caller waited, time/reward_hidden what it did not.
    """

    AHEAD = 2  # chunks that may wait for the thread: bounds memory

    def __init__(self, rewards: RewardSet, ledger: Ledger, *, overlap: bool = False) -> None:
        self.rewards, self.ledger = rewards, ledger
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="reward") if overlap else None
        self.whole_groups = "group" in rewards.needs
        self.waiting: tuple[Tensor, PromptBatch, Tensor] | None = None
        self.parts: list[Rewards] = []
        self.pending: deque[Future[tuple[Rewards, float]]] = deque()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def add(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        """media of samples whose prompts are rows `group` of batch; not the same batch as before:
        after `finish_groups`."""
        if self.waiting is not None:
            media, group = torch.cat([self.waiting[0], media]), torch.cat([self.waiting[2], group])
            self.waiting = None
        ready = (
            int((group == group[-1]).nonzero()[0]) if self.whole_groups else len(group)
        )  # the newest group may go on
        if ready < len(group):
            self.waiting = (media[ready:], batch, group[ready:])
        if ready:
            self._start(media[:ready], batch, group[:ready])

    def finish_groups(self) -> None:
        """No more members of the last group will come."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self._start(*waiting)

    def scores(self) -> Rewards:
        """All of them, in order."""
        while self.pending:
            self._collect()
        return concat(self.parts)

    def _start(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        members = group.tolist()
        texts = [batch.text[g] for g in members]
        context = MediaContext(meta=[batch.meta[g] for g in members], group=group)
        if self.pool is None:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                self.parts.append(score(media, texts, self.rewards, context))
            return
        while len(self.pending) >= self.AHEAD:
            self._collect()
        self.pending.append(self.pool.submit(_timed, media, texts, self.rewards, context))

    def _collect(self) -> None:
        began = time.perf_counter()
        with self.ledger.phase("reward"), self.ledger.work("reward"):
            rewards, seconds = self.pending.popleft().result()
        self.ledger.add_time("reward_hidden", max(0.0, seconds - (time.perf_counter() - began)))
        self.parts.append(rewards)


def _timed(
    media: Tensor, texts: list[str], rewards: RewardSet, context: MediaContext
) -> tuple[Rewards, float]:
    began = time.perf_counter()
    return score(media, texts, rewards, context), time.perf_counter() - began


def meta_rows(prompts: list[dict[str, Any]], ids: list[int]) -> tuple[list[str], MediaContext]:
    """Text and context of prompts[i] for i in ids."""
    chosen = [prompts[i] for i in ids]
    meta = [{k: v for k, v in p.items() if k != "prompt"} for p in chosen]
    return [p["prompt"] for p in chosen], MediaContext(meta=meta, group=torch.tensor(ids))
