"""Media and pairs of a user's own: layouts give the same rows, and errors name file and row."""

import json
from pathlib import Path

import pytest
import torch
from torchvision.io import write_png

from flowrl.data import scored_dataset
from flowrl.data.supervised import read
from flowrl.rollouts.from_files import read_fitting


def picture(path, value=0, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_png(torch.full((3, *size), value, dtype=torch.uint8), str(path))
    return path


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        picture(tmp_path / f"{i}.png", 40 * i)
    return tmp_path


@pytest.mark.parametrize(
    "row",
    [
        {"file_name": "1.png", "text": "red"},
        {"file": "1.png", "prompt": "red"},
        {"image": "1.png", "caption": "red"},
        {"media": "1.png", "prompt": "red"},
        {
            "schema_version": 2,
            "input": {"prompt": "red"},
            "supervision": {"type": "demonstration", "target": "1.png"},
        },
    ],
)
def test_a_media_row_is_read_in_each_layout(row, folder):
    kind, (found,) = read(lines(folder / "metadata.jsonl", row))
    assert (kind, found.prompt, found.files) == ("media", "red", (folder / "1.png",))
    assert read(folder)[1][0].prompt == "red"  # the folder's own list


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"prompt": "red", "chosen": "1.png", "rejected": "0.png"}, 1.0),
        ({"prompt": "red", "chosen": "1.png", "rejected": "0.png", "label": 0.5}, 0.5),
        ({"prompt": "red", "path1": "1.png", "path2": "0.png"}, 1.0),
        ({"prompt": "red", "img_win": "1.png", "img_lose": "0.png"}, 1.0),
        (
            {
                "input": {"prompt": "red"},
                "supervision": {"type": "preference", "chosen": "1.png", "rejected": "0.png"},
            },
            1.0,
        ),
    ],
)
def test_a_pair_is_read_in_each_layout(row, label, folder):
    kind, (found,) = read(lines(folder / "pairs.jsonl", row))
    assert (kind, found.files, found.label) == (
        "pairs",
        (folder / "1.png", folder / "0.png"),
        label,
    )
    data = scored_dataset.load(folder / "pairs.jsonl")
    assert [item.total for item in data.items[0]] == [label, 1 - label]
    assert (data.kind, data.weights) == ("pairs", {})


def test_a_folder_with_a_text_beside_each_file(folder):
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"number {i}\n")
    (folder / "2.txt").write_text("")  # the unconditional prompt
    kind, rows = read(folder)
    assert kind == "media" and [row.prompt for row in rows] == ["number 0", "number 1", ""]
    (folder / "1.txt").unlink()
    with pytest.raises(ValueError, match="of 3 files lack one: 1.png"):
        read(folder)


def test_each_row_is_a_prompt_of_its_own_as_often_as_it_repeats(folder):
    rows = [{"file": f"{i}.png", "prompt": "red", "repeats": 1 + i, "task": i} for i in range(3)]
    data = scored_dataset.load(lines(folder / "list.jsonl", *rows))
    assert [prompt["task"] for prompt in data.prompts] == [0, 1, 1, 2, 2, 2]
    assert all(prompt.keys() == {"prompt", "task"} for prompt in data.prompts)
    names = [item.file for items in data.items for item in items]
    assert len(set(names)) == 6 and data.singles == 0


GOOD = {"file": "1.png", "prompt": "red"}
PAIR = {"prompt": "red", "chosen": "1.png", "rejected": "0.png"}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [GOOD, {"file": "9.png", "prompt": "red"}],
            r"line 2 names .*9\.png, which does not exist",
        ),
        ([{"prompt": "red"}], "line 1 names no file; give it in a column file"),
        ([{"file": "1.png"}], "line 1 needs a prompt, a text in a column prompt, text, caption"),
        ([{"file": 3, "prompt": "red"}], "has file=3, which should be the path"),
        ([PAIR | {"rejected": "1.png"}], "line 1 prefers 1.png to 1.png, which is the same"),
        ([PAIR | {"rejected": "copy.png"}], "line 1 prefers 1.png to copy.png, which is the same"),
        ([PAIR | {"label": 0.7}], "line 1 has label=0.7, the share of raters"),
        ([GOOD, PAIR], "line 1 has 1 file and .*line 2 2; keep demonstrations and pairs"),
        ([GOOD | {"repeats": 0}], "repeats=0, which is a count from 1"),
    ],
)
def test_a_row_that_is_wrong_is_named(rows, says, folder):
    (folder / "copy.png").write_bytes((folder / "1.png").read_bytes())
    with pytest.raises(ValueError, match=says):
        read(lines(folder / "list.jsonl", *rows))


@pytest.mark.parametrize("name", ["../out.png", "link.png", "/etc/hostname"])
def test_a_folders_own_list_names_files_of_the_folder_alone(name, tmp_path):
    picture(tmp_path / "out.png")
    place = picture(tmp_path / "in" / "0.png").parent
    (place / "link.png").symlink_to(tmp_path / "out.png")
    row = {"file_name": name, "prompt": "red"}
    with pytest.raises(ValueError, match="leaves the folder .*give data.offline the list itself"):
        read(lines(place / "metadata.jsonl", row).parent)
    if name == "../out.png":
        assert read(place / "metadata.jsonl")[1][0].files[0].name == "out.png"


def test_lists_that_name_no_files_and_places_that_are_not_there(folder):
    (folder / "prompts.txt").write_text("a red circle\n")
    with pytest.raises(ValueError, match="names no file; a row is"):
        read(folder / "prompts.txt")
    with pytest.raises(ValueError, match="does not exist"):
        read(Path(folder / "nowhere"))


def test_files_of_another_size_are_refused_or_cropped_to_their_middle(tmp_path):
    wide = torch.zeros(3, 8, 24, dtype=torch.uint8)
    wide[:, :, 8:16] = 255  # the middle is white
    write_png(wide, str(tmp_path / "wide.png"))
    with pytest.raises(
        ValueError, match="24x8 pixels, but the model makes 8x8; .*data.crop=center"
    ):
        read_fitting(tmp_path / "wide.png", (3, 8, 8), "none")
    assert bool((read_fitting(tmp_path / "wide.png", (3, 8, 8), "center") == 1).all())
    small = read_fitting(tmp_path / "wide.png", (3, 4, 4), "center")
    assert small.shape == (3, 4, 4) and float(small[:, :, 1:3].mean()) > 0.9


def test_a_video_gives_its_first_frames_and_needs_enough_of_them(tmp_path):
    from flowrl.data.media import save

    frames = (torch.arange(5) / 5)[:, None, None, None].expand(5, 3, 8, 8)
    path = save(frames, tmp_path / "a.gif", fps=10)
    found = read_fitting(path, (3, 3, 8, 8), "none")
    torch.testing.assert_close(found, frames[:3], atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="has 5 frames, but the model makes 9"):
        read_fitting(path, (9, 3, 8, 8), "none")
