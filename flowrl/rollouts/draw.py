"""Prompts of one iteration, their samples, and their rewards.

Samples are drawn once, or in rounds until groups have a signal (flowrl/rollouts/redraw.py), or
read from a folder of scored files. Every sample is named by its prompt and the number of its copy,
so results do not depend on how prompts are dealt out to processes.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flowrl.data import prompts
from flowrl.rewards import RewardUnavailable
from flowrl.rollouts import from_files, redraw
from flowrl.rollouts.overlap import OverlappedScorer
from flowrl.rollouts.records import Drawn, Source
from flowrl.rollouts.redraw import Sample
from flowrl.rollouts.roll_out import roll_out
from flowrl.rollouts.sample_helped import helping
from flowrl.rollouts.scorer import SHOWN, Scorer, decode_into
from flowrl.types import Plan, PromptBatch, Rollout


def draw(source: Source, iteration: int, plan: Plan) -> Drawn:
    """Choose the prompts of an iteration, and sample and score this process's share of them."""
    cfg, world = source.cfg, source.world
    batch = source.chooser.choose(iteration, cfg.batch.prompts)
    mine = batch.ids[world.share(len(batch))]
    if source.dataset is not None:
        return from_files.read(source, iteration, plan, mine)
    sample_prompts: Sample = partial(sample, source, iteration, plan)
    # prompts that need help are sampled apart from the others
    if source.chooser.helper is not None:
        sample_prompts = helping(source, iteration, plan, sample)
    with world.all_or_none(RewardUnavailable):
        drawn = sample_prompts(mine)
    if cfg.draw.mode == "refill":
        drawn = redraw.refill(source, sample_prompts, iteration, batch, drawn)
    elif cfg.draw.mode == "balance":
        drawn = redraw.balance(source, sample_prompts, drawn)
    if source.references:
        with source.ledger.phase("reward"), world.all_or_none(RewardUnavailable):
            drawn = from_files.with_references(source, drawn)
            drawn = replace(drawn, rewards=world.alike(drawn.rewards))
    return drawn


def sample(source: Source, iteration: int, plan: Plan, ids: Tensor, round_: int = 0) -> Drawn:
    """Sample one group for each prompt, and score it.

    ids (P,): the places of the prompts. round_: how many groups of them were drawn before in this
    iteration, after whose copies these are numbered. With batch.overlap a few prompts are sampled
    at a time, and their rewards run while the next ones are sampled.
    """
    cfg, policy, ledger = source.cfg, source.policy, source.ledger
    # a pipeline's steps may differ by their number: an evaluation may have asked for others
    policy.schedule(cfg.sampler.steps)
    made: list[tuple[PromptBatch, Rollout]] = []
    shown = torch.empty(0)
    scorer = (OverlappedScorer if cfg.batch.overlap else Scorer)(source.rewards, ledger)
    with closing(scorer):
        for some in ids.split(cfg.batch.overlap or len(ids)):
            batch = prompts.select(source.prompts, some)
            with ledger.phase("rollout"), source.autocast(), policy.view(source.view):
                rollout = roll_out(
                    policy,
                    source.with_helpful_texts(batch) if source.column else batch,
                    plan,
                    group=cfg.batch.group,
                    guidance=source.guidance,
                    seed=cfg.seed,
                    iteration=iteration,
                    micro=cfg.batch.micro,
                    ledger=ledger,
                    round_=round_,
                    rlg=cfg.sampler.rlg,
                    host=cfg.batch.states == "host",
                )
            # Leaves become media, chunk by chunk, and each chunk is handed to the rewards.
            media = decode_into(scorer, policy, rollout, batch, decode=cfg.batch.decode)
            made.append((batch, rollout))
            # The first media are kept for the grid of samples that a run writes.
            if len(shown) < SHOWN:
                shown = torch.cat([shown, media]) if len(shown) else media
        # Processes of a team hold the same samples; a judge may score them differently.
        rewards = source.world.alike(scorer.scores())
    if len(made) > 1:
        batch = prompts.select(source.prompts, ids)
        rollout = redraw.joined(source, made, batch)
    return Drawn(batch=batch, rollout=rollout, rewards=rewards, shown=shown)
