"""Checks of a reward's contract on any pictures, without knowing what it measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.rewards import RewardBug
from flowrl.rewards.checks.examples import Example, context_of
from flowrl.rewards.checks.pictures import RECODINGS
from flowrl.rewards.checks.subject import (
    ROUNDING,
    Finding,
    Subject,
    Verdict,
    deviation,
    gap,
    middle,
)
from flowrl.runtime.copies import own

FEW = 8  # number of examples that the cheap checks score
REPLIES = ("", " ", ".", "...", "!?", "**", "-", "\n\n")  # replies of a judge that say nothing
STEPS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # steps of finite differences, in units of pixels in [0, 1]


def contract(subject: Subject) -> list[Finding]:
    """Check that every score is finite and in the declared range; shape, dtype and device are
    checked wherever rewards are scored.

    value: the number of examples that could be scored; if some failed, the number of failures.
    """
    try:
        bad, count = int((~subject.honest.isfinite()).sum()), len(subject.honest)
    except RewardBug as error:
        # the table names the reward beside it
        says = str(error).removeprefix(f'reward "{subject.label}" ')
        return [Finding(name="contract", verdict="fail", says=says)]
    if beyond := _beyond(subject, subject.honest):
        return [Finding(name="contract", verdict="fail", says=beyond)]
    if not bad:
        says = f"{count} fp32 numbers on {subject.device}, all finite"
        return [Finding(name="contract", verdict="ok", value=float(count), says=says)]
    verdict: Verdict = "fail" if bad == count else "warn"
    first = "".join(subject.errors[:1]).removeprefix(f"{subject.label}: ")
    says = f"{bad} of {count} could not be scored; {first}"
    return [Finding(name="contract", verdict=verdict, value=float(bad), says=says)]


def _beyond(subject: Subject, scores: Tensor) -> str | None:
    """Say what is wrong where scores (n,) leave the range that the reward declares."""
    scores = scores[scores.isfinite()]
    if subject.reward.range is None or not len(scores):
        return None
    low, high = subject.reward.range
    width = high - low if math.isfinite(high - low) else 0.0
    slack = ROUNDING * max(width, float(scores.abs().max()))
    outside = scores[(scores < low - slack) | (scores > high + slack)]
    if not len(outside):
        return None
    return (
        f"it declares a range of {low:g} to {high:g}, and {len(outside)} of {len(scores)} scores"
        f" are outside, {float(outside[0]):.4g} first"
    )


def determinism(subject: Subject) -> list[Finding]:
    """Check that two equal calls give equal scores, up to 1% of their spread."""
    found = gap(subject.honest, subject.scores(subject.examples))
    subject.deterministic = found <= max(subject.rounding, 0.01 * subject.deviation)
    verdict: Verdict = "ok" if subject.deterministic else "fail"
    says = "two equal calls give equal scores"
    if found:
        says = f"two equal calls differ by up to {found:.3g}"
    return [Finding(name="determinism", verdict=verdict, value=found, says=says)]


def batch_mates(subject: Subject) -> list[Finding]:
    """Check that a score stays the same in another order, and for a sample or group alone."""
    if not subject.deterministic:
        says = "not judged, because equal calls differ"
        return [Finding(name="batch mates", verdict="note", says=says)]
    gaps = _gaps_in_other_batches(subject)
    worst = max(gaps, key=lambda name: gaps[name])
    # A reward in half precision differs by about its own noise.
    limit = max(subject.rounding, 0.05 * subject.deviation, 4 * subject.noise)
    if gaps[worst] <= limit:
        says = f"they change a score by at most {gaps[worst]:.3g}"
        return [Finding(name="batch mates", verdict="ok", value=gaps[worst], says=says)]
    finite = math.isfinite(gaps[worst])
    change = f"changes by up to {gaps[worst]:.3g}" if finite else "is there or not"
    says = (
        f"a score {change} when its sample is scored {worst}: it depends on the rest of the batch"
    )
    return [Finding(name="batch mates", verdict="fail", value=gaps[worst], says=says)]


def _gaps_in_other_batches(subject: Subject) -> dict[str, float]:
    """Way of scoring -> largest change of a score: all samples in another order, and three samples
    alone (one group, for a reward that compares the members of a group)."""
    if subject.together:
        some, how, scores = subject.examples, "without other groups", subject.honest
        groups = [int(s.columns["group"]) for s in some]
        batches = [[row for row, group in enumerate(groups) if group == groups[0]]]
    else:
        first, how = subject.examples[:FEW], "alone"
        some = _unlike(first)
        same = all(a is b for a, b in zip(some, first, strict=True))
        scores = subject.honest[:FEW] if same else subject.scores(some)
        batches = [[row] for row in range(min(3, len(some)))]
    alone = torch.cat([subject.scores([some[row] for row in batch]) for batch in batches])
    reordered = subject.scores(some[::-1]).flip(0)
    return {
        "in another order": gap(scores, reordered),
        how: gap(scores[[row for batch in batches for row in batch]], alone),
    }


def _unlike(examples: list[Example]) -> list[Example]:
    """Give every second example the picture of its first near miss, if it has one: a verifier gives
    all honest pictures the same score, and a batch mate would change nothing."""
    return [
        replace(s, media=s.near_misses[0].media) if i % 2 and s.near_misses else s
        for i, s in enumerate(examples)
    ]


def own_noise(subject: Subject) -> list[Finding]:
    """Compare the reward's own noise with the spread of all scores."""
    everything = deviation(torch.cat(subject.seen))
    ways = ", ".join(RECODINGS)
    says = f"standard deviation of the change under re-encodings that nobody sees ({ways})"
    if everything:
        share = subject.noise / everything
        says += f", {share:.1%} of the spread of all scores seen here"
    verdict: Verdict = "warn" if subject.noise > everything / 2 else "note"
    return [Finding(name="noise", verdict=verdict, value=subject.noise, says=says)]


