"""Try the rewards on a few samples of the first iteration, before a run spends hours.

They are the very samples of that iteration: noise is a function of seed, iteration, prompt and
copy, so the run afterwards does not change by a bit. Their network calls, those of FEW samples or
of one copy of a forking plan, are on the books of no iteration.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flowrl.config.schema import Config
from flowrl.data import conditions, prompts
from flowrl.rewards import RewardBug, RewardSet, score
from flowrl.rewards.checks.check import before_training, below_noise
from flowrl.rewards.checks.contract import FEW
from flowrl.rewards.core.domains import domains_of, is_asked
from flowrl.rollouts.asked import other_frames
from flowrl.rollouts.roll_out import roll_out
from flowrl.rollouts.scorer import media_of
from flowrl.runtime import registry
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger
from flowrl.training.observe import Observation
from flowrl.training.records import RunParts
from flowrl.types import PromptBatch, Rollout

PICTURE, FRAMES = (3, 64, 64), (8, 3, 64, 64)  # shapes of a grey sample


class NoiseWatch:
    """Warns, once for each reward, if scores within groups differ by less than its own noise."""

    def __init__(self) -> None:
        self.noise: dict[str, float] = {}  # label -> noise of a reward without a warning so far

    def __call__(self, seen: Observation) -> dict[str, float]:
        """Look at an iteration, since training narrows the spread of a group; it logs nothing."""
        for label, sentence in below_noise(self.noise, seen.rewards.raw, seen.group).items():
            logger.warning(sentence)
            del self.noise[label]
        return {}


def try_rewards(parts: RunParts) -> dict[str, float]:
    """Warn of findings of the cheap checks -> {label: noise} of the trained rewards that have any.

    Every process makes the same samples and tries its part of the rewards. See
    flowrl.rewards.checks.check.before_training.
    """
    source, world = parts.source, parts.source.world
    batch, rollout, media = first_samples(parts, Ledger(source.policy.device))
    if unlike := other_frames(source.policy, media):
        logger.warning(f"model: {unlike}")
    members = rollout.group[: len(media)]
    rows = members.tolist()
    context = conditions.context_of([batch.meta[g] for g in rows], media, members)
    mine = dict([*source.rewards.rewards.items()][world.rank :: world.size])
    tried = replace(source.rewards, rewards=mine)
    if tried.ready is not None:
        tried.ready()
    with world.all_or_none(RewardBug):
        sentences, noise = before_training(tried, media, [batch.text[g] for g in rows], context)
    results = world.collect((sentences, noise))
    for sentence in [line for lines, _ in results for line in lines] * world.main:
        logger.warning(sentence)
    return {label: level for _, noise in results for label, level in noise.items() if level}


def try_own(cfg: Config, rewards: RewardSet, data: prompts.Prompts) -> None:
    """Call each reward of the user's own once on two grey pictures of the first prompt, before a
    model is loaded; what is wrong with it -> RewardBug, ValueError.

    A reward may be made for videos: frames are tried where no picture is scored. What a model of
    the user's own makes, nobody knows before it is there.
    """
    source = cfg.model.source
    if registry.is_live(source) or registry.is_outside("flowrl.models", source):
        return
    for label, reward in rewards.rewards.items():
        name = str(cfg.reward.get(label, {}).get("name", label))
        if not (registry.is_live(name) or registry.is_outside("flowrl.rewards", name)):
            continue
        video = reward.video == "only" or "num_frames" in cfg.model.pipeline
        alone = replace(
            rewards, rewards={label: reward}, weights={label: 1.0}, rules={}, domains={}
        )
        if not (
            read := [row for row in data if is_asked(rewards, label, row)]
        ):  # its domains are those of evaluations
            continue
        wrong = _wrong(alone, read, FRAMES if video else PICTURE)
        if wrong and (video or _wrong(alone, read, FRAMES)):
            raise RewardBug(
                f"{wrong}; this was a trial on two grey {'videos' if video else 'pictures'} before"
                " a model is loaded: correct the reward, or set guard.check_rewards=false if it is"
                " right to score none of them"
            )


def _wrong(alone: RewardSet, data: prompts.Prompts, shape: tuple[int, ...]) -> str:
    """What is wrong with a reward, alone in its set, on two grey samples; "": they have scores."""
    media = torch.full((2, *shape), 0.5)
    texts, context = prompts.meta_rows(data, [0, 0], media)
    try:
        return "".join(score(media, texts, replace(alone, features=None), context).errors[:1])
    except RewardBug as error:
        return str(error)


def first_samples(parts: RunParts, ledger: Ledger) -> tuple[PromptBatch, Rollout, Tensor]:
    """Sample the first FEW samples of the first iteration, of two prompts if there are two, of two
    domains if rewards tell these apart, and decode their media."""
    cfg, source, leaves = parts.setup.cfg, parts.source, parts.setup.plan.leaves
    whole = prompts.batch(source.prompts, iteration=0, size=cfg.batch.prompts, seed=cfg.seed)
    names = domains_of(source.rewards, whole.meta) or [""] * len(whole)
    order = sorted(range(len(whole)), key=lambda i: names[:i].count(names[i]))
    each = min(cfg.batch.group, FEW // min(2, len(whole))) // leaves * leaves
    group = max(leaves, each)
    batch = prompts.select(source.prompts, whole.ids[order[: max(1, FEW // group)]])
    logger.info(f"trying the rewards on {min(FEW, group * len(batch))} samples")
    with source.autocast(), source.policy.view(source.view):
        rollout = roll_out(
            source.policy,
            batch,
            parts.setup.plan,
            group=group,
            guidance=source.guidance,
            seed=cfg.seed,
            iteration=0,
            micro=cfg.batch.micro,
            ledger=ledger,
            rlg=cfg.sampler.rlg,
        )
    leaf = rollout.leaf[:FEW]
    x, sigma = rollout.at(leaf), rollout.state_sigma[leaf]
    whose = (rollout.cond, rollout.group[: len(leaf)])
    chunks = media_of(source.policy, x, sigma, whose, decode=cfg.batch.decode, ledger=ledger)
    return batch, rollout, torch.cat([media for _, media in chunks])
