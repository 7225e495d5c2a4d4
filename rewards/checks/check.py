"""Tests whether a reward can be trusted, before GPU hours are spent on climbing it.

Each check asks one question and answers with findings. fail: the contract is broken, or right is
told from wrong worse than by chance. warn: training will find this too. note: a number to know.
Pictures whose truth is known come from rewards/checks/examples.py; checks of order are in
rewards/checks/order.py, those on changed pictures in rewards/checks/attacks.py.

The reward's own noise is the standard deviation of the change of its score under re-encodings that
nobody can see. Where scores of a group differ by less, advantages divided by that spread are mostly
noise: with a true spread s and noise n they correlate by s / sqrt(s^2 + n^2) with the true ones,
0.1 at s = n / 10 (0.09 in groups of 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from rich import box
from rich.table import Table
from rich.text import Text
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
from flowrl.rewards.checks.examples import Example
from flowrl.rewards.checks.order import grouped, in_groups, right_picture, right_prompt, swap_matrix
from flowrl.rewards.checks.subject import Finding, Subject, examples_of
from flowrl.rewards.core.domains import is_asked
from flowrl.types import MediaContext

Check = Callable[[Subject], list[Finding]]

UNSCORED = (
    "; these are the first samples of the run: correct what the reward is given, or set"
    " guard.check_rewards=false if it is right to score none of them"
)
GROUPS = 6  # number of groups for a reward that compares their members
FIRST: tuple[Check, ...] = (determinism, batch_mates)
LAST: tuple[Check, ...] = (replies, own_noise, reach, spread)
ORDER: tuple[Check, ...] = (  # right_prompt comes first: it finds out whether the prompt is read
    right_prompt,
    right_picture,
    swap_matrix,
)


def check(
    reward: Reward | Callable[..., Tensor],
    examples: Sequence[Example],
    *,
    cheap: bool = False,
    device: torch.device | str | None = None,
) -> list[Finding]:
    """Try a reward on examples.

    cheap: only contract, determinism, batch mates and noise, on a few examples. device: None takes
    CUDA, if there is one.
    """
    if len(examples) < 2:
        raise ValueError(
            f"{len(examples)} examples: a reward is compared over pictures; give at least 2"
        )
    subject = Subject(reward, examples, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if cheap:
        subject.examples = subject.examples[:FEW]
        return _findings(subject, [*FIRST, own_noise])
    if subject.together:
        subject.examples, subject.kinds = grouped(subject.examples[:GROUPS])
        return _findings(subject, [*FIRST, gradient, in_groups, *LAST])
    changed = (mirror, attacked, frame_order)
    return _findings(subject, [*FIRST, videos, gradient, *ORDER, *changed, *LAST])


def _findings(subject: Subject, checks: Sequence[Check]) -> list[Finding]:
    """Findings in order. Without scores, or with scores that depend on their batch, nothing else
    can be said."""
    out = contract(subject)
    for each in checks:
        if out[-1].verdict == "fail" and out[-1].name in ("contract", "batch mates"):
            break
        out += each(subject)
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

    media: (B, 3, H, W) or (B, F, 3, H, W), B >= 2; a shift that all samples share is not noise, as
    it moves no advantage. rounds: each scores all samples once, re-encoded in one of RECODINGS'
    ways.
    """
    return Subject(reward, examples_of(media, prompts, context), media.device).noise_of(rounds)


def group_spread(scores: Tensor, group: Tensor) -> float:
    """Root mean square of the standard deviations (n - 1) of scores (B,) within groups (B,); 0 if
    there are none.

    Groups without a difference teach nothing and are left out.
    """
    members = [scores[group == g].double() for g in group.unique()]
    members = [m[m.isfinite()] for m in members]
    variances = [float(m.var()) for m in members if len(m) > 1 and float(m.max()) > float(m.min())]
    return math.sqrt(sum(variances) / len(variances)) if variances else 0.0


