"""Pages of the reference that are made from the code: the public names of `flowrl` with their
signatures and docstrings, and the help text of every command.

No plugin makes them: `flowrl.rewards` and `flowrl.samplers` lie outside the package's folder, where
a reader of sources does not find them, and importing torch while the site is built is slow.
`scripts/docs/from_code.py` writes these pages.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from typer.testing import CliRunner

import flowrl
from flowrl.cli.main import COMMANDS, app

API = """\
These are the names that `import flowrl` offers, and they stay from one version to the next. Each
loads when it is first used, so `import flowrl` itself is fast. In shapes, B is a number of samples,
P of prompts and F of frames. [Notebooks](notebooks.md) use these names step by step, and
[Write your own](extending.md) says what a reward, an algorithm or a policy of yours looks like.
Records that pass between parts of the loop, as `Rollout` and `Rewards`, are explained field by
field in `flowrl/types.py`.

<!-- written by scripts/docs/from_code.py from the docstrings -->"""
HELP = """\
`flowrl COMMAND --help` prints these texts. Exit code 0 means done, 1 a failure while running or a
budget that does not fit, and 2 that the input was wrong and nothing was started. Settings
(`KEY=VALUE`) are those of [Configuration](configuration/index.md), which also has their grammar.

<!-- written by scripts/docs/from_code.py from the help texts -->"""
PARTS = {  # heading -> names, in the order in which a script uses them
    "Config": ("load_config", "Config"),
    "Models": ("load_policy", "Policy"),
    "Training": ("train", "Trainer", "Run"),
    "Samples and scores": ("generate", "score", "reward", "show", "show_tree"),
    "Evaluation": ("evaluate", "evaluate_run"),
}
ITEM = r"(?:(?<=[.;] )|^)((?:\w+, )*\w+): "  # "steps, seed: " at the start of a clause


def api() -> str:
    """The page of public names."""
    lines = ["# Python API", "", API]
    for heading, names in PARTS.items():
        lines += ["", f"## {heading}"]
        for name in names:
            lines += ["", f"### flowrl.{name}", "", *entry(getattr(flowrl, name))]
            lines = [*lines[:-1], *([] if lines[-1] == "" else lines[-1:])]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """The page of all commands."""
    lines = ["# Command line", "", HELP]
    for heading, group in COMMANDS.items():
        lines += ["", f"## {heading}"]
        for name in group:
            lines += ["", f"### flowrl {name}", "", "```text", help_of(name), "```"]
    return "\n".join(lines) + "\n"


def help_of(command: str) -> str:
    """What `flowrl COMMAND --help` prints on a console of 90 columns."""
    done = CliRunner().invoke(
        app, [command, "--help"], prog_name="flowrl", terminal_width=90, env={"COLUMNS": "90"}
    )
    return done.output.rstrip()


def entry(thing: Any) -> Iterator[str]:
    """Lines of one public name: its signature or fields, its docstring, its methods."""
    if thing is flowrl.Config:  # its fields have pages of their own
        yield from prose(inspect.getdoc(thing) or "", ())
        yield "[Configuration](configuration/index.md) explains its sections: `cfg.batch.group`."
        return
    yield from ("```python", signature(thing), "```", "")
    yield from prose(inspect.getdoc(thing) or "", tuple(inspect.signature(thing).parameters))
    if inspect.isclass(thing):
        methods = [*public(thing)]
        yield from ("| method | what it does |", "|---|---|")
        for name, member in methods:
            first = sentence(inspect.getdoc(member) or "")
            yield f"| `{name}` | {' '.join(escaped(first).split())} |"


def signature(thing: Any) -> str:
    """The definition as Python, without its body: of a function, a class's __init__, or fields."""
    source = inspect.cleandoc("\n" + inspect.getsource(thing))
    node = ast.parse(source).body[0]
    if isinstance(node, ast.FunctionDef):
        return definition(node)
    assert isinstance(node, ast.ClassDef)
    made = [i for i in node.body if isinstance(i, ast.FunctionDef) and i.name == "__init__"]
    if made:
        return f"class {node.name}:\n" + textwrap.indent(definition(made[0]), "    ")
    fields = [inner for inner in node.body if isinstance(inner, ast.AnnAssign)]
    lines = source.splitlines()[fields[0].lineno - 1 : fields[-1].end_lineno]
    return "\n".join([f"class {node.name}:", *lines])


def definition(node: ast.FunctionDef) -> str:
    """`def name(...) -> type: ...`, an argument on each line."""
    pieces = [spaced(piece) for piece in at_depth_0(ast.unparse(node.args), ",")]
    back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    trailing = "" if pieces[-1].startswith("**") else ","
    inner = ",\n".join(f"    {piece}" for piece in pieces)
    return f"def {node.name}(\n{inner}{trailing}\n){back}: ..."


def spaced(argument: str) -> str:
    """`name: type=value` -> `name: type = value`."""
    return " = ".join(at_depth_0(argument, "="))


def at_depth_0(text: str, sign: str) -> list[str]:
    """The parts of a text between signs that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == sign and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def public(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties of a class that have no underscore, in the order of its source."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield name, member


def sentence(text: str) -> str:
    """The first sentence of a docstring."""
    return re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0].rstrip(";.") + "."


def prose(doc: str, arguments: tuple[str, ...]) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, and a list of what it says of each argument."""
    for paragraph in re.split(r"\n\s*\n", doc):
        text = " ".join(paragraph.split())
        starts = [m for m in re.finditer(ITEM, text) if {*m[1].split(", ")} <= {*arguments}]
        ends = [m.start() for m in starts[1:]] + [len(text)] * bool(starts)
        before = text[: starts[0].start()] if starts else text
        if before.strip():
            yield escaped(before.strip())
            yield ""
        for start, end in zip(starts, ends, strict=True):
            names = ", ".join(f"`{name}`" for name in start[1].split(", "))
            yield f"* {names}: {escaped(text[start.end() : end].strip())}"
        if starts:
            yield ""


def escaped(text: str) -> str:
    """Text with the characters that Markdown would read escaped; `code` stays as it is."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*_<|])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)
