"""evaluation.json of a run and the pictures beside it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.data import media
from flowrl.evaluation.held_out import Evaluation, spread_rows
from flowrl.report import grids
from flowrl.runtime import statistics
from flowrl.runtime.run_folder import read_json
from flowrl.types import replace

FILE = "evaluation.json"


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
            interval = statistics.mean_interval(value[ok], groups=groups, resamples=2000)
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
    grids.grid(evaluation.images, captions).save(run / "samples" / f"{stem}.png")
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
        grids.before_after(first, evaluation.images, captions, verdicts=both).save(
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
        result = statistics.paired_bootstrap(x, y, groups=groups)
        out[key] = {
            "difference": result.difference,
            "ci": list(result.ci),
            "p": result.p,
            "n": result.n,
            "clusters": result.clusters,
        }
    return out
