"""Files as the dataset of a run, in place of samples: a folder of `flowrl score`, media with their
prompts, or pairs (supervised.py)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.data import supervised
from flowrl.data.prompts import Prompts
from flowrl.data.samples import meta_of, read_list
from flowrl.data.scored_folder import list_of
from flowrl.data.stored import PictureCell
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located, nearby
from flowrl.samplers import keys
from flowrl.types import PromptBatch

LARGEST = 3.4e38  # largest number in fp32, rounded down


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredImage:
    """One scored image."""

    path: Path | PictureCell  # path of the file, or its bytes in a table
    file: str  # name in the list, which stays the same wherever the folder lies
    # weighted sum of the scores, finite; of a pair's file: share of raters who prefer it
    total: float
    scores: dict[str, float]  # reward -> score; NaN where a reward of weight 0 failed
    weight: float = 1.0  # weight of its pair in the loss
    mask: Path | PictureCell | None = None  # where its pair's errors count; None: everywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A scored folder, sorted by prompt, or rows of media or of pairs, in the order of the list."""

    prompts: Prompts  # distinct texts, with the meta on which all lines agree; or one of each row
    items: list[list[ScoredImage]]  # images of each prompt; the two of a pair
    weights: dict[str, float]  # reward -> its weight in every total; empty without scores
    kind: Literal["scored", "media", "pairs"] = "scored"  # what a row of the list is
    mixed: bool = False  # totals are of different rewards, as some are absent from some prompts

    @property
    def singles(self) -> int:
        """Prompts with a single item, whose advantage is 0 in every method that compares within
        groups."""
        return self.kind == "scored" and sum(len(items) == 1 for items in self.items)

    @property
    def paths(self) -> list[Path | PictureCell]:
        return [item.path for items in self.items for item in items]

    @property
    def masks(self) -> list[Path | PictureCell]:
        return [pair[0].mask for pair in self.items if pair[0].mask]


NO_MEDIA = Dataset(prompts=[], items=[], weights={}, kind="media")


def load(folder: str | Path, *, soft: bool = False, temperature: float = 1.0) -> Dataset:
    """Read FOLDER/scores.jsonl, which names files in the folder, or the .jsonl list given, whose
    files may be anywhere; or media and pairs in one of the layouts of supervised.py.

    soft, temperature: how pairs are labelled, as in `of_rows`.

    A prompt's meta holds the values on which all its lines agree. A list without "scores" has one,
    "total", of weight 1. A missing list or image, a broken or repeated line, a number that is not
    finite, or other rewards than in the first line -> ValueError that names file and line.
    """
    path = list_of(located(folder))
    if supervised.is_supervised(located(folder)):
        return of_rows(located(folder), soft, temperature)
    if not path.is_file():
        given = located(folder)
        raise ValueError(
            f"{given} does not exist{nearby(given)}; give a folder or a list of media, of pairs, or"
            " of scores, which `flowrl score MEDIA... --prompt TEXT --reward NAME -o FOLDER` makes"
        )
    # lines of one text are one prompt, whose facts are those on which all of them agree
    prompts: dict[str, dict[str, Any]] = {}
    items: dict[str, list[ScoredImage]] = {}
    lines = list(_lines(path, contained=path != located(folder)))
    for entry, item, _ in lines:
        text, meta = entry["prompt"], meta_of(entry)
        agreed = prompts.setdefault(text, meta)
        prompts[text] = {k: v for k, v in agreed.items() if k in meta and meta[k] == v}
        items.setdefault(text, []).append(item)
    return Dataset(
        prompts=[{"prompt": text, **meta} for text, meta in prompts.items()],
        items=list(items.values()),
        weights=lines[0][2],
        mixed=any(math.isnan(item.scores[k]) for _, item, own in lines for k in own if own[k]),
    )


