"""Contract tests of a reward, shipped to users: what can be known about it before GPU hours are
spent on climbing it.

Each canary asks one question and answers with findings. fail: the contract is broken, or right is
told from wrong worse than by chance. warn: training will find this too. note: a number to know.
Pictures whose truth is known come from flowrl/specimens.py; canaries of order are in
flowrl/ordering.py, those of changed pictures in flowrl/tampering.py.

The reward's own noise is the standard deviation of the change of its score under re-encodings that
nobody can see. Where scores of a group differ by less, advantages divided by that spread are mostly
noise: with a true spread s and noise n they correlate by s / sqrt(s^2 + n^2) with the true ones,
0.1 at s = n / 10 (0.09 in groups of 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.ordering import grouped, in_groups, right_picture, right_prompt, swap_matrix
from flowrl.rewards import Reward, RewardBug, RewardSet
from flowrl.specimens import RECODINGS, Specimen, context_of
from flowrl.tampering import attacked, frame_order, mirror, videos
from flowrl.trial import ROUNDING, Finding, Trial, Verdict, deviation, gap, middle, specimens_of
from flowrl.types import MediaContext

FEW = 8  # specimens that the cheap canaries score
GROUPS = 6  # of a reward that compares their members
REPLIES = ("", " ", ".", "...", "!?", "**", "-", "\n\n")  # of a judge that said nothing
STEPS = (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)  # of finite differences, in pixels of [0, 1]


def check(
    reward: Reward | Callable[..., Tensor],
    specimens: Sequence[Specimen],
    *,
    cheap: bool = False,
    device: torch.device | str | None = None,
) -> list[Finding]:
    """Try a reward on specimens. cheap: contract, determinism, batch mates and noise only, on a
    few. device: default CUDA, if any."""
    if len(specimens) < 2:
        raise ValueError(
            f"{len(specimens)} specimens: a reward is compared over pictures; give at least 2"
        )
    trial = Trial(reward, specimens, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    first: list[Callable[[Trial], list[Finding]]] = [determinism, batch_mates]
    last = [replies, own_noise, reach, spread]
    if cheap:
        trial.specimens = trial.specimens[:FEW]
        return _asked(trial, [*first, own_noise])
    if trial.together:
        trial.specimens, trial.kinds = grouped(trial.specimens[:GROUPS])
        return _asked(trial, [*first, gradient, in_groups, *last])
    order = [
        right_prompt,
        right_picture,
        swap_matrix,
    ]  # right_prompt finds out whether the prompt is read
    return _asked(trial, [*first, videos, gradient, *order, mirror, attacked, frame_order, *last])


def _asked(trial: Trial, canaries: Sequence[Callable[[Trial], list[Finding]]]) -> list[Finding]:
    """Findings in order. Without scores, or with scores that depend on their batch, nothing else
    can be said."""
    out = contract(trial)
    for canary in canaries:
        if out[-1].verdict == "fail" and out[-1].name in ("contract", "batch mates"):
            break
        out += canary(trial)
    return out


def failed(findings: Iterable[Finding]) -> bool:
    """Whether a check ends with exit code 1."""
    return any(finding.verdict == "fail" for finding in findings)


# ---------------------------------------------------------------------------
# canaries


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


# ---------------------------------------------------------------------------
# training


def noise(
    reward: Reward,
    media: Tensor,
    prompts: list[str],
    context: MediaContext | None = None,
    *,
    rounds: int = 3,
) -> float:
    """The reward's own noise, in units of its score: standard deviation of the change under
    imperceptible re-encodings.

    media: (B, 3, H, W) or (B, F, 3, H, W), B >= 2; a shift that all samples share is no noise, as
    it moves no advantage. rounds: each scores all samples once, re-encoded in one of RECODINGS'
    ways.
    """
    return Trial(reward, specimens_of(media, prompts, context), media.device).noise_of(rounds)


def group_spread(scores: Tensor, group: Tensor) -> float:
    """Root mean square of the standard deviations (n - 1) of scores (B,) within groups (B,); 0
    without any.

    Groups without a difference teach nothing and are left out.
    """
    members = [scores[group == g].double() for g in group.unique()]
    members = [m[m.isfinite()] for m in members]
    variances = [float(m.var()) for m in members if len(m) > 1 and float(m.max()) > float(m.min())]
    return math.sqrt(sum(variances) / len(variances)) if variances else 0.0


def spread_warning(label: str, noise: float, spread: float) -> str | None:
    """A sentence where scores within a group (standard deviation `spread`) differ by less than the
    reward's own noise; else None.

    noise is of a change, so of two scores: one score has noise^2 / 2 of its variance, and what is
    left of spread^2 is the true one's.
    """
    if spread >= noise:
        return None
    true = 1 - (noise / spread) ** 2 / 2 if spread else 0.0
    return (
        f'reward "{label}": scores within a group differ by {spread:.3g} (standard deviation), and'
        f" the score of one picture moves by {noise:.3g} under re-encodings that nobody sees;"
        f" advantages divided by that spread correlate by about {math.sqrt(max(0.0, true)):.2f}"
        " with the true ones. Let samples of a prompt differ more (sampler.eta,"
        " sampler.init_noise), or take another reward"
    )


def below_noise(
    noise: Mapping[str, float], scored: Mapping[str, Tensor], group: Tensor
) -> dict[str, str]:
    """label -> `spread_warning`, where there is one. noise: of each reward; scored: label -> raw
    scores (B,) of samples in groups (B,).

    Groups that are all flat train nothing, so they say nothing of later ones.
    """
    spread = {label: group_spread(scored[label].cpu(), group.cpu()) for label in noise}
    said = {
        label: spread_warning(label, noise[label], value)
        for label, value in spread.items()
        if value
    }
    return {label: sentence for label, sentence in said.items() if sentence}


def before_training(
    rewards: RewardSet, media: Tensor, prompts: list[str], context: MediaContext
) -> tuple[list[str], dict[str, float]]:
    """The cheap canaries of every reward that is trained on -> sentences to warn with, and each
    reward's own noise by label.

    RewardBug where a reward breaks its contract or batch mates change a score. media, prompts,
    context: samples of the run's first iteration; FEW of them are scored about six times.
    """
    said: list[str] = []
    noise: dict[str, float] = {}
    for label, reward in rewards.rewards.items():
        specimens = specimens_of(media[:FEW], prompts[:FEW], context)
        if "group" in reward.needs:  # those that are not alone in theirs
            groups = [int(s.columns["group"]) for s in specimens]
            specimens = [s for s, g in zip(specimens, groups, strict=True) if groups.count(g) > 1]
        if not rewards.weights[label] or len(specimens) < 2:
            continue
        found = {f.name: f for f in check(reward, specimens, cheap=True, device=media.device)}
        if found["contract"].verdict == "fail" and found["contract"].value is None:
            raise RewardBug(f'reward "{label}": {found["contract"].says}')
        if "batch mates" not in found:  # none could be scored: the loop counts them
            continue
        if found["batch mates"].verdict == "fail":
            raise RewardBug(
                f'reward "{label}": {found["batch mates"].says}; a score may depend on nothing but'
                " its sample and its context"
            )
        if found["determinism"].verdict == "fail":
            said.append(
                f'reward "{label}": {found["determinism"].says}; what differs is noise in every'
                " advantage"
            )
        noise[label] = found["noise"].value or 0.0
    return said, noise


# ---------------------------------------------------------------------------
# output


def table(findings: Iterable[Finding]) -> Any:
    """Canary, verdict, number and sentence, for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "fail": "bold red", "warn": "yellow", "note": "dim"}
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("canary")
    out.add_column("verdict")
    out.add_column("value", justify="right")
    out.add_column("", overflow="fold")
    for f in findings:
        value = "" if f.value is None else f"{f.value:.4g}"
        out.add_row(Text(f.name), Text(f.verdict, style=styles[f.verdict]), value, Text(f.says))
    return out
