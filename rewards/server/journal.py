"""Scores that were already paid for: a run that is resumed does not ask for them again.

It has one JSON line for each score, {"key": sha256 of what was scored, "score": number}, appended
in one write per batch: scores that a killed process had received are there, and several processes
may share the file. Python writes a float so that it reads back as the same float. A line that was
torn by a kill is skipped. Failed samples are not kept: they are tried again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.rewards.server.wire import meta_text
from flowrl.runtime.store import lines
from flowrl.runtime.store.side_files import FileModel


class ScoreRow(FileModel):
    """A line of the journal."""

    key: str  # sha256 of all that the score depends on
    score: float  # score as the reward gave it, finite or not


class ScoreJournal:
    """Key -> score, on disk without limit, in memory the newest `keep`; safe in several threads."""

    def __init__(self, path: str | Path, *, keep: int = 200_000):
        """path: file that is made when the first score comes. A file of another kind ->
        ValueError."""
        self.path, self.keep = Path(path), keep
        self.lock = threading.Lock()
        newest = list(lines.read(self.path, ScoreRow, newest=keep))
        self.scores = {line.row["key"]: line.row["score"] for line in newest if line.row}
        if newest and not self.scores and newest[0].text.endswith(b"\n"):
            raise ValueError(
                f"{self.path} is not a journal of scores: none of its lines holds a key and a"
                " score; name another file"
            )

    def get(self, key: str) -> float | None:
        return self.scores.get(key)

    def add(self, scores: Mapping[str, float]) -> None:
        """Keep more scores; they are on the disk when this returns."""
        if not scores:
            return
        rows = [{"key": key, "score": score} for key, score in scores.items()]
        with self.lock:
            lines.append(self.path, rows)
            self.scores |= scores
            while len(self.scores) > self.keep:
                del self.scores[next(iter(self.scores))]


def keys(version: str, media: Tensor, prompts: list[str], columns: Mapping[str, Any]) -> list[str]:
    """sha256 of all that the score of each sample depends on -> B hex texts.

    version: version of the reward and its settings. media: (B, ...) on CPU. columns: columns that
    the reward needs (columns_of). With a column "group" a score depends on the whole group, in
    order.
    """
    own = [_own_key(version, media, prompts, columns, i) for i in range(len(prompts))]
    if "group" not in columns:
        return own
    members: dict[int, list[int]] = {}
    for i, group in enumerate(columns["group"].tolist()):
        members.setdefault(group, []).append(i)
    out = dict.fromkeys(range(len(own)), "")
    for rows in members.values():
        whole = "".join(own[i] for i in rows).encode()
        out |= {i: _hash(whole, str(place).encode()) for place, i in enumerate(rows)}
    return list(out.values())


def _own_key(
    version: str, media: Tensor, prompts: list[str], columns: Mapping[str, Any], i: int
) -> str:
    """The key of sample i, apart from its group."""
    parts = [version.encode(), prompts[i].encode(), *_tensor(media[i])]
    for name, column in columns.items():
        if name != "group":
            row = column[i]
            cells = _tensor(row) if isinstance(column, Tensor) else (meta_text(row).encode(),)
            parts += [name.encode(), *cells]
    return _hash(*parts)


def _hash(*parts: bytes) -> str:
    """Hash the parts' own hashes, so that no two lists of parts run together."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _tensor(row: Tensor) -> tuple[bytes, bytes]:
    return f"{row.dtype} {tuple(row.shape)}".encode(), row.contiguous().numpy().tobytes()
