"""A run goes on with every kind of data as long as they are the same, and is refused after that."""

import json

import numpy as np
import pytest
import small
import torch
from PIL import Image
from zoo import cases

import flowrl
from flowrl.data import conditions, given
from flowrl.data.media import save
from flowrl.data.prompts import load_prompts
from flowrl.training import identity, outputs

NAMED = "images of the data"
TEXTS = ["a red circle", "a blue square"]
OWN = """
from pathlib import Path

def texts():
    return (Path(__file__).parent / "texts.txt").read_text().splitlines()
"""


def picture(path, shade):
    """Files of all shades have as many bytes."""
    Image.new("RGB", (16, 16), (shade, 0, 0)).save(path, compress_level=0)
    return path.name


def listed(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def text_file(folder, shade):
    (folder / "prompts.txt").write_text(f"{TEXTS[0]}\nshade {shade}\n")
    return {"data__train": folder / "prompts.txt"}, "prompts.txt"


def table(folder, shade):
    (folder / "prompts.csv").write_text(f"prompt,topic\n{TEXTS[0]},x\n{TEXTS[1]},{shade}\n")
    return {"data__train": folder / "prompts.csv"}, "prompts.csv"


def own_function(folder, shade):
    """The file of the function stays, and what it reads changes."""
    (folder / "own.py").write_text(OWN)
    (folder / "texts.txt").write_text(f"{TEXTS[0]}\nshade {shade}")
    given.of_place.cache_clear()
    return {"data__train": f"{folder}/own.py:texts"}, "prompts ("


def held_out(folder, shade):
    path = listed(folder / "held.jsonl", [{"prompt": f"shade {shade}"}])
    return {"data__eval": path}, "held.jsonl"


def references(folder, shade):
    rows = [{"prompt": t, "reference": f"{i}.png"} for i, t in enumerate(TEXTS)]
    for i in range(2):
        save(torch.full((3, 64, 64), 0.1 * i + 0.01 * shade), folder / f"{i}.png")
    return {"data__train": listed(folder / "references.jsonl", rows)}, NAMED


def scored(folder, shade):
    rows = []
    for i in range(4):
        save(torch.full((3, 64, 64), 0.1 * i + 0.01 * shade), folder / f"{i}.png")
        rows.append({"file": f"{i}.png", "prompt": TEXTS[i % 2], "total": float(i)})
    listed(folder / "scores.jsonl", rows)
    return {"data__offline": folder}, NAMED


def new_scores(folder, shade):
    words, _ = scored(folder, 0)
    lines = (folder / "scores.jsonl").read_text().replace("3.0", f"{3 + shade}.0")
    (folder / "scores.jsonl").write_text(lines)
    return words, "scores.jsonl"


def one_image(folder, shade):
    name = picture(folder / "a.png", shade)
    rows = [{"prompt": text, "image": name} for text in TEXTS]
    return {"data__train": listed(folder / "edits.jsonl", rows)}, NAMED


def held_out_images(folder, shade):
    train, _ = one_image(folder, 0)
    rows = [{"prompt": "later", "image": picture(folder / "held.png", shade)}]
    return {**train, "data__eval": listed(folder / "held.jsonl", rows)}, NAMED


def argument(folder, shade):
    rows = [{"prompt": text, "conditions": {"image": "c.png"}} for text in TEXTS]
    picture(folder / "c.png", shade)
    return {"data__train": listed(folder / "edits.jsonl", rows)}, NAMED


TEXT = [text_file, table, own_function, held_out, references, scored, new_scores]
PICTURED = [one_image, held_out_images, argument]


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    case, folder = cases()["flux_kontext"], tmp_path_factory.mktemp("model")
    case.make().save_pretrained(folder)
    call = {f"+model.pipeline.{k}": v for k, v in case.call.items() if k != "image"} | {
        "sampler__guidance": "none"
    }
    return {"model": folder, **call, "data": "file"}


@pytest.mark.parametrize("kind", [*TEXT, *PICTURED], ids=lambda kind: kind.__name__)
def test_a_run_goes_on_until_its_data_are_others(tmp_path, monkeypatch, request, kind):
    small.load_once(monkeypatch)
    (tmp_path / "data").mkdir()
    words = {"data__eval": "null", "guard__check_rewards": "false", "eval__at_start": "false"}
    words |= request.getfixturevalue("editor") if kind in PICTURED else {}
    data, named = kind(tmp_path / "data", 1)
    cfg = small.config(tmp_path / "run", **words | data)
    outputs.start(flowrl.Trainer(cfg))  # which saves a checkpoint
    trainer = flowrl.Trainer(cfg, resume=tmp_path / "run")
    assert trainer.started
    del trainer
    kind(tmp_path / "data", 2)
    with pytest.raises(ValueError, match="has changed since its newest checkpoint") as caught:
        flowrl.Trainer(cfg, resume=tmp_path / "run")
    assert named in str(caught.value)
    flowrl.Trainer(cfg, resume=tmp_path / "run", accept_changes=True)


@pytest.mark.long
def test_a_run_that_trained_on_scored_pictures_goes_on(tmp_path):
    words, _ = scored(tmp_path, 1)
    words |= {"data__eval": "null", "guard__check_rewards": "false"}
    assert (
        small.invoke("train", *small.words(tmp_path / "run", iterations="1", **words)).exit_code
        == 0
    )
    gone_on = small.invoke("train", "--resume", tmp_path / "run", "iterations=2")
    assert gone_on.exit_code == 0 and len(small.lines(tmp_path / "run")) == 2, gone_on.output


def test_live_prompts_are_known_by_what_they_hold():
    def known(prompts):
        return identity.of_data({"prompts": prompts}, [])

    picture = Image.new("RGB", (4, 4))
    rows = [{"prompt": "a", "image": picture, "size": np.float64(3), ("a", 1): "odd"}]
    assert known(rows) == known([{**rows[0], "image": picture.copy()}])
    picture.putpixel((0, 0), (1, 0, 0))
    assert known(rows) != known([{**rows[0], "image": Image.new("RGB", (4, 4))}])
    assert known(rows) != known([{**rows[0], "prompt": "b"}])


def test_each_of_several_pictures_masks_and_videos_is_known(tmp_path):
    row = {"prompt": "a", "image": ["a.png", "b.png"], "mask_image": "m.png"}
    row["conditions"] = {"control_video": "v.mp4"}
    for name in ("a.png", "b.png", "m.png", "v.mp4"):
        picture(tmp_path / name.replace("mp4", "png"), 0)
    (tmp_path / "v.mp4").write_bytes(b"video")
    rows = load_prompts(str(listed(tmp_path / "rows.jsonl", [row])))

    def known():
        return identity.of_data({}, conditions.files(rows))[NAMED]

    found = {known()}
    for name in ("a.png", "b.png", "m.png"):
        picture(tmp_path / name, 1)
        found.add(known())
    (tmp_path / "v.mp4").write_bytes(b"VIDEO")
    assert len(found | {known()}) == 5


def test_files_of_pictures_are_known_by_size_and_both_ends(tmp_path):
    path, found = tmp_path / "a.mp4", set()
    content = bytes(3 * identity.MEDIA_ENDS)
    for other in (content, b"x" + content[1:], content[:-1] + b"x", content + b"x"):
        path.write_bytes(other)
        found.add(identity.digest(path))
    assert len(found) == 4