def spread_warning(label: str, noise: float, spread: float) -> str | None:
    """A sentence where scores within a group (standard deviation `spread`) differ by less than the
    reward's own noise; else None.

    noise belongs to a change, so to two scores: noise^2 / 2 of the variance of one score is noise,
    and the rest of spread^2 is true.
    """
    if spread >= noise:
        return None
    true = 1 - (noise / spread) ** 2 / 2 if spread else 0.0
    correlation = math.sqrt(max(0.0, true))
    return (
        f'reward "{label}": scores within a group differ by {spread:.3g} (standard deviation), and'
        f" the score of one picture moves by {noise:.3g} under re-encodings that nobody sees;"
        f" advantages divided by that spread correlate by about {correlation:.2f} with the true"
        " ones. Let samples of a prompt differ more (sampler.eta, sampler.init_noise), or take"
        " another reward"
    )


def below_noise(
    noise: Mapping[str, float], scored: Mapping[str, Tensor], group: Tensor
) -> dict[str, str]:
    """label -> `spread_warning`, where there is one.

    noise: label -> noise of the reward; scored: label -> raw scores (B,) of samples in groups (B,).
    Groups that are all flat train nothing, so they say nothing about later ones.
    """
    out = {}
    for label, own in noise.items():
        spread = group_spread(scored[label].cpu(), group.cpu())
        warning = spread_warning(label, own, spread) if spread else None
        if warning:
            out[label] = warning
    return out


def before_training(
    rewards: RewardSet, media: Tensor, prompts: list[str], context: MediaContext
) -> tuple[list[str], dict[str, float]]:
    """Run the cheap checks of every reward that is trained on -> sentences to warn with, and each
    reward's own noise by label.

    Raises RewardBug where a reward breaks its contract or can score no sample, or where batch mates
    change a score. media, prompts, context: samples of the run's first iteration; FEW of them are
    scored about six times.
    """
    said: list[str] = []
    noise: dict[str, float] = {}
    examples = examples_of(media[:FEW], prompts[:FEW], context)
    for label, reward in rewards.rewards.items():
        own = [s for s in examples if is_asked(rewards, label, s.meta)]
        own = _in_company(own) if "group" in reward.needs else own
        if label not in rewards.weighted or len(own) < 2:
            continue
        found = {f.name: f for f in check(reward, own, cheap=True, device=media.device)}
        _refuse_bugs(label, found)
        if found["determinism"].verdict == "fail":
            why = f"{found['determinism'].says}; what differs is noise in every advantage"
            said.append(f'reward "{label}": {why}')
        noise[label] = found["noise"].value or 0.0
    return said, noise


def _in_company(examples: list[Example]) -> list[Example]:
    """Examples whose group has at least two members."""
    groups = [int(s.columns["group"]) for s in examples]
    return [s for s, group in zip(examples, groups, strict=True) if groups.count(group) > 1]


def _refuse_bugs(label: str, found: Mapping[str, Finding]) -> None:
    """Raise RewardBug where the contract is broken, no sample has a score, or batch mates change
    one."""
    contract = found["contract"]
    if contract.verdict == "fail":
        why = "" if contract.value is None else UNSCORED
        raise RewardBug(f'reward "{label}": {contract.says}{why}')
    if (mates := found["batch mates"]).verdict == "fail":
        raise RewardBug(
            f'reward "{label}": {mates.says}; a score may depend on nothing but its sample and its'
            " context"
        )


def table(findings: Iterable[Finding]) -> Table:
    """Check, verdict, number and sentence, for the terminal."""
    styles = {"ok": "green", "fail": "bold red", "warn": "yellow", "note": "dim"}
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    out.add_column("check")
    out.add_column("verdict")
    out.add_column("value", justify="right")
    out.add_column("", overflow="fold")
    for f in findings:
        value = "" if f.value is None else f"{f.value:.4g}"
        out.add_row(f.name, Text(f.verdict, style=styles[f.verdict]), value, f.says)
    return out
