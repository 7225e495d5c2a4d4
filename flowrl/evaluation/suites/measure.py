"""Sampling and scoring for evaluation suites: every prompt several times, chunk by chunk.

Pictures are dropped as soon as they are scored. What a chunk gave is kept in a journal, so an
evaluation that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
from flowrl.runtime.store import files
from flowrl.samplers import keys
from flowrl.types import MediaContext

CHUNK = 256  # images sampled at a time; more only where one prompt has more
THUMB = 16  # pixels a side of what diversity in pixels compares
# begins the part of a checklist that is the share of yes to one dimension's questions
DIMENSION = "dimension/"

Features = dict[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is known of n images of each prompt.

    values: reading -> (P, n) fp32, NaN where one failed; diversity: kind -> (P,) mean distance
    of a prompt's images; nfe: network rows an image, guidance branches included; answers: of
    checklists, about the first image of a few prompts, whose places are the numbers.
    """

    values: dict[str, Tensor]
    diversity: dict[str, Tensor]
    nfe: int
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
    """`images` pictures of each prompt under the view that is active.

    Image k of prompt p has the noise of (seed, p, k).
    """
    ledger, journal = Ledger(policy.device), journal or MeasureJournal()
    policy.say_cut(prompt["prompt"] for prompt in prompts)
    asked = Evaluator(policy=policy, prompts=prompts, rewards=rewards, how=sampling, ledger=ledger)
    features = features_of(rewards, images)
    world, chunks = sampling.world, _chunks(len(prompts), images)
    known = {which.start: journal.get(setting, which.start) for which in chunks}
    left = [w for w in chunks if not _fits(known[w.start], len(w), images)]
    left = world.told(left)  # the journal is the main process's
    with Progress(len(prompts), title=setting or "evaluate", show=world.main) as bar:
        for start in range(0, len(left), world.size):  # a chunk for each process
            part, own = None, left[start + world.rank :][:1]
            with world.all_or_none(RewardUnavailable):
                part = _chunk(asked, own[0], images, features) if own else None
            for which, made in zip(left[start:], world.collect(part), strict=False):
                known[which.start] = made
                journal.put(setting, which.start, made)
                bar.update(which.stop)
    known = world.told(known)
    parts = [(which, known[which.start]) for which in chunks]
    return Measured(
        values=_joined(parts, "values", (len(prompts), images)),
        diversity=_joined(parts, "diversity", (len(prompts),)),
        nfe=sum(part["calls"] for _, part in parts) // (len(prompts) * images),
        answers=joined(part["answers"] for _, part in parts),
    )


