"""`flowrl generate RUN prompts.txt -o out/`: a folder that goes on where it was stopped, and whose
files carry their settings; of a run that was moved away from all that it was trained with."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import av
import numpy as np
import pytest
import small
import torch
from PIL import ExifTags, Image

from flowrl.cli import generate
from flowrl.data import media
from flowrl.policy import load_policy
from flowrl.rollouts.inference import gallery
from flowrl.runtime.store import files

PROMPTS = ["a red circle", "two blue squares", "a green triangle"]
HOW = ["--steps", 2, "--guidance", "none"]
OWN = """
import flowrl
from flowrl.algorithms.nft import NFT

@flowrl.reward
def red(media, prompts, context=None):
    return media[:, 0].mean((1, 2))

class Mine(NFT):
    pass
"""
# A1111's own pattern for the last line (modules/infotext_utils.py)
FACTS = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in another place than it was trained in; its prompts, reward, algorithm and first LoRA
    are gone."""
    here = tmp_path_factory.mktemp("first")
    (here / "own.py").write_text(OWN)
    (here / "list.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    lora = load_policy("shapes-sd3", lora={"rank": 16, "alpha": 16}).save_lora(here / "lora")
    own = {"reward": f"{here}/own.py:red", "algorithm__name": f"{here}/own.py:Mine"}
    data = dict.fromkeys(("data__train", "data__eval"), str(here / "list.jsonl"))
    changes = {**own, **data, "train__init_lora": str(lora), "optimizer__lr": "0.05"}
    small.trainer(here / "run", iterations="1", **changes).run()
    place = tmp_path_factory.mktemp("second") / "mine"
    shutil.move(here / "run", place)
    shutil.rmtree(here)
    return place


@pytest.fixture(scope="module")
def policy(run):
    words = {"lora": None, "pipeline": None, "hints": None}
    return generate._load(str(run), words, PROMPTS)


@pytest.fixture
def made(run, policy, tmp_path, monkeypatch):
    """Runs the command on the moved run, which is loaded once, and returns its output."""
    monkeypatch.setattr(generate, "_load", lambda *_: policy)
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text("# three\n" + "\n".join(PROMPTS))

    def make(*words, code=0, prompts="list.txt"):
        result = small.invoke("generate", run, prompts, *HOW, *words)
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    return make


def rows(folder):
    return [json.loads(line) for line in Path(folder, gallery.INDEX).read_text().splitlines()]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_samples_are_the_same_in_any_batch_and_of_any_part_of_the_list(made):
    made("--seeds", "0,5", "-o", "one/", "--format", "npy", "--batch", 1)
    made("--seeds", "5,0", "-o", "three/", "--format", "npy", "--batch", 3)
    assert names("one") == names("three") and len(rows("one")) == 6
    for path in Path("one").glob("*.npy"):
        assert np.abs(np.load(path) - np.load("three" / Path(path.name))).max() < 1e-5
    made("--seed", "5", "-o", "file.npy")  # numbered files are the same samples
    assert np.abs(np.load("file-2.npy") - np.load("one/00002-a-green-triangle-s5.npy")).max() < 1e-5


def killed_at(number):
    """A function in place of files.sync that kills the process as it writes this file."""
    real, seen = files.sync, []

    def sync(path):
        seen.extend([path] * path.name.startswith(files.TEMPORARY))
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path)

    return sync


def test_a_list_that_was_killed_goes_on_where_it_was(made):
    words = ("--seeds", "0,1", "--batch", 2, "--reward", "jpeg", "-o", "out")
    child = os.fork()
    if not child:
        files.sync = killed_at(4)  # the second file of the second batch
        made(*words)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    whole = [Path("out", row["file_name"]) for row in rows("out")]
    assert len(whole) == 2 and len(names("out")) == 2 + 1 + 1 + 1  # list, unlisted, unfinished
    times = [path.stat().st_mtime_ns for path in whole]
    assert "out: 6 samples, 4 of them new" in made(*words)
    assert times == [path.stat().st_mtime_ns for path in whole] and len(names("out")) == 7
    listed = rows("out")
    assert [row["place"] for row in listed] == [0, 0, 1, 1, 2, 2]
    assert "0 of them new" in made(*words)
    whole[0].unlink()
    assert "1 of them new" in made(*words) and whole[0].is_file()
    scored = json.loads(small.invoke("score", "out", "--reward", "jpeg", "--json", "-").stdout)
    totals = {Path(row["file"]).name: row["total"] for row in scored}
    assert totals == pytest.approx({row["file_name"]: row["total"] for row in listed}, abs=1e-5)


def test_the_base_model_makes_its_samples_from_the_same_noise(made, policy):
    said = made("--with-base", "-o", "out", "--format", "npy")
    assert "6 samples" in said
    with policy.view("reference"):
        plain = gallery.generate(policy, PROMPTS, steps=2, guidance="none")
    for row in rows("out"):
        item, base = np.load(Path("out", row["file_name"])), plain[row["place"]].numpy()
        assert (np.abs(item - base).max() < 1e-5) == row["base"]


