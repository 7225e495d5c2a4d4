"""One process writes a run folder: others learn who it is, and a lock ends with its holder."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from flowrl.runtime.store import files, history, lock
from flowrl.runtime.store.lock import Busy, Lock

HOLD = """
import sys
from pathlib import Path
from flowrl.runtime.store.lock import Lock
held = Lock(Path(sys.argv[1]), "flowrl train")
print("held", flush=True)
sys.stdin.read()
"""


KEPT = {
    "sys": "stat.kept = held",
    "a cycle": "stat.kept = [held]; stat.kept.append(stat.kept)",
    "a generator that was left": """
def steps():
    with held:
        yield 1
stat.kept = steps()
next(stat.kept)""",
    "what was raised": """
def fail():
    own = held
    raise KeyError("left")
try:
    fail()
except KeyError as error:
    stat.kept = error""",
}


def free(folder):
    """Whether nobody holds the lock: a file opened anew is asked, as another process would."""
    with open(folder / lock.FILE, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_second_process_learns_who_holds_the_folder_and_a_killed_one_blocks_nobody(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    owner = f"is being written by process {holder.pid} \\(flowrl train\\) on {socket.gethostname()}"
    with pytest.raises(Busy, match=f"{owner} since 20.*; wait until it ends, or stop it"):
        Lock(tmp_path, "flowrl report")
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == holder.pid
    with Lock(tmp_path, "flowrl report"):
        assert json.loads((tmp_path / lock.FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("kept", KEPT)
def test_a_lock_that_lives_as_long_as_the_interpreter_ends_without_a_word(tmp_path, kept):
    """Extensions such as torch leave references behind, as here to both modules: then the names in
    lock.py are gone when the last object is."""
    left = "import ctypes, stat\nfor module in (stat, sys.modules[Lock.__module__]):\n"
    left += "    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))\n"
    code = HOLD.rpartition("print")[0] + left + KEPT[kept]
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stdout + done.stderr and free(tmp_path)


def test_one_process_may_lock_a_folder_twice_and_lets_go_with_the_last(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    first, second = Lock(tmp_path, "train"), Lock(tmp_path / "link", "report")
    first.release()
    assert not free(tmp_path)
    second.release()
    assert free(tmp_path)
    second.take()
    assert not free(tmp_path)
    del second
    assert free(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    held = Lock(tmp_path, "train")
    child_end, parent_end = socket.socketpair()
    if (child := os.fork()) == 0:
        child_end.send(b"runs")
        child_end.recv(1)
        os._exit(0)
    parent_end.recv(4)
    held.release()
    try:
        assert free(tmp_path)
    finally:
        parent_end.send(b"x")
        os.waitpid(child, 0)
        child_end.close()
        parent_end.close()


def test_a_lock_file_that_was_removed_is_not_taken_for_the_lock(tmp_path, monkeypatch):
    flock, removed = fcntl.flock, []

    def remove_first(*arguments):
        flock(*arguments)
        if not removed:
            removed.append((tmp_path / lock.FILE).unlink())

    monkeypatch.setattr(fcntl, "flock", remove_first)
    held = Lock(tmp_path, "train")
    monkeypatch.undo()
    assert removed and not free(tmp_path)
    held.release()


def test_a_disk_without_locks_is_named_and_used(tmp_path, monkeypatch, caplog):
    def unknown(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with Lock(tmp_path, "train"):
        assert "is on a disk without file locks (No locks available)" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(files.WriteError, match="gone cannot be written .* and try again"):
        Lock(tmp_path / "gone", "train")


def test_history_passes_over_what_was_damaged(tmp_path):
    history.add(tmp_path, "started", iteration=0, processes=2)
    with (tmp_path / history.FILE).open("a") as file:
        file.write('{"torn": \n[1]\n' + "[" * 100_000 + "\n")
    history.add(tmp_path, "ended", iteration=3, what="all iterations are done")
    assert [line["event"] for line in history.read(tmp_path)] == ["started", "ended"]
    assert history.read(tmp_path)[0]["pid"] == os.getpid() and not history.read(tmp_path / "gone")
