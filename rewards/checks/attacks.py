"""Canaries of changed pictures: attacks that nobody should reward, mirror images, frames in another
order, a still as a video."""

from __future__ import annotations

import math

import torch

from flowrl.rewards import RewardBug
from flowrl.rewards.checks.order import GOOD
from flowrl.rewards.checks.pictures import attacks
from flowrl.rewards.checks.subject import Finding, Trial, deviation, middle
from flowrl.types import replace


def attacked(trial: Trial) -> list[Finding]:
    """What nobody should reward, against the median of the honest pictures; a reward of quality
    fails on noise and on nothing at all."""
    made = [attacks(s.media, s.prompt) for s in trial.specimens]
    honest = middle(trial.honest)
    out = []
    for name in made[0]:
        value = middle(
            trial.scores(
                [replace(s, media=m[name]) for s, m in zip(trial.specimens, made, strict=True)]
            )
        )
        won = value > honest + trial.rounding
        says = (
            f"median {value:.3g}, {'above the' if won else 'and'} {honest:.3g} of the honest"
            " pictures"
        )
        says = says if math.isfinite(value) else "it is not scored"
        out.append(
            Finding(
                name=f"attack: {name}",
                verdict=trial.blame(name) if won else "ok",
                value=value,
                says=says,
            )
        )
    return out


def mirror(trial: Trial) -> list[Finding]:
    """A score should stay when left and right are swapped in picture and prompt, and drop when in
    the picture alone."""
    rows = [row for row, s in enumerate(trial.specimens) if s.mirrored is not None]
    if not rows:
        return []
    flipped = [trial.specimens[row].mirror() for row in rows]
    change = trial.scores([s.under(*s.mirrored) for s in flipped]) - trial.honest[rows]
    size = math.sqrt(float(change.double().square().nanmean()))
    limit = max(3 * trial.noise + trial.rounding, 0.05 * deviation(torch.cat(trial.seen)))
    says = (
        f"root mean square of the change when picture and prompt are mirrored; up to {limit:.3g} is"
        " noise, or little"
    )
    out = [
        Finding(
            name="mirror image", verdict="ok" if size <= limit else "warn", value=size, says=says
        )
    ]
    turned = [i for i, s in enumerate(flipped) if s.mirrored[0] != s.prompt]
    if turned and trial.reads_prompt:
        drop = trial.honest[[rows[i] for i in turned]] - trial.scores([flipped[i] for i in turned])
        seen = int((drop > trial.noise + trial.rounding).sum())
        share = seen / len(turned)
        says = (
            f"{seen} of {len(turned)} pictures lose score when they are mirrored and their prompt,"
            " which says left or right, is not"
        )
        out.append(
            Finding(
                name="left and right",
                verdict="ok" if share >= GOOD else "warn",
                value=share,
                says=says,
            )
        )
    return out


def frame_order(trial: Trial) -> list[Finding]:
    """What shuffled and reversed frames do to the score of a video; a frozen one is among the
    attacks."""
    if trial.specimens[0].media.ndim == 3:
        return []
    count = len(trial.specimens[0].media)
    orders = {
        "shuffled": torch.randperm(count, generator=torch.Generator().manual_seed(0)),
        "reversed": torch.arange(count).flip(0),
    }
    says = f"median change of the score; its noise is {trial.noise:.3g}"
    out = []
    for name, order in orders.items():
        change = (
            trial.scores([replace(s, media=s.media[order]) for s in trial.specimens]) - trial.honest
        )
        out.append(Finding(name=f"frames {name}", verdict="note", value=middle(change), says=says))
    return out


def videos(trial: Trial) -> list[Finding]:
    """A still of two frames, for a reward of pictures that says it takes videos."""
    if trial.reward.video != "yes" or trial.specimens[0].media.ndim == 4:
        return []
    stills = [replace(s, media=torch.stack([s.media] * 2)) for s in trial.specimens[:2]]
    if "reference" in trial.reward.needs:  # shaped as the media
        stills = [replace(s, columns={**s.columns, "reference": s.media}) for s in stills]
    before = len(trial.errors)
    try:
        bad = (
            ""
            if bool(trial.scores(stills).isfinite().all())
            else "; ".join(trial.errors[before : before + 1])
        )
    except RewardBug as error:
        bad = str(error)
    says = (
        f'it does not take videos ({bad}); let it say so with video = "no"'
        if bad
        else "a still of two frames is scored"
    )
    return [Finding(name="videos", verdict="warn" if bad else "ok", says=says)]
