"""Sampling with help: more guidance, more steps or another text, for prompts that need it.

A helped sample is scored and trained like any other: under its prompt's own text, at the noise
levels of the run's own steps and without guidance. So help serves methods on finished samples,
which read nothing of a sample but its final state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.data.prompts import select
from flowrl.rewards import concat
from flowrl.rollouts.join import join
from flowrl.rollouts.records import Drawn, Source
from flowrl.rollouts.redraw import Sample
from flowrl.types import Plan


def helping(source: Source, iteration: int, plan: Plan, sample: Callable[..., Drawn]) -> Sample:
    """Return a function (ids, round_) that samples prompts, those that need help apart.

    sample: draws for (source, iteration, plan, ids, round_), see draw.py.
    """
    helper, config = source.chooser.helper, source.cfg.data.sampler.help
    assert helper is not None
    helped = replace(
        source,
        guidance=source.guidance if config.guidance is None else config.guidance,
        column=config.column,
    )
    helped_plan = source.helped_plan(iteration) if source.helped_plan else plan

    def sample_each(ids: Tensor, round_: int = 0) -> Drawn:
        needed = helper.helps(iteration, ids)
        ways = [(source, plan, ~needed), (helped, helped_plan, needed)]
        parts = [
            (sample(how, iteration, path, ids[which], round_), torch.nonzero(which).flatten())
            for how, path, which in ways
            if bool(which.any())
        ]
        return parts[0][0] if not bool(needed.any()) else as_plain(source, plan, ids, parts)

    return sample_each


def as_plain(source: Source, plan: Plan, ids: Tensor, parts: list[tuple[Drawn, Tensor]]) -> Drawn:
    """Join draws of the prompts `ids` to one that looks as if nobody was helped: with the prompts'
    own texts, and with the run's guidance and plan. parts: each draw, and the places of its prompts
    in ids."""
    drawn, places = [part for part, _ in parts], [at for _, at in parts]
    batch = select(source.prompts, ids)
    whole = join([part.rollout for part in drawn], places)
    first, last = drawn[0], drawn[-1]
    cut = len(drawn) == 1 or len(first.shown) < len(first.rollout.leaf)
    return replace(
        first,
        batch=batch,
        rollout=replace(whole, cond=source.encode(batch), plan=plan, guidance=source.guidance),
        rewards=concat([part.rewards for part in drawn]),
        shown=first.shown if cut else torch.cat([first.shown, last.shown]),
    )
