"""Standard output and error that no text and no reader can break.

Work that is done is not lost to printing: a character that a terminal does not have becomes an
escape, such as \\u5706, and what nobody is there to read (the rest of `| head`) is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

STREAMS = ("stdin", "stdout", "stderr")  # by their number
GONE = (errno.EPIPE, errno.EIO)  # the reader (of `| head`), or the terminal


class _Output(io.FileIO):
    """Standard output; what nobody is there to read is dropped."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return memoryview(data).nbytes


def keep_streams_open() -> None:
    """Make standard output and error of this process ones that no character and no reader can
    break. A stream that was closed leads nowhere: a file that is opened next would take its number,
    and get what libraries print."""
    for number, name in enumerate(STREAMS):
        stream = getattr(sys, name)
        if stream is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
        elif number and stream is getattr(sys, f"__{name}__"):  # not that of a notebook
            stream.flush()
            output = io.BufferedWriter(_Output(number, "w", closefd=False))
            lines = stream.line_buffering or stream.write_through
            text = io.TextIOWrapper(output, stream.encoding, "backslashreplace", None, lines)
            setattr(sys, name, text)
