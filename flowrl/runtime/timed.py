"""Calls with a time limit.

In the main thread, a signal ends the call where it is: no second thread computes, which on few
cores would slow a run by half. A call from another thread has no signals, so it runs in a thread of
its own, always the same one, which is left behind when the limit passes.

A call that does not return to Python (a kernel that hangs, an expression that backtracks for ever)
leaves nobody who could say so; GRACE seconds after the limit the interpreter itself then ends the
process with exit code 1 and says where every thread was.
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

GRACE = 60.0  # seconds
AGAIN = 1.0  # seconds after which a call that caught its end is ended again
SIGNAL = getattr(signal, "SIGVTALRM", None)  # one that nobody sends; None: there are no signals
Job = tuple[Future[Any], Callable[[], Any]]


class Overdue(BaseException):
    """The limit passed. Not an Exception: the call itself might take it for one of its own."""


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
        watcher.join()  # so that no signal is on its way once the handler is gone
        signal.signal(SIGNAL, before)


class Caller:
    """Calls one function at a time in a thread of its own. late: whether any call was, here or in
    the main thread; what it waits for may keep the process from its end."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; a forked process has none of its parent's threads."""
        self.turn = threading.Lock()
        self.jobs: queue.SimpleQueue[Job] | None = None
        self.late = False

    def within(self, seconds: float, function: Callable[[], Any]) -> Any:
        """As `within` above, in the thread of this caller."""
        future: Future[Any] = Future()
        with self.turn:
            if self.jobs is None:
                self.jobs = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self.jobs,), daemon=True).start()
            self.jobs.put((future, function))
            del function  # the caller's: nothing here outlives the call
            try:
                return future.result(seconds)
            except TimeoutError:
                if future.done():  # the function's own
                    raise
                raise Overdue from None
            finally:
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
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)