def reach(subject: Subject) -> list[Finding]:
    """Check that all scores, also those of wrong prompts and attacks, are in the declared range."""
    if subject.reward.range is None:
        return []
    if beyond := _beyond(subject, torch.cat(subject.seen)):
        return [Finding(name="range", verdict="fail", says=beyond)]
    low, high = subject.reward.range
    says = f"all scores are between {low:g} and {high:g}, as it declares"
    return [Finding(name="range", verdict="ok", says=says)]


def spread(subject: Subject) -> list[Finding]:
    """Check that the reward tells anything apart: lowest, highest and deviation of all scores."""
    values = torch.cat(subject.seen)
    values = values[values.isfinite()]
    low, high = float(values.min()), float(values.max())
    if high - low <= subject.rounding:
        says = f"all {len(values)} scores are {low:.3g}: nothing is told apart"
        return [Finding(name="spread", verdict="fail", value=0.0, says=says)]
    says = (
        f"{low:.3g} to {high:.3g} over {len(values)} scores, honest pictures around"
        f" {middle(subject.honest):.3g}"
    )
    return [Finding(name="spread", verdict="ok", value=deviation(values), says=says)]


def replies(subject: Subject) -> list[Finding]:
    """Check that a judge that says nothing gives no score: `read_reply(text) -> float`, where a
    reward has it, must return NaN."""
    read = getattr(subject.reward, "read_reply", None)
    if read is None:
        return []
    values = {text: float(read(text)) for text in REPLIES}
    scored = {text: value for text, value in values.items() if math.isfinite(value)}
    if not scored:
        says = "an empty reply, or one of punctuation, is not a score"
        return [Finding(name="replies", verdict="ok", value=0.0, says=says)]
    text, value = next(iter(scored.items()))
    says = (
        f"{len(scored)} of {len(REPLIES)} replies that say nothing are scores: {text!r} is"
        f" {value:.3g}"
    )
    return [Finding(name="replies", verdict="fail", value=float(len(scored)), says=says)]


def gradient(subject: Subject) -> list[Finding]:
    """Check a declared gradient: it is finite, not zero for any sample, and equal to a finite
    difference along a random direction."""
    if not subject.reward.differentiable:
        return [Finding(name="gradient", verdict="note", says="none is declared")]
    some = _one_batch(subject)
    prompts, context = [s.prompt for s in some], context_of(some, subject.device)
    media = _roughened(some).to(subject.device).requires_grad_()

    def values_of(pictures: Tensor) -> Tensor:
        return subject.reward(*own((pictures, prompts, context)))

    try:
        with torch.enable_grad():
            slope = torch.autograd.grad(values_of(media).sum(), media)[0]
    except Exception as error:  # a reward may fail in any way
        says = f"it is declared, and does not come: {type(error).__name__}: {error}"
        return [Finding(name="gradient", verdict="fail", says=says)]
    if flaw := _flaw_of(slope):
        says = f"it is declared, and {flaw}"
        return [Finding(name="gradient", verdict="fail", says=says)]
    return [_against_differences(values_of, media.detach(), slope)]


def _one_batch(subject: Subject) -> list[Example]:
    """Two examples of one shape; one group, for a reward that compares the members of a group."""
    first = subject.examples[0]
    some = [s for s in subject.examples if s.media.shape == first.media.shape]
    if subject.together:
        return [s for s in some if s.columns["group"] == first.columns["group"]]
    return some[:2]


def _roughened(examples: list[Example]) -> Tensor:
    """Media (n, *) of examples, moved off the clamps at 0 and 1 and off kinks of equal pixels."""
    media = torch.stack([s.media for s in examples])
    grain = torch.randn(media.shape, generator=torch.Generator().manual_seed(1)).to(media)
    return 0.1 + 0.8 * media + 0.05 * grain


def _flaw_of(slope: Tensor) -> str | None:
    """Say what is wrong with a gradient (n, *) at first sight."""
    if bad := int((~slope.isfinite()).sum()):
        return f"{bad} of {slope.numel()} numbers are NaN or inf"
    if dead := int((slope.flatten(1).abs().amax(1) == 0).sum()):
        return f"it is 0 for {dead} of {len(slope)} samples"
    return None


def _against_differences(
    function: Callable[[Tensor], Tensor], media: Tensor, slope: Tensor
) -> Finding:
    """Compare the slope along a random direction with central differences; the best step counts."""
    direction = _direction(media)
    expected = float((slope * direction).double().sum())
    errors = []  # relative errors of the steps that fp32 resolves
    for step in STEPS:
        with torch.no_grad():
            high, low = (function(media + sign * step * direction).double() for sign in (1, -1))
        found = float((high - low).sum()) / (2 * step)
        size = max(abs(found), abs(expected), 1e-30)
        rounding = 2**-22 * float(high.abs().sum()) / step
        errors += [abs(found - expected) / size] if rounding < 0.05 * size else []
    if not errors:
        says = "finite and not zero; the score is too flat for a finite difference in fp32"
        return Finding(name="gradient", verdict="note", says=says)
    verdict: Verdict = "ok" if min(errors) <= 0.05 else "fail"
    says = "relative difference to a finite difference along a random direction"
    return Finding(name="gradient", verdict=verdict, value=min(errors), says=says)


def _direction(media: Tensor) -> Tensor:
    """Coarse and fine noise, shaped as media (n, *)."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(media.flatten(0, -4).shape[0], 3, 4, 4, generator=generator)
    coarse = F.interpolate(coarse, media.shape[-2:], mode="bilinear")
    fine = torch.randn(media.shape, generator=generator)
    return (coarse.view(media.shape) + fine).to(media)
