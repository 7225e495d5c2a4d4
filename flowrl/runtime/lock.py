"""One writer of a run folder: a lock that the system drops when its holder ends, however it ends.

The lock is `flock` on RUN/run.lock, so a file that a killed process left never blocks anybody.
Who holds it is written into the file, and can be read by everyone. It holds between processes of
one machine on any disk of its own, and between machines on NFS (v4, or v3 with lockd) and on
cluster disks mounted with locks; a disk without locks is named in a warning.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from errno import EACCES, EINVAL, ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP, EWOULDBLOCK
from pathlib import Path
from weakref import WeakValueDictionary

from flowrl.runtime.files import ADVICE, WriteError
from flowrl.runtime.log import logger

FILE = "run.lock"
PATIENCE = 1.0  # seconds: a command that is just ending is waited for
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP, EINVAL}


class Busy(ValueError):
    """Another process holds the folder; the message says which, where and since when."""


class Lock:
    """This process alone writes a folder, until `release`, or until nobody holds the object.

    Within one process a folder may be locked several times: it is let go with the last of them.
    """

    def __init__(self, folder: Path, doing: str) -> None:
        """folder: must exist. doing: what holds it, for others' messages. Held elsewhere -> Busy;
        a folder that cannot be written -> WriteError."""
        self.folder, self.doing = folder, doing
        self._handle: _Handle | None = None
        self.take()

    def take(self) -> None:
        """Lock it again after `release`."""
        path = Path(os.path.realpath(self.folder)) / FILE
        self._handle = _held.get(path)
        if self._handle is None:
            self._handle = _held[path] = _Handle(path, self.folder, self.doing)

    def release(self) -> None:
        self._handle = None

    def withdraw(self) -> None:
        """Release it, and leave no file that was not there before."""
        if self._handle is not None and self._handle.new:
            (self.folder / FILE).unlink(missing_ok=True)  # while nobody else can hold it
        self.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Handle:
    """An open file that is locked; closing it drops the lock."""

    def __init__(self, path: Path, folder: Path, doing: str) -> None:
        self.number, self.new = -1, not path.exists()
        until = time.monotonic() + PATIENCE
        while not self._take(path, folder):
            if time.monotonic() > until:
                raise Busy(
                    f"{folder} is being written by {_owner(path)}; wait until it ends, or stop it"
                )
            time.sleep(0.05)
        _write_owner(self.number, doing)

    def _take(self, path: Path, folder: Path) -> bool:
        """Open and lock the file; False: another process has it."""
        try:
            self.number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            advice = ADVICE.get(error.errno or 0, "look at the disk")
            reason = error.strerror or error
            raise WriteError(
                f"{folder} cannot be written ({reason}); {advice} and try again"
            ) from error
        try:
            fcntl.flock(self.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                self.close()
                if error.errno in (EWOULDBLOCK, EACCES):
                    return False
                raise
            logger.warning(
                f"{folder} is on a disk without file locks ({error.strerror}), so nothing keeps a"
                " second process from writing into it: see to it that there is only one"
            )
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.number), os.stat(path)):
                return True
        self.close()  # its holder removed it in between
        return False

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """close: bound, because a module is empty by the time the interpreter ends."""
        if self.number >= 0:
            close(self.number)
            self.number = -1

    __del__ = close


_held: WeakValueDictionary[Path, _Handle] = WeakValueDictionary()


def _write_owner(number: int, doing: str) -> None:
    """Into the locked file itself: one put in its place would be another file, not locked."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "doing": doing}
    with suppress(OSError):  # a full disk: what matters is the lock
        os.ftruncate(number, 0)
        os.pwrite(number, (json.dumps(owner) + "\n").encode(), 0)


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return (
            f"process {owner['pid']} ({owner['doing']}) on {owner['host']} since {owner['since']}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _forget_in_child() -> None:
    """A forked child must not keep the lock of a parent that ended."""
    for handle in list(_held.values()):
        handle.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
