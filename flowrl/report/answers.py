"""Answers of checklists in report.html, folded: those about a few pictures, which evaluations keep
with the row that they belong to.

A row's "answers" are {label of the checklist: [{"image": number, "prompt": text, "said": what
Checklist.told gives}, ...]}. Rows of one evaluation show the same images, so a table has a column a
row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Answers = dict[str, list[dict[str, Any]]]


def folded(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a checklist: questions below their prompt, and a column for each row that has
    answers; "" where none has."""
    labels = dict.fromkeys(label for row in rows for label in row.get("answers", {}))
    out = ""
    for label in labels:
        out += _table(
            label,
            {
                str(row["name"]): row["answers"][label]
                for row in rows
                if label in row.get("answers", {})
            },
        )
    return out


def _table(label: str, columns: Mapping[str, list[dict[str, Any]]]) -> str:
    """columns: name of a row -> its entries."""
    asked: dict[
        tuple[Any, ...], dict[str, list[dict[str, Any]]]
    ] = {}  # image, prompt and questions -> name of a row -> what was said
    for name, entries in columns.items():
        for entry in entries:
            texts = [question["question"] for question in entry["said"]]
            asked.setdefault((entry["image"], entry["prompt"], *texts), {})[name] = entry["said"]
    body = ""
    for (image, prompt, *questions), said in sorted(asked.items()):
        body += f'<tr><th colspan="{len(columns) + 1}">image {image}: {escape(prompt)}</th></tr>'
        for number, question in enumerate(questions):
            cells = "".join(
                f"<td>{_cell(said[name][number]) if name in said else ''}</td>" for name in columns
            )
            body += f"<tr><td>{escape(question)}</td>{cells}</tr>"
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("", *columns))
    table = (
        "<div"
        f' class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )
    return (
        f"<details><summary>{escape(label)}: answers about {len(asked)}"
        f" images</summary>{table}</details>"
    )


def _cell(said: Mapping[str, Any]) -> str:
    """
    >>> _cell({"question": "Is it red?", "answer": 0.875, "counted": 0.0, "zeroed": True})
    '0.88<small>counts 0: a parent is no</small>'
    """
    if said["answer"] is None:
        return "failed"
    answer = {0.0: "no", 1.0: "yes"}.get(said["answer"], f"{said['answer']:.2f}")
    return answer + ("<small>counts 0: a parent is no</small>" if said["zeroed"] else "")
