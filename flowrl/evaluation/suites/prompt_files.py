"""Prompt files of evaluation suites in the forms in which benchmarks publish them.

Texts come from the user's disk or the hub; flowrl ships none of them, and flowrl.data.prompts reads
them. The suite says of which form a table is:
* table: one prompt a line; `columns` names the columns that are kept (DrawBench's sheet,
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

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.data import tables
from flowrl.data.prompts import WORLDS, Prompts, load_prompts
from flowrl.runtime import hub
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located
from flowrl.runtime.registry import did_you_mean

Form = Literal["table", "dpg", "unigenbench"]
Rows = list[dict[str, Any]]
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
    """Read the prompts of a file or of "hf:owner/repo/file" on the hub, or generate them
    ("shapes:eval").

    origin: where the file is found, for the sentence that is raised where it is missing.
    """
    if source is None:
        raise ValueError(
            f'suite "{suite}" ships no prompts: download {origin} and give it with --prompts'
            " /path/to/the/file"
        )
    if source.partition(":")[0] in WORLDS:
        return load_prompts(source)
    path = _file(source, suite, origin)
    how, rows = tables.rows(path, columns or {})
    if how == "table":
        return _of_rows([row for _, row in rows], path, form, columns or {"prompt": "prompt"})
    return load_prompts(str(path))


def _file(source: str, suite: str, origin: str) -> Path:
    path = _from_hub(source, suite, origin) if source.startswith(HUB) else located(source)
    if not path.is_file():
        raise ValueError(
            f'suite "{suite}": there is no prompt file {path}; download {origin or "it"} and give'
            " it with --prompts PATH"
        )
    return path


def _of_rows(given: Rows, path: Path, form: Form, columns: Mapping[str, str]) -> Prompts:
    rows = [{name: cell or "" for name, cell in row.items()} for row in given]
    if form == "dpg":
        prompts = _dpg(rows, path)
    elif form == "unigenbench":
        prompts = _unigenbench(rows, path)
    else:
        prompts = _table(rows, columns, path)
    if not prompts:
        raise ValueError(f"prompt file {path} holds no prompts")
    return prompts


def _from_hub(source: str, suite: str, origin: str) -> Path:
    owner, _, rest = source.removeprefix(HUB).partition("/")
    repo, _, file = rest.partition("/")
    if not file:
        raise ValueError(
            f"prompts={source} should be hf:owner/repo/file, hf:owner/repo@revision/file, or the"
            " path of a file"
        )
    from huggingface_hub import hf_hub_download

    try:
        name, revision = hub.split(f"{owner}/{repo}")
        found = hf_hub_download(name, file, repo_type="dataset", revision=revision)
        hub.note(f"{owner}/{repo}", dataset=True)
        return Path(found)
    # the hub's client raises many kinds: no network, no such repository, a gate, a full disk
    except Exception as error:
        raise ValueError(
            f'suite "{suite}" needs {file} of https://huggingface.co/datasets/{owner}/{repo}, which'
            f" is not here and could not be fetched ({type(error).__name__}); download"
            f" it{f' or {origin}' if origin else ''} and give it with --prompts /path/to/{file}"
        ) from error


def _column(rows: Rows, names: Sequence[str], path: Path) -> str:
    """The name of the first of these columns that the file has, whatever its capitals."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DpgQuestion:
    """A line of dpg_bench.csv."""

    item: str  # id of the prompt to which it belongs
    text: str  # text of the prompt
    number: int  # number of the question among those of its prompt, from 1
    parents: set[int]  # numbers of the questions that it depends on
    question: str  # text of the question
    dimension: str  # subject of the question, as "entity - whole"


def _dpg(rows: Rows, path: Path) -> Prompts:
    """Make a prompt of each item_id, with "item" and "checklist"."""
    items: dict[str, list[DpgQuestion]] = {}
    for own in _dpg_questions(rows, path):
        items.setdefault(own.item, []).append(own)
    out, dropped = [], 0
    for name, members in items.items():
        by_number = {own.number: own for own in members}
        wanted = {number: own.parents for number, own in by_number.items()}
        place, parents = _parents_first(wanted)
        dropped += sum(map(len, wanted.values())) - sum(map(len, parents.values()))
        checklist = [
            _checked(by_number[n].question, by_number[n].dimension)
            | {"parent": sorted(place[p] for p in parents[n]) or None}
            for n in place
        ]
        out.append({"prompt": members[0].text, "item": name, "checklist": checklist})
    if dropped:
        logger.warning(
            f"{path}: {dropped} dependencies of questions point nowhere or in a circle, and are"
            " left out"
        )
    return out


def _dpg_questions(rows: Rows, path: Path) -> list[DpgQuestion]:
    names = ("item_id", "text", "proposition_id", "dependency", "tuple")
    item, text, number, dependency, kind = (_column(rows, [name], path) for name in names)
    question = _column(rows, ["question_natural_language"], path)
    return [
        DpgQuestion(
            item=row[item],
            text=row[text].strip(),
            number=_whole(row[number], path),
            parents={_whole(d, path) for d in row[dependency].split(",") if d.strip()} - {0},
            question=row[question].strip(),
            dimension=row[kind].partition("(")[0].strip(),
        )
        for row in rows
    ]


def _checked(question: str, dimension: str) -> dict[str, Any]:
    """A question of a checklist."""
    return {"question": question, "weight": 1.0, "dimension": dimension}


def _parents_first(wanted: dict[int, set[int]]) -> tuple[dict[int, int], dict[int, set[int]]]:
    """Put questions in an order in which parents come first -> (place of each question; the parents
    that come before it). wanted: number of a question -> its parents."""
    place: dict[int, int] = {}
    left = dict(wanted)
    while left:
        ready = [n for n, parents in left.items() if not (parents & left.keys() - {n})]
        if not ready:  # the parents form a circle, which is cut at its first question
            ready = list(left)[:1]
        for n in ready:
            place[n] = len(place)
            del left[n]
    return place, {n: {p for p in wanted[n] if p in place and place[p] < place[n]} for n in place}


def _whole(text: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f'prompt file {path}: "{text}" is not a question\'s number (proposition_id, dependency)'
        ) from None


def _unigenbench(rows: Rows, path: Path) -> Prompts:
    """Make a prompt of each line, with "category" (its theme) and "checklist" (one question a test
    point)."""
    text = _column(rows, ["prompt", "prompt_en", "prompt_zh"], path)
    points = _column(rows, ["sub_dims", "sub_dims_en", "sub_dims_zh"], path)
    out = []
    for line, row in enumerate(rows, 2):
        category, pairs = _test_points(row[points], f"prompt file {path}, entry {line}")
        checklist = [_checked(POINT.format(dimension=d, text=t), d.strip()) for d, t in pairs]
        prompt = {"prompt": row[text].strip(), "category": category, "checklist": checklist}
        out.append(prompt)
    return out


def _test_points(text: str, where: str) -> tuple[str, list[tuple[str, str]]]:
    """Read a line's JSON -> (theme, test points with their descriptions)."""
    try:
        about = json.loads(text)
        pairs = list(zip(about["Testpoints"], about["Testpoint Description"], strict=True))
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: its test points cannot be read ({type(error).__name__}: {error})"
        ) from None
    return about.get("Primary Categories", ""), pairs
