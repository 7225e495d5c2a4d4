"""Work that is done is not lost to printing: characters that a console lacks, streams that are
closed, readers that leave; and files are UTF-8 whatever the console is."""

import ast
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.table import Table

from flowrl.cli import common, show
from flowrl.runtime import log
from flowrl.runtime.terminal import Terminal
from flowrl.runtime.text import visible

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import sys
from flowrl.runtime.streams import keep_streams_open
keep_streams_open()
print("圆 é", flush=True)
with open("next", "w") as file:
    assert file.fileno() > 2
    print("圆 é", file=sys.stderr)
    for i in range(9000):
        print(i)
sys.stdout.flush()
open("done", "x").close()
"""
FLOWRL = [sys.executable, "-m", "flowrl"]


def print_config(name):
    show.show(["data=file", f"data.train='{name}'"])


@pytest.fixture
def work(tmp_path):
    """A command that prints, and its folder."""
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")
    return [sys.executable, "work.py"]


def run(words, folder, redirected="", **environment):
    """(exit code, stdout, stderr) of a command whose streams the shell redirects."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = ["bash", "-c", f'set -o pipefail; "$@" {redirected}', "-", *words]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii"}, rb"\u5706 \xe9"),
        ({"PYTHONIOENCODING": "ascii:strict", "PYTHONUNBUFFERED": "1"}, rb"\u5706 \xe9"),
        ({"PYTHONIOENCODING": "cp1252"}, b"\\u5706 \xe9"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, rb"\u5706 \xe9"),
        ({"LC_ALL": "C"}, "圆 é".encode()),
    ],
)
def test_a_character_that_a_console_lacks_is_an_escape(environment, shown, work, tmp_path):
    code, out, err = run(work, tmp_path, **environment)
    assert (code, err.strip()) == (0, shown) and out.startswith(shown + b"\n0\n1\n")


@pytest.mark.parametrize("redirected", [">&-", ">&- 2>&-", "<&- >&- 2>&-", "| true", "2>&1 | true"])
def test_work_goes_on_where_nobody_reads(redirected, work, tmp_path):
    code, _, err = run(work, tmp_path, redirected)
    assert code == 0 and b"Error" not in err
    assert (tmp_path / "done").exists() and (tmp_path / "next").read_bytes() == b""


def test_the_command_line_begins_with_it(tmp_path):
    code = "import sys; from flowrl.cli import main; main.app = lambda: print('圆'); main.main()"
    found = run([sys.executable, "-c", code], tmp_path, PYTHONIOENCODING="ascii")
    assert found[:2] == (0, b"\\u5706\n")


@pytest.mark.parametrize("say", [common.echo, common.show, common.complain, print_config])
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_command_prints_escapes(say, encoding, monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    say("a 圆 and ✓.txt")
    text = b"".join(stream.buffer.getvalue() for stream in streams if stream.flush() is None)
    assert rb"a \u5706 and \u2713.txt" in text and text.isascii()
    if say is print_config:
        assert yaml.safe_load(text)["data"]["train"] == "a 圆 and ✓.txt"


@pytest.mark.long
@pytest.mark.parametrize("redirected", [">&-", "| head -n 1", "2>&1 | true"])
def test_a_command_whose_reader_leaves_ends_well(redirected, tmp_path):
    code, _, err = run([*FLOWRL, "list"], tmp_path, redirected)
    assert (code, err) == (0, b"")


@pytest.mark.long
def test_a_disk_without_room_for_what_is_printed_is_no_success(tmp_path):
    code, _, err = run([*FLOWRL, "show"], tmp_path, "> /dev/full")
    assert code != 0 and b"No space left on device" in err


@pytest.mark.parametrize("name", ["圆圆", "éa", "a"])
def test_columns_of_a_table_are_as_wide_as_what_is_shown(name):
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    table = Table("file", "score")
    table.add_row(name, "1")
    table.add_row("b", "2")
    Terminal(file=printed, width=60).print(table)
    printed.seek(0)
    lines = printed.read().splitlines()
    assert visible(name, "ascii") in lines[3] and len({len(line) for line in lines}) == 1


class Left(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


def test_a_progress_line_that_nobody_reads_ends_no_training(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Left())
    monkeypatch.setattr(log, "_shared", None)
    with log.Progress(2) as bar:
        for i in (1, 2):
            bar.update(i, reward=0.5)
    assert bar.done == 2


def _without_encoding(call):
    """Whether a call reads or writes text in whatever encoding the machine has."""
    given = {word.arg for word in call.keywords}
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    owner = ast.unparse(call.func).rpartition(".")[0]
    if given & {"encoding", None} or owner in ("os", "av", "Image"):
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    text = [
        a.value for a in call.args if isinstance(a, ast.Constant) and a.value in ("r", "w", "a")
    ]
    return name in ("open", "fdopen", "NamedTemporaryFile") and bool(text or not call.args)


def test_every_text_file_is_in_utf8():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("flowrl", "rewards", "samplers")
        for path in (ROOT / folder).rglob("*.py")
        if "open(" in (text := path.read_text(encoding="utf-8")) or "_text(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _without_encoding(node)
    ]
    assert not found