def _chunks(prompts: int, images: int) -> list[range]:
    """Places of the prompts whose images are sampled together."""
    each = max(1, CHUNK // images)
    return [range(start, min(start + each, prompts)) for start in range(0, prompts, each)]


def _fits(part: dict[str, Any] | None, prompts: int, images: int) -> bool:
    """Whether what a journal kept is of so many prompts and images."""
    if part is None:
        return False
    tables, columns = part["values"].values(), part["diversity"].values()
    rows = [row for table in tables for row in table]
    whole = all(len(own) == prompts for own in (*tables, *columns))
    return whole and all(len(row) == images for row in rows)


def _joined(
    parts: list[tuple[range, dict[str, Any]]], key: str, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Chunks of rows -> whole columns.

    A reading that a chunk does not have (a dimension of other prompts) is NaN there.
    """
    out: dict[str, Tensor] = {}
    for which, part in parts:
        for name, rows in part[key].items():
            column = out.setdefault(name, torch.full(shape, float("nan")))
            column[which.start : which.stop] = torch.as_tensor(rows)
    return out


def _chunk(asked: Evaluator, which: range, images: int, features: Features) -> dict[str, Any]:
    """{"values": reading -> lists (prompts of the chunk, images), "diversity": kind -> list
    (prompts of the chunk), "calls", "answers"}."""
    ids = [p for p in which for _ in range(images)]
    number = torch.arange(images).repeat(len(which))
    noise = keys.key(asked.how.seed, "suite", torch.tensor(ids), number)
    chosen = spread_rows(len(asked.prompts), len(asked.prompts))
    # of a chosen prompt, its first image
    shown = {
        row: p for row, p in zip(range(0, len(ids), images), which, strict=True) if p in chosen
    }
    calls, answers = asked.policy.calls, []
    values: dict[str, Tensor] = {}
    seen: dict[str, list[Tensor]] = {kind: [] for kind in features}
    for part in asked.judged(ids, noise, shown):
        for name, value in part.values.items():
            values.setdefault(name, torch.full((len(ids),), float("nan")))[part.rows] = value
        for kind, feature in features.items():
            seen[kind].append(feature(part.media).float().cpu())
        answers.append(part.answers)
    values.pop("total", None)
    return {
        "values": {name: value.view(-1, images).tolist() for name, value in values.items()},
        "diversity": {
            kind: [spread(kind, own).item() for own in torch.cat(rows).split(images)]
            for kind, rows in seen.items()
        },
        "calls": asked.policy.calls - calls,
        "answers": joined(answers),
    }


# ---------------------------------------------------------------------------
# diversity


def features_of(rewards: RewardSet, images: int) -> Features:
    """What distances between a prompt's images are measured on, media -> (n, d).

    Thumbnails, and embeddings of the first CLIP, if any.
    """
    if images < 2:
        return {}
    out: Features = {"pixels": thumbnails}
    for label, reward in rewards.rewards.items():
        if isinstance(reward, TwoTowers):
            return out | {label: _embedding_of(reward)}
    return out


def thumbnails(media: Tensor) -> Tensor:
    """(n, 3, H, W) or (n, F, 3, H, W) -> (n, d): every frame at 16 x 16."""
    return F.adaptive_avg_pool2d(frames_of(media), THUMB).reshape(len(media), -1)


def _embedding_of(reward: TwoTowers) -> Callable[[Tensor], Tensor]:
    def embed(media: Tensor) -> Tensor:
        vectors = reward.pictures(frames_of(media))
        return F.normalize(vectors.view(len(media), -1, vectors.shape[-1]).mean(1), dim=-1)

    return embed


def spread(kind: str, own: Tensor) -> Tensor:
    """Mean distance over the pairs of (n, d).

    Of pixels the root mean square difference, of embeddings 1 - cosine.
    """
    distance = torch.pdist(own)
    return (distance / own.shape[1] ** 0.5).mean() if kind == "pixels" else (distance**2 / 2).mean()


# ---------------------------------------------------------------------------
# checklists


class ByDimension(Checklist):
    """A checklist that also reads the share of yes to each "dimension" of questions.

    Before parents zero any (DPG-Bench, UniGenBench).
    """

    def __init__(self, loaded: Checklist):
        self.__dict__.update(vars(loaded))  # shares its judge

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
            said = answer if math.isnan(answer) else float(answer >= YES)
            by_name.setdefault(question["dimension"], []).append(said)
        return {name: sum(own) / len(own) for name, own in by_name.items()}


def by_dimension(rewards: RewardSet) -> RewardSet:
    """The set with its checklists read by dimension."""
    read: dict[str, Reward] = {
        k: ByDimension(r) if isinstance(r, Checklist) else r for k, r in rewards.rewards.items()
    }
    return replace(rewards, rewards=read)


# ---------------------------------------------------------------------------
# journal


@dataclass
class MeasureJournal:
    """What an evaluation has measured so far: a file with a line a chunk.

    Without a path nothing is kept. key: what is measured and how; a file with another key is begun
    anew. A line cut short or damaged is dropped, with what follows it.
    """

    path: Path | None = None
    key: str = ""
    known: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        first, *parts = _lines(self.path) or [b""]
        if first != json.dumps({"key": self.key}).encode():
            first, parts = json.dumps({"key": self.key}).encode(), []
        kept = [first]
        for line in parts:
            try:
                read = json.loads(line)
                self.known[read["setting"], read["start"]] = read["part"]
            except (ValueError, TypeError, KeyError):  # what follows is measured again
                break
            kept.append(line)
        files.write(self.path, b"".join(line + b"\n" for line in kept))

    def get(self, setting: str, start: int) -> dict[str, Any] | None:
        return self.known.get((setting, start))

    def put(self, setting: str, start: int, part: dict[str, Any]) -> None:
        if self.path is not None:
            line = {"setting": setting, "start": start, "part": part}
            files.append(self.path, json.dumps(line) + "\n")

    def close(self) -> None:
        """The evaluation is finished and written elsewhere."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []
