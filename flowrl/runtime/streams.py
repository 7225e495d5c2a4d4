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
        elif number and (raw := _raw(stream)) is not None and raw.fileno() == number:
            stream.flush()
            output: Any = _Output(number, "w", closefd=False)
            if not isinstance(stream.buffer, io.FileIO):  # as without PYTHONUNBUFFERED
                output = io.BufferedWriter(output)
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            text = io.TextIOWrapper(output, stream.encoding, "backslashreplace", **how)
            setattr(sys, name, text)


def _raw(stream: Any) -> io.FileIO | None:
    """The file behind a stream; None where there is none (in a notebook or on a Windows console,
    which show every character)."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, io.FileIO) else None
