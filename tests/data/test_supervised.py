"""Media and pairs of a user's own: layouts give the same rows, and errors name file and row."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchvision.io import write_png

from flowrl.data import scored_dataset
from flowrl.data.media import save
from flowrl.data.scan import scan
from flowrl.data.supervised import read
from flowrl.rollouts.from_files import check, read_fitting


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
    data = scored_dataset.load(folder / "pairs.jsonl", soft=True)
    assert [item.total for item in data.items[0]] == [label, 1 - label]
    assert (data.kind, data.weights) == ("pairs", {})


def test_cells_of_a_table_are_the_numbers_and_lists_that_they_write(folder):
    """Those of a prompt stay text."""
    table = folder / "list.csv"
    table.write_text(
        "prompt,chosen,rejected,label,repeats\n7,1.png,0.png,0.5,2\nred,2.png,0.png,1,1\n"
    )
    rows = read(table)[1]
    assert [(row.prompt, row.label, row.repeats) for row in rows] == [("7", 0.5, 2), ("red", 1, 1)]
    table.write_text("prompt,path1,path2,margin\nred,1.png,0.png,-1.5\n")
    assert read(table)[1][0].margin == -1.5
    table.write_text(
        'prompt,image_path,rank\nred,"[""1.png"", ""0.png""]","[2, 1]"\n', encoding="utf-8"
    )
    assert read(table)[1][0].files == (folder / "0.png", folder / "1.png")
    table.write_text("prompt,chosen,rejected,label\nred,1.png,0.png,x\n")
    with pytest.raises(ValueError, match="line 2 has label='x', the share of raters"):
        read(table)


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
    frames = (torch.arange(5) / 5)[:, None, None, None].expand(5, 3, 8, 8)
    path = save(frames, tmp_path / "a.gif", fps=10)
    found = read_fitting(path, (3, 3, 8, 8), "none")
    torch.testing.assert_close(found, frames[:3], atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="has 5 frames, but the model makes 9"):
        read_fitting(path, (9, 3, 8, 8), "none")


def pick_a_pic(path, *rows):
    """A parquet file with the columns of Pick-a-Pic v2, in row groups of two rows."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    kinds = {"caption": pa.string(), "jpg_0": pa.binary(), "jpg_1": pa.binary()}
    kinds |= {"label_0": pa.float64(), "label_1": pa.float64(), "has_label": pa.bool_()}
    schema = pa.schema([*kinds.items(), ("best_image_uid", pa.string())])
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, row_group_size=2)
    return path


@pytest.fixture
def picks(folder):
    content = [(folder / f"{i}.png").read_bytes() for i in range(3)]
    row = {"caption": "red", "jpg_0": content[1], "jpg_1": content[0], "has_label": True}
    rows = [
        row | {"label_0": 1.0, "label_1": 0.0},
        row | {"label_0": 0.0, "label_1": 1.0, "jpg_1": content[2]},
        row | {"label_0": 0.5, "label_1": 0.5},
        row | {"label_0": 1.0, "label_1": 0.0, "has_label": False},
    ]
    return pick_a_pic(folder / "picks.parquet", *rows)


def test_pick_a_pics_bytes_are_pairs_that_stay_on_the_disk(picks, caplog):
    data = scored_dataset.load(picks)
    assert "1 of 3 pairs of" in caplog.text and "are ties" in caplog.text
    assert [[item.total for item in pair] for pair in data.items] == [[1, 0], [0, 1]]
    assert [p["prompt"] for p in data.prompts] == ["red", "red"]
    soft = scored_dataset.load(picks, soft=True)
    assert [item.total for item in soft.items[2]] == [0.5, 0.5]
    first, second = (item.path for item in data.items[1])
    assert str(second).endswith('picks.parquet, row 2: "jpg_1"')
    assert float(read_fitting(first, (3, 8, 8), "none").mean()) * 255 == pytest.approx(40)
    assert float(read_fitting(second, (3, 8, 8), "none").mean()) * 255 == pytest.approx(80)
    with pytest.raises(ValueError, match='row 2: "jpg_1" is 8x8 pixels, but the model makes 4x4'):
        read_fitting(second, (3, 4, 4), "none")
    assert len({item.file for pair in soft.items for item in pair}) == 6


def test_a_scan_reads_pick_a_pics_pictures_and_names_their_rows(picks, folder):
    found = scan(picks)
    assert (found.pairs, found.ties, dict(found.sizes)) == (3, 1, {(8, 8): 6}) and not found.faults
    assert found.notes["no preference"] == [f"{picks}, row 4 prefers no file, and is left out"]
    good = (folder / "1.png").read_bytes()
    row = {"caption": "red", "jpg_0": good, "label_0": 1.0, "has_label": True}
    bad = [{"jpg_1": good[:40]}, {"jpg_1": good}, {"jpg_1": None}]
    found = scan(pick_a_pic(folder / "bad.parquet", *(row | more for more in bad)))
    assert ["row 1" in found.faults["unreadable file"][0], found.pairs] == [True, 0]
    assert 'row 3: "jpg_1" holds no picture' in found.faults["unreadable file"][1]
    assert found.faults["pair of equal files"] == [
        f"{folder}/bad.parquet, row 2 prefers a picture to the same"
    ]


