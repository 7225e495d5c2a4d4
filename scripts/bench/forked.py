"""A command of flowrl in a process forked from this one, and what is wrong with how it ended.

A fork has imported everything and starts in milliseconds, where a process of its own imports for
ten seconds. This process must not have used a network: threads of torch do not survive a fork.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl.cli.main import app

CONTROLS = frozenset(map(chr, [*range(9), *range(11, 32), *range(127, 160), 0x202E]))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int | None  # exit code; minus a signal; None: it hung and was killed
    text: str  # all that it printed
    seconds: float = 0.0  # from its start to its end

    def wrong(self, *names: str) -> list[str]:
        """Return what is wrong, unless it did its work or said in a sentence why not.

        names: the output of a command that failed has to hold one of them.
        """
        if self.code is None:
            return ["it hung"]
        if "Traceback (most recent call last)" in self.text:
            return ["traceback"]
        if found := CONTROLS & set(self.text):
            return [f"raw control characters {sorted(found)!r}"]
        if self.code == 0:
            return []
        if self.code not in (1, 2):
            return [f"exit code {self.code}"]
        if not any(line.startswith(("flowrl: ", "Usage: ")) for line in self.text.splitlines()):
            return [f"exit code {self.code} without a sentence"]
        if names and not any(name in self.text for name in names):
            return [f"its sentence names none of {', '.join(names)}"]
        return []


class Forked:
    """A command line at work.

    printed: the file that takes what it prints. around: it runs inside of this context.
    """

    def __init__(
        self,
        words: Sequence[str],
        printed: Path,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.printed, self.began = printed, time.monotonic()
        # before the fork: a command may be killed before it has opened anything
        output = os.open(printed, os.O_WRONLY | os.O_CREAT, 0o666)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(list(words), output, around))
        os.close(output)

    def _run(
        self, words: list[str], output: int, around: Callable[[], AbstractContextManager[object]]
    ) -> int:
        """Run the command in the fork, with what it prints in `output` -> its exit code."""
        code = 1
        for stream in (1, 2):
            os.dup2(output, stream)
        # the parent's streams may hold text of its own, or belong to a test
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
        try:
            with around():
                app(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        except BaseException:
            traceback.print_exc()
        with suppress(OSError):  # a disk that fails on purpose may be full
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    def poll(self) -> int | None:
        """Return the exit code, or None while the command runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def wait(self, hang: float, kill: float | None = None) -> Ended:
        """Wait for its end. kill: SIGKILL it after so many seconds; hang: give it up then."""
        limit = hang if kill is None else min(hang, kill)
        while (code := self.poll()) is None and time.monotonic() - self.began <= limit:
            time.sleep(0.005)
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            code = None if limit == hang else -signal.SIGKILL
        seconds = time.monotonic() - self.began
        return Ended(code=code, text=self.printed.read_text(errors="replace"), seconds=seconds)
