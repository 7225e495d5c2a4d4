"""Standard output and error that no text and no reader can break.

Printing never loses finished work: a character that a terminal does not have becomes an escape,
such as \\u5706, and output that has no reader any more (the rest of `| head`) is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")  # names by file descriptor, 0 to 2
GONE = (errno.EPIPE, errno.EIO)  # errors when the reader (as of `| head`) or the terminal is gone


class _Output(io.FileIO):
    """Standard output that drops text when its reader is gone."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return memoryview(data).nbytes


def keep_streams_open() -> None:
    """Make standard output and error of this process ones that no character and no reader can
    break. A stream that was closed leads nowhere: otherwise the next file that is opened would take
    its number, and get what libraries print."""
    for number, name in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
        # only the process's own stream, not the replacement in a notebook
        elif number and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            output = io.BufferedWriter(_Output(number, "w", closefd=False))
            lines = stream.line_buffering or stream.write_through
            text = io.TextIOWrapper(output, stream.encoding, "backslashreplace", None, lines)
            setattr(sys, name, text)
