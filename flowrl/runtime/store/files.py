"""Write files so that each is whole or as it was: every file that flowrl writes comes from here.

A file is written under a temporary name beside its place, flushed to disk and renamed; lines are
appended in one write (lines.py). A process killed at any moment, a full disk or a power cut leaves
the file before or the file after, never something between. A test finds code that writes otherwise.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EDQUOT, EEXIST, EISDIR, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS
from pathlib import Path

TEMPORARY = ".flowrl-tmp-"  # prefix of the names of unfinished files and folders
WRITER = re.compile(rf"{re.escape(TEMPORARY)}(?P<host>.*)-(?P<pid>\d+)-[0-9a-f]{{8}}")
ADVICE = {
    **dict.fromkeys((ENOSPC, EDQUOT), "free some space on this disk"),
    **dict.fromkeys((EROFS, EACCES, EPERM), "make its folder writable, or choose another one,"),
    **dict.fromkeys((ENOTDIR, EISDIR, EEXIST, ENAMETOOLONG), "give another path"),
}


class WriteError(OSError):
    """A file could not be written and is as it was; the message names it and says what to do."""


def write(path: str | Path, content: bytes | str) -> Path:
    """Write a file, or leave one with the same content untouched -> its path. Folders are made."""
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    if not _holds(path, data):
        with replacing(path) as temporary:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                put(handle, data)
            finally:
                os.close(handle)
    return path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a temporary name to a writer that opens its file itself; the file then takes the place
    of `path`."""
    # realpath: a symbolic link stays one, and the file that it names is replaced
    target = Path(os.path.realpath(path))
    temporary = target.with_name(_temporary_name())
    with write_errors(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to be filled, which then appears at `path` at once; an older one there
    is removed."""
    temporary = path.with_name(_temporary_name())
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            yield temporary
            for place in (*temporary.rglob("*"), temporary):
                sync(place)
            if path.exists():  # a rename cannot replace a folder that holds files
                remove(path)
            os.rename(temporary, path)
            sync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that no half of it is ever found."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(_temporary_name())
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink()


def clean(folder: Path, *, owned: bool = False) -> None:
    """Remove unfinished files and folders that killed processes left in a folder.

    owned: it is a run folder whose lock this process holds, so nothing unfinished is in use; then
    folders below are cleaned too. Otherwise only files of this machine's dead processes go.
    """
    with suppress(OSError):
        found = list(folder.rglob(f"{TEMPORARY}*") if owned else folder.glob(f"{TEMPORARY}*"))
        for leftover in found:
            if owned or _writer_is_gone(leftover.name):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or the list of names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary_name() -> str:
    """Make a name that is unique among threads, processes and machines, and says who writes. It has
    no suffix, so that code that looks for pictures or records skips it."""
    return f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def _writer_is_gone(name: str) -> bool:
    match = WRITER.fullmatch(name)
    return match is not None and gone(match["host"], int(match["pid"]))


def gone(host: str, pid: int) -> bool:
    """Whether a process is one of this machine, and has ended."""
    try:
        if host == socket.gethostname():
            os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, TypeError):  # the process runs, but belongs to another user
        pass
    return False


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def put(handle: int, data: bytes) -> None:
    """Write all of the data to an open file, and flush it to disk."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]
    os.fsync(handle)


@contextmanager
def write_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError inside into one sentence about the file."""
    try:
        yield
    except OSError as error:
        # the cause has the errno, where the error comes from a file in a folder that is replaced
        cause = error.__cause__ if isinstance(error, WriteError) else error
        reason = getattr(cause, "strerror", None) or cause
        advice = ADVICE.get(getattr(cause, "errno", 0), "look at the disk")
        raise WriteError(
            f"{path} could not be written ({reason}), so what was there is unchanged; {advice} and"
            " try again"
        ) from cause