def of_rows(path: Path, soft: bool, temperature: float) -> Dataset:
    """Read media or pairs: each row is a prompt of its own, so that an epoch has each once.

    A pair's label is p, the share of raters who prefer its first file; of a margin p =
    sigmoid(margin / temperature). Without `soft` p becomes 1 or 0, and ties are left out.
    """
    kind, found = supervised.read(path)
    prompts: Prompts = []
    items: list[list[ScoredImage]] = []
    for row in found:
        # sigmoid(m / T), written so that no exponential overflows
        p = row.label
        if row.margin is not None:
            p = 0.5 + 0.5 * math.tanh(row.margin / temperature / 2)
        if kind == "pairs" and not soft:
            if p == 0.5:
                continue
            p = float(p > 0.5)
        for number in range(row.repeats):
            prompts.append({"prompt": row.prompt, **row.meta})
            names = [f"{number}:{_name(file, path.parent)}" for file in row.files]
            items.append(
                [
                    ScoredImage(
                        path=file,
                        file=name,
                        total=total,
                        scores={},
                        weight=row.weight,
                        mask=row.mask,
                    )
                    for file, name, total in zip(row.files, names, (p, 1 - p), strict=False)
                ]
            )
    if ties := sum(row.label == 0.5 or row.margin == 0 for row in found) if not soft else 0:
        said = f"{ties:,} of {len(found):,} pairs of {path} are ties"
        if not items:
            raise ValueError(f"{said}, which are trained with data.labels=soft alone")
        logger.warning(f"{said}, and are left out; data.labels=soft trains them")
    return Dataset(prompts=prompts, items=items, weights={}, kind=kind)


def _name(file: Path | PictureCell, folder: Path) -> str:
    """The name of a file from the folder, or the place of a picture in its table."""
    if isinstance(file, PictureCell):
        return os.path.basename(str(file))
    return os.path.relpath(file, folder)


def _lines(
    path: Path, contained: bool
) -> Iterator[tuple[dict[str, Any], ScoredImage, dict[str, float]]]:
    """Read (entry, item, weights) of each line; all lines have the same weights, and none is
    repeated."""
    weights: dict[str, float] = {}
    seen: dict[tuple[str, str], str] = {}
    for where, entry in read_list(path, contained=contained):
        file = path.parent / entry["file"] if contained else located(entry["file"], path.parent)
        item, own = _item(file, where, entry)
        weights = weights or own
        if own != weights:
            raise ValueError(
                f"{where} has weights {own}, but the first line {weights}; score all media with the"
                " same rewards"
            )
        text = entry["prompt"]
        before = seen.setdefault((os.path.normpath(str(item.path)), text), where)
        if before != where:
            raise ValueError(f'{where} repeats {before}: "{item.file}" for the prompt "{text}"')
        yield entry, item, weights


def _item(path: Path, where: str, entry: Mapping[str, Any]) -> tuple[ScoredImage, dict[str, float]]:
    """Read the image of a line, and the weights of its total."""
    if not path.is_file():
        raise ValueError(f"{where} names {path}, which does not exist{nearby(path)}")
    total = _number(f'{where}: "total"', entry.get("total"))
    scores = _mapping(f'{where}: "scores"', entry.get("scores", {"total": total}))
    weights = _weights(where, entry, scores)
    raw = {}
    # beside other scores, one that is missing was absent: the total is without it
    counted = any(weights[label] for label, value in scores.items() if value is not None)
    for label, value in scores.items():
        missing = value is None and (weights[label] == 0 or counted)
        raw[label] = math.nan if missing else _number(f'{where}: the score "{label}"', value)
    return ScoredImage(path=path, file=entry["file"], total=total, scores=raw), weights


def _weights(where: str, entry: Mapping[str, Any], scores: Mapping[str, Any]) -> dict[str, float]:
    """Read the weights of a line's total: 1 for each score where the line states none."""
    stated = _mapping(f'{where}: "weights"', entry.get("weights", dict.fromkeys(scores, 1.0)))
    weights = {
        label: _number(f'{where}: the weight of "{label}"', value)
        for label, value in stated.items()
    }
    if scores.keys() != weights.keys():
        raise ValueError(
            f"{where} has scores of {sorted(scores)}, but weights of {sorted(weights)}; give each"
            " score a weight"
        )
    return weights


def _mapping(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f'{what} is {value!r}, which should hold a number a reward, as in {{"jpeg": 1.0}}'
        )
    return value


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"{what} is {value!r}, which should be a finite number")
    return float(value)


def gather(
    dataset: Dataset, batch: PromptBatch, group: int, *, seed: int, iteration: int
) -> list[list[ScoredImage]]:
    """Draw `group` items of each prompt without replacement; all of them where there are fewer.

    The draw is a function of (seed, iteration, prompt id) and of the prompt's items: ids are places
    in dataset.prompts.
    """
    drawn = []
    for i in batch.ids.tolist():
        items = dataset.items[i]
        order = keys.permutation(keys.key(seed, "offline", iteration, i), len(items))
        drawn.append([items[place] for place in order[:group].tolist()])
    return drawn
