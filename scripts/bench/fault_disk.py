"""A disk that fails on purpose: counts what this process writes below a folder, and has one of
these operations go wrong.

before, half, after: SIGKILL before the operation, in the middle of a write, or after it. power: a
power cut after it; what was written and not flushed is partly lost. ENOSPC, EDQUOT, EROFS, EIO:
from this operation on the disk is full, over its quota, read-only or broken.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

KILLS = ("before", "half", "after", "power")
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
GROWS = ("open", "write", "mkdir")  # what a full disk refuses
FLUSHES = ("write", "fsync")  # what a broken one does
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """Wraps the functions of `os` and `open` for the rest of this process's life."""

    def __init__(self, folder: Path, how: str = "", at: int = 0, seed: int = 0) -> None:
        """how: see above, "" goes on; at: which operation, from 1."""
        self.folder, self.how, self.at = f"{os.path.realpath(folder)}", how, at
        self.random, self.count = random.Random(seed), 0
        self.flushed: dict[str, int] = {}  # files written to -> their bytes that are on the disk
        self.write, self.fsync, self.open = os.write, os.fsync, builtins.open

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Fail as planned from here on; one that goes on prints its operations in the end."""
        self.install()
        try:
            yield
        finally:
            if not self.how:
                print(f"operations: {self.count}")

    def install(self) -> None:
        for name in ("replace", "rename"):
            self._wrap(name, self._moved)
        for name in ("mkdir", "unlink", "remove", "rmdir", "ftruncate"):
            self._wrap(name, lambda *_: None)
        for name in ("open", "write", "fsync"):
            self._wrap(name, getattr(self, f"_{name}"))
        builtins.open = io.open = self._opened

    def _wrap(self, name: str, note: Callable[..., None]) -> None:
        plain = getattr(os, name)

        def wrapped(target: Any, *args: Any, **options: Any) -> Any:
            path = _path(target, options.get("dir_fd"))
            reads = name == "open" and not (args and args[0] & WRITES)
            if reads or not self._is_mine(path):
                return plain(target, *args, **options)
            act = lambda: _noted(plain(target, *args, **options), note, path, *args)  # noqa: E731
            return self._operate(name, act, target, args)

        setattr(os, name, wrapped)

    def _is_mine(self, path: str) -> bool:
        return path == self.folder or path.startswith(f"{self.folder}/")

    def _opened(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """`open`, by which whoever does not use `os.open` writes."""
        writes = isinstance(file, str | os.PathLike) and set(mode) & set("wax+")
        if not writes or not self._is_mine(path := _path(file, None)):
            return self.open(file, mode, *args, **options)
        opened = lambda: self.open(file, mode, *args, **options)  # noqa: E731
        return self._operate("open", lambda: _noted(opened(), self._open, path), file, ())

    def _operate(self, name: str, act: Callable[[], Any], target: Any, args: Any) -> Any:
        self.count += 1
        if not self.how or self.count < self.at:
            return act()
        if self.how in ERRORS:
            return self._fail(name, act, target, args)
        if self.how == "before":
            _die()
        if self.how == "half" and name == "write":
            self.write(target, bytes(args[0])[: self.random.randrange(len(args[0]) + 1)])
            _die()
        act()
        if self.how == "power":
            self._cut()
        _die()

    def _fail(self, name: str, act: Callable[[], Any], target: Any, args: Any) -> Any:
        """A full disk takes a part of the first write."""
        if self.how in ("ENOSPC", "EDQUOT") and name not in GROWS:
            return act()
        if self.how == "EIO" and name not in FLUSHES:
            return act()
        if self.how == "ENOSPC" and self.count == self.at and name == "write" and len(args[0]) > 1:
            return self.write(target, bytes(args[0])[: len(args[0]) // 2])
        number = getattr(errno, self.how)
        raise OSError(number, os.strerror(number), None if isinstance(target, int) else target)

    # what is on the disk

    def _open(self, path: str, *_: Any) -> None:
        self.flushed.setdefault(path, os.path.getsize(path))

    def _write(self, path: str, *_: Any) -> None:
        self.flushed.setdefault(path, 0)

    def _fsync(self, path: str, *_: Any) -> None:
        if os.path.isfile(path):
            self.flushed[path] = os.path.getsize(path)

    def _moved(self, path: str, target: Any, *_: Any) -> None:
        if path in self.flushed:
            self.flushed[_path(target, None)] = self.flushed.pop(path)

    def _cut(self) -> None:
        for path, whole in self.flushed.items():
            if os.path.isfile(path) and (size := os.path.getsize(path)) > whole:
                os.truncate(path, self.random.randint(whole, size))


def _noted(result: Any, note: Callable[..., None], path: str, *args: Any) -> Any:
    note(path, *args)
    return result


def _path(target: Any, folder: int | None) -> str:
    """The real path of a name, or of an open file."""
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    name = os.fsdecode(target)
    if folder is not None:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
