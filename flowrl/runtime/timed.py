"""Calls with a time limit.

Nothing can stop a call from outside, so it runs in a thread of its own, always the same one, which
is left behind when the limit passes. A call that holds Python's lock while it hangs leaves nobody
who could notice; GRACE seconds after the limit the interpreter itself then ends the process with
exit code 1 and says where every thread was.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

GRACE = 60.0  # seconds
Job = tuple[Future[Any], Callable[[], Any]]


class Overdue(Exception):
    """The limit passed; the call goes on, and its thread is left behind."""


class Caller:
    """Calls one function at a time in a thread of its own. busy: the calls that did not return."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; a forked process has none of its parent's threads."""
        self.turn = threading.Lock()
        self.jobs: queue.SimpleQueue[Job] | None = None
        self.busy: set[Future[Any]] = set()

    def within(self, seconds: float, function: Callable[[], Any]) -> Any:
        """What the function returns or raises; Overdue after `seconds`."""
        future: Future[Any] = Future()
        with self.turn:
            if self.jobs is None:
                self.jobs = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self.jobs,), daemon=True).start()
            self.busy.add(future)
            future.add_done_callback(self.busy.discard)
            self.jobs.put((future, function))
            del function  # the caller's: nothing here outlives the call
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
            try:
                return future.result(seconds)
            except TimeoutError:
                if future.done():  # the function's own
                    raise
                raise Overdue from None
            finally:
                faulthandler.cancel_dump_traceback_later()
                if not future.done():  # also where a signal ends the wait
                    self.jobs = None

    def _serve(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Call what is asked for, until a call is left behind."""
        import asyncio

        asyncio.set_event_loop(asyncio.new_event_loop())  # as in the main thread, there is one
        while self.jobs is jobs:
            future, function = jobs.get()
            try:
                result = function()
            except BaseException as error:  # whoever waits for the future gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function  # what a call held is free before the next one
            result = None


caller = Caller()
os.register_at_fork(after_in_child=caller.forget)


def leave(code: int) -> NoReturn:
    """End the process without waiting for any thread, with everything printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
