"""Names with brackets, control characters and any script are printed as they are, by every
command."""

import shlex
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

from flowrl.cli import common, evaluate, generate, report, score, train
from flowrl.cli.common import to_try
from flowrl.config.compose import ConfigError
from flowrl.config.load import load_config
from flowrl.data import media
from flowrl.data.samples import Sample
from flowrl.data.scored_folder import ScoredSample
from flowrl.report import grids, run_page, terminal
from flowrl.report.render import TEMPLATES

NAME = "run[seed3]/x[/b]:smile:\x1b[2J"
SHOWN = r"run[seed3]/x[/b]:smile:\x1b[2J"
ROW = {"guidance": "none", "steps": 2, "images": 4, "nfe": 8}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def record(name):
    entry = {"mean": 0.5, "ci": [0.4, 0.6]}
    return {"rows": [{"name": name, **ROW, "metrics": {NAME: entry}}]}


def print_train():
    run = SimpleNamespace(
        path=Path(NAME),
        evaluation=record("before"),
        metrics=[],
        stopped=f"{NAME}/stop",
        peak=None,
    )
    train._conclude(run, prompt="x")


def print_evaluate():
    evaluate.show(terminal.evaluation_table(record(NAME)))
    evaluate.show(terminal._text_table(NAME, ["", "base"], [[NAME, "0.5 [0.4, 0.6]"]]))


def print_generate():
    generate.show(NAME, wrap=True)


def print_report():
    report.report([Path("run")], Path(f"{NAME}.html"))


def print_score():
    sample = Sample(path=Path(NAME), prompt="", meta={})
    scored = [ScoredSample(sample=sample, scores={NAME: 1.0}, total=1.0)]
    score.show(terminal.score_table(scored, {NAME: 1.0}))
    score.complain(f"left out: {NAME}")


PRINTERS = (print_train, print_evaluate, print_generate, print_report, print_score)


@pytest.mark.parametrize("printer", PRINTERS, ids=lambda printer: printer.__name__)
def test_names_are_printed_as_they_are(printer, capsys, monkeypatch):
    monkeypatch.setattr(run_page, "build", lambda run, output: output)
    monkeypatch.setattr(media, "save", lambda item, path: path)
    printer()
    out, err = capsys.readouterr()
    assert SHOWN in out and "\x1b" not in out + err
    assert (SHOWN in err) == (printer in (print_score, print_train))  # how to go on


def test_a_value_with_brackets_is_one_sentence_and_forges_none(capsys):
    with pytest.raises(typer.Exit) as left, common.one_sentence_errors():
        raise ValueError(f"output='{NAME}'\nflowrl: forged")
    assert left.value.exit_code == 2
    assert capsys.readouterr().err == f"flowrl: output='{SHOWN}' flowrl: forged\n"


def test_many_wrong_settings_are_a_line_each_and_at_most_twenty(capsys):
    with pytest.raises(typer.Exit), common.one_sentence_errors():
        raise ConfigError("\n".join(f"a{i}=1 \x07" for i in range(50)))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == r"flowrl: a0=1 \x07" and lines[-1] == "... and 30 more" and len(lines) == 21


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_memory_that_ran_out_is_a_sentence_with_the_next_step(error, capsys):
    with pytest.raises(typer.Exit) as left, common.one_sentence_errors():
        raise error
    assert left.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith("flowrl: memory ran out (") and "lower batch.micro" in said


def test_reports_show_control_characters_and_escape_markup():
    page = TEMPLATES.from_string("{{ text }}").render(text="<b>\x1b[2J\u202e圆</b>")
    assert page == r"&lt;b&gt;\x1b[2J\u202e圆&lt;/b&gt;"


# ---------------------------------------------------------------------- captions

FONT = grids._font(128)


def lines(text, width=128):
    found = grids._lines(text, width, FONT)
    assert len(found) <= 2 and all(FONT.getlength(line) <= width for line in found)
    return found


def test_captions_end_at_words_and_in_an_ellipsis():
    assert lines("a red circle") == ["a red circle"]
    assert lines("a red circle left of a square") == ["a red circle left of a", "square"]
    assert lines("a red circle " * 9)[1].endswith("...")
    assert lines("") == [""] and lines(" \n ") == [""]


def test_a_word_longer_than_a_line_is_broken_and_so_is_text_without_spaces():
    first, second = lines("x" * 30)
    assert first + second == "x" * 30
    first, second = lines("圆形" * 300)
    assert len(first) > 5 and second.endswith("...")
    assert lines("a " + "x" * 25)[0].startswith("a xxx")


def test_accents_and_joined_signs_stay_with_their_letter():
    first, second = lines("e\u0301" * 60)
    assert not second.startswith("\u0301") and first.count("e") == first.count("\u0301")
    family = "👩\u200d👩\u200d👧"
    assert lines(family * 60)[0].replace(family, "") == ""


HUGE = {
    "letters": "a" * 10_000,
    "words": "a red circle " * 80_000,
    "Chinese": "圆形" * 200_000,
    "accents": "e" + "\u0301" * 500_000,
    "nothing": "\u200b" * 500_000,
    "right to left": "דג מרחבא " * 50_000,
    "controls": "\x1b[2J" * 200_000,
}


@pytest.mark.parametrize("text", HUGE)
def test_a_caption_of_any_length_takes_no_time(text):
    began = time.process_time()
    sheet = grids.before_after(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8), [HUGE[text]])
    assert sheet.height < 250 and time.process_time() - began < 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.eval=shapes:eval"], "'a square'"),
        (["data.eval=shapes_motion:eval"], "'a green triangle moves left'"),
        (["data.eval=shapes_edit:eval"], "shapes_edit:eval"),
        (["data.eval=gone.txt"], '"a red circle"'),
        (["data.eval=null"], "'a circle'"),
        (["data.eval=null", "data.train=shapes_motion:train"], "'a red triangle moves left'"),
        (["data.eval=null", "data.train=shapes_edit:train"], "shapes_edit:train"),
        (["data.eval=mine.txt"], '"it\'s red"'),
    ],
)
def test_a_run_is_tried_with_a_prompt_of_its_own_or_with_its_pictures(
    words, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(f"{'long ' * 20}\nit's red\n")
    tried = to_try(load_config(None, words))
    assert shlex.split(tried) == shlex.split(said)
