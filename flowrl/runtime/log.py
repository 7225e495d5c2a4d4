"""Output of a run for people: messages, a live bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from flowrl.runtime.text import one_line, printable

logger = logging.getLogger("flowrl")


def _one_line(record: logging.LogRecord) -> bool:
    """Make a message one line that a terminal can show, whatever it quotes."""
    record.msg, record.args = one_line(record.getMessage()), ()
    return True


logger.addFilter(_one_line)


def setup(level: str = "INFO") -> None:
    """Send flowrl's messages to stderr through rich."""
    from rich.logging import RichHandler

    if not logger.handlers:
        logger.addHandler(
            RichHandler(console=_console(), show_path=False, show_time=False, markup=False)
        )
        logger.propagate = False
    logger.setLevel(level)


# Messages without consequence when torchao and bitsandbytes are imported: logger -> their words.
CHATTER = {
    "torch.utils._pytree": "is now natively supported by torch.compile",
    "bitsandbytes.backends.cpu.ops": "from kernels-community",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor",
}


def _tells(words: str, record: logging.LogRecord) -> bool:
    return words not in record.getMessage()


for _name, _words in CHATTER.items():
    logging.getLogger(_name).addFilter(partial(_tells, _words))


def hush() -> list[tuple[Any, int, bool]]:
    """Let diffusers and transformers report errors only, and show no progress bars.

    Return their earlier settings: (logging, verbosity, bars).
    """
    import diffusers
    import transformers

    libraries = [library.utils.logging for library in (diffusers, transformers)]
    before = [(lib, lib.get_verbosity(), lib.is_progress_bar_enabled()) for lib in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    return before


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, diffusers and transformers report errors only and show no progress bars."""
    before = hush()
    try:
        yield
    finally:
        for library, verbosity, bars in before:
            library.set_verbosity(verbosity)
            if bars:
                library.enable_progress_bar()


class Progress:
    """`with Progress(total) as bar: bar.update(iteration, reward=..., ...)`: a live bar on a
    terminal, a line each few seconds elsewhere. A bar inside of another one is a line below it.

    total: None: not known. show: False on all processes but the main one. lines: False: nothing is
    printed elsewhere.
    """

    def __init__(
        self,
        total: int | None,
        *,
        done: int = 0,
        title: str = "train",
        show: bool = True,
        every: float = 10.0,
        lines: bool = True,
    ) -> None:
        self.total, self.done, self.every = total, done, every
        self.title = printable(title)
        self.live = show and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        self.show = self.live or (show and lines)
        self.last = -math.inf
        # (time, iteration) when the first iteration here ended; start-up does not count
        self.first: tuple[float, int] | None = None

    def __enter__(self) -> Progress:
        if self.live:
            if not _bars:
                _bars.append(_new_bar())
            self.bar = _bars[0]
            self.task = self.bar.add_task(
                self.title, total=self.total, completed=self.done, numbers=""
            )
            self.bar.start()  # without effect on a bar that is shown already
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live and len(self.bar.tasks) > 1:
            self.bar.remove_task(self.task)
        elif self.live:
            _bars.pop().stop()

    def update(self, iteration: int, **numbers: float) -> None:
        """Show how many iterations are finished, and the few numbers worth watching."""
        self.done = iteration
        if not self.show:
            return
        text = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        if self.live:
            self.bar.update(self.task, completed=iteration, numbers=text)
            return
        assert self.total is not None
        now = time.perf_counter()
        self.first = self.first or (now, iteration)
        if now - self.last >= self.every or iteration >= self.total:
            self.last = now
            line = f"{self.title} {iteration}/{self.total}  {text}{self._left(now, iteration)}"
            _console().print(line, soft_wrap=True, highlight=False)

    def _left(self, now: float, iteration: int) -> str:
        """Estimate the time left from the pace of this process; "" before there is one."""
        assert self.first is not None and self.total is not None
        began, start = self.first
        if iteration <= start:
            return ""
        return f"  {(now - began) / (iteration - start) * (self.total - iteration):.0f} s left"


def _new_bar() -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[numbers]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=_console(),
    )


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Show on a terminal that a block, or a function that this decorates, is still at work."""
    with Progress(None, title=title, lines=False):
        yield


def _console() -> Any:
    """Return the only console on stderr: the bar and messages must not overwrite each other."""
    global _shared
    from flowrl.runtime.terminal import Terminal

    if _shared is None:
        _shared = Terminal(stderr=True)
    return _shared


_shared: Any = None
_bars: list[Any] = []  # at most one bar of rich: a terminal shows one at a time
