"""Answers of checklists in report.html, folded: those about a few pictures, which evaluations keep.

A row's "answers" are {label of the checklist: [{"image": number, "prompt": text, "said": result of
Checklist.told}, ...]}. Rows of one evaluation show the same images, so a table has one column for
each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flowrl.report.render import render

Entry = Mapping[str, Any]  # {"image", "prompt", "said"} of one picture
Answers = dict[str, list[dict[str, Any]]]


def folded(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Fold answers into a table for each checklist: questions below their prompt, a column for each
    row with answers."""
    labels = dict.fromkeys(label for row in rows for label in row.get("answers", {}))
    tables = []
    for label in labels:
        answered = [row for row in rows if label in row.get("answers", {})]
        columns = {str(row["name"]): row["answers"][label] for row in answered}
        tables.append((label, list(columns), _images(columns)))
    return render("answers.html", tables=tables)


def _images(columns: Mapping[str, Sequence[Entry]]) -> list[tuple[Any, ...]]:
    """Entries by name of their row -> image, prompt, and a line a question with a cell a column.

    Where rows asked different questions about one image, it stands there once for each list.
    """
    # (image, prompt, *questions) -> name of a row -> its answers
    asked: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, entries in columns.items():
        for entry in entries:
            questions = [question["question"] for question in entry["said"]]
            asked.setdefault((entry["image"], entry["prompt"], *questions), {})[name] = entry[
                "said"
            ]
    images = []
    for (image, prompt, *questions), said in sorted(asked.items()):
        lines = [
            (question, [_cell(said[name][k]) if name in said else ("", False) for name in columns])
            for k, question in enumerate(questions)
        ]
        images.append((image, prompt, lines))
    return images


def _cell(said: Mapping[str, Any]) -> tuple[str, bool]:
    """The answer, and whether it counts 0 because the answer to its parent was no.

    >>> _cell({"question": "Is it red?", "answer": 0.875, "counted": 0.0, "zeroed": True})
    ('0.88', True)
    """
    if said["answer"] is None:
        return "failed", False
    words = {0.0: "no", 1.0: "yes"}
    return words.get(said["answer"], f"{said['answer']:.2f}"), said["zeroed"]
