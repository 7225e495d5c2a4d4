"""Leaves become media and media become rewards, in chunks: no process holds all its media."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.data import conditions
from flowrl.policy import Cond, Policy
from flowrl.rewards import RewardSet, concat
from flowrl.rewards.core.score import check_media, score_with
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import Progress
from flowrl.types import MediaContext, PromptBatch, Rewards, Rollout

SHOWN = 8  # least number of samples whose media are kept, for the log


def decode_into(
    scorer: Scorer, policy: Policy, rollout: Rollout, batch: PromptBatch, *, decode: int
) -> Tensor:
    """Decode all leaves and give them to the scorer -> media of the first chunks, SHOWN samples or
    more, on the CPU."""
    first: list[Tensor] = []
    sigma = rollout.state_sigma[rollout.leaf]
    whose = (rollout.cond, rollout.group)
    chunks = media_of(policy, rollout.leaves, sigma, whose, decode=decode, ledger=scorer.ledger)
    for rows, media in chunks:
        scorer.add(media, batch, rollout.group[rows])
        if sum(map(len, first)) < SHOWN:
            first.append(media.cpu())
    scorer.finish_groups()
    return torch.cat(first)


@torch.no_grad()
def media_of(
    policy: Policy,
    x: Tensor,
    sigma: Tensor,
    whose: tuple[Cond, Tensor],
    *,
    decode: int,
    ledger: Ledger,
) -> Iterator[tuple[slice, Tensor]]:
    """Decode final states x (B, *L), all at one sigma (B,), in chunks -> (their places, media).

    whose: a conditioning, and the row (B,) of it that each state belongs to.
    """
    assert bool((sigma == sigma[0]).all())
    policy.turns.rest()  # the denoiser leaves the device, if it should, to make room for the VAE
    with Progress(len(x), title="decode", lines=False) as bar:
        for i in range(0, len(x), decode):
            rows = slice(i, min(i + decode, len(x)))
            with ledger.phase("decode"), ledger.work("vae"):
                here = x[rows].to(policy.device)
                media = policy.decode(here, float(sigma[0]), whose[0], whose[1][rows])
            yield rows, media
            bar.update(rows.stop)


class Scorer:
    """Scores media in the order they come.

    A reward that compares the members of a group sees whole groups: media come group by group, and
    those of an unfinished group wait.
    """

    def __init__(self, rewards: RewardSet, ledger: Ledger) -> None:
        self.rewards, self.ledger = rewards, ledger
        self.detectors = rewards.detectors
        watched = self.detectors is not None and self.detectors.whole_groups
        self.whole_groups = "group" in rewards.needs or watched
        # media of the newest group, which may get more members, their batch, and their rows of it
        self.waiting: tuple[Tensor, PromptBatch, Tensor] | None = None
        self.parts: list[Rewards] = []  # rewards of each chunk
        self.seen: list[dict[str, Tensor]] = []  # numbers that detectors read from each chunk

    def add(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        """Take in media of samples whose prompts are the rows `group` (n,) of a batch.

        Call `finish_groups` before the first media of another batch.
        """
        if self.waiting is not None:
            media = torch.cat([self.waiting[0], media])
            group = torch.cat([self.waiting[2], group])
            self.waiting = None
        ready = len(group)
        if self.whole_groups:  # the newest group may get more members
            ready = int((group == group[-1]).nonzero()[0])
        if ready < len(group):
            self.waiting = (media[ready:], batch, group[ready:])
        if ready:
            self.start(media[:ready], batch, group[:ready])

    def finish_groups(self) -> None:
        """Score the group that waits: no more members of it will come."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.start(*waiting)

    def start(self, media: Tensor, batch: PromptBatch, group: Tensor) -> None:
        """Score media of whole groups."""
        if self.detectors is not None:
            with self.ledger.phase("reward"), self.ledger.work("reward"):
                self.seen.append(self.detectors(media, group))
        members = group.tolist()
        context = conditions.context_of([batch.meta[g] for g in members], media, group)
        self.score(media, [batch.text[g] for g in members], context)

    def score(self, media: Tensor, texts: list[str], context: MediaContext) -> None:
        """Ask the rewards about a chunk of media."""
        with self.ledger.phase("reward"), self.ledger.work("reward"):
            media = check_media(media, texts)
            self.parts.append(score_with(self.rewards, media, texts, context))

    def scores(self) -> Rewards:
        """Rewards of all media, in order."""
        names = self.seen[0] if self.seen else ()
        seen = {name: torch.cat([part[name] for part in self.seen]) for name in names}
        return replace(concat(self.parts), seen=seen)

    def close(self) -> None:
        """Give back what scoring needed; the plain scorer needs nothing."""
