"""evaluation.json of a run and the pictures beside it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.data.media import encoded, fitting, media_kind, save, to_uint8
from flowrl.data.prompts import Prompts
from flowrl.evaluation.held_out import Evaluation, spread_rows
from flowrl.report import grids, pictures
from flowrl.runtime.log import logger
from flowrl.runtime.statistics import mean_interval, paired_bootstrap
from flowrl.runtime.store import files
from flowrl.runtime.store.run_folder import EVALUATION, read_evaluation

Verdicts = list[bool | None]  # whether each image is right; None: not known


def shown_prompts(prompts: Prompts, images: int) -> list[str]:
    """The prompts of `Evaluation.images`, in its order."""
    return [prompts[i % len(prompts)]["prompt"] for i in spread_rows(images, len(prompts))]


def add_row(
    run: Path, name: str, evaluation: Evaluation, prompts: Prompts, **setting: Any
) -> dict[str, Any]:
    """Write a row into evaluation.json, in place of one of its name, and return the whole
    record."""
    record = {"rows": []} | read_evaluation(run)
    row = {"name": name, **setting, **_row(evaluation, prompts)}
    record["rows"] = [r for r in record["rows"] if r["name"] != name] + [row]
    by_name = {r["name"]: r for r in record["rows"]}
    if name in ("before", "after") and {"before", "after"} <= by_name.keys():
        before, after = (by_name[side].get("values", {}) for side in ("before", "after"))
        record["paired"] = _paired(before, after, _texts(evaluation, prompts))
    files.write(run / EVALUATION, json.dumps(record))
    return record


def _texts(evaluation: Evaluation, prompts: Prompts) -> list[str]:
    """The text of each image: texts are what is resampled, because held-out data may hold a text
    several times."""
    return [prompts[i]["prompt"] for i in evaluation.prompt]


def _row(evaluation: Evaluation, prompts: Prompts) -> dict[str, Any]:
    texts = _texts(evaluation, prompts)
    metrics = {
        key: _metric(value, texts, evaluation.asked.get(key))
        for key, value in evaluation.values.items()
    }
    row = {
        "images": len(texts),
        "prompts": texts[: len(prompts)],
        "nfe": evaluation.nfe,
        "metrics": {key: metric for key, metric in metrics.items() if metric is not None},
        "tasks": {
            key: _by_task(value, evaluation.prompt, prompts)
            for key, value in evaluation.values.items()
        },
        "values": {
            key: [None if math.isnan(v) else round(v, 6) for v in value.tolist()]
            for key, value in evaluation.values.items()
        },
    }
    return row | ({"answers": evaluation.answers} if evaluation.answers else {})


def _metric(value: Tensor, texts: list[str], asked: Tensor | None) -> dict[str, Any] | None:
    """The mean over the valid images, with its interval over texts; None where no image is valid.
    asked: images that may have a value; None: all."""
    valid = torch.nonzero(~value.isnan()).flatten()
    if not len(valid):
        return None
    groups = [texts[i] for i in valid.tolist()]
    interval = mean_interval(value[valid], groups=groups, resamples=2000)
    return {
        "mean": interval.mean,
        "ci": interval.ci and list(interval.ci),
        "clusters": len(set(groups)),
        "invalid": (len(value) if asked is None else int(asked.sum())) - len(valid),
    }


def _by_task(value: Tensor, prompt: list[int], prompts: Prompts) -> dict[str, float]:
    """The mean over a task's valid images, where prompts name a task."""
    tasks: dict[str, list[float]] = {}
    for v, p in zip(value.tolist(), prompt, strict=True):
        if "task" in prompts[p] and not math.isnan(v):
            tasks.setdefault(prompts[p]["task"], []).append(v)
    return {task: sum(v) / len(v) for task, v in tasks.items()}


def _paired(
    before: dict[str, list[Any]], after: dict[str, list[Any]], texts: list[str]
) -> dict[str, Any]:
    """The difference of every value that both rows have of each image, over images that are valid
    in both."""
    out = {}
    for key in sorted(before.keys() & after.keys()):
        if not len(before[key]) == len(after[key]) == len(texts):
            continue
        images = zip(before[key], after[key], texts, strict=True)
        pairs = [(a, b, text) for a, b, text in images if a is not None and b is not None]
        if not pairs:
            continue
        x, y, groups = zip(*pairs, strict=True)
        out[key] = asdict(paired_bootstrap(x, y, groups=groups))
    return out


def save_images(run: Path, name: str, evaluation: Evaluation, prompts: Prompts) -> None:
    """Write samples/<name>.png of media that can be drawn, and samples/before_after.png as soon as
    both are there; samples/<name>.npz holds them all: "images" as bytes, or "media" fp32 as they
    are. Videos are also written whole, into samples/<name>/."""
    captions = shown_prompts(prompts, len(evaluation.prompt))
    media, kind = evaluation.images, media_kind(evaluation.images.shape)
    stem = run / "samples" / name.replace(", ", "_").replace(" ", "_")
    if kind == "videos":  # sheets and arrays show the middle frame
        for i, video in enumerate(media):
            save(video, fitting(stem / f"{i:02d}.mp4", video))
        media = media[:, media.shape[1] // 2]
    if drawn := grids.drawable(media):
        files.write(stem.with_name(f"{stem.name}.png"), encoded(grids.grid(media, captions)))
    verdicts = evaluation.verdicts(spread_rows(len(evaluation.prompt), len(prompts)))
    arrays: dict[str, Any] = {f"verdicts.{key}": _marks(own) for key, own in verdicts.items()}
    arrays["prompts"] = np.array(captions)
    key = "media" if kind == "arrays" else "images"
    arrays[key] = (media.float() if kind == "arrays" else to_uint8(media)).numpy()
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    files.write(stem.with_name(f"{stem.name}.npz"), buffer.getvalue())
    if drawn and name == "after" and (old := _kept_before(run, key, arrays[key])):
        first = torch.from_numpy(old[key]).float() / (255 if key == "images" else 1)
        both = _common_verdicts(old, verdicts)
        grid = grids.before_after(first, media, captions, verdicts=both)
        files.write(run / "samples" / "before_after.png", encoded(grid))


def _kept_before(run: Path, key: str, now: np.ndarray) -> dict[str, np.ndarray]:
    """Read samples/before.npz, if it has media like those of now under `key` and verdicts on them;
    a damaged one is left out with a warning."""
    path = run / "samples" / "before.npz"
    if not path.exists():
        return {}
    arrays = pictures.arrays(path)
    sound = key in arrays and arrays[key].dtype == now.dtype and arrays[key].shape == now.shape
    sound &= all(own.shape == now.shape[:1] for name, own in arrays.items() if name != key)
    if not sound:
        logger.warning(f"{path} was damaged or changed; no pictures are shown before and after")
        return {}
    return arrays


def _marks(verdicts: Verdicts) -> np.ndarray:
    """Encode verdicts: right 1, wrong 0, missing -1."""
    return np.array([-1 if v is None else v for v in verdicts], np.int8)


def _common_verdicts(
    old: Mapping[str, np.ndarray], verdicts: dict[str, Verdicts]
) -> tuple[Verdicts, Verdicts] | None:
    """Verdicts before and after by the first value that both have; None where they have none in
    common."""
    for key, own in verdicts.items():
        if f"verdicts.{key}" in old:
            marks = old[f"verdicts.{key}"]
            return [None if v < 0 else bool(v) for v in marks], own
    return None
