"""The pages of the documentation, their fenced blocks, and the commands in them."""

import re
import shlex
from pathlib import Path

import torch.distributed.run
from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8")
    for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
}
FENCE = re.compile(r"^(<!-- run -->\n)?(`{3,})(\w*)\n(.*?)^\2$", re.M | re.S)
SHELLS = ("bash", "sh", "shell", "console")
STARTS = ("flowrl ", "accelerate launch ", "torchrun ")  # of commands, in fences without a language
# Files of these pages are the reader's: see test_extending.py, test_plugins.py, test_own_module.py.
READERS = ("docs/extending.md", "docs/your_own_module.md")
OURS = {page: text for page, text in PAGES.items() if page not in READERS}


def blocks(page, text):
    """(place, language, text, whether it is marked to run) of every fenced block."""
    return [
        (f"{page}:{text[: m.start()].count(chr(10)) + 1}", m[3], m[4], bool(m[1]))
        for m in FENCE.finditer(text)
    ]


def shell(page, text):
    """(place, words) of every command line, `\\` at its end joining the next one to it. A fence
    without a language may hold other lines."""
    lines = [
        (where, line.removeprefix("$ "))
        for where, language, code, _ in blocks(page, text)
        for line in code.replace("\\\n", " ").splitlines()
        if language in SHELLS or (not language and line.removeprefix("$ ").startswith(STARTS))
    ]
    split = [(where, shlex.split(line, comments=True)) for where, line in lines]
    return [(where, words) for where, words in split if words]


def started(page, text):
    """(place, words after `flowrl`, processes) of every command of ours, by itself or with a
    launcher, which takes its options."""
    found = []
    for where, words in shell(page, text):
        if words[0] == "flowrl":
            found.append((where, words[1:], 1))
        elif words[0] == "torchrun" or words[:2] == ["accelerate", "launch"]:
            own, processes = launched(words)
            assert own.module and own.training_script == "flowrl", where
            found.append((where, own.training_script_args, processes))
    return found


def launched(words):
    """(options of a launcher, processes that it starts)."""
    if words[0] == "torchrun":
        own = torch.distributed.run.get_args_parser().parse_args(words[1:])
        return own, int(own.nnodes.split(":")[-1]) * int(own.nproc_per_node)
    own = launch_command_parser().parse_args(words[2:])
    return own, own.num_processes


def commands(page, text):
    """(place, words after `flowrl`) of every command of ours."""
    return [(where, words) for where, words, _ in started(page, text)]