def test_a_ranking_gives_each_pair_and_a_prompt_counts_once(folder):
    """Three files in order 1, 2, 0: three pairs of weight 1/3; equal ranks are not compared."""
    names = ["0.png", "1.png", "2.png"]
    row = {"prompt": "red", "image_path": names, "human_preference": [3, 1, 2]}
    kind, found = read(lines(folder / "ranked.jsonl", row))
    pairs = [tuple(int(file.stem) for file in pair.files) for pair in found]
    assert kind == "pairs" and pairs == [(1, 2), (1, 0), (2, 0)]
    assert [pair.weight for pair in found] == [1 / 3] * 3
    for more in ({"human_preference": [0, 1, 0]}, {"rank": [2, 1.5, 2]}):
        chosen = {"prompt": "red", "file_path": names} | more
        found = read(lines(folder / "ranked.jsonl", chosen))[1]
        assert [tuple(int(f.stem) for f in pair.files) for pair in found] == [(1, 0), (1, 2)]
        assert [pair.weight for pair in found] == [0.5] * 2
    wrong = row | {"human_preference": [1, 0]}
    with pytest.raises(ValueError, match=r"line 1 has 3 files and ranks \[1, 0\]; each file needs"):
        read(lines(folder / "ranked.jsonl", wrong))
    flat = row | {"human_preference": [0, 0, 0]}
    with pytest.raises(ValueError, match="holds no row with a label"):
        read(lines(folder / "ranked.jsonl", flat))


def test_scores_and_margins_are_soft_labels(folder):
    """sigmoid(1.5 / 3) = .622459; hard labels ask only which is larger, and leave out ties."""
    pair = {"prompt": "red", "img_win": "1.png", "img_lose": "0.png"}
    rows = [
        pair | {"win_score": 2.0, "lose_score": 0.5},
        PAIR | {"margin": -1.5},
        PAIR | {"margin": 0},
        PAIR | {"margin": 9.0, "label": 0.5},  # the label says it
    ]
    path = lines(folder / "pairs.jsonl", *rows)
    soft = scored_dataset.load(path, soft=True, temperature=3.0)
    labels = [items[0].total for items in soft.items]
    assert labels == pytest.approx([0.622459, 0.377541, 0.5, 0.5], abs=1e-6)
    assert [sum(item.total for item in items) for items in soft.items] == pytest.approx([1] * 4)
    hard = scored_dataset.load(path)
    assert [items[0].total for items in hard.items] == [1, 0]
    for wrong in ({"margin": "far"}, {"margin": float("nan")}, {"win_score": 1.0}):
        with pytest.raises(ValueError, match="line 1 has .*, which should be finite numbers"):
            read(lines(path, PAIR | wrong))
    with pytest.raises(ValueError, match="1 of 1 pairs of .* are ties, which are trained with"):
        scored_dataset.load(lines(path, PAIR | {"label": 0.5}))


class Videos:
    """A policy that makes videos of 13 frames of 8 x 8 pixels."""

    device, latent_shape = torch.device("cpu"), (4, 4, 2, 2)
    pipe = SimpleNamespace(vae_scale_factor_temporal=4)

    def decode(self, x):
        return torch.zeros(len(x), 13, 3, 8, 8)

    def encode_media(self, media):
        return torch.zeros(len(media), *self.latent_shape)


def test_a_video_that_is_too_short_names_the_counts_that_its_vae_takes(tmp_path):
    """A VAE that folds 4 frames into one takes 4 k + 1: of a file with 11, 1, 5 or 9."""
    path = save(torch.rand(11, 3, 8, 8), tmp_path / "a.gif", fps=10)
    for crop in ("none", "center"):
        with pytest.raises(
            ValueError,
            match=r"a\.gif has 11 frames, but the model makes 13; .*to 1 "
            r"or 5 or 9 \(4 k \+ 1\) or less",
        ):
            check(Videos(), [path], crop)


def test_a_video_of_another_size_is_refused_before_it_is_read(tmp_path):
    path = save(torch.rand(13, 3, 8, 16), tmp_path / "a.gif", fps=10)
    with pytest.raises(ValueError, match="a.gif is 16x8 pixels, but the model makes 8x8; resize"):
        check(Videos(), [path])
    check(Videos(), [path], "center")
