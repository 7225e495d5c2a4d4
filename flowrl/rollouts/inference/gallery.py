"""Samples of a list of prompts as files, a batch at a time. metadata.jsonl of their folder has a
line for each, and what has a line is not made again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import __version__
from flowrl.data import media
from flowrl.data.conditions import context_of
from flowrl.policy import Policy
from flowrl.report import grids
from flowrl.rewards import score
from flowrl.rewards.core.score import say_problem
from flowrl.rollouts.inference.generate import generate
from flowrl.runtime.log import Progress, warned_once
from flowrl.runtime.store import files, lines
from flowrl.runtime.store.run_folder import plain
from flowrl.runtime.text import printable

INDEX = "metadata.jsonl"  # `flowrl score FOLDER` reads it
NAME = ("place", "seed", "base")  # what names a sample: place of its prompt, seed, which model
# what a line says beside; "run" and "lora" are names of places, and "weights" tells them apart
BESIDE = {"file_name", "scores", "total", "run", "lora"}
LONGEST = 40  # most letters of a prompt in the name of a file
CELL, WIDE, MOST = 192, 8, 128  # on a sheet: pixels of a cell, cells in a row, cells in all
Row = dict[str, Any]


def wanted(prompts: Sequence[Any], seeds: Sequence[int], settings: Row, *, base: bool) -> list[Row]:
    """Lines of the samples that are asked for, {"file_name" without a suffix, "prompt", "place" in
    the list, "seed", "base", "entry" (the whole record of a prompt that is one), **settings}; those
    of the base model, if it is asked for, at the end. prompts: texts or records."""
    rows = []
    for view in (False, True)[: 1 + base]:
        for place, prompt in enumerate(prompts):
            more = {} if isinstance(prompt, str) else {"entry": prompt}
            text = prompt["prompt"] if more else prompt
            words = re.sub(r"\W+", "-", text)[:LONGEST].strip("-")
            for seed in seeds:
                name = f"{place:05d}-{words}-s{seed}" + "-base" * view
                row = {"file_name": name, "prompt": text, "place": place, "seed": seed}
                rows.append(row | {"base": view} | more | settings)
    # a value that JSON does not have, as an open picture, is named by its type
    return json.loads(json.dumps(rows, default=lambda value: type(value).__name__))


def left(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """Those of the rows whose file is not in the folder; the others get the names of their files.
    ValueError where one was made of another prompt or with other settings."""
    old = [line.row for line in lines.read(folder / INDEX) if line.row]
    if any(not {*NAME, "file_name"} <= row.keys() for row in old):
        raise ValueError(f"{folder / INDEX} is not of flowrl generate; give another folder")
    found = {tuple(row[name] for name in NAME): row for row in old}
    missing = []
    for row in rows:
        was = found.get(tuple(row[name] for name in NAME), row)
        for name in sorted({*row, *was} - BESIDE):
            if was.get(name) != row.get(name):
                then, now = (printable(each.get(name), 60) for each in (was, row))
                raise ValueError(
                    f"{folder / was['file_name']} was made with {name}={then}, and now it is"
                    f" {now}; give another folder, or the words of then (a list may grow at its"
                    " end)"
                )
        if (folder / was["file_name"]).is_file():
            row["file_name"] = was["file_name"]
        else:
            missing.append(row)
    return missing


def fill(
    policy: Policy,
    prompts: Sequence[Any],
    rows: Sequence[Row],
    folder: Path,
    how: Mapping[str, Any],
    *,
    batch: int,
    listed: bool,
) -> None:
    """Write the files of rows, and if they are to be listed, the rows with their scores once the
    files are there.

    prompts: the whole list. how: arguments of `generate`, of which meta is that of the whole list.
    batch: most samples made at once.
    """
    files.clean(folder)
    old = lines.read(folder / INDEX) if listed else ()
    known = {line.row["file_name"] for line in old if line.row}
    micro, done = batch * policy.branches(how["guidance"]), 0
    with Progress(len(rows), title="generate", lines=listed) as bar, warned_once():
        while done < len(rows):
            some = [r for r in rows[done : done + batch] if r["base"] is rows[done]["base"]]
            # a batch is of one model: the base model is the extrapolation of weight 0
            places = [row["place"] for row in some]
            meta = how["meta"] and [how["meta"][p] for p in places]
            each = {"seed": [row["seed"] for row in some], "places": places, "meta": meta}
            each |= {"micro": micro, "decode": batch} | ({"rlg": 0.0} if some[0]["base"] else {})
            made = generate(policy, [prompts[p] for p in places], **{**how, **each})
            _add_scores(some, made, how["reward"], meta)
            for row, item in zip(some, made, strict=True):
                about = caption(row, item.shape[-2:])
                media.save(item, folder / row["file_name"], about=about)
            if listed:
                new = [row for row in some if row["file_name"] not in known]
                lines.append(folder / INDEX, new, ensure_ascii=False)
            done += len(some)
            bar.update(done)


def _add_scores(rows: Sequence[Row], made: Tensor, rewards: Any, meta: Any) -> None:
    """Give rows the scores of their samples (n, *D), if there are rewards."""
    if rewards is not None:
        seen = context_of(meta or [row.get("entry", {}) for row in rows], made)
        found = score(made, [row["prompt"] for row in rows], rewards, seen)
        say_problem(found)
        for i, row in enumerate(rows):
            row["scores"] = {name: plain(values[i]) for name, values in found.raw.items()}
            row["total"] = plain(found.total[i])


def caption(row: Row, size: Sequence[int]) -> str:
    """Write prompts and settings of a row as A1111 does, the settings in the last line: "Steps: 28,
    Seed: 0, Size: 512x512, ...". size: (height, width)."""
    own = {name: value for name, value in row.items() if name not in ("file_name", "place")}
    prompt, entry, call = own.pop("prompt"), own.pop("entry", {}), own.pop("pipeline")
    negative = entry.get("negative_prompt") or call.get("negative_prompt")
    if own["guidance"] == "pipeline":
        own["guidance"] = call.get("guidance_scale", "pipeline")
    scale = "Guidance" if isinstance(own["guidance"], str) else "CFG scale"
    facts = {"Steps": own.pop("steps"), "Sampler": "Euler", scale: own.pop("guidance")}
    facts |= {"Seed": own.pop("seed"), "Size": f"{size[1]}x{size[0]}"}
    facts |= {name.capitalize(): value for name, value in own.items() if value is not False}
    facts["Version"] = f"flowrl {__version__}"
    said = ", ".join(f"{name}: {_quoted(str(value))}" for name, value in facts.items())
    return "\n".join([prompt, *[f"Negative prompt: {negative}"] * bool(negative), said])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if re.search('[,:\n"]', text) else text


def sheet(rows: Sequence[Row], folder: Path, path: Path) -> Path:
    """Draw a contact sheet of the first files, the base model's before the others -> its path."""
    shown = sorted(rows, key=lambda row: (row["place"], row["seed"], not row["base"]))[:MOST]
    each = sum(row["place"] == 0 for row in rows)
    said = [f"{'base, ' * row['base']}seed {row['seed']}: {row['prompt']}" for row in shown]
    items = [media.read_media(folder / row["file_name"], frames=3) for row in shown]
    columns = each * max(1, WIDE // each)
    image = grids.grid(torch.stack(items), said, columns=columns, cell=CELL)
    return files.write(path, media.encoded(image, path.suffix))
