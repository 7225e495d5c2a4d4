"""SIGTERM and Ctrl-C end a run with a checkpoint.

The iteration is finished, or given up after 30 seconds if no weight was touched yet. If there are
several processes, all end together, whichever of them the signal reached: after the iteration, or
before its update if one of them does not wait.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

GRACE = 30.0  # seconds after a signal in which an iteration may still reach its update
RECEIVED = " received"


def by_signal(reason: str | None) -> bool:
    """Whether a run's reason to stop is a signal, not one of its own rules."""
    return reason is not None and reason.endswith(RECEIVED)


class Aborted(BaseException):
    """The iteration was given up, and the weights are those of the last finished one. The text is
    the reason. It is no Exception, because scoring takes an Exception for a failed sample."""


class StopRequest:
    """Inside `with`, a signal is passed on to the trainer's World, which the loop asks between
    iterations; a second signal does not wait."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.world = trainer, trainer.parts.source.world
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
        again = self.world.asked is not None
        self.world.asked = signal.Signals(number).name + RECEIVED
        signal.setitimer(signal.ITIMER_REAL, 0.01 if again else GRACE)

    def _abort(self, number: int, frame: FrameType | None) -> None:
        # once weights were touched, the iteration ends soon, and until then they are not whole
        if self.trainer.learner.touched:
            return
        if self.world.processes == 1:
            raise Aborted(self.world.asked)
        self.world.hurry = True  # the other processes must give up the iteration, too
