"""metrics.jsonl is valid JSON whatever the numbers, and a run without a terminal says where it is
in plain lines."""

import io
import json
import re

import numpy as np
import pytest
import torch

from flowrl.runtime import log
from flowrl.runtime.store import run_folder
from flowrl.runtime.terminal import Terminal


def test_each_line_is_valid_json_and_not_a_number_becomes_null(tmp_path):
    run_folder.add_metrics(
        tmp_path,
        1,
        {
            "reward/total": torch.tensor(0.5),
            "loss": float("nan"),
            "kl": np.float32("inf"),
            "nfe/rollout": 3,
            "text": "a",
        },
    )
    run_folder.add_metrics(tmp_path, 2, {"reward/total": 1e-30})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in lines[0] and json.loads(lines[0]) == {
        "iteration": 1,
        "reward/total": 0.5,
        "loss": None,
        "kl": None,
        "nfe/rollout": 3,
        "text": "a",
    }
    assert run_folder.read_metrics(tmp_path)[1] == {"iteration": 2, "reward/total": 1e-30}


def test_a_run_without_lines_has_no_metrics(tmp_path):
    assert run_folder.read_metrics(tmp_path) == []


def test_without_a_terminal_progress_is_plain_lines(capsys):
    with log.Progress(3, every=0) as bar:
        bar.update(1, 51.4, reward=0.25)
        bar.update(3, 2.0, **{"reward": 0.5, "no signal:": "all groups have equal rewards"})
    assert capsys.readouterr().err.splitlines() == [
        "train 1/3  reward 0.25, 51 s, 0:01:43 left",
        "train 3/3  reward 0.5  no signal: all groups have equal rewards, 2 s",
    ]


def test_without_a_terminal_a_message_is_one_line_with_the_time(capsys, monkeypatch):
    monkeypatch.setattr(log.logger, "handlers", [])
    log.setup()
    log.logger.warning("a word " * 40 + "[red]")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING (a word ){40}\[red\]", line)


def test_counted_work_inside_of_a_run_is_named_after_a_silence(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(log, "_printed", 0.0)
    with log.Progress(9, title="sample", lines=False) as bar:
        for done in (1, 2, 3, 4, 9):
            now[0] += 16
            bar.update(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["sample 2/9", "sample 4/9"]


def test_lines_are_few_and_the_last_is_always_there(capsys):
    with log.Progress(50, every=1000) as bar:
        for i in range(1, 51):
            bar.update(i)
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/50", "50/50"]


def test_other_processes_stay_silent(capsys):
    with log.Progress(1, show=False) as bar:
        bar.update(1)
    with log.waiting("load the model"), log.Progress(2, lines=False) as bar:
        bar.update(2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_bars_on_a_terminal_stand_below_each_other_on_the_first_process(monkeypatch, rank, shown):
    out = io.StringIO()
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal shows no bar
    monkeypatch.setattr(log, "_shared", Terminal(file=out, force_terminal=True, width=100))
    monkeypatch.setattr(log.sys.stderr, "isatty", lambda: True, raising=False)
    with log.Progress(9, lines=False) as train:
        train.update(3)
        with log.waiting("load the model"), log.Progress(7, title="decode", lines=False) as bar:
            bar.update(5)
            if shown:
                train.bar.refresh()
    assert all((text in out.getvalue()) == shown for text in ("3/9", "load the model", "5/7"))
    assert not shown or out.getvalue().splitlines()[-1].find("decode") < 0
    assert not log._bars
