"""Text from elsewhere is shown on a terminal, never obeyed, and cut; memory that ran out is
told."""

import errno
import io
import logging

import pytest
import torch

from flowrl.runtime import log
from flowrl.runtime.memory import advice, ran_out
from flowrl.runtime.terminal import Terminal
from flowrl.runtime.text import LIMIT, LONGEST, error_text, one_line, printable, visible

HOSTILE = {
    "escape sequence": ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
    "C1": ("a\x9b31mb", r"a\x9b31mb"),
    "bidirectional": ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
    "hidden": ("a\U000e0041\u200bb\ufeff", r"a\U000e0041\u200bb\ufeff"),
    "separators": ("a\u2028b", r"a\u2028b"),
    "half a pair": ("a\ud800", r"a\ud800"),
    "carriage return": ("flowrl: ok\r", r"flowrl: ok\r"),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_would_obey_is_visible(text):
    given, shown = HOSTILE[text]
    assert visible(given) == shown


@pytest.mark.parametrize(
    "text", ["圆形", "e\u0301", "👩\u200d👩\u200d👧", "مى\u200cخواهم", "a\tb\n[c]"]
)
def test_every_script_stays_as_it_is(text):
    assert visible(text) == text


def test_a_sentence_from_elsewhere_is_one_short_line():
    assert printable("<html>\n  502\tBad\r\n") == "<html> 502 Bad"
    assert len(printable("x" * 10**6)) == len(printable("\x1b" * 10**6)) == LIMIT
    assert printable("a" * LIMIT) == "a" * LIMIT


def test_a_sentence_of_ours_keeps_the_spaces_of_a_path():
    assert one_line("my  run\nflowrl: forged") == "my  run flowrl: forged"
    assert len(one_line("x" * 10**6)) == LONGEST


def test_what_an_error_quotes_of_others_is_cut():
    def fail():
        try:
            raise OSError("<body>" + "y" * 5000)
        except OSError as error:
            raise ValueError(f"the server cannot be used: {error}; start it") from None

    with pytest.raises(ValueError, match="server") as raised:
        fail()
    said = error_text(raised.value)
    assert said.startswith("the server cannot be used: <body>yyy") and said.endswith(
        "...; start it"
    )
    assert len(said) < LIMIT + 60


def test_tables_and_sentences_are_printed_without_markup():
    from rich.table import Table

    out = io.StringIO()
    table = Table(title="x[/b]")
    table.add_column("run[seed3]")
    table.add_row("a[red]b :smile: \x1b[31m")
    for printed in (table, "output='x[/b]' \x1b[2J"):
        Terminal(file=out, width=80).print(printed)
    for shown in ("x[/b]", "run[seed3]", r"a[red]b :smile: \x1b[31m", r"output='x[/b]' \x1b[2J"):
        assert shown in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_message_is_one_line_of_plain_text(caplog):
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        log.logger.warning("the server says [/b]\nflowrl: \x1b[31m%s", "z" * 5000)
    [message] = caplog.messages
    assert message.startswith(r"the server says [/b] flowrl: \x1b[31mzz")
    assert len(message) == LONGEST


def test_the_bar_has_no_markup_either(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(log, "_shared", Terminal(file=out, force_terminal=True, width=100))
    monkeypatch.setattr(log.sys.stderr, "isatty", lambda: True, raising=False)
    with log.Progress(2, title="base[/b]\x1b]0;x\x07") as bar:
        bar.update(2, reward=1.0)
    assert r"base[/b]\x1b]0;x\x07" in out.getvalue()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_recognized_and_the_next_step_said(error):
    assert ran_out(error)
    assert "lower batch.micro" in advice(error) and "model.dtype=bf16" in advice(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("memory=3"), OSError(28, "")]
)
def test_other_errors_are_not_of_memory(error):
    assert not ran_out(error)


def test_torch_says_it_in_these_words():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(10**15)
    assert ran_out(raised.value)
