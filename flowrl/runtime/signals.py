"""SIGTERM and Ctrl-C end a run with a checkpoint.

The iteration is finished, or given up after 30 seconds if no weight was touched yet.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

GRACE = 30.0  # seconds
RECEIVED = " received"


def by_signal(reason: str | None) -> bool:
    """Whether a run's reason to stop is a signal, not one of its own rules."""
    return reason is not None and reason.endswith(RECEIVED)


class Aborted(BaseException):
    """The iteration was given up; weights are those of the last finished one. Not an Exception:
    scoring takes those for a failed sample."""


class StopRequest:
    """Inside `with`, a signal sets trainer.stopped, which the loop reads between iterations; a
    second one does not wait."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.installed: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self.installed = {s: signal.signal(s, self._stop) for s in self.SIGNALS}
            self.installed[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._abort)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.installed:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.installed.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        again = self.trainer.stopped is not None
        self.trainer.stopped = signal.Signals(number).name + RECEIVED
        signal.setitimer(signal.ITIMER_REAL, 0.01 if again else GRACE)

    def _abort(self, number: int, frame: FrameType | None) -> None:
        # once weights were touched, the iteration ends soon, and only then they are whole
        if not self.trainer.learner.touched:
            raise Aborted
