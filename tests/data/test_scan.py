"""`flowrl check --data`: every fault of media and pairs by file and row, from headers alone."""

import json
import re
import subprocess
import sys

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from flowrl.cli.main import app
from flowrl.data import media
from flowrl.data.scan import command, facts, scan


def picture(path, size=(8, 8), mode="RGB", colour=0):
    Image.new(mode, size, colour).save(path)
    return path


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        picture(tmp_path / f"{i}.png", colour=40 * i)
    return tmp_path


GOOD = {"file": "1.png", "prompt": "red"}
PAIR = {"prompt": "red", "chosen": "1.png", "rejected": "0.png"}


def torn(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("row", "fault", "says"),
    [
        (GOOD | {"file": "9.png"}, "missing file", r"9\.png, which does not exist"),
        (GOOD | {"file": "torn.png"}, "unreadable file", "torn.png cannot be read: it was cut off"),
        (GOOD | {"file": "torn.jpg"}, "unreadable file", "torn.jpg cannot be read: it was cut off"),
        (GOOD | {"file": "torn.webp"}, "unreadable file", "torn.webp cannot be read"),
        (GOOD | {"file": "torn.gif"}, "unreadable file", "torn.gif cannot be read"),
        (GOOD | {"file": "text.png"}, "unreadable file", "text.png cannot be read"),
        (GOOD | {"file": "empty.png"}, "unreadable file", "empty.png cannot be read"),
        ({"file": "1.png"}, "no prompt", "needs a prompt"),
        ({"prompt": "red"}, "no file named", "names no file"),
        (PAIR | {"rejected": "1.png"}, "pair of equal files", "prefers 1.png to 1.png"),
        (PAIR | {"rejected": "copy.png"}, "pair of equal files", "prefers 1.png to copy.png"),
        (PAIR | {"label": 0.7}, "wrong label", "has label=0.7"),
        (PAIR | {"mask": "9.png"}, "missing file", "names .*9.png, which does not exist"),
        (PAIR | {"mask": "text.png"}, "unreadable file", "text.png cannot be read"),
        (PAIR | {"mask": "0.png"}, "wrong mask", "has the mask .*0.png, which is black: nothing"),
        (PAIR | {"mask": "wide.png"}, "wrong mask", "a mask of 24x8 pixels for .*1.png of 8x8"),
        (GOOD | {"mask": "1.png"}, "mask without a pair", "has one file and a mask, which weighs"),
        (PAIR | {"label": "win"}, "wrong label", "has label='win'"),
        (PAIR | {"rejected": "clip.gif"}, "image against video", "an image with a video"),
        (GOOD | {"mask_image": "9.png"}, "wrong condition", "names .*9.png, which is no file"),
    ],
)
def test_a_fault_is_counted_and_names_file_and_row(row, fault, says, folder):
    picture(folder / "wide.png", size=(24, 8), colour=40)
    (folder / "copy.png").write_bytes((folder / "1.png").read_bytes())
    (folder / "text.png").write_text("no picture")
    (folder / "empty.png").write_bytes(b"")
    for suffix in ("png", "jpg", "webp"):
        torn(picture(folder / f"torn.{suffix}", size=(64, 64)))
    frames = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    torn(media.save(frames, folder / "torn.gif"))
    media.save(frames, folder / "clip.gif")
    other = PAIR if "chosen" in row else GOOD
    found = scan(lines(folder / "list.jsonl", other, row))
    assert {kind: len(f) for kind, f in found.faults.items()} == {fault: 1}
    (said,) = found.faults[fault]
    assert "list.jsonl, line 2" in said
    assert re.search(says, said), said
    assert found.media + found.pairs == 1  # the other row


def test_all_faults_are_found_and_those_of_a_kind_are_together(folder):
    rows = [GOOD, *[GOOD | {"file": f"gone{i}.png"} for i in range(30)], {"prompt": "red"}, PAIR]
    found = scan(lines(folder / "list.jsonl", *rows))
    counts = {kind: len(f) for kind, f in found.faults.items()}
    assert counts == {"missing file": 30, "no file named": 1, "media and pairs mixed": 1}
    done = CliRunner().invoke(app, ["check", "--data", str(folder / "list.jsonl")])
    assert done.exit_code == 2 and "fault: missing file (30)" in done.output
    assert "  and 10 more (--json FILE lists them)" in done.output
    assert done.output.count("which does not exist") == 20
    done = CliRunner().invoke(app, ["check", "--data", str(folder / "list.jsonl"), "--json", "-"])
    assert len(json.loads(done.output)["faults"]["missing file"]) == 30


