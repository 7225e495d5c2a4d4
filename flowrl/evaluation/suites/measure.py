"""Sampling and scoring for evaluation suites: every prompt several times, chunk by chunk.

Pictures are dropped as soon as they are scored. A journal keeps the results of each chunk, so an
evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.data.prompts import Prompts
from flowrl.evaluation.answers import joined
from flowrl.evaluation.held_out import Evaluator, Sampling, spread_rows
from flowrl.policy import Policy
from flowrl.report.answers import Answers
from flowrl.rewards import Reward, RewardSet, RewardUnavailable
from flowrl.rewards.checklist import YES, Checklist
from flowrl.rewards.core.pictures import frames_of
from flowrl.rewards.networks.clip import TwoTowers
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import Progress
from flowrl.runtime.store import files, lines
from flowrl.samplers import keys
from flowrl.types import MediaContext

CHUNK = 256  # images sampled at a time; more only where one prompt has more
THUMB = 16  # pixels a side of the thumbnails that diversity compares
# beginning of the name of a checklist's part: share of yes to the questions of one dimension
DIMENSION = "dimension/"

Features = dict[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Readings of n images of each of P prompts, all sampled in one way."""

    values: dict[str, np.ndarray]  # reading -> (P, n), NaN where scoring failed
    diversity: dict[str, np.ndarray]  # kind -> (P,) mean distance of each prompt's images
    nfe: int  # network rows an image, guidance branches included
    guidance: float | str = "none"  # guidance, as in `Sampling`
    rlg: float = 1.0  # weight of RLG, as in `Sampling`
    # answers of checklists about the first image of a few prompts; "image" is the prompt's place
    answers: Answers = field(default_factory=dict)


@torch.no_grad()
def measure(
    policy: Policy,
    prompts: Prompts,
    rewards: RewardSet,
    sampling: Sampling,
    *,
    images: int,
    journal: MeasureJournal | None = None,
    setting: str = "",
) -> Measured:
    """Sample and score `images` pictures of each prompt under the view that is active.

    Image k of prompt p has the noise of (seed, p, k). setting: the name of this row in the journal.
    """
    ledger, journal = Ledger(policy.device), journal or MeasureJournal()
    policy.say_cut(prompt["prompt"] for prompt in prompts)
    evaluator = Evaluator(
        policy=policy, prompts=prompts, rewards=rewards, how=sampling, ledger=ledger
    )
    features, world, chunks = features_of(rewards, images), sampling.world, _chunks(prompts, images)
    # only the main process has a journal
    known = world.from_main(journal.of(setting))
    left = [which for which in chunks if which.start not in known]
    with Progress(len(prompts), title=setting or "evaluate", show=world.main) as bar:
        for start in range(0, len(left), world.size):  # each process takes one chunk
            part, mine = None, left[start + world.rank :][:1]
            with world.all_or_none(RewardUnavailable):
                part = _chunk(evaluator, mine[0], images, features) if mine else None
            for which, made in zip(left[start:], world.collect(part), strict=False):
                known[which.start] = made
                journal.put(setting, which.start, made)
                bar.update(which.stop)
    parts = [(which, known[which.start]) for which in chunks]
    return Measured(
        values=_columns(parts, "values", (len(prompts), images)),
        diversity=_columns(parts, "diversity", (len(prompts),)),
        nfe=sum(part["calls"] for _, part in parts) // (len(prompts) * images),
        guidance=sampling.guidance,
        rlg=sampling.rlg,
        answers=joined(part["answers"] for _, part in parts),
    )


