"""Output of a run for people: messages, a live bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
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
    """Send flowrl's messages to stderr: through rich to a terminal, else a line each, with the
    time of day."""
    from rich.logging import RichHandler

    if not logger.handlers:
        shown = {"show_path": False, "show_time": False, "markup": False}
        rich = sys.stderr.isatty()
        logger.addHandler(RichHandler(console=_console(), **shown) if rich else Lines())
        logger.propagate = False
    logger.setLevel(level)


class Lines(logging.Handler):
    """Prints a message as one line, however long, so that grep finds it whole."""

    form = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def emit(self, record: logging.LogRecord) -> None:
        _print(self.form.format(record))


# Messages without consequence when torchao and bitsandbytes are imported: logger -> their words.
CHATTER = {
    "torch.utils._pytree": "is now natively supported by torch.compile",
    "bitsandbytes.backends.cpu.ops": "from kernels-community",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor",
}
for _name, _words in CHATTER.items():
    logging.getLogger(_name).addFilter(partial(lambda w, r: w not in r.getMessage(), _words))
warnings.filterwarnings("ignore", "IProgress not found")  # tqdm says so in notebooks


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


@contextmanager
def warned_once() -> Iterator[None]:
    """Inside, a message that was logged is not logged again."""
    seen = set[str]()

    def new(record: logging.LogRecord) -> bool:
        count = len(seen)
        seen.add(record.msg)
        return len(seen) > count

    logger.addFilter(new)
    try:
        yield
    finally:
        logger.removeFilter(new)


class Progress:
    """`with Progress(total) as bar: bar.update(iteration, reward=..., ...)`: a live bar on a
    terminal, in a notebook a line that changes, elsewhere a line each few seconds. A bar inside of
    another one is a line below it.

    total: None: not known. show: False on all processes but the main one. lines: False: elsewhere
    the main process prints a line only where nothing was printed for QUIET seconds.
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
        self.total, self.done, self.every, self.lines = total, done, every, lines
        self.title = printable(title)
        main = os.environ.get("RANK", "0") == "0"
        self.live = show and sys.stderr.isatty() and main
        self.show = self.live or (show and (lines or main))
        self.last = -math.inf if lines else time.perf_counter()
        # (time, iteration) when the first iteration here ended; start-up does not count
        self.first: tuple[float, int] | None = None
        self.place: Any = None  # the output of a notebook's cell that holds the line

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

    def update(self, iteration: int, seconds: float | None = None, **facts: float | str) -> None:
        """Show how many iterations are finished, and the few numbers or words worth watching.
        seconds: those of the last iteration."""
        self.done = iteration
        if not self.show:
            return
        texts = {k: v if isinstance(v, str) else f"{v:.4g}" for k, v in facts.items()}
        text = "  ".join(map(" ".join, texts.items()))
        if self.live:
            self.bar.update(self.task, completed=iteration, numbers=text)
            return
        assert self.total is not None
        now = time.perf_counter()
        self.first = self.first or (now, iteration)
        every = OFTEN if in_notebook() else self.every
        due = now - self.last >= every or iteration >= self.total
        if due if self.lines else now - max(self.last, _printed) >= QUIET:
            self.last = now
            took = "" if seconds is None else f", {seconds:.0f} s"
            line = f"{self.title} {iteration}/{self.total}  {text}".rstrip()
            self._print(f"{line}{took}{self._left(now, iteration, seconds)}")

    def _print(self, line: str) -> None:
        """Print a line; in a notebook the bar's newest line takes the place of the one before."""
        if not in_notebook():
            return _print(line)
        from IPython.display import display

        done = 20 * self.done // (self.total or 1)
        self.place = self.place or display({}, raw=True, display_id=True)
        self.place.update({"text/plain": f"{'━' * done}{'─' * (20 - done)} {line}"}, raw=True)

    def _left(self, now: float, iteration: int, seconds: float | None) -> str:
        """Estimate the time left from the pace so far, at first from an iteration's seconds."""
        assert self.first is not None and self.total is not None
        began, start = self.first
        pace = (now - began) / (iteration - start) if iteration > start else seconds
        if pace is None or iteration >= self.total:
            return ""
        return f", {timedelta(seconds=round(pace * (self.total - iteration)))} left"


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


def _print(line: str) -> None:
    """Print a line for a file, unwrapped."""
    global _printed
    _printed = time.perf_counter()
    _console().print(line, soft_wrap=True, highlight=False, markup=False)


def in_notebook() -> bool:
    """Whether output goes below the cell of a notebook."""
    return bool(_console().is_jupyter)


def _console() -> Any:
    """Return the only console on stderr: the bar and messages must not overwrite each other."""
    global _shared
    from flowrl.runtime.terminal import Terminal

    if _shared is None:
        _shared = Terminal(stderr=True)
    return _shared


OFTEN = 0.2  # seconds between two lines that take one place in a notebook
QUIET = 30.0  # longest silence in seconds, where work that is counted goes on without a terminal
_printed = -math.inf  # time.perf_counter() of the last line
_shared: Any = None
_bars: list[Any] = []  # at most one bar of rich: a terminal shows one at a time
