"""Held-out evaluation: the same prompts, seeds and solver every time, so that before and after are
paired image by image.

evaluation.json of a run holds one row a setting (before, before with guidance, after ...), each
with per-image values, means with 95% bootstrap intervals that resample whole prompts (equal texts
are one prompt), and the paired difference of "after" to "before".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl import media, stats
from flowrl.data import Prompts
from flowrl.generation import Solver, sample
from flowrl.ledger import Ledger
from flowrl.log import read_json
from flowrl.policy import Policy
from flowrl.report_answers import Answers, joined
from flowrl.rewards import RewardSet, readings
from flowrl.rewards.checklist import Checklist
from flowrl.rollout import media_of, meta_rows
from flowrl.samplers import keys
from flowrl.types import replace

FILE = "evaluation.json"
SHOWN = 16  # images kept for the before/after grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Values of one setting: name -> (n,) fp32 CPU tensors; prompt (n,) row of the held-out
    prompts; images: the first ones;
    answers: what checklists said about those (flowrl/report_answers.py)."""

    values: dict[str, Tensor]
    prompt: list[int]
    images: Tensor
    nfe: int  # network rows an image, guidance branches included
    answers: Answers = field(default_factory=dict)

    def mean(self, name: str) -> float:
        return self.values[name].nanmean().item()

    def verdicts(self, rows: list[int]) -> dict[str, list[bool | None]]:
        """Right or wrong for some images, by every value that is only ever 0 or 1; None where it is
        missing."""
        out = {}
        for name, value in self.values.items():
            known = value[~value.isnan()]
            if len(known) and bool(((known == 0) | (known == 1)).all()):
                out[name] = [None if math.isnan(v) else v == 1 for v in value[rows].tolist()]
        return out

    def metrics(self) -> dict[str, float]:
        """eval/<name> of every value."""
        return {f"eval/{name}": self.mean(name) for name in self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How evaluation samples. micro: most network rows in a forward; decode: most images decoded
    and scored at once; autocast: context of the sampling network; as in training, decoding and
    rewards run outside it."""

    steps: int
    guidance: float | str
    solver: Solver = "euler"
    seed: int = 0
    micro: int = 64
    decode: int = 32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@torch.no_grad()
def judged(
    policy: Policy,
    prompts: Prompts,
    which: Sequence[int],
    noise: Tensor,
    rewards: RewardSet,
    how: Sampling,
    ledger: Ledger,
) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
    """Sample prompts[i] for i in `which` from noise keys (n,), decode and score, chunk by chunk ->
    (rows, media, readings)."""
    with how.autocast():
        x, sigma = sample(
            policy,
            [prompts[i]["prompt"] for i in which],
            noise,
            steps=how.steps,
            guidance=how.guidance,
            solver=how.solver,
            micro=how.micro,
            ledger=ledger,
        )
    for rows, pictures in media_of(policy, x, sigma, decode=how.decode, ledger=ledger):
        with ledger.phase("reward"), ledger.work("reward"):
            shown, context = meta_rows(prompts, list(which[rows]))
            scored = readings(pictures, shown, rewards, context)
        yield rows, pictures, {name: value.float().cpu() for name, value in scored.items()}


def told(
    rewards: RewardSet,
    pictures: Tensor,
    prompts: Prompts,
    which: Sequence[int],
    shown: Mapping[int, int],
) -> Answers:
    """What checklists have just answered about pictures (n, ...) of prompts[i] for i in which, as a
    row of evaluation.json keeps it.

    shown: row -> number of the image, for those that are kept. Asks nothing: of a chunk in which a
    check broke down nothing is kept.
    """
    checklists = {
        label: reward for label, reward in rewards.rewards.items() if isinstance(reward, Checklist)
    }
    if not checklists or not shown:
        return {}
    rows = torch.nonzero(
        pictures.flatten(1).isfinite().all(1).cpu()
    ).flatten()  # the others were shown to no reward
    texts, context = meta_rows(prompts, [which[i] for i in rows.tolist()])
    said = {
        label: reward.told(pictures[rows.to(pictures.device)], context)
        for label, reward in checklists.items()
    }
    out: Answers = {}
    for label, every in said.items():
        entries = zip(rows.tolist(), texts, every or (), strict=every is not None)
        out[label] = [
            {"image": shown[row], "prompt": text, "said": own}
            for row, text, own in entries
            if row in shown
        ]
    return out


@torch.no_grad()
def evaluate(
    policy: Policy,
    prompts: Prompts,
    rewards: RewardSet,
    *,
    images: int,
    steps: int,
    guidance: float | str = "none",
    seed: int = 0,
    solver: Solver = "euler",
    micro: int = 64,
    decode: int = 32,
    ledger: Ledger | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Evaluation:
    """Sample and score `images` images, prompt i % P for image i; image i's noise is a function of
    (seed, i) only. See Sampling.

    Rewards that compare the members of a group say nothing about a model's level and are left out.
    """
    how = Sampling(
        steps=steps,
        guidance=guidance,
        solver=solver,
        seed=seed,
        micro=micro,
        decode=decode,
        autocast=autocast,
    )
    ledger, rewards = ledger or Ledger(policy.device), rewards.pointwise()
    number = torch.arange(images)
    which = (number % len(prompts)).tolist()
    order = sorted(range(images), key=lambda i: which[i])  # equal prompts together: encoded once
    noise = keys.key(seed, "evaluation", number)
    calls, values, kept, answers = policy.calls, {}, {}, []
    chosen = spread_rows(images, len(prompts))
    for start in range(0, images, 256):
        rows = order[start : start + 256]
        for chunk, pictures, scored in judged(
            policy, prompts, [which[i] for i in rows], noise[rows], rewards, how, ledger
        ):
            members = rows[chunk]
            for name, value in scored.items():
                values.setdefault(name, torch.full((images,), float("nan")))[members] = value
            shown = {row: i for row, i in enumerate(members) if i in chosen}
            kept |= {i: pictures[row].cpu() for row, i in shown.items()}
            answers.append(told(rewards, pictures, prompts, [which[i] for i in members], shown))
    grid = torch.stack([kept[i] for i in sorted(kept)])
    nfe, said = (policy.calls - calls) // images, joined(answers)
    return Evaluation(values=values, prompt=which, images=grid, nfe=nfe, answers=said)


def spread_rows(images: int, prompts: int) -> list[int]:
    """Images of the grid: spread evenly over the first pass through the prompts; chosen by place,
    never by score."""
    count = min(images, prompts)
    return sorted({round(i * (count - 1) / max(1, SHOWN - 1)) for i in range(SHOWN)})


def shown_prompts(prompts: list[dict[str, Any]], images: int) -> list[str]:
    """Prompts of `Evaluation.images`, in its order."""
    return [prompts[i % len(prompts)]["prompt"] for i in spread_rows(images, len(prompts))]


def add_row(
    run: Path, name: str, evaluation: Evaluation, prompts: list[dict[str, Any]], **setting: Any
) -> dict[str, Any]:
    """Write a row into evaluation.json (atomically; a row of the same name is replaced) and return
    the whole record."""
    path = run / FILE
    record = {"rows": []} | (read_json(path) if path.exists() else {})
    clusters = [
        prompts[i]["prompt"] for i in evaluation.prompt
    ]  # held-out data may hold a text several times
    metrics, tasks = {}, {}
    for key, value in evaluation.values.items():
        ok = torch.nonzero(~value.isnan()).flatten()
        if len(ok):
            groups = [clusters[i] for i in ok.tolist()]
            interval = stats.mean_interval(value[ok], groups=groups, resamples=2000)
            invalid = len(value) - len(ok)
            metrics[key] = {
                "mean": interval.mean,
                "ci": list(interval.ci),
                "clusters": len(set(groups)),
                "invalid": invalid,
            }
        tasks[key] = _by_task(value, evaluation.prompt, prompts)
    row = {
        "name": name,
        **setting,
        "images": len(clusters),
        "nfe": evaluation.nfe,
        "metrics": metrics,
        "tasks": tasks,
    }
    row["values"] = {
        key: [None if math.isnan(v) else round(v, 6) for v in value.tolist()]
        for key, value in evaluation.values.items()
    }
    row |= {"answers": evaluation.answers} if evaluation.answers else {}
    record["rows"] = [r for r in record["rows"] if r["name"] != name] + [row]
    by_name = {r["name"]: r for r in record["rows"]}
    if name in ("before", "after") and {"before", "after"} <= by_name.keys():
        record["paired"] = _paired(
            by_name["before"]["values"], by_name["after"]["values"], clusters
        )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    os.replace(temporary, path)
    return record


def save_images(
    run: Path, name: str, evaluation: Evaluation, prompts: list[dict[str, Any]]
) -> None:
    """samples/<name>.png, and samples/before_after.png as soon as both are there."""
    captions = shown_prompts(prompts, len(evaluation.prompt))
    if evaluation.images.ndim != 4:  # of a video, its middle frame
        evaluation = replace(
            evaluation, images=evaluation.images[:, evaluation.images.shape[1] // 2]
        )
    stem = name.replace(", ", "_").replace(" ", "_")
    media.grid(evaluation.images, captions).save(run / "samples" / f"{stem}.png")
    verdicts = evaluation.verdicts(spread_rows(len(evaluation.prompt), len(prompts)))
    judged = {
        f"verdicts.{key}": np.array([-1 if v is None else v for v in marks], np.int8)
        for key, marks in verdicts.items()
    }
    np.savez(
        run / "samples" / f"{stem}.npz", images=media.to_uint8(evaluation.images).numpy(), **judged
    )
    before = run / "samples" / "before.npz"
    if name == "after" and before.exists():
        old = np.load(before)
        common = next(
            (key for key in verdicts if f"verdicts.{key}" in old), None
        )  # of both or of none
        both = (
            None
            if common is None
            else ([None if v < 0 else bool(v) for v in old[f"verdicts.{common}"]], verdicts[common])
        )
        first = torch.from_numpy(old["images"]).float() / 255
        media.before_after(first, evaluation.images, captions, verdicts=both).save(
            run / "samples" / "before_after.png"
        )


def _by_task(value: Tensor, prompt: list[int], prompts: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over a task's valid images, where prompts name one."""
    tasks: dict[str, list[float]] = {}
    for v, p in zip(value.tolist(), prompt, strict=True):
        if "task" in prompts[p] and not math.isnan(v):
            tasks.setdefault(prompts[p]["task"], []).append(v)
    return {task: sum(v) / len(v) for task, v in tasks.items()}


def _paired(
    before: dict[str, list[Any]], after: dict[str, list[Any]], clusters: list[str]
) -> dict[str, Any]:
    """Difference of every value that both rows hold, over the images valid in both."""
    out = {}
    for key in sorted(before.keys() & after.keys()):
        pairs = [
            (a, b, c)
            for a, b, c in zip(before[key], after[key], clusters, strict=True)
            if a is not None and b is not None
        ]
        if not pairs:
            continue
        x, y, groups = zip(*pairs, strict=True)
        result = stats.paired_bootstrap(x, y, groups=groups)
        out[key] = {
            "difference": result.difference,
            "ci": list(result.ci),
            "p": result.p,
            "n": result.n,
            "clusters": result.clusters,
        }
    return out