def test_a_sheet_shows_all_samples_and_their_pairs(made):
    said = made("--with-base", "--seeds", "0,1", "-o", "out", "--grid", "sheet.png")
    assert "out: 12 samples" in said and "sheet.png" in said
    assert Image.open("sheet.png").size[0] == 8 + 8 * (gallery.CELL + 8)
    (row,) = gallery.wanted(["a"], [0], {}, base=False)
    row["file_name"] = media.save(torch.rand(5, 3, 16, 16), "a.mp4").name
    assert Image.open(gallery.sheet([row], Path(), Path("a.jpg"))).format == "JPEG"


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "mp4"])
def test_a_file_carries_its_prompts_and_settings(tmp_path, suffix):
    own = {"model": "a/b", "steps": 28, "guidance": 4.5, "pipeline": {}, "run": 'of "me", 漢'}
    entry = [{"prompt": "a circle: red,\nround", "negative_prompt": "blue"}]
    (row,) = gallery.wanted(entry, [7], own, base=False)
    video = torch.rand(*[4] * (suffix in ("gif", "mp4")), 3, 16, 32)
    path = media.save(video, tmp_path / f"a.{suffix}", about=gallery.caption(row, (16, 32)))
    prompt, negative, facts = text_of(path).rsplit("\n", 2)
    assert prompt == entry[0]["prompt"] and negative == "Negative prompt: blue"
    found = {k: json.loads(v) if v[0] == '"' else v for k, v in FACTS.findall(facts)}
    assert found["Size"] == "32x16" and found["Run"] == own["run"] and found["Seed"] == "7"
    assert found["CFG scale"] == "4.5" and found["Steps"] == "28" and found["Model"] == "a/b"
    assert found["Version"].startswith("flowrl ")


def text_of(path):
    """The text where programs look for it in this kind of file."""
    if path.suffix == ".mp4":
        with av.open(str(path)) as container:
            return container.metadata["comment"]
    picture = Image.open(path)
    if path.suffix == ".gif":
        return picture.info["comment"].decode()
    if path.suffix == ".png":
        return picture.text["parameters"]
    said = picture.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    return said.removeprefix(b"UNICODE\0").decode("utf-16-be")


def test_the_command_writes_the_run_and_its_checkpoint_into_the_file(made):
    Path("two.jsonl").write_text('{"prompt": "a", "negative_prompt": "b"}\n' * 2)
    said = made("--batch", 1, "-o", "once/", prompts="two.jsonl")
    assert said.count("negative_prompt has no effect") == 1
    made("-o", "out", "--format", "webp", "--guidance", "3.50", prompts="a red circle")
    (row,) = rows("out")
    assert row["file_name"] == "00000-a-red-circle-s0.webp" and row["checkpoint"] == "step-000001"
    said = text_of(Path("out", row["file_name"]))
    assert "Run: mine" in said and "CFG scale: 3.5, Seed: 0, Size: 64x64, Model: " in said


def test_what_a_folder_holds_of_another_kind_is_refused(made, run):
    made("-o", "out")
    Path("empty.txt").write_text("# one\n\n# two\n")
    Path("other.txt").write_text("a red circle\na blue square\n")
    Path("more.txt").write_text("\n".join([*PROMPTS, "a blue square"]))
    wrong = {
        ("list.txt", "--steps", "3"): "was made with steps=2, and now it is 3; give another folder",
        ("list.txt", "--format", "jpg"): "was made with form=None, and now it is jpg",
        ("list.txt", "--rlg", "2"): "was made with rlg=1.0, and now it is 2.0",
        ("list.txt", "--pipeline", "height=32"): "was made with pipeline=",
        ("other.txt",): "made with prompt=two blue squares, and now it is a blue square",
        ("empty.txt",): "prompt file empty.txt is empty",
    }
    for (prompts, *words), sentence in wrong.items():
        assert sentence in made("-o", "out", *words, prompts=prompts, code=2), words
    assert "--format mp4 does not suit what is made" in made("-o", "a", "--format", "mp4", code=2)
    Path("c").mkdir()
    Path("c", gallery.INDEX).write_text('{"file_name": "a.png", "text": "a"}\n')
    assert f"c/{gallery.INDEX} is not of flowrl generate" in made("-o", "c", code=2)
    assert "c/a-2.png" in made("-o", "c/a.png")  # files of other names may stand there
    assert "is the folder of a run" in made("-o", run, code=2)
    assert "--grid shows pictures" in made("-o", "a.npy", "--grid", "b.png", code=2)
    assert "1 of them new" in made("-o", "out", prompts="more.txt")
    (run / "checkpoints/step-000001/manifest.json").write_text("{}")
    assert "was made with weights=" in made("-o", "out", code=2)


def test_a_run_whose_model_is_gone_says_what_to_give(run, tmp_path):
    shutil.copytree(run, tmp_path / "b")
    file = tmp_path / "b" / "config.yaml"
    file.write_text(re.sub("source: package.*", "source: ./sd15", file.read_text(), count=1))
    result = small.invoke("generate", tmp_path / "b", "a red circle")
    assert result.exit_code == 2 and "./sd15" in result.output
    assert f"flowrl generate PLACE PROMPTS --lora {tmp_path}" in " ".join(result.output.split())
