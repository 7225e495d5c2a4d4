"""docs/reading.md holds: its files and functions exist, its spine is as long as it says, and an
iteration takes it, down to the network."""

import ast
import re
import traceback
from pathlib import Path

import pytest
from pages import PAGES, ROOT

import flowrl

PAGE = PAGES["docs/reading.md"]
SPAN = re.compile(r"`([^`\n]+)`")


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


def test_the_spine_is_as_long_as_it_says():
    files, hundreds = re.search(r"told in (\d+) files of about ([\d,]+) lines", PAGE).groups()
    lines = [len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in SPINE]
    assert len(set(SPINE)) == len(SPINE) == int(files)
    assert abs(sum(lines) - int(hundreds.replace(",", ""))) <= 100, sum(lines)


def test_one_iteration_enters_the_spine_and_every_function_down_to_the_network(tmp_path):
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
    (network,) = trainer.policy.networks.values()
    stacks = []
    network.register_forward_pre_hook(lambda *_: stacks.append(traceback.extract_stack()))
    entered = script.Entered(ROOT / "flowrl")
    with entered:
        trainer.iterate(0)
    found = entered.functions()
    assert to_the_network(stacks)
    assert not [path for path in SPINE if str(ROOT / path) not in found]
    for path, function in steps_of_the_spine():
        assert function in found[str(ROOT / path)], f"{path} is entered without {function}"


def to_the_network(stacks):
    """Whether the engine reaches the network by the functions that the page lists, and no other."""
    text = section("One iteration: the spine").split("\n### From a step to the network\n")[1]
    text = text.split("\n### ")[0]
    way = [(path, name.split(".")[-1]) for path, name in named(text) if name]
    assert len(way) - 1 == int(re.search(r"lie (\d+) functions", text)[1])
    for stack in stacks:
        frames = [
            (Path(frame.filename).relative_to(ROOT).as_posix(), frame.name)
            for frame in stack
            if Path(frame.filename).is_relative_to(ROOT) and not frame.name.startswith("<")
        ]
        if way[0] in frames:
            below = frames[frames.index(way[0]) :]
            below = [frame for frame in below if frame[0].startswith(("flowrl/", "samplers/"))]
            assert below == way
            return True
    return False


def steps_of_the_spine():
    """(file, function) of each item's **Read** line, which says what an iteration calls."""
    spine = section("One iteration: the spine").split("\n### ")[0]
    for item in re.split(r"^\d+\. ", spine, flags=re.M)[1:]:
        read = re.search(r"Read (.*?)\.(?:\s|$)", item, re.S)
        assert read, f"nothing is said to be read in {item.splitlines()[0]}"
        path = SPAN.search(item)[1]
        yield from ((path, name.removesuffix("()")) for name in SPAN.findall(read[1]))
