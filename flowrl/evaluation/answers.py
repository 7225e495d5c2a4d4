"""Answers of checklists about the pictures that an evaluation shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flowrl.data.prompts import Prompts, meta_rows
from flowrl.report.answers import Answers
from flowrl.rewards import RewardSet
from flowrl.rewards.core.domains import is_asked


def answers_about(
    rewards: RewardSet,
    pictures: Tensor,
    prompts: Prompts,
    which: Sequence[int],
    shown: Mapping[int, int],
) -> Answers:
    """Keep the newest answers of checklists about pictures (n, ...) of prompts[i] for i in `which`.

    The form is that of a row of evaluation.json. shown: row -> number of the image, for those that
    are kept. No question is asked again; of a chunk in which a check broke down nothing is kept.
    """
    checklists = {label: reward for label, reward in rewards.rewards.items() if reward.answers}
    if not checklists or not shown:
        return {}
    # pictures that are not finite were shown to no reward
    rows = torch.nonzero(pictures.flatten(1).isfinite().all(1).cpu()).flatten()
    out: Answers = {}
    for label, reward in checklists.items():
        # a reward with domains was asked about their pictures alone
        own = [i for i in rows.tolist() if is_asked(rewards, label, prompts[which[i]])]
        if not own:
            continue
        scored = pictures[torch.tensor(own, device=pictures.device)]
        texts, context = meta_rows(prompts, [which[i] for i in own], scored)
        answers = reward.told(scored, context)
        entries = zip(own, texts, answers or (), strict=answers is not None)
        out[label] = [
            {"image": shown[row], "prompt": text, "said": own}
            for row, text, own in entries
            if row in shown
        ]
    return out


def joined(parts: Iterable[Answers]) -> Answers:
    """Join the answers of several chunks, sorted by the number of the image."""
    out: Answers = {}
    for part in parts:
        for label, entries in part.items():
            out[label] = sorted(out.get(label, []) + entries, key=lambda entry: entry["image"])
    return out
