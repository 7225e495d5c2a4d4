"""history.jsonl of a run: when it was started, resumed, changed and ended, and by which process."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from flowrl.runtime.store import files

FILE = "history.jsonl"


def add(run: Path, event: str, *, iteration: int, **facts: Any) -> None:
    """Append a line. event: started, resumed, changed, lost, damaged, ended ... iteration: finished
    ones, from 0. facts: anything json can hold."""
    line = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "event": event,
        "iteration": iteration,
        **facts,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    files.append(run / FILE, json.dumps(line) + "\n")


def read(run: Path) -> list[dict[str, Any]]:
    """The lines, oldest first; what was damaged is left out, as nothing depends on it."""
    path, lines = run / FILE, []
    for text in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
