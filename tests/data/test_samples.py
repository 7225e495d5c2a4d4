"""Which prompt an image file is judged by: a list's, or its folder's own."""

import os
from pathlib import Path

import pytest
import small
from image_files import in_an_empty_folder, listing, noise  # noqa: F401  a fixture for every test

from flowrl.cli.main import app  # noqa: F401  imported before a test changes folders
from flowrl.data import scored_dataset
from flowrl.data.samples import collect


def test_prompts_come_from_a_list_by_path_or_bare_name_and_an_image_may_have_several():
    noise("imgs/a.png"), noise("imgs/b.png"), noise("imgs/.hidden.png")
    listing(
        "lists/p.jsonl",
        {"file": "../imgs/a.png", "prompt": "one", "k": 1},
        {"file": "b.png", "prompt": "two", "total": 5.0},
        {"file": "b.png", "prompt": "three"},
    )
    found = collect([Path("imgs")], prompts=Path("lists/p.jsonl"))
    assert [(s.path.name, s.prompt, s.meta) for s in found] == [
        ("a.png", "one", {"k": 1}),
        ("b.png", "two", {}),
        ("b.png", "three", {}),
    ]


def test_a_folders_own_list_is_read_in_its_order_and_file_name_is_file():
    noise("imgs/a.png"), noise("imgs/sub/b.png")
    listing(
        "imgs/metadata.jsonl",
        {"file_name": "sub/b.png", "prompt": "two"},
        {"file_name": "a.png", "prompt": "one"},
    )
    assert [(s.path, s.prompt) for s in collect([Path("imgs")])] == [
        (Path("imgs/sub/b.png"), "two"),
        (Path("imgs/a.png"), "one"),
    ]


def test_a_file_that_a_folders_own_list_names_in_vain_is_left_out():
    noise("imgs/a.png")
    listing(
        "imgs/scores.jsonl", {"file": "a.png", "prompt": "x"}, {"file": "gone.png", "prompt": "x"}
    )
    result = small.invoke("score", "imgs", "--reward", "jpeg")
    assert result.exit_code == 1
    assert "imgs/gone.png cannot be read: it does not exist" in result.stderr


# ---------------------------------------------------------------------------
# a folder's own list stays in the folder

LEAVING = ["../a.png", "sub/../../a.png", "/etc/a.png", "out.png", "linked/a.png", "sub\\a.png"]
LEAVING += ["..\\a.png", "C:\\a.png", "a\0.png"]


def beside_a_folder():
    """Images in and beside a folder, and links from it to those beside it."""
    noise("a.png"), noise("imgs/a.png"), noise("imgs/sub/a.png"), noise("other/a.png")
    Path("imgs/out.png").symlink_to(Path("a.png").resolve())
    Path("imgs/linked").symlink_to(Path("other").resolve())


@pytest.mark.parametrize("file", LEAVING)
def test_a_folders_own_list_names_no_file_that_is_elsewhere(file):
    beside_a_folder()
    listing("imgs/scores.jsonl", {"file_name": file, "prompt": "x", "total": 1.0})
    said = "imgs/scores.jsonl, line 1 names .* leaves the folder imgs or is not written with /"
    for read in (lambda: collect([Path("imgs")]), lambda: scored_dataset.load("imgs")):
        with pytest.raises(ValueError, match=said):
            read()


def test_links_and_dots_that_stay_in_the_folder_are_followed():
    noise("real/imgs/sub/a.png")
    Path("imgs").symlink_to("real/imgs")
    Path("real/imgs/b.png").symlink_to("sub/a.png")
    files = ("sub/../sub/a.png", "b.png", os.path.abspath("imgs/sub/a.png"))
    for file in files:
        listing("real/imgs/scores.jsonl", {"file": file, "prompt": "x", "total": 1.0})
        assert collect([Path("imgs")])[0].path == Path("imgs", file)
        assert len(scored_dataset.load("imgs").paths) == 1


def test_a_list_given_by_its_own_path_may_name_files_anywhere():
    beside_a_folder()
    listing("lists/mine.jsonl", {"file": "../a.png", "prompt": "x", "total": 1.0})
    assert scored_dataset.load("lists/mine.jsonl").paths == [Path("lists/../a.png")]
    assert collect([Path("a.png")], prompts=Path("lists/mine.jsonl"))[0].prompt == "x"


def test_copies_get_names_that_a_folder_may_list():
    noise("one\\two.png")
    words = ["score", "one\\two.png", "--prompt", "x", "--reward", "jpeg", "-o", "out"]
    assert small.invoke(*words).exit_code == 0
    assert scored_dataset.load("out").paths == [Path("out/media/one_two.png")]


def test_files_of_a_folder_that_are_not_read_are_counted_and_named(caplog):
    noise("all/a.png")
    noise("all/deep/b.png", seed=1)
    listing("all/own.jsonl", {"file": "a.png", "prompt": "x"})
    assert len(collect([Path("all")], prompt="x")) == 2
    assert "1 of 3 files in all are not read: own.jsonl; what is read ends in .png" in caplog.text
    caplog.clear()
    listing("all/metadata.jsonl", {"file": "a.png", "prompt": "x"})
    for name in ("all/photo.HEIC", "all/deep/scan.tif", "all/.hidden", "all/a.txt"):
        Path(name).write_text("x")
    collect([Path("all")], prompt="x")
    assert "4 of 7 files in all are not read: a.txt, deep/scan.tif, own.jsonl, pho" in caplog.text
    caplog.clear()
    for i in range(20):
        Path(f"all/{i:02}.avif").write_text("x")
    collect([Path("all")], prompt="x")
    assert "24 of 27 files in all" in caplog.text and "07.avif and 16 more" in caplog.text
    Path("none").mkdir()
    Path("none/a.bmp").write_text("x")
    with pytest.raises(
        ValueError, match=r"none holds no image .*1 of 1 files in none are not read"
    ):
        collect([Path("none")], prompt="x")


def test_a_list_that_is_given_counts_as_read(caplog):
    noise("all/a.png")
    listing("all/own.jsonl", {"file": "a.png", "prompt": "x"})
    collect([Path("all")], prompts=Path("all/own.jsonl"))
    assert "not read" not in caplog.text


def test_a_line_of_generate_brings_the_record_of_its_prompt():
    noise("made/a.png")
    line = {"file_name": "a.png", "prompt": "remove it", "entry": {"image": "x.png", "seed": "no"}}
    listing("made/metadata.jsonl", line | {"place": 0, "seed": 3})
    (sample,) = collect([Path("made")])
    assert sample.meta == {"image": "x.png", "place": 0, "seed": 3}
    listing("made/metadata.jsonl", line)  # somebody else's column of that name
    (sample,) = collect([Path("made")])
    assert sample.meta == {"entry": line["entry"]}
