"""Prompts x group -> Rollout: encode once and grow the plan's forest; apart from it, turn leaves
into scored media, chunk by chunk."""

from __future__ import annotations

import torch

from flowrl import types
from flowrl.policy import Policy
from flowrl.rollouts.velocity import init_of, noise_of, rows_of, velocity_of
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys, tree
from flowrl.types import Plan, PromptBatch, Rollout

SHOWN = 8  # samples whose media are kept, for the log


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