def test_what_may_stay_is_noted_and_training_is_the_next_command(folder):
    picture(folder / "clear.png", mode="RGBA")
    picture(folder / "wide.png", size=(24, 8))
    rows = [
        GOOD | {"prompt": "", "domain": "text"},
        GOOD | {"file": "clear.png", "domain": "text"},
        GOOD | {"file": "wide.png"},
        GOOD | {"file": "0.png", "domain": "art"},
    ]
    listed = lines(folder / "metadata.jsonl", *rows)
    found = scan(folder)
    assert not found.faults
    assert {kind: [len(f), f[0]] for kind, f in found.notes.items()} == {
        "empty prompt": [1, f"{listed}, line 1 has no text: it trains the empty prompt"],
        "transparency": [
            1,
            f"{listed}, line 2: {folder}/clear.png has an alpha channel; it is laid over white",
        ],
        'no "domain"': [1, f'{listed}, line 3 has no "domain", and other rows have'],
        "file without a row": [1, f"{folder}/2.png has no row in the folder's list"],
    }
    said = dict(facts(found))
    assert said["rows"] == "4" and said["sizes"] == "8x8 (3), 24x8 (1)"
    assert said["width / height"] == "1.00 to 3.00, median 1.00"
    done = CliRunner().invoke(app, ["check", "--data", str(folder)])
    assert done.exit_code == 0
    said = done.output.replace("\n", " ").replace("  ", " ")
    words = f"algorithm=sft batch.prompts=4 data.offline={folder} data.crop=center"
    assert f"train with: flowrl train {words} reward.shapes.weight=0" in said


def test_pairs_ties_and_pairs_of_two_sizes_are_counted(folder):
    picture(folder / "wide.png", size=(24, 8))
    rows = [PAIR, PAIR | {"label": 0.5, "mask": "2.png"}, PAIR | {"rejected": "wide.png"}]
    found = scan(lines(folder / "pairs.jsonl", *rows))
    assert dict(facts(found))["pairs"] == "3, of them 1 ties, 1 with a mask" and not found.faults
    (said,) = found.notes["pair of two sizes"]
    assert "line 3 compares files of 8x8 and 24x8" in said
    assert "dpo batch.group=2 batch.prompts=2 data" in command(found, folder / "pairs.jsonl")
    ties = scan(lines(folder / "pairs.jsonl", *[PAIR | {"label": 0.5}] * 20))
    assert "dpo batch.group=2 data.labels=soft data" in command(ties, folder / "pairs.jsonl")


def test_videos_say_their_frames_and_other_rates_are_noted(tmp_path):
    frames = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for i, fps in enumerate((10, 10, 20)):
        media.save(frames, tmp_path / f"{i}.gif", fps=fps)
        (tmp_path / f"{i}.txt").write_text("moving")
    found = scan(tmp_path)
    assert dict(facts(found))["frames"] == "5 (3)"
    assert dict(facts(found))["frames a second"] == "10.0 (2), 20.0 (1)"
    (said,) = found.notes["other frames a second"]
    assert "2.gif has 20 frames a second, and most have 10" in said


def test_the_header_of_a_video_file_says_frames_rate_and_whether_it_was_cut_off(tmp_path):
    pytest.importorskip("av")
    path = media.save(torch.rand(9, 3, 16, 32), tmp_path / "a.mp4", fps=8)
    header = media.header(path)
    assert (header.size, header.frames, header.fps, header.alpha) == ((32, 16), 9, 8.0, False)
    content = path.read_bytes()
    assert content.find(b"mdat") < content.find(b"moov")  # the index lies behind the frames
    path.write_bytes(content[: content.find(b"moov") - 8])
    with pytest.raises(ValueError, match=r"a\.mp4 cannot be read"):
        media.header(path)


def test_a_scan_imports_no_torch_and_scores_are_not_for_it(folder):
    code = "import sys; from pathlib import Path; from flowrl.data.scan import scan;"
    code += "print(scan(Path(sys.argv[1])).media, 'torch' in sys.modules)"
    listed = lines(folder / "list.jsonl", GOOD)
    done = subprocess.run([sys.executable, "-c", code, listed], capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr
    lines(folder / "scores.jsonl", GOOD | {"total": 1.0})
    done = CliRunner().invoke(app, ["check", "--data", str(folder)])
    assert done.exit_code == 2 and "holds scores of `flowrl score`" in done.output
    for words in (["check", "sd3.5-medium"], ["check", "--frames", "4"]):
        done = CliRunner().invoke(app, [*words, "--data", str(folder)])
        assert done.exit_code == 2
