"""Checks of order: does a reward put right above wrong? Pictures under close prompts, close
pictures under a prompt, members of a group.

All pairs differ in one attribute, so a number says which attribute a reward is blind to. The check
fails where a sign test shows that fewer pairs are in the right order than chance would give. A
share below 0.75 fails if the reward declares that it verifies the attribute, and else gives a
warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flowrl.rewards import Reward
from flowrl.rewards.checks.examples import Example, NearMiss
from flowrl.rewards.checks.pictures import attacks
from flowrl.rewards.checks.subject import Finding, Subject, Verdict, gap

CHANCE, GOOD = 0.05, 0.75


def right_prompt(subject: Subject) -> list[Finding]:
    """Compare each picture under its prompt and under wrong ones; also find whether the prompt is
    read."""
    pairs = _pairs(subject)
    if not pairs:
        subject.reads_prompt = False
        says = "no wrong prompts to compare with: give pictures of several prompts"
        return [Finding(name="right prompt", verdict="note", says=says)]
    right = subject.honest[[row for row, _ in pairs]]
    wrong = subject.scores(
        [subject.examples[row].under(miss.prompt, miss.meta) for row, miss in pairs]
    )
    if gap(right, wrong) <= subject.rounding:
        subject.reads_prompt = False
        return [_unread(subject, len(pairs))]
    what, out = "its own prompt above a wrong one", []
    for attribute in dict.fromkeys(miss.attribute for _, miss in pairs):
        rows = [i for i, (_, miss) in enumerate(pairs) if miss.attribute == attribute]
        name = f"right prompt, {attribute}"
        verdict = subject.blind(attribute)
        out.append(in_order(name, right[rows], wrong[rows], subject.rounding, what, verdict))
    return out + rates(subject.honest, wrong)


def _pairs(subject: Subject) -> list[tuple[int, NearMiss]]:
    """All pairs (row of an example, one of its near misses)."""
    return [(row, miss) for row, s in enumerate(subject.examples) for miss in s.near_misses]


def _unread(subject: Subject, count: int) -> Finding:
    """Report that the prompt changes no score, a fault if the reward says that it reads the
    prompt."""
    if not _reads(subject.reward):
        says = "the score does not depend on the prompt"
        return Finding(name="right prompt", verdict="note", says=says)
    says = (
        f"it says that it reads the prompt, and scores all {count} wrong prompts as the right ones"
    )
    return Finding(name="right prompt", verdict="fail", value=0.5, says=says)


def _reads(reward: Reward) -> bool:
    """Whether the reward declares in any way that prompts matter to it."""
    return bool(reward.reads_prompt or reward.reads or reward.verifies)


def in_order(
    name: str, right: Tensor, wrong: Tensor, rounding: float, what: str, below: Verdict = "warn"
) -> Finding:
    """Share of pairs (n,) and (n,) in which right is above wrong; a tie counts 1/2.

    The sign test reads the pairs that are not ties. below: the verdict on a share under 0.75.
    """
    difference = (right - wrong)[(right - wrong).isfinite()]
    count = len(difference)
    won, lost = int((difference > rounding).sum()), int((difference < -rounding).sum())
    if not count:
        return Finding(name=name, verdict=below, says="none of the pairs could be scored")
    ties = count - won - lost
    share = (won + ties / 2) / count
    by_chance = sum(math.comb(won + lost, k) for k in range(won + 1)) / 2 ** (won + lost)
    verdict: Verdict = below if share < GOOD else "ok"
    if won < lost and by_chance < CHANCE:
        verdict = "fail"
    says = f"{what} in {won} of {count}{f' ({ties} ties)' if ties else ''}"
    return Finding(name=name, verdict=verdict, value=share, says=says)


def rates(right: Tensor, wrong: Tensor) -> list[Finding]:
    """Rates of false positives and negatives when the best threshold (Youden's) separates scores of
    right prompts (n,) from scores of wrong ones (m,)."""
    right, wrong = right[right.isfinite()].double(), wrong[wrong.isfinite()].double()
    levels = torch.cat([right, wrong]).unique()
    if len(levels) < 2:
        return []
    above, ties = (right[:, None] > wrong).double(), (right[:, None] == wrong).double()
    area = float((above + ties / 2).mean())
    thresholds = (levels[1:] + levels[:-1]) / 2
    passed = (wrong[:, None] > thresholds).double().mean(0)
    missed = (right[:, None] < thresholds).double().mean(0)
    best = int((passed + missed).argmin())
    says = (
        f"AUC over all pictures and prompts; at the best threshold, {float(thresholds[best]):.3g},"
        f" {float(passed[best]):.0%} of the wrong prompts pass and {float(missed[best]):.0%} of the"
        " right ones do not"
    )
    verdict: Verdict = "ok" if area >= GOOD else "warn"
    return [Finding(name="false positives and negatives", verdict=verdict, value=area, says=says)]


def right_picture(subject: Subject) -> list[Finding]:
    """Compare each picture with pictures of its wrong prompts, under its own prompt, as training
    compares the members of a group."""
    if not subject.reads_prompt:
        return []
    pairs = _pairs(subject)
    wrong = subject.scores(
        [replace(subject.examples[row], media=miss.media) for row, miss in pairs]
    )
    right = subject.honest[[row for row, _ in pairs]]
    if gap(right, wrong) <= subject.rounding:
        says = f"all {len(pairs)} pictures of wrong prompts score as those of the right ones"
        return [Finding(name="right picture", verdict="fail", value=0.5, says=says)]
    what = "a picture of the prompt above one of a wrong prompt"
    verdict = subject.blind(*(miss.attribute for _, miss in pairs))
    return [in_order("right picture", right, wrong, subject.rounding, what, verdict)]


def swap_matrix(subject: Subject) -> list[Finding]:
    """Score k close prompts and their pictures, each picture under each prompt, and test whether
    the diagonal is the highest of its row and of its column."""
    if not subject.reads_prompt:
        return []
    members = _close_prompts(subject)
    k = len(members)
    every = [picture.under(other.prompt, other.meta) for picture in members for other in members]
    matrix = subject.scores(every).view(k, k)
    diagonal = matrix.diagonal()
    over_row, over_column = _over(matrix, diagonal[:, None]), _over(matrix, diagonal)
    rows, columns = int((over_row.amax(1) < 0).sum()), int((over_column.amax(0) < 0).sum())
    share = (rows + columns) / (2 * k)
    i, j = divmod(int(over_row.argmax()), k)
    says = (
        f"of {k} close prompts and their pictures, the right prompt comes first for {rows} pictures"
        f" and the right picture for {columns} prompts; nearest: the picture of"
        f' "{members[i].prompt}" gets {float(matrix[i, i]):.3g}, and {float(matrix[i, j]):.3g} as'
        f' "{members[j].prompt}"'
    )
    verdict: Verdict = "ok" if share >= GOOD else "warn"
    return [Finding(name="prompt-swap matrix", verdict=verdict, value=share, says=says)]


def _close_prompts(subject: Subject) -> list[Example]:
    """The example with the most wrong prompts, and each of these with its picture, once."""
    own = max(subject.examples, key=lambda s: len({miss.prompt for miss in s.near_misses}))
    # a dict, because files may hold a prompt several times
    near = {miss.prompt: miss for miss in own.near_misses}
    others = [replace(own, media=m.media, prompt=m.prompt, meta=m.meta) for m in near.values()]
    return [own, *others]


def _over(matrix: Tensor, own: Tensor) -> Tensor:
    """How far each score is above `own`; the lowest number on the diagonal and for failed
    scores."""
    return (matrix - own).fill_diagonal_(-math.inf).nan_to_num(-math.inf)


def grouped(examples: Sequence[Example]) -> tuple[list[Example], list[str]]:
    """Make each picture, its near misses and attacks a group under its prompt -> the members, and
    the kind of each (`Subject.kinds`)."""
    members, kinds = [], []
    for number, s in enumerate(examples):
        rivals = {"right": s.media} | {miss.attribute: miss.media for miss in s.near_misses}
        rivals |= {f"attack: {name}": media for name, media in attacks(s.media, s.prompt).items()}
        columns = {**s.columns, "group": torch.tensor(number)}
        members += [replace(s, media=media, columns=columns) for media in rivals.values()]
        kinds += list(rivals)
    return members, kinds


def in_groups(subject: Subject) -> list[Finding]:
    """Check whether the right picture wins against near misses and attacks, for a reward that
    compares the members of a group."""
    out, kinds = [], subject.kinds
    groups = torch.tensor([int(s.columns["group"]) for s in subject.examples])
    right = subject.honest[[row for row, kind in enumerate(kinds) if kind == "right"]]
    what = "the right picture above one of a wrong prompt"
    for kind in dict.fromkeys(kinds):
        rows = [row for row, k in enumerate(kinds) if k == kind]
        own, rival = right[groups[rows]], subject.honest[rows]
        if kind.startswith("attack: "):
            out.append(_attack_in_groups(subject, kind, own, rival))
        elif kind != "right" and _reads(subject.reward):
            name = f"right picture, {kind}"
            out.append(in_order(name, own, rival, subject.rounding, what, subject.blind(kind)))
    return out


def _attack_in_groups(subject: Subject, kind: str, own: Tensor, rival: Tensor) -> Finding:
    """Count the groups in which an attack (n,) scores above the right picture (n,)."""
    if failed := subject.unscored(rival):
        return Finding(name=kind, verdict="fail", value=math.nan, says=failed)
    beaten = float((rival > own + subject.rounding).double().mean())
    verdict = subject.blame(kind.removeprefix("attack: ")) if beaten > 0.5 else "ok"
    says = f"wins against the right picture in {beaten:.0%} of the groups"
    return Finding(name=kind, verdict=verdict, value=beaten, says=says)
