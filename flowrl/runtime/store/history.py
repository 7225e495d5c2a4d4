"""history.jsonl of a run: when it was started, resumed, changed and ended, and by which process."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from flowrl.runtime.store import lines

FILE = "history.jsonl"


def add(run: Path, event: str, *, iteration: int, **facts: Any) -> None:
    """Append a line. event: started, resumed, changed, lost, damaged, failed, ended ... iteration:
    how many are finished. facts: anything json can hold."""
    row = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "event": event,
        "iteration": iteration,
        **facts,
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    lines.append(run / FILE, [row])


def read(run: Path) -> list[dict[str, Any]]:
    """Return the lines, oldest first, without damaged ones: nothing depends on them."""
    return [line.row for line in lines.read(run / FILE) if line.row]
