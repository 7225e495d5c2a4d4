"""Checks of a reward's contract on any pictures, without knowing what it measures."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.rewards import RewardBug
from flowrl.rewards.checks.examples import context_of
from flowrl.rewards.checks.pictures import RECODINGS
from flowrl.rewards.checks.subject import ROUNDING, Finding, Trial, Verdict, deviation, gap, middle

FEW = 8  # specimens that the cheap canaries score


REPLIES = ("", " ", ".", "...", "!?", "**", "-", "\n\n")  # of a judge that said nothing


STEPS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # of finite differences, in pixels of [0, 1]


def contract(trial: Trial) -> list[Finding]:
    """Shape, dtype and device are held to the contract wherever rewards are scored, the range here;
    value: how many could not be scored."""
    try:
        bad, count = int((~trial.honest.isfinite()).sum()), len(trial.honest)
    except RewardBug as error:
        return [Finding(name="contract", verdict="fail", says=str(error))]
    if beyond := _beyond(trial, trial.honest):
        return [Finding(name="contract", verdict="fail", says=beyond)]
    if bad:
        says = f"{bad} of {count} could not be scored; {'; '.join(trial.errors[:1])}"
        return [
            Finding(
                name="contract",
                verdict="fail" if bad == count else "warn",
                value=float(bad),
                says=says,
            )
        ]
    return [
        Finding(
            name="contract",
            verdict="ok",
            value=float(count),
            says=f"{count} fp32 numbers on {trial.device}, all finite",
        )
    ]


def _beyond(trial: Trial, scores: Tensor) -> str | None:
    """What is wrong where scores (n,) leave the range that the reward declares."""
    scores = scores[scores.isfinite()]
    if trial.reward.range is None or not len(scores):
        return None
    low, high = trial.reward.range
    width = high - low if math.isfinite(high - low) else 0.0
    slack = ROUNDING * max(width, float(scores.abs().max()))
    outside = scores[(scores < low - slack) | (scores > high + slack)]
    if not len(outside):
        return None
    return (
        f"it declares a range of {low:g} to {high:g}, and {len(outside)} of {len(scores)} scores"
        f" are outside, {float(outside[0]):.4g} first"
    )


def determinism(trial: Trial) -> list[Finding]:
    found = gap(trial.honest, trial.scores(trial.specimens))
    trial.deterministic = found <= max(trial.rounding, 0.01 * trial.deviation)
    says = (
        f"two equal calls differ by up to {found:.3g}"
        if found
        else "two equal calls give equal scores"
    )
    return [
        Finding(
            name="determinism",
            verdict="ok" if trial.deterministic else "fail",
            value=found,
            says=says,
        )
    ]


def batch_mates(trial: Trial) -> list[Finding]:
    """All in another order, and a few alone; of a reward that compares the members of a group, one
    group alone."""
    if not trial.deterministic:
        return [
            Finding(
                name="batch mates", verdict="note", says="not judged, because equal calls differ"
            )
        ]
    some = trial.specimens if trial.together else trial.specimens[:FEW]
    parts, how = [[row] for row in range(min(3, len(some)))], "alone"
    if trial.together:
        groups = [int(s.columns["group"]) for s in some]
        parts, how = (
            [[row for row, group in enumerate(groups) if group == groups[0]]],
            "without other groups",
        )
    alone = torch.cat([trial.scores([some[row] for row in part]) for part in parts])
    gaps = {
        "in another order": gap(trial.honest[: len(some)], trial.scores(some[::-1]).flip(0)),
        how: gap(trial.honest[[row for part in parts for row in part]], alone),
    }
    worst = max(gaps, key=lambda name: gaps[name])
    limit = max(
        trial.rounding, 0.05 * trial.deviation, 4 * trial.noise
    )  # a reward in half precision differs by about its own noise
    if gaps[worst] <= limit:
        return [
            Finding(
                name="batch mates",
                verdict="ok",
                value=gaps[worst],
                says=f"they change a score by at most {gaps[worst]:.3g}",
            )
        ]
    change = (
        f"changes by up to {gaps[worst]:.3g}" if math.isfinite(gaps[worst]) else "is there or not"
    )
    says = (
        f"a score {change} when its sample is scored {worst}: it depends on the rest of the batch"
    )
    return [Finding(name="batch mates", verdict="fail", value=gaps[worst], says=says)]


def own_noise(trial: Trial) -> list[Finding]:
    everything = deviation(torch.cat(trial.seen))
    share = (
        f", {trial.noise / everything:.1%} of the spread of all scores seen here"
        if everything
        else ""
    )
    says = (
        "standard deviation of the change under re-encodings that nobody sees"
        f" ({', '.join(RECODINGS)}){share}"
    )
    return [
        Finding(
            name="noise",
            verdict="warn" if trial.noise > everything / 2 else "note",
            value=trial.noise,
            says=says,
        )
    ]


def reach(trial: Trial) -> list[Finding]:
    """Whether all scores, of wrong prompts and attacks too, are in the range that the reward
    declares, if it declares one."""
    beyond = _beyond(trial, torch.cat(trial.seen))
    if trial.reward.range is None:
        return []
    says = beyond or "all scores are between {:g} and {:g}, as it declares".format(
        *trial.reward.range
    )
    return [Finding(name="range", verdict="fail" if beyond else "ok", says=says)]


def spread(trial: Trial) -> list[Finding]:
    """Whether it tells anything apart: lowest, highest and standard deviation of all scores, of
    honest pictures and the rest."""
    values = torch.cat(trial.seen)
    values = values[values.isfinite()]
    low, high = float(values.min()), float(values.max())
    if high - low <= trial.rounding:
        return [
            Finding(
                name="spread",
                verdict="fail",
                value=0.0,
                says=f"all {len(values)} scores are {low:.3g}: nothing is told apart",
            )
        ]
    says = (
        f"{low:.3g} to {high:.3g} over {len(values)} scores, honest pictures around"
        f" {middle(trial.honest):.3g}"
    )
    return [Finding(name="spread", verdict="ok", value=deviation(values), says=says)]


def replies(trial: Trial) -> list[Finding]:
    """A judge that says nothing gives no score: rewards with `read_reply(text) -> float` are asked,
    and NaN is right."""
    read = getattr(trial.reward, "read_reply", None)
    if read is None:
        return []
    scored = {text: value for text in REPLIES if math.isfinite(value := float(read(text)))}
    says = "an empty reply, or one of punctuation, is no score"
    if scored:
        text, value = next(iter(scored.items()))
        says = (
            f"{len(scored)} of {len(REPLIES)} replies that say nothing are scores: {text!r} is"
            f" {value:.3g}"
        )
    return [
        Finding(
            name="replies", verdict="fail" if scored else "ok", value=float(len(scored)), says=says
        )
    ]


def gradient(trial: Trial) -> list[Finding]:
    """If declared: finite, not zero for any sample, and equal to a finite difference along a random
    direction."""
    if not trial.reward.differentiable:
        return [Finding(name="gradient", verdict="note", says="none is declared")]
    first = trial.specimens[0]
    some = [s for s in trial.specimens if s.media.shape == first.media.shape]
    some = (
        [s for s in some if s.columns["group"] == first.columns["group"]]
        if trial.together
        else some[:2]
    )
    media = torch.stack([s.media for s in some])
    grain = torch.randn(media.shape, generator=torch.Generator().manual_seed(1)).to(media)
    media = (
        (0.1 + 0.8 * media + 0.05 * grain).to(trial.device).requires_grad_()
    )  # off the clamps, and off the kinks where pixels are equal
    prompts, context = [s.prompt for s in some], context_of(some, trial.device)
    try:
        with torch.enable_grad():
            slope = torch.autograd.grad(trial.reward(media, prompts, context).sum(), media)[0]
    except Exception as error:  # a reward may fail in any way
        return [
            Finding(
                name="gradient",
                verdict="fail",
                says=f"it is declared, and does not come: {type(error).__name__}: {error}",
            )
        ]
    bad, dead = int((~slope.isfinite()).sum()), int((slope.flatten(1).abs().amax(1) == 0).sum())
    if bad or dead:
        what = (
            f"{bad} of {slope.numel()} numbers are NaN or inf"
            if bad
            else f"it is 0 for {dead} of {len(some)} samples"
        )
        return [Finding(name="gradient", verdict="fail", says=f"it is declared, and {what}")]
    verdict, difference, says = _along_a_direction(
        lambda x: trial.reward(x, prompts, context), media.detach(), slope
    )
    return [Finding(name="gradient", verdict=verdict, value=difference, says=says)]


def _along_a_direction(
    function: Callable[[Tensor], Tensor], media: Tensor, slope: Tensor
) -> tuple[Verdict, float | None, str]:
    """The slope along coarse and fine noise against central differences, of which the best step
    counts."""
    generator = torch.Generator().manual_seed(0)
    coarse = F.interpolate(
        torch.randn(media.flatten(0, -4).shape[0], 3, 4, 4, generator=generator),
        media.shape[-2:],
        mode="bilinear",
    )
    direction = (coarse.view(media.shape) + torch.randn(media.shape, generator=generator)).to(media)
    expected = float((slope * direction).double().sum())
    errors = []  # relative, of the steps that fp32 resolves
    for step in STEPS:
        with torch.no_grad():
            high, low = (function(media + sign * step * direction).double() for sign in (1, -1))
        found = float((high - low).sum()) / (2 * step)
        size, rounding = (
            max(abs(found), abs(expected), 1e-30),
            2**-22 * float(high.abs().sum()) / step,
        )
        errors += [abs(found - expected) / size] if rounding < 0.05 * size else []
    if not errors:
        return (
            "note",
            None,
            "finite and not zero; the score is too flat for a finite difference in fp32",
        )
    return (
        "ok" if min(errors) <= 0.05 else "fail",
        min(errors),
        "relative difference to a finite difference along a random direction",
    )
