"""The command that tries to destroy runs finds what it plants, and a few of its cases hold."""

import json
import os
import random
import shutil
import sys

import fault_damage
import faults
import forked
import pytest
import torch
from fault_disk import Disk

from flowrl.config import build
from flowrl.runtime.store import files
from flowrl.training import build as training_build

forks = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a process with a GPU cannot be forked"
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One method of two iterations, and its uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, training_build):
            patch.setattr(module, "make_policy", build.make_policy)
        patch.setattr(faults, "ITERATIONS", 2)
        patch.setattr(faults, "METHODS", {"nft": {"algorithm.steps": 2}})
        patch.setattr(faults, "SETTINGS", faults.SETTINGS | {"iterations": 2, "eval.every": 0})
        made = faults.Bench(tmp_path_factory.mktemp("faults"), hang=250)
        made.prepare(halves=False)
        yield made


@forks
def test_a_killed_run_and_one_without_room_end_as_the_uninterrupted_one(bench, tmp_path):
    run = tmp_path / "run"
    disk = Disk(run, "half", bench.ops["nft"] * 2 // 3)
    killed = faults.Command(faults.words(run, "nft"), tmp_path, disk).wait(120)
    assert killed.code == -9 and (run / "config.yaml").exists()
    full = faults.Command(faults.resume(run), tmp_path, Disk(run, "ENOSPC", 20)).wait(120)
    assert full.code == 1 and full.wrong("run") == []
    assert "No space left on device" in full.text
    assert bench._finish(run, "nft") == []


@forks
def test_a_command_that_is_killed_before_it_has_begun_has_printed_nothing(tmp_path):
    ended = forked.Forked(["list"], tmp_path / "printed.txt").wait(60, kill=-1)
    assert (ended.code, ended.text) == (-9, "")


@forks
def test_what_differs_from_the_uninterrupted_run_is_named(bench, tmp_path):
    run = shutil.copytree(bench.home / "nft" / "run", tmp_path / "run")
    whole = bench.whole["nft"]
    assert faults.unequal(run, whole) == []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines, lines[-1]]))  # an iteration twice
    (run / f"{files.TEMPORARY}x").touch()
    (run / "report.html").write_text("<html>")
    assert faults.unequal(run, whole) == ["metrics differ", "report differ", "unfinished differ"]
    (run / "evaluation.json").unlink()
    assert "cannot be read" in faults.unequal(run, whole)[0]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("flowrl: run/x could not be written", []),
        ("Traceback (most recent call last)\nflowrl: run", ["traceback"]),
        ("Killed", ["exit code 1 without a sentence"]),
        ("flowrl: something", ["its sentence names none of run"]),
        ("flowrl: \x1b[31mrun", ["raw control characters ['\\x1b']"]),
    ],
)
def test_what_is_no_sentence_is_found(text, wrong):
    assert forked.Ended(code=1, text=text).wrong("run") == wrong
    assert forked.Ended(code=0, text="done").wrong("run") == []
    assert forked.Ended(code=None, text=text).wrong() == ["it hung"]
    assert forked.Ended(code=-11, text="").wrong() == ["exit code -11"]


def _in_child(act, folder, how, at):
    """A write in a process whose disk fails -> its exit code."""
    pid = os.fork()
    if pid == 0:
        Disk(folder, how, at).install()
        try:
            act()
        finally:
            os._exit(3 if sys.exc_info()[0] else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@forks
@pytest.mark.parametrize(
    ("how", "at", "code", "left"),
    [("before", 1, -9, b"old"), ("half", 2, -9, b""), ("ENOSPC", 1, 3, b"old"), ("", 9, 0, b"new")],
)
def test_a_bare_write_is_torn_by_the_disk_and_a_whole_one_never(tmp_path, how, at, code, left):
    def bare():
        handle = os.open(tmp_path / "x", os.O_WRONLY | os.O_TRUNC)
        os.write(handle, b"new")

    (tmp_path / "x").write_bytes(b"old")
    assert _in_child(bare, tmp_path, how, at) == code
    assert (tmp_path / "x").read_bytes() in (left, b"n", b"ne", b"new")[: 4 if how == "half" else 1]
    (tmp_path / "y").write_bytes(b"old")
    _in_child(lambda: files.write(tmp_path / "y", b"new"), tmp_path, how, at)
    assert (tmp_path / "y").read_bytes() == (b"new" if not how else b"old")


def test_a_power_cut_loses_what_was_not_flushed(tmp_path):
    disk = Disk(tmp_path)
    (tmp_path / "x").write_bytes(b"0123456789")
    disk.flushed = {str(tmp_path / "x"): 4}
    disk._cut()
    assert 4 <= (tmp_path / "x").stat().st_size <= 10
    assert (tmp_path / "x").read_bytes() == b"0123456789"[: (tmp_path / "x").stat().st_size]


def test_damage_changes_a_file_and_is_undone(tmp_path):
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps({"rows": [{"name": "a", "values": [1, 2, 3]}]}))
    path, done = tmp_path / "x.json", set()
    for seed in range(40):
        fault_damage.restore(path, whole)
        done.add(fault_damage.damage(path, random.Random(seed)))
        assert not path.is_file() or path.read_bytes() != whole.read_bytes() or done & {"nothing"}
    assert len(done) > 10
