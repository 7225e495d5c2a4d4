"""Canaries of order: does a reward put right above wrong? Pictures under close prompts, close
pictures under a prompt, members of a group.

All pairs differ in one attribute, so a number says which attribute a reward is blind to. A share of
right orders fails where a sign test excludes chance from the wrong side, and is warned of below
0.75.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.rewards.checks.examples import Specimen
from flowrl.rewards.checks.pictures import attacks
from flowrl.rewards.checks.subject import Finding, Trial, Verdict, gap
from flowrl.types import replace

CHANCE, GOOD = 0.05, 0.75


def right_prompt(trial: Trial) -> list[Finding]:
    """Each picture under its prompt and under wrong ones; also whether the prompt is read at
    all."""
    pairs = [(row, foil) for row, specimen in enumerate(trial.specimens) for foil in specimen.foils]
    if not pairs:
        trial.reads_prompt = False
        return [
            Finding(
                name="right prompt",
                verdict="note",
                says="no wrong prompts to compare with: give pictures of several prompts",
            )
        ]
    right = trial.honest[[row for row, _ in pairs]]
    wrong = trial.scores(
        [trial.specimens[row].under(foil.prompt, foil.meta) for row, foil in pairs]
    )
    if gap(right, wrong) <= trial.rounding:
        trial.reads_prompt = False
        if trial.reward.reads_prompt or trial.reward.reads:
            says = (
                f"it says that it reads the prompt, and scores all {len(pairs)} wrong prompts as"
                " the right ones"
            )
            return [Finding(name="right prompt", verdict="fail", value=0.5, says=says)]
        return [
            Finding(
                name="right prompt", verdict="note", says="the score does not depend on the prompt"
            )
        ]
    out = []
    for attribute in dict.fromkeys(foil.attribute for _, foil in pairs):
        rows = [i for i, (_, foil) in enumerate(pairs) if foil.attribute == attribute]
        out.append(
            order(
                f"right prompt, {attribute}",
                right[rows],
                wrong[rows],
                trial.rounding,
                "its own prompt above a wrong one",
            )
        )
    return out + rates(trial.honest, wrong)


def order(name: str, right: Tensor, wrong: Tensor, rounding: float, what: str) -> Finding:
    """Share of pairs (n,) and (n,) in which right is above wrong, a tie for half; the sign test is
    on pairs that are no tie."""
    difference = (right - wrong)[(right - wrong).isfinite()]
    count, won, lost = (
        len(difference),
        int((difference > rounding).sum()),
        int((difference < -rounding).sum()),
    )
    if not count:
        return Finding(name=name, verdict="warn", says="none of the pairs could be scored")
    ties = count - won - lost
    share = (won + ties / 2) / count
    by_chance = sum(math.comb(won + lost, k) for k in range(won + 1)) / 2 ** (won + lost)
    verdict: Verdict = (
        "fail" if won < lost and by_chance < CHANCE else "warn" if share < GOOD else "ok"
    )
    return Finding(
        name=name,
        verdict=verdict,
        value=share,
        says=f"{what} in {won} of {count}{f' ({ties} ties)' if ties else ''}",
    )


def rates(right: Tensor, wrong: Tensor) -> list[Finding]:
    """False positives and negatives where one threshold, the best there is (Youden's), tells right
    prompts (n,) from wrong ones (m,)."""
    right, wrong = right[right.isfinite()].double(), wrong[wrong.isfinite()].double()
    levels = torch.cat([right, wrong]).unique()
    if len(levels) < 2:
        return []
    area = float(
        ((right[:, None] > wrong).double() + (right[:, None] == wrong).double() / 2).mean()
    )
    thresholds = (levels[1:] + levels[:-1]) / 2
    passed, missed = (
        (wrong[:, None] > thresholds).double().mean(0),
        (right[:, None] < thresholds).double().mean(0),
    )
    best = int((passed + missed).argmin())
    says = (
        f"AUC over all pictures and prompts; at the best threshold, {float(thresholds[best]):.3g},"
        f" {float(passed[best]):.0%} of the wrong prompts pass and {float(missed[best]):.0%} of the"
        " right ones do not"
    )
    return [
        Finding(
            name="false positives and negatives",
            verdict="ok" if area >= GOOD else "warn",
            value=area,
            says=says,
        )
    ]


def right_picture(trial: Trial) -> list[Finding]:
    """Each picture against pictures of its wrong prompts, under its own prompt: what the members of
    a group are to each other."""
    if not trial.reads_prompt:
        return []
    pairs = [(row, foil) for row, s in enumerate(trial.specimens) for foil in s.foils]
    wrong = trial.scores([replace(trial.specimens[row], media=foil.media) for row, foil in pairs])
    right = trial.honest[[row for row, _ in pairs]]
    return [
        order(
            "right picture",
            right,
            wrong,
            trial.rounding,
            "a picture of the prompt above one of a wrong prompt",
        )
    ]


def swap_matrix(trial: Trial) -> list[Finding]:
    """k close prompts and their pictures, each picture under each prompt: is the diagonal the
    highest of its row and of its column?"""
    if not trial.reads_prompt:
        return []
    own = max(trial.specimens, key=lambda s: len({foil.prompt for foil in s.foils}))
    near = {
        foil.prompt: foil for foil in own.foils
    }.values()  # files may hold a prompt several times
    members = [own, *(replace(own, media=f.media, prompt=f.prompt, meta=f.meta) for f in near)]
    k = len(members)
    matrix = trial.scores(
        [picture.under(other.prompt, other.meta) for picture in members for other in members]
    ).view(k, k)
    over_row = (matrix - matrix.diagonal()[:, None]).fill_diagonal_(-math.inf).nan_to_num(-math.inf)
    over_column = (matrix - matrix.diagonal()).fill_diagonal_(-math.inf).nan_to_num(-math.inf)
    rows, columns = int((over_row.amax(1) < 0).sum()), int((over_column.amax(0) < 0).sum())
    i, j = divmod(int(over_row.argmax()), k)
    share = (rows + columns) / (2 * k)
    says = (
        f"of {k} close prompts and their pictures, the right prompt comes first for {rows} pictures"
        f" and the right picture for {columns} "
        f'prompts; nearest: the picture of "{members[i].prompt}" gets {float(matrix[i, i]):.3g},'
        f" and {float(matrix[i, j]):.3g} as "
        f'"{members[j].prompt}"'
    )
    return [
        Finding(
            name="prompt-swap matrix",
            verdict="ok" if share >= GOOD else "warn",
            value=share,
            says=says,
        )
    ]


def grouped(specimens: Sequence[Specimen]) -> tuple[list[Specimen], list[str]]:
    """Each picture with near misses and attacks as a group under its prompt -> the members, and
    what each is (`Trial.kinds`)."""
    members, kinds = [], []
    for number, s in enumerate(specimens):
        rivals = {"right": s.media} | {foil.attribute: foil.media for foil in s.foils}
        rivals |= {f"attack: {name}": media for name, media in attacks(s.media, s.prompt).items()}
        members += [
            replace(s, media=media, columns={**s.columns, "group": torch.tensor(number)})
            for media in rivals.values()
        ]
        kinds += list(rivals)
    return members, kinds


def in_groups(trial: Trial) -> list[Finding]:
    """Of a reward that compares the members of a group: does the right picture win against near
    misses, and against attacks?"""
    out, kinds = [], trial.kinds
    groups = torch.tensor([int(s.columns["group"]) for s in trial.specimens])
    right = trial.honest[[row for row, kind in enumerate(kinds) if kind == "right"]]
    for kind in dict.fromkeys(kinds):
        rows = [row for row, k in enumerate(kinds) if k == kind]
        own, rival = right[groups[rows]], trial.honest[rows]
        if kind.startswith("attack: "):
            beaten = float((rival > own + trial.rounding).double().mean())
            says = f"wins against the right picture in {beaten:.0%} of the groups"
            bad = trial.blame(kind.removeprefix("attack: "))
            out.append(
                Finding(name=kind, verdict=bad if beaten > 0.5 else "ok", value=beaten, says=says)
            )
        elif kind != "right" and (trial.reward.reads_prompt or trial.reward.reads):
            out.append(
                order(
                    f"right picture, {kind}",
                    own,
                    rival,
                    trial.rounding,
                    "the right picture above one of a wrong prompt",
                )
            )
    return out
