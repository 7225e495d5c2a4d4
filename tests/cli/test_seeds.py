"""`flowrl train --seeds`: a folder a seed, resumable as a whole; one that fails stops no other."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small

from flowrl.cli import seeds as several
from flowrl.config.load import load_config, read_config
from flowrl.report import comparison

# a process that takes the place of flowrl: it writes its words, and fails or waits as told
STUB = """
import json, pathlib, sys, time
words = sys.argv[1:]
with open({log!r}, "a") as log: log.write(json.dumps(words) + "\\n")
if "{sleep}" in words[-1]: time.sleep(60)
sys.exit(3 if "{fails}" in words[-1] else 0)
"""


@pytest.fixture
def out(tmp_path):
    return tmp_path / "all"


def here(monkeypatch, broken=()):
    """Train in this process, which loads no library anew -> the list of seeds that were trained."""
    trained = []

    def run(words):
        folder = words[-1].removeprefix("output=")
        trained.append((words[1] if words[1] == "--resume" else "start", folder[-1]))
        if folder[-1] in broken:
            return 1, False
        return small.invoke(*words).exit_code, False

    monkeypatch.setattr(several, "_run", run)
    return trained


def test_seeds_are_trained_compared_and_gone_on_with(out, monkeypatch):
    """Seed 1 fails: seed 0 is trained and compared, exit code 1; the same command trains seed 1
    alone; a run that a signal stopped is resumed."""
    words = small.words(out, iterations="1", optimizer__lr="1e-2", eval__images="8")
    trained = here(monkeypatch, broken="1")
    result = small.invoke("train", *words, "--seeds", "1,0")
    assert result.exit_code == 1 and trained == [("start", "1"), ("start", "0")], result.output
    assert "not finished: seed 1; the same command goes on" in result.output
    assert (out / "comparison.html").exists() and "Cost of a run" in result.output
    assert read_config(out / "seed-0" / "config.yaml").seed == 0

    trained = here(monkeypatch)
    result = small.invoke("train", *words, "--seeds", "0", "1")
    assert result.exit_code == 0 and trained == [("start", "1")], result.output
    assert "Seed 0 (1 of 2) is finished" in result.output
    rows = json.loads((out / "seed-1" / "evaluation.json").read_text())["rows"]
    assert len(rows[0]["prompts"]) == rows[0]["images"] == 8
    groups = comparison.grouped([out / "seed-0", out / "seed-1"], "algorithm")
    found = comparison.numbers_of("jpeg", "nft", groups["nft"])
    assert found["prompts_low"] < found["gain"] < found["prompts_high"]
    assert found["seeds_low"] < found["gain"] and comparison.notes(groups) == []
    page = (out / "comparison.html").read_text()
    assert "2 runs compared" in page and "seed-1" in page

    history = out / "seed-1" / "history.jsonl"
    history.write_text(json.dumps({"event": "ended", "what": "SIGTERM received"}) + "\n")
    trained = here(monkeypatch)
    assert small.invoke("train", "--seeds", "0,1", *words).exit_code == 0
    assert trained == [("--resume", "1")]

    refused = small.invoke("train", *words, "batch.group=4", "--seeds", "0,1")
    assert refused.exit_code == 2 and "other settings (batch.group)" in refused.output


def stub(tmp_path, monkeypatch, **told):
    log = tmp_path / "log.jsonl"
    told = {"sleep": "none", "fails": "none", **told}
    (tmp_path / "stub.py").write_text(STUB.format(log=str(log), **told))
    command = [sys.executable, str(tmp_path / "stub.py")]
    monkeypatch.setattr(several, "FLOWRL", command)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


def test_each_seed_is_a_process_and_one_that_fails_stops_no_other(tmp_path, out, monkeypatch):
    ran = stub(tmp_path, monkeypatch, fails="seed-0")
    words = ["quickstart", f"output={out}", "iterations=3"]
    result = small.invoke("train", *words, "--seeds", "0,7")
    assert result.exit_code == 1 and "not finished: seed 0, 7" in result.output
    for seed, command in zip((0, 7), ran(), strict=True):
        assert command == ["train", *words, f"seed={seed}", f"output={out}/seed-{seed}"]
        cfg = load_config(command[1], command[2:])
        assert (cfg.seed, str(cfg.output)) == (seed, f"{out}/seed-{seed}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_and_starts_no_other(tmp_path, out, monkeypatch, number):
    """SIGTERM to the command alone; Ctrl-C to all processes of the terminal."""
    ran = stub(tmp_path, monkeypatch, sleep="seed-0")
    code = (
        "from flowrl.cli import seeds; from flowrl.cli.main import main;"
        f" seeds.FLOWRL = {several.FLOWRL!r}; main()"
    )
    words = ["train", "quickstart", f"output={out}", "--seeds", "0,1"]
    command = [sys.executable, "-c", code, *words]
    whole = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 60
    while not (tmp_path / "log.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (os.kill if number == signal.SIGTERM else os.killpg)(whole.pid, number)
    _, said = whole.communicate(timeout=30)
    assert whole.returncode == 1 and "not finished: seed 0, 1" in said and len(ran()) == 1


MISTAKES = {  # words after train -> what the sentence says
    "--seeds 0,x": '"x" is not a whole number; write --seeds 0,1,2',
    "--seeds 0,,1": '"" is not a whole number',
    "--seeds 0,1.5": '"1.5" is not a whole number',
    "--seeds -1,2": '"-1" is not a whole number',
    "--seeds 0,1,0": "--seeds names 0 twice",
    "--seeds 0 1 0": "--seeds names 0 twice",
    "--seeds": "--seeds needs a value",
    "seed=3 --seeds 0,1": "seed=3 and --seeds both choose the seed",
    "--seeds 0,1 --dry-run": "--dry-run is about one run",
    "--seeds 0,1 --resume runs/a": "--resume is about one run",
    "output=null --seeds 0,1": "--seeds needs a folder for its runs; add output=runs/NAME",
    "output=is_run --seeds 0,1": "output=is_run is a run; add output=runs/NAME",
    "batch.grup=3 --seeds 0,1": 'unknown key "batch.grup"',
    "-m seed=0,1": "several seeds are several runs: flowrl train ... --seeds 0,1",
    "seed=0,1": "several seeds are several runs: flowrl train ... --seeds 0,1",
    "seed=[0,1]": "several seeds are several runs: flowrl train ... --seeds 0,1",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence_and_starts_nothing(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(several, "_run", lambda words: pytest.fail("it started"))
    (tmp_path / "is_run").mkdir()
    (tmp_path / "is_run" / "config.yaml").write_text("seed: 0\n")
    result = small.invoke("train", "quickstart", "output=runs/mine", *words.split())
    said = result.output.strip()
    assert result.exit_code == 2 and MISTAKES[words] in said and "\n" not in said
    assert not (tmp_path / "runs").exists()


def test_a_launcher_is_told_that_seeds_start_by_themselves(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = small.invoke("train", "quickstart", "--seeds", "0,1")
    assert result.exit_code == 2 and "under a launcher, give seed=" in result.output
