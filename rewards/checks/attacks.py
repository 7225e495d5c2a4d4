"""Checks on changed pictures: attacks that nobody should reward, mirror images, frames in another
order, a still as a video."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.rewards import RewardBug
from flowrl.rewards.checks.examples import Example
from flowrl.rewards.checks.order import GOOD
from flowrl.rewards.checks.pictures import attacks
from flowrl.rewards.checks.subject import Finding, Subject, Verdict, deviation, middle


def attacked(subject: Subject) -> list[Finding]:
    """Compare attacks, which nobody should reward, with the median of the honest pictures; a reward
    of quality fails if noise or blank pictures win."""
    made = [attacks(s.media, s.prompt) for s in subject.examples]
    honest = middle(subject.honest)
    return [_attack(subject, name, [each[name] for each in made], honest) for name in made[0]]


def _attack(subject: Subject, name: str, media: list[Tensor], honest: float) -> Finding:
    """Compare one attack, made of every picture, with the median of the honest ones."""
    pairs = zip(subject.examples, media, strict=True)
    scores = subject.scores([replace(s, media=changed) for s, changed in pairs])
    value = middle(scores)
    if failed := subject.unscored(scores):
        return Finding(name=f"attack: {name}", verdict="fail", value=value, says=failed)
    won = value > honest + subject.rounding
    if won:
        says = f"median {value:.3g}, above the {honest:.3g} of the honest pictures"
    else:
        says = f"median {value:.3g}, and {honest:.3g} of the honest pictures"
    verdict = subject.blame(name) if won else "ok"
    return Finding(name=f"attack: {name}", verdict=verdict, value=value, says=says)


def mirror(subject: Subject) -> list[Finding]:
    """A score should stay when left and right are swapped in picture and prompt, and drop when they
    are swapped in the picture alone."""
    rows = [row for row, s in enumerate(subject.examples) if s.mirrored is not None]
    if not rows:
        return []
    flipped = [subject.examples[row].mirror() for row in rows]
    own = subject.honest[rows]
    out = [_mirrored_with_prompt(subject, flipped, own)]
    turned = [i for i, s in enumerate(flipped) if s.mirrored[0] != s.prompt]
    if turned and subject.reads_prompt:
        out.append(_mirrored_alone(subject, [flipped[i] for i in turned], own[turned]))
    return out


def _mirrored_with_prompt(subject: Subject, flipped: list[Example], own: Tensor) -> Finding:
    """Compare mirror images, under the prompt that they show, with the pictures' scores (n,)."""
    change = subject.scores([s.under(*s.mirrored) for s in flipped]) - own
    size = math.sqrt(float(change.double().square().nanmean()))
    limit = max(3 * subject.noise + subject.rounding, 0.05 * deviation(torch.cat(subject.seen)))
    says = (
        f"root mean square of the change when picture and prompt are mirrored; up to {limit:.3g} is"
        " noise, or little"
    )
    verdict: Verdict = "ok" if size <= limit else "warn"
    return Finding(name="mirror image", verdict=verdict, value=size, says=says)


def _mirrored_alone(subject: Subject, flipped: list[Example], own: Tensor) -> Finding:
    """Score mirror images under the prompt of the picture, which says left or right."""
    drop = own - subject.scores(flipped)
    seen = int((drop > subject.noise + subject.rounding).sum())
    share = seen / len(flipped)
    says = (
        f"{seen} of {len(flipped)} pictures lose score when they are mirrored and their prompt,"
        " which says left or right, is not"
    )
    verdict: Verdict = "ok" if share >= GOOD else subject.blind("relation")
    return Finding(name="left and right", verdict=verdict, value=share, says=says)


def frame_order(subject: Subject) -> list[Finding]:
    """How shuffled and reversed frames change the score of a video; a frozen video is among the
    attacks."""
    if subject.examples[0].media.ndim == 3:
        return []
    count = len(subject.examples[0].media)
    orders = {
        "shuffled": torch.randperm(count, generator=torch.Generator().manual_seed(0)),
        "reversed": torch.arange(count).flip(0),
    }
    says = f"median change of the score; its noise is {subject.noise:.3g}"
    out = []
    for name, order in orders.items():
        reordered = [replace(s, media=s.media[order]) for s in subject.examples]
        change = middle(subject.scores(reordered) - subject.honest)
        out.append(Finding(name=f"frames {name}", verdict="note", value=change, says=says))
    return out


def videos(subject: Subject) -> list[Finding]:
    """Score a still of two frames, for a reward of pictures that says it takes videos."""
    if subject.reward.video != "yes" or subject.examples[0].media.ndim == 4:
        return []
    stills = [replace(s, media=torch.stack([s.media] * 2)) for s in subject.examples[:2]]
    if "reference" in subject.reward.needs:  # references must have the shape of the media
        stills = [replace(s, columns={**s.columns, "reference": s.media}) for s in stills]
    flaw = _why_not_scored(subject, stills)
    if flaw is None:
        return [Finding(name="videos", verdict="ok", says="a still of two frames is scored")]
    says = f'it does not take videos ({flaw}); let it say so with video = "no"'
    return [Finding(name="videos", verdict="warn", says=says)]


def _why_not_scored(subject: Subject, examples: list[Example]) -> str | None:
    """Why the first of these samples that has no score could not be scored; None: all were."""
    before = len(subject.errors)
    try:
        if bool(subject.scores(examples).isfinite().all()):
            return None
    except RewardBug as error:
        return str(error)
    return "; ".join(subject.errors[before : before + 1])
