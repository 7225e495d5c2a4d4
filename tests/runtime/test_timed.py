"""A call that outlives its limit is ended, or left behind in its thread; its errors are its own."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flowrl.runtime import timed
from flowrl.runtime.timed import Caller, Overdue

FROZEN = """
import re
from flowrl.runtime import timed
timed.GRACE = 0.2
timed.within(0.2, lambda: re.match(r"(a+)+$", "a" * 40 + "b"))
"""


def test_calls_share_a_thread_of_their_own():
    caller = Caller()
    threads = {caller.within(9, threading.get_ident) for _ in range(3)}
    assert len(threads) == 1 and threading.get_ident() not in threads


@pytest.mark.parametrize("error", [KeyError("x"), TimeoutError("its own"), SystemExit(0)])
def test_what_the_function_raises_is_raised(error):
    def fails():
        raise error

    caller = Caller()
    with pytest.raises(type(error)) as caught:
        caller.within(9, fails)
    assert caught.value is error and caller.within(9, lambda: 1) == 1


def test_a_call_beyond_its_limit_is_left_behind():
    caller, over = Caller(), threading.Event()
    began = time.monotonic()
    with pytest.raises(Overdue):
        caller.within(0.05, over.wait)
    assert time.monotonic() - began < 5
    assert caller.within(9, lambda: "the next one has another thread")
    over.set()


def stubborn():
    """Takes the first ends for errors of its own."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            time.sleep(60)
    time.sleep(60)


@pytest.mark.parametrize("hangs", [threading.Event().wait, stubborn])
def test_in_the_main_thread_a_call_is_ended_where_it_is(hangs, monkeypatch):
    monkeypatch.setattr(timed, "AGAIN", 0.05)
    before, threads = signal.getsignal(timed.SIGNAL), set(threading.enumerate())
    began = time.monotonic()
    with pytest.raises(Overdue):
        timed.within(0.1, hangs)
    assert time.monotonic() - began < 5 and timed.caller.late
    assert signal.getsignal(timed.SIGNAL) is before and not set(threading.enumerate()) - threads


def test_a_call_in_time_leaves_nothing_behind_in_the_main_thread():
    threads = set(threading.enumerate())
    assert timed.within(9, threading.get_ident) == threading.get_ident()
    assert not set(threading.enumerate()) - threads


def test_a_call_that_holds_pythons_lock_ends_the_process_with_its_place():
    """Catastrophic backtracking: no other thread runs, so no sentence and no exception could."""
    result = subprocess.run(
        [sys.executable, "-c", FROZEN], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and "in match" in result.stderr


def test_a_forked_process_has_a_thread_of_its_own():
    assert timed.caller.within(5, lambda: 1) == 1
    pid = os.fork()
    if pid == 0:
        os._exit(timed.caller.within(5, lambda: 7))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
