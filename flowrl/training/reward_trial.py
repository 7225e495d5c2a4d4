"""Before a run spends hours, its rewards are tried on a few samples of its first iteration.

They are the very samples: noise is a function of seed, iteration, prompt and copy, so what follows
does not change by a bit. Their network calls, those of FEW samples or of one copy of a forking
plan, are on the books of no iteration.
"""

from __future__ import annotations

import torch

from flowrl.data import prompts
from flowrl.rewards import RewardSet
from flowrl.rewards.checks.check import before_training
from flowrl.rewards.checks.contract import FEW
from flowrl.rollouts.roll_out import roll_out
from flowrl.rollouts.velocity import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger
from flowrl.training.build import Parts
from flowrl.types import MediaContext


def rehearse(parts: Parts, rewards: RewardSet) -> dict[str, float]:
    """Warn of what the cheap canaries say -> the own noise of each reward that is trained on, by
    label; see canaries.before_training."""
    cfg, policy, plan, ledger = parts.cfg, parts.policy, parts.plan, Ledger(parts.policy.device)
    whole = prompts.batch(parts.prompts, iteration=0, size=cfg.batch.prompts, seed=cfg.seed)
    mine = whole.ids[parts.world.share(len(whole))]
    group = max(
        plan.leaves, min(cfg.batch.group, FEW // min(2, len(mine))) // plan.leaves * plan.leaves
    )  # of two prompts, if there are
    batch = prompts.select(parts.prompts, mine[: max(1, FEW // group)])
    logger.info(f"trying the rewards on {min(FEW, group * len(batch))} samples")
    with parts.autocast(), policy.view(parts.algorithm.rollout_view):
        rollout = roll_out(
            policy,
            batch,
            plan,
            group=group,
            guidance=parts.guidance,
            seed=cfg.seed,
            iteration=0,
            micro=cfg.batch.micro,
            ledger=ledger,
        )
    leaf, members = rollout.leaf[:FEW], rollout.group[:FEW]
    chunks = media_of(
        policy,
        rollout.states[leaf],
        rollout.state_sigma[leaf],
        decode=cfg.batch.decode,
        ledger=ledger,
    )
    media = torch.cat([decoded for _, decoded in chunks])
    rows = members.tolist()
    context = MediaContext(meta=[batch.meta[g] for g in rows], group=members)
    said, noise = before_training(rewards, media, [batch.text[g] for g in rows], context)
    for sentence in said:
        logger.warning(sentence)
    return noise
