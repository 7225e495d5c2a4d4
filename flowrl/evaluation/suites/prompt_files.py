"""Prompt files of evaluation suites in the forms in which benchmarks publish them; texts come from
the user's disk or the hub, none ship.

.txt, .jsonl and generated prompts are read by flowrl.data.prompts. Of a .csv or .tsv file the suite says
what it is:
* table: one prompt a line; `columns` names what is kept of it (DrawBench's sheet,
  PartiPrompts.tsv).
* dpg: ELLA's dpg_bench.csv (arXiv:2403.05135), one question a line -> a checklist for each prompt,
  with parents. A question's dimension is its tuple before the bracket ("entity - whole"). Departure
  from dpg_bench/compute_dpg_bench.py: the first question of the first prompt, which it skips,
  counts.
* unigenbench: CodeGoat24/UniGenBench's test_prompts_*.csv (arXiv:2508.20751): test points ->
  questions in our words about their descriptions. The official judge answers all points of a
  picture in one reply.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from flowrl.data.prompts import WORLDS, Prompts, load_prompts
from flowrl.runtime.log import logger
from flowrl.runtime.registry import did_you_mean

Form = Literal["table", "dpg", "unigenbench"]
Rows = list[dict[str, str]]
HUB = "hf:"
POINT = 'Does the picture hold what the caption asks for under "{dimension}", namely: {text}?'


def load(
    source: str | None,
    *,
    suite: str,
    origin: str,
    form: Form = "table",
    columns: Mapping[str, str] | None = None,
) -> Prompts:
    """Prompts of a file, of "hf:owner/repo/file" (a data set on the hub), or generated
    ("shapes:eval").

    origin: where the file is found, for the sentence that is raised where it is not here.
    """
    if source is None:
        raise ValueError(
            f'suite "{suite}" ships no prompts: download {origin} and give it with --prompts'
            " /path/to/the/file"
        )
    if source.partition(":")[0] in WORLDS:
        return load_prompts(source)
    path = _from_hub(source, suite, origin) if source.startswith(HUB) else Path(source).expanduser()
    if not path.is_file():
        raise ValueError(
            f'suite "{suite}": there is no prompt file {path}; download {origin or "it"} and give'
            " it with --prompts PATH"
        )
    if path.suffix not in (".csv", ".tsv"):
        return load_prompts(str(path))
    rows = read_rows(path)
    prompts = {"table": _table, "dpg": _dpg, "unigenbench": _unigenbench}[form](
        rows, columns or {"prompt": "prompt"}, path
    )
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompts")
    return prompts


def _from_hub(source: str, suite: str, origin: str) -> Path:
    owner, _, rest = source.removeprefix(HUB).partition("/")
    repo, _, file = rest.partition("/")
    if not file:
        raise ValueError(f"prompts={source} should be hf:owner/repo/file, or the path of a file")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(f"{owner}/{repo}", file, repo_type="dataset"))
    except (
        Exception
        # the hub's client raises a dozen kinds: no network, no such repository, a gate, a full disk
    ) as error:
        raise ValueError(
            f'suite "{suite}" needs {file} of https://huggingface.co/datasets/{owner}/{repo}, which'
            " is not here and could not be "
            f"fetched ({type(error).__name__}); download it{f' or {origin}' if origin else ''} and"
            f" give it with --prompts /path/to/{file}"
        ) from error


def read_rows(path: Path) -> Rows:
    """Lines of a .csv, or of a .tsv (whose quotes are text), by the names in the first line."""
    how: dict[str, Any] = (
        {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
    )
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return [
                {key: value or "" for key, value in row.items() if key is not None}
                for row in csv.DictReader(file, **how)
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"prompt file {path} cannot be read: {error}; save it as UTF-8") from None


def _column(rows: Rows, names: Sequence[str], path: Path) -> str:
    """The first of these columns that the file has, whatever its capitals."""
    header = list(rows[0]) if rows else []
    for name in names:
        for own in header:
            if own.casefold() == name.casefold():
                return own
    raise ValueError(
        f"prompt file {path} has no column"
        f' "{names[0]}"{did_you_mean(names[0], header) or "; it is empty"}'
    )


def _table(rows: Rows, columns: Mapping[str, str], path: Path) -> Prompts:
    own = {key: _column(rows, [name], path) for key, name in columns.items()}
    return [
        {key: row[name].strip() for key, name in own.items()}
        for row in rows
        if row[own["prompt"]].strip()
    ]


def _dpg(rows: Rows, columns: Mapping[str, str], path: Path) -> Prompts:
    """A prompt of each item_id, with "item" and "checklist"."""
    names = (
        "item_id",
        "text",
        "proposition_id",
        "dependency",
        "tuple",
        "question_natural_language",
    )
    item, text, number, dependency, kind, question = (_column(rows, [name], path) for name in names)
    items: dict[str, Rows] = {}
    for row in rows:
        items.setdefault(row[item], []).append(row)
    out, dropped = [], 0
    for name, members in items.items():
        by_number = {_whole(row[number], path): row for row in members}
        wanted = {
            n: {_whole(d, path) for d in row[dependency].split(",") if d.strip()} - {0}
            for n, row in by_number.items()
        }
        place, parents = _parents_first(wanted)
        dropped += sum(map(len, wanted.values())) - sum(map(len, parents.values()))
        checklist = [
            {
                "question": by_number[n][question].strip(),
                "weight": 1.0,
                "parent": sorted(place[p] for p in parents[n]) or None,
                "dimension": by_number[n][kind].partition("(")[0].strip(),
            }
            for n in place
        ]
        out.append({"prompt": members[0][text].strip(), "item": name, "checklist": checklist})
    if dropped:
        logger.warning(
            f"{path}: {dropped} dependencies of questions point nowhere or in a circle, and are"
            " left out"
        )
    return out


def _parents_first(wanted: dict[int, set[int]]) -> tuple[dict[int, int], dict[int, set[int]]]:
    """Questions' parents -> (place of each question, parents first, else in their order; the
    parents that come before it)."""
    place: dict[int, int] = {}
    left = dict(wanted)
    while left:
        ready = [n for n, parents in left.items() if not (parents & left.keys() - {n})] or list(
            left
        )[:1]
        for n in ready:
            place[n] = len(place)
            del left[n]
    return place, {n: {p for p in wanted[n] if p in place and place[p] < place[n]} for n in place}


def _whole(text: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'prompt file {path}: "{text}" is no number of a question (proposition_id, dependency)'
        ) from None


def _unigenbench(rows: Rows, columns: Mapping[str, str], path: Path) -> Prompts:
    """A prompt a line, with "category" (its theme) and "checklist" (one question a test point)."""
    text, points = (
        _column(rows, ["prompt", "prompt_en", "prompt_zh"], path),
        _column(rows, ["sub_dims", "sub_dims_en", "sub_dims_zh"], path),
    )
    out = []
    for line, row in enumerate(rows, 2):
        try:
            about = json.loads(row[points])
            pairs = list(zip(about["Testpoints"], about["Testpoint Description"], strict=True))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"prompt file {path}, entry {line}: its test points cannot be read"
                f" ({type(error).__name__}: {error})"
            ) from None
        checklist = [
            {"question": POINT.format(dimension=d, text=t), "weight": 1.0, "dimension": d.strip()}
            for d, t in pairs
        ]
        out.append(
            {
                "prompt": row[text].strip(),
                "category": about.get("Primary Categories", ""),
                "checklist": checklist,
            }
        )
    return out
