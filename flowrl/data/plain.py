"""Plain text files of prompts, one a line, and the notations of other programs in them.

In the sample_prompts.txt of kohya's sd-scripts and its relatives, "# ..." is a comment and
"--n TEXT" a negative prompt; other flags are settings of a call.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from flowrl.runtime.log import logger
from flowrl.runtime.text import listed, printable

FLAG = re.compile(r"\s--(?=[A-Za-z])")
# letters of kohya's flags, beside --n
SETTINGS = set("whfdslgti") | {"fs", "ss", "ci", "cn", "cv", "am", "ctr"}
RECORD = re.compile(r"\[?\s*{\s*['\"]?\w+['\"]?\s*:|\[\s*['\"]")  # beginning of a record
CHOICE = re.compile(r"{.*?}|__\w+__")  # wildcards and templates of other programs


def rows(content: str, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read (where, {"prompt", "negative_prompt"}) of each line that is no comment. A line that is a
    row of a table or a record -> ValueError; a warning names words that may be meant as more than
    text."""
    found, comments, settings, odd = [], list[str](), set[str](), list[str]()
    for number, line in enumerate(map(str.strip, content.split("\n")), 1):
        if line.startswith("#") or (not found and line.casefold() in ("prompt", "prompts")):
            comments.append(str(number))
        elif line:
            where = f"prompt file {path}, line {number}"
            _check(line, where)
            text, *flags = FLAG.split(line)
            given = {name.lower(): value for name, _, value in (f.partition(" ") for f in flags)}
            if other := given.keys() - SETTINGS - {"n"}:
                text, given = line, {}
            settings |= given.keys() - {"n"}
            odd += [f"line {number}"] if other or CHOICE.search(text) else []
            found.append((where, {"prompt": text, "negative_prompt": given.get("n", "").strip()}))
    if not any(entry["negative_prompt"] for _, entry in found):
        found = [(where, {"prompt": entry["prompt"]}) for where, entry in found]
    if comments:
        _say(f"{path}: a comment or a header is no prompt: line {listed(comments)}")
    if settings:
        names = listed([f"--{name}" for name in sorted(settings)])
        _say(f"{path}: {names} are left out: size, steps and seed are settings, for all prompts")
    if odd:
        _say(f"{path}: flags, {{}} and __ are read as text, not as commands: {listed(odd)}")
    return found


def _check(line: str, where: str) -> None:
    if "\t" in line:
        raise ValueError(
            f'{where} holds a tab: "{printable(line, 60)}"; a table needs a first line that names'
            ' its columns, "prompt" among them, and a prompt needs spaces'
        )
    if RECORD.match(line):
        raise ValueError(
            f'{where} looks like a record and is not JSON: "{printable(line, 60)}"; a line of JSON'
            ' is like {"prompt": "a red circle"}'
        )


@functools.cache
def _say(sentence: str) -> None:
    """Warn only once in a process, because a list is read several times."""
    logger.warning(sentence)
