"""Prompts x group -> Rollout: encode the prompts once, then grow the plan's forest for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowrl.data import conditions
from flowrl.policy import Cond, Policy
from flowrl.rollouts.join import with_clean_leaves
from flowrl.rollouts.velocity import guided
from flowrl.runtime.ledger import CountedPolicy, Ledger
from flowrl.samplers import keys, sde, tree
from flowrl.samplers.tree import Velocity
from flowrl.types import Plan, PromptBatch, Rollout


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
    rlg: float = 1.0,
    host: bool = False,
) -> Rollout:
    """Grow group / plan.leaves copies of the plan for each prompt.

    Noise is a function of (seed, iteration, prompt id, node path). Leaves are data at sigma 0, as
    decode takes them, even where the schedule ends above it. round_: how often these prompts were
    rolled out in this iteration before; each round has copies of its own. rlg: see velocity.py.
    host: keep the states in host memory (batch.states).
    """
    # Every copy of the plan is named by its prompt and its number, not by its place in the batch.
    cond, copies = policy.encode(batch.text, conditions.of(batch.meta)), group // plan.leaves
    rows = torch.arange(len(batch)).repeat_interleave(copies)
    numbers = round_ * copies + torch.arange(copies).repeat(len(batch))
    prompt_keys = keys.key(seed, "rollout", iteration, batch.ids)
    grown = tree.grow(
        velocity_of(policy, cond, guidance=guidance, ledger=ledger, rlg=rlg),
        noise_of(policy),
        plan,
        shape=policy.latent_shape,
        rows=rows,
        prompt_keys=prompt_keys[rows],
        copies=numbers,
        shared_key=keys.key(seed, "shared", iteration),
        init=partial(policy.start, sigma=plan.sigma.max().item(), cond=cond),
        micro=policy.states(micro, guidance),
        std=partial(policy.step_std, cond) if sde.find(plan.sde).learned else None,
        host=host,
    )
    # The loss must ask for velocities under the same conditioning and guidance.
    grown = replace(grown, cond=cond, guidance=guidance)
    ends_above_0 = bool(plan.sigma_next[plan.leaf_edges].any())
    return with_clean_leaves(policy, grown) if ends_above_0 else grown


def velocity_of(
    policy: Policy, cond: Cond, *, guidance: float | str, ledger: Ledger, rlg: float = 1.0
) -> Velocity:
    """velocity(x, sigma, rows) for a sampling engine; time, FLOPs and network rows are counted.

    rlg: the weight w of RLG, see velocity.py; any but 0 and 1 costs twice the calls.
    """
    counted = CountedPolicy(policy, ledger, phase="rollout")

    def velocity(x: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        return counted.velocity(x, sigma, cond, rows, guidance=guidance)

    # w = 1 is the policy itself, while reference + 1 (v - reference) is v up to rounding only
    return velocity if rlg == 1 else guided(policy, velocity, rlg)


def noise_of(policy: Policy) -> Callable[[Tensor], Tensor]:
    """Noise by key: (n,) int64 -> standard normal latents (n, *L) fp32, or what tokens need."""
    return policy.noise
