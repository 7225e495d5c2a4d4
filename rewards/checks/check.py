"""Contract tests of a reward, shipped to users: what can be known about it before GPU hours are
spent on climbing it.

Each canary asks one question and answers with findings. fail: the contract is broken, or right is
told from wrong worse than by chance. warn: training will find this too. note: a number to know.
Pictures whose truth is known come from rewards/checks/examples.py; canaries of order are in
rewards/checks/order.py, those of changed pictures in rewards/checks/attacks.py.

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
from torch import Tensor

from flowrl.rewards import Reward, RewardBug, RewardSet
from flowrl.rewards.checks.attacks import attacked, frame_order, mirror, videos
from flowrl.rewards.checks.contract import (
    FEW,
    batch_mates,
    contract,
    determinism,
    gradient,
    own_noise,
    reach,
    replies,
    spread,
)
from flowrl.rewards.checks.examples import Specimen
from flowrl.rewards.checks.order import grouped, in_groups, right_picture, right_prompt, swap_matrix
from flowrl.rewards.checks.subject import Finding, Trial, specimens_of
from flowrl.types import MediaContext

GROUPS = 6  # of a reward that compares their members


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
