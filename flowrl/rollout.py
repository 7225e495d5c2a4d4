"""Prompts x group -> Rollout: encode once and grow the plan's forest; apart from it, turn leaves into scored media, chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flowrl import types
from flowrl.ledger import Ledger
from flowrl.policy import Cond, Policy
from flowrl.rewards import RewardSet, concat, score
from flowrl.samplers import keys, tree
from flowrl.types import MediaContext, Plan, PromptBatch, Rewards, Rollout

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def velocity_of(policy: Policy, cond: Cond, *, guidance: float | str, ledger: Ledger) -> Velocity:
    """velocity(x, sigma, rows) of the policy for an engine that samples; its time, FLOPs and network rows are booked."""

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
    policy: Policy, batch: PromptBatch, plan: Plan, *, group: int, guidance: float | str, seed: int, iteration: int, micro: int,
    ledger: Ledger, round_: int = 0,
) -> Rollout:  # fmt: skip
    """Grow group / plan.leaves copies of the plan for each prompt; noise is a function of (seed, iteration, prompt id, node path).

    Leaves are data at sigma 0, as decode takes them, even where the schedule ends above it. round_: how often these prompts were rolled out
    in this iteration before; the copies are others each time.
    """
    cond, copies = policy.encode(batch.text), group // plan.leaves
    rows = torch.arange(len(batch)).repeat_interleave(copies)
    numbers = round_ * copies + torch.arange(copies).repeat(len(batch))
    prompt_keys = keys.key(seed, "rollout", iteration, batch.ids)
    grown = tree.grow(
        velocity_of(policy, cond, guidance=guidance, ledger=ledger), noise_of(policy), plan, shape=policy.latent_shape, rows=rows,
        prompt_keys=prompt_keys[rows], copies=numbers, shared_key=keys.key(seed, "shared", iteration), init=init_of(policy, plan),
        micro=rows_of(micro, policy, guidance),
    )  # fmt: skip
    return types.replace(_with_clean_leaves(policy, grown), cond=cond, guidance=guidance)


def _with_clean_leaves(policy: Policy, grown: Rollout) -> Rollout:
    """Where final states lie above sigma 0, what decode makes of them becomes states of its own; transitions keep theirs."""
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
def media_of(policy: Policy, x: Tensor, sigma: Tensor, *, decode: int, ledger: Ledger) -> Iterator[tuple[slice, Tensor]]:
    """Decode (B, *L) final states at sigma (B,), the same for all, in chunks of `decode` -> (rows, media)."""
    assert bool((sigma == sigma[0]).all())
    for i in range(0, len(x), decode):
        rows = slice(i, min(i + decode, len(x)))
        with ledger.phase("decode"), ledger.work("vae"):
            media = policy.decode(x[rows], float(sigma[0]))
        yield rows, media


def score_leaves(
    policy: Policy, rollout: Rollout, batch: PromptBatch, rewards: RewardSet, *, decode: int, ledger: Ledger
) -> tuple[Rewards, Tensor]:
    """Scores of all leaves, and the first chunk of media for the log; the rest is dropped as soon as it is scored."""
    group, parts, first = rollout.group.cpu(), [], torch.empty(0)
    for rows, media in media_of(policy, rollout.leaves, rollout.state_sigma[rollout.leaf], decode=decode, ledger=ledger):
        members = group[rows].tolist()
        context = MediaContext(meta=[batch.meta[g] for g in members], group=group[rows])
        with ledger.phase("reward"), ledger.work("reward"):
            parts.append(score(media, [batch.text[g] for g in members], rewards, context))
        first = first if len(first) else media.cpu()
    return concat(parts), first


def meta_rows(prompts: list[dict[str, Any]], ids: list[int]) -> tuple[list[str], MediaContext]:
    """Text and context of prompts[i] for i in ids."""
    chosen = [prompts[i] for i in ids]
    meta = [{k: v for k, v in p.items() if k != "prompt"} for p in chosen]
    return [p["prompt"] for p in chosen], MediaContext(meta=meta, group=torch.tensor(ids))
