"""Calls with a time limit.

In the main thread, a signal ends the call where it is: no second thread computes, which on few
cores would slow a run by half. A call from another thread cannot get signals, so it runs in a
thread of its own, always the same one, which is abandoned when the limit passes.

A call that does not return to Python (a kernel that hangs, an expression that backtracks for ever)
leaves no code that could report it; GRACE seconds after the limit the interpreter itself then ends
the process with exit code 1 and prints where every thread was.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NoReturn

GRACE = 60.0  # seconds after the limit until the interpreter ends the process
AGAIN = 1.0  # seconds after which a call that caught Overdue gets it again
# a signal that no program sends; None: this system has no signals
SIGNAL = getattr(signal, "SIGVTALRM", None)
Job = tuple[Future[Any], Callable[[], Any]]


class Overdue(BaseException):
    """The limit passed. It is no Exception, which the call itself might catch as one of its own."""


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return what the function returns, or raise what it raises; Overdue after `seconds`."""
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
    try:
        if SIGNAL is None or threading.current_thread() is not threading.main_thread():
            return caller.within(seconds, function)
        with _ended_after(seconds):
            return function()
    except Overdue:
        caller.late = True
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise Overdue inside, in the main thread, after `seconds` and every second from then.

    A thread that only waits sends the signal, since the process's timer belongs to `signals`.
    """
    inside, done = True, threading.Event()

    def end(*_: Any) -> None:
        if inside:
            raise Overdue

    def watch() -> None:
        pause = seconds
        while not done.wait(pause):
            signal.pthread_kill(main, SIGNAL)
            pause = AGAIN

    main, before = threading.get_ident(), signal.signal(SIGNAL, end)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        inside = False
        done.set()
        watcher.join()  # no signal may be on its way when the handler is gone
        signal.signal(SIGNAL, before)


class Caller:
    """Calls one function at a time in a thread of its own. late: whether any call exceeded its
    limit, here or in the main thread; an object that it waits for may keep the process from
    ending."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; a forked process has none of its parent's threads."""
        self.turn = threading.Lock()
        self.jobs: queue.SimpleQueue[Job] | None = None
        self.late = False

    def within(self, seconds: float, function: Callable[[], Any]) -> Any:
        """Do the same as `within` above, in the thread of this caller."""
        future: Future[Any] = Future()
        with self.turn:
            if self.jobs is None:
                self.jobs = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self.jobs,), daemon=True).start()
            self.jobs.put((future, function))
            # the caller owns the function: nothing here may keep it alive after the call
            del function
            try:
                return future.result(seconds)
            except TimeoutError:
                if future.done():  # the function itself raised the TimeoutError
                    raise
                raise Overdue from None
            finally:
                # the wait ended by the limit or by a signal: abandon this thread
                if not future.done():
                    self.jobs = None

    def _serve(self, jobs: queue.SimpleQueue[Job]) -> None:
        """Run the jobs, until one of them is abandoned."""
        import asyncio

        # libraries expect an event loop, as the main thread has one
        asyncio.set_event_loop(asyncio.new_event_loop())
        while self.jobs is jobs:
            future, function = jobs.get()
            try:
                result = function()
            # `future.result` raises it again in the thread that waits
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, function  # objects of one call are freed before the next one
            result = None


caller = Caller()
os.register_at_fork(after_in_child=caller.forget)


def leave(code: int) -> NoReturn:
    """Flush the output, and end the process without waiting for any thread."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)