def _chunks(prompts: Prompts, images: int) -> list[range]:
    """Places of the prompts whose images are sampled together."""
    each = max(1, CHUNK // images)
    count = len(prompts)
    return [range(start, min(start + each, count)) for start in range(0, count, each)]


def _columns(
    parts: list[tuple[range, dict[str, Any]]], key: str, shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    """Put the rows of all chunks together into arrays of a shape.

    A reading that a chunk does not have (a dimension of other prompts) is NaN there.
    """
    out: dict[str, np.ndarray] = {}
    for which, part in parts:
        for name, rows in part[key].items():
            column = out.setdefault(name, np.full(shape, np.nan))
            column[which.start : which.stop] = rows
    return out


def _chunk(evaluator: Evaluator, which: range, images: int, features: Features) -> dict[str, Any]:
    """Sample and score a chunk of prompts, as JSON holds it -> {"values": reading -> (prompts of
    the chunk, images), "diversity": kind -> (prompts of the chunk), "calls", "answers"}."""
    ids = [p for p in which for _ in range(images)]
    number = torch.arange(images).repeat(len(which))
    noise = keys.key(evaluator.how.seed, "suite", torch.tensor(ids), number)
    # answers are kept about the first image of prompts that are spread over the suite
    chosen = spread_rows(len(evaluator.prompts), len(evaluator.prompts))
    shown = {place * images: p for place, p in enumerate(which) if p in chosen}
    found = evaluator.scored(ids, noise, shown, features)
    readings = {name: value for name, value in found.values.items() if name != "total"}
    return {
        "values": {name: value.view(-1, images).tolist() for name, value in readings.items()},
        "diversity": {
            kind: [spread(kind, rows).item() for rows in vectors.split(images)]
            for kind, vectors in found.vectors.items()
        },
        "calls": found.calls,
        "answers": found.answers,
    }


# ---------------------------------------------------------------------------
# diversity


def features_of(rewards: RewardSet, images: int) -> Features:
    """Choose the features, media -> (n, d), on which distances between a prompt's images are
    measured: thumbnails, and embeddings of the first CLIP, if any."""
    if images < 2:
        return {}
    out: Features = {"pixels": thumbnails}
    for label, reward in rewards.rewards.items():
        if isinstance(reward, TwoTowers):
            return out | {label: _embedding_of(reward)}
    return out


def thumbnails(media: Tensor) -> Tensor:
    """Reduce every frame to 16 x 16: (n, 3, H, W) or (n, F, 3, H, W) -> (n, d)."""
    return F.adaptive_avg_pool2d(frames_of(media), THUMB).reshape(len(media), -1)


def _embedding_of(reward: TwoTowers) -> Callable[[Tensor], Tensor]:
    def embed(media: Tensor) -> Tensor:
        vectors = reward.pictures(frames_of(media))
        return F.normalize(vectors.view(len(media), -1, vectors.shape[-1]).mean(1), dim=-1)

    return embed


def spread(kind: str, vectors: Tensor) -> Tensor:
    """The mean distance over the pairs of (n, d): the root mean square difference of pixels, and
    1 - cosine of embeddings."""
    distance = torch.pdist(vectors)
    if kind == "pixels":
        return (distance / vectors.shape[1] ** 0.5).mean()
    return (distance**2 / 2).mean()


# ---------------------------------------------------------------------------
# checklists


class ByDimension(Checklist):
    """A checklist that also reads the share of yes to each "dimension" of questions, before a
    parent's no zeroes any of them (DPG-Bench, UniGenBench)."""

    def __init__(self, loaded: Checklist):
        self.__dict__.update(vars(loaded))  # shares the judge of the loaded checklist

    def parts(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> dict[str, Tensor]:
        out = super().parts(media, prompts, context)
        assert context is not None and context.meta is not None
        unasked = torch.full((len(prompts),), float("nan"), device=media.device)
        for i, (meta, answers) in enumerate(zip(context.meta, self.last_answers, strict=True)):
            for name, share in self._shares(meta, answers).items():
                out.setdefault(DIMENSION + name, unasked.clone())[i] = share
        return out

    def _shares(self, meta: dict[str, Any], answers: Sequence[float]) -> dict[str, float]:
        """Dimension -> share of yes; NaN where a check failed."""
        by_name: dict[str, list[float]] = {}
        for question, answer in zip(self.questions(meta), answers, strict=True):
            yes = answer if math.isnan(answer) else float(answer >= YES)
            by_name.setdefault(question["dimension"], []).append(yes)
        return {name: sum(own) / len(own) for name, own in by_name.items()}


def by_dimension(rewards: RewardSet) -> RewardSet:
    """The set with its checklists read by dimension."""
    read: dict[str, Reward] = {
        k: ByDimension(r) if isinstance(r, Checklist) else r for k, r in rewards.rewards.items()
    }
    return replace(rewards, rewards=read)


# ---------------------------------------------------------------------------
# journal


class MeasureJournal:
    """Results of an evaluation so far: a file with one line a chunk, after a line with its key.

    Without a path nothing is kept. A line that was cut short is dropped.
    """

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        """key: names what is measured and how; a file with another key is begun anew."""
        self.path, begun = path, {"key": key}
        self.rows: list[dict[str, Any]] = []
        if path is not None:
            first, *self.rows = [line.row for line in lines.read(path) if line.row] or [{}]
            if first != begun:
                self.rows = []
                files.write(path, json.dumps(begun) + "\n")

    def of(self, setting: str) -> dict[int, dict[str, Any]]:
        """The chunks of a setting that were measured, by the place of their first prompt."""
        return {row["start"]: row["part"] for row in self.rows if row["setting"] == setting}

    def put(self, setting: str, start: int, part: dict[str, Any]) -> None:
        if self.path is not None:
            lines.append(self.path, [{"setting": setting, "start": start, "part": part}])

    def close(self) -> None:
        """Remove the file: the evaluation is finished and written elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
