"""docs/reading.md holds: its files and functions exist, its spine is short, and an iteration takes
it."""

import ast
import re

import pytest
from pages import PAGES, ROOT

import flowrl

PAGE = PAGES["docs/reading.md"]
SPAN = re.compile(r"`([^`\n]+)`")
MOST_FILES, MOST_LINES = 12, 1100  # of the spine


def section(title):
    """The text of a `##` section."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def named(text):
    """(file, function) of every `function()` after the `file.py` it follows; (file, None) too."""
    found, file = [], None
    for span in SPAN.findall(re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S)):
        if re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|css)", span):
            file = span
            found.append((file, None))
        elif match := re.fullmatch(r"([\w.]+)\(\)", span):
            assert file, f"`{span}` stands before any file"
            found.append((file, match[1]))
    return found


def defined(path):
    """Names of the functions, methods and classes of a file: "train", "Trainer.iterate"."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return set(definitions(tree, ""))


def definitions(node, prefix):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name
            yield from definitions(child, f"{prefix}{child.name}.")


SPINE = re.findall(r"^\d+\. `([^`]+)`", section("One iteration: the spine"), re.M)


@pytest.mark.parametrize("path", sorted({path for path, _ in named(PAGE)}))
def test_files_exist_and_define_the_functions_named_after_them(path):
    assert (ROOT / path).is_file()
    functions = {function for file, function in named(PAGE) if file == path and function}
    if path.endswith(".py"):
        assert not functions - defined(path)
    else:
        assert not functions


def test_every_walk_names_functions():
    for title in ("One iteration: the spine", "One reward call", "One start of `flowrl train`"):
        assert sum(function is not None for _, function in named(section(title))) >= 15
    spine = named(section("One iteration: the spine"))
    assert {file for file, function in spine if function} >= set(SPINE)


def test_a_function_that_is_not_in_its_file_would_be_found():
    assert named("`x/a.py` and `f()`, then `x/b.py`: `C.g()`, `x = 1`") == [
        ("x/a.py", None),
        ("x/a.py", "f"),
        ("x/b.py", None),
        ("x/b.py", "C.g"),
    ]
    assert "Trainer.iterate" in defined("flowrl/training/loop.py")
    assert "iterate" not in defined("flowrl/training/loop.py")


def test_the_spine_can_be_read_in_one_sitting():
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SPINE}
    assert 0 < len(lines) <= MOST_FILES and len(lines) == len(SPINE)
    assert sum(lines.values()) <= MOST_LINES, lines


def test_one_iteration_enters_every_file_of_the_spine_and_every_function_that_it_names(tmp_path):
    import entered as script

    settings = [
        *script.OPTIONS,
        "iterations=1",
        "batch.group=4",
        "sampler.steps=4",
        "model.self_check=false",
        f"output={tmp_path}/run",
    ]
    trainer = flowrl.Trainer(flowrl.load_config(None, settings))
    entered = script.Entered(ROOT / "flowrl")
    with entered:
        trainer.iterate(0)
    found = entered.functions()
    assert not [path for path in SPINE if str(ROOT / path) not in found]
    for path, function in steps_of_the_spine():
        assert function in found[str(ROOT / path)], f"{path} is entered without {function}"


def steps_of_the_spine():
    """(file, function) of each item's **Read** line, which says what an iteration calls."""
    spine = section("One iteration: the spine").split("\n### ")[0]
    for item in re.split(r"^\d+\. ", spine, flags=re.M)[1:]:
        read = re.search(r"Read (.*?)\.(?:\s|$)", item, re.S)
        assert read, f"nothing is said to be read in {item.splitlines()[0]}"
        path = SPAN.search(item)[1]
        yield from ((path, name.removesuffix("()")) for name in SPAN.findall(read[1]))
