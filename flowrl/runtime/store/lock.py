"""One writer of a run folder: a lock that the system drops when its holder ends, however it ends.

The lock is `flock` on RUN/run.lock, so a file that a killed process left never blocks anybody.
Its holder is written into the file, where everyone can read it. It holds between processes of
one machine on any disk of its own, and between machines on NFS (v4, or v3 with lockd) and on
cluster disks mounted with locks; a disk without locks is named in a warning.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from errno import EINVAL, ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock, Timeout

from flowrl.runtime.log import logger
from flowrl.runtime.store.files import ADVICE, WriteError

FILE = "run.lock"
PATIENCE = 1.0  # seconds of waiting for a command that is just ending
NO_LOCKS = {ENOLCK, ENOSYS, ENOTSUP, EOPNOTSUPP, EINVAL}


class Busy(ValueError):
    """Another process holds the folder; the message says which, where and since when."""


class Lock:
    """This process alone writes a folder, until `release`, or until nobody holds the object.

    Within one process a folder may be locked several times: the last of them releases it.
    """

    def __init__(self, folder: Path, doing: str) -> None:
        """The folder must exist. doing: what this process does there, for the messages of others. A
        holder elsewhere -> Busy; a folder that cannot be written -> WriteError."""
        self.folder, self.doing = folder, doing
        self.made: list[Path] = []  # folders that were made for this one, the innermost first
        self._new = False  # the lock's file did not exist before
        # filelock has one object for each path, and drops the lock when the object is gone
        self._file: FileLock | None = None
        self.take()

    def take(self) -> None:
        """Lock it again after `release`."""
        try:
            path = Path(os.path.realpath(self.folder, strict=True)) / FILE
            self._file = FileLock(
                path, thread_local=False, is_singleton=True, fallback_to_soft=False
            )
            if self._file.is_locked:
                return
            self._new = not path.exists()
            self._file.acquire(timeout=PATIENCE)
        except Timeout:
            raise Busy(
                f"{self.folder} is being written by {_owner(path)}; wait until it ends, or stop it"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            if error.errno not in NO_LOCKS:
                advice = ADVICE.get(error.errno or 0, "look at the disk")
                raise WriteError(
                    f"{self.folder} cannot be written ({reason}); {advice} and try again"
                ) from error
            logger.warning(
                f"{self.folder} is on a disk without file locks ({reason}), so nothing keeps a"
                " second process from writing into it: see to it that there is only one"
            )
        _write_owner(path, self.doing)

    def release(self) -> None:
        self._file = None

    def withdraw(self) -> None:
        """Release it, and leave no file and no folder that was not there before, unless something
        else is in it now."""
        if self._file is not None and self._new:
            # before the release, while no other process can hold the lock
            (self.folder / FILE).unlink(missing_ok=True)
        self.release()
        with suppress(OSError):
            for place in self.made:
                place.rmdir()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _write_owner(path: Path, doing: str) -> None:
    """Write the owner into the locked file itself: a file put in its place would be another one,
    which is not locked."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "doing": doing}
    # a full disk must not stop the run: the lock itself matters, not its owner's line
    with suppress(OSError):
        path.write_text(json.dumps(owner) + "\n", encoding="utf-8")


def _owner(path: Path) -> str:
    try:
        owner = json.loads(path.read_bytes())
        return (
            f"process {owner['pid']} ({owner['doing']}) on {owner['host']} since {owner['since']}"
        )
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return "another process"
