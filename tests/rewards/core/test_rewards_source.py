"""The picture before an edit as a file that each prompt names: read by the command line and by
training's checks."""

import json

import numpy as np
import pytest
import small
import torch
from judge_server import Answer, pictures, serving
from PIL import Image

from flowrl import rewards
from flowrl.data.media import save
from flowrl.rewards.core.score import check_meta
from flowrl.types import MediaContext

NAMED = {"edit": True, "source": "meta"}


@pytest.fixture
def folder(tmp_path):
    """Edits of grey levels 51 and 102, the pictures before them of 153 and 204, and the list that
    joins them."""
    for name, level in (("a", 0.2), ("b", 0.4), ("before_a", 0.6), ("before_b", 0.8)):
        save(torch.full((3, 8, 12), level), tmp_path / f"{name}.png")
    lines = [
        {"file": f"{name}.png", "prompt": f"brighten {name}", "source": f"before_{name}.png"}
        for name in "ab"
    ]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def levels(body):
    return [int(np.asarray(image)[0, 0, 0]) for image in pictures(body)]


def test_flowrl_score_shows_an_edit_beside_the_source_that_its_prompt_names(folder):
    """The judge says "4" alone for the first edit, "2" for the second: 0.8 and 0.4."""

    def answer(body, n):
        return Answer("", first={"4" if levels(body) == [153, 51] else "2": 1.0})

    out, images = folder / "out.jsonl", [folder / "a.png", folder / "b.png"]
    with serving(answer) as server:
        settings = {**NAMED, "base_url": server.url, "folder": folder}
        words = [f"vlm_logit.{key}={value}" for key, value in settings.items()]
        flags = [part for word in ["vlm_logit", *words] for part in ("--reward", word)]
        given = ["--prompts", folder / "metadata.jsonl", *flags, "-o", out]
        result = small.invoke("score", *images, *given)
    assert result.exit_code == 0, result.output
    totals = [json.loads(line)["total"] for line in out.read_text().splitlines()]
    assert totals == pytest.approx([0.8, 0.4])
    assert sorted(levels(body) for body in server.requests) == [[153, 51], [204, 102]]


def test_a_source_that_is_not_there_is_named_before_a_run(folder):
    reward = rewards.load("vlm_logit", **NAMED, folder=str(folder))
    chosen = rewards.load_set({"vlm_logit": {"reward": reward}})
    rewards.check_needs(chosen, ("meta", "group"))
    check_meta(chosen, {"data.train": [{"prompt": "x", "source": "before_a.png"}]})
    for line, said in (
        ({}, 'reads "source" of each prompt, which "x" in data.train does not carry'),
        (
            {"source": "c.png"},
            (
                "has no picture before editing: source=c.png: there is no file .*; set"
                " reward.vlm_logit.folder to"
            ),
        ),
        ({"source": "notes.txt"}, "source='notes.txt', which should be the path of an image"),
        ({"source": 3}, "source=3, which should be the path of an image"),
    ):
        with pytest.raises(ValueError, match=said):
            check_meta(chosen, {"data.train": [{"prompt": "x", **line}]})


def test_a_source_that_cannot_be_read_is_named_and_one_on_its_side_is_turned_upright(folder):
    reward = rewards.load("vlm_logit", **NAMED, folder=str(folder))
    media = torch.zeros(2, 3, 8, 8)
    picture, exif = Image.new("RGB", (4, 8), (255, 0, 0)), Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    picture.save(folder / "turned.png", exif=exif)
    before = reward.sources(
        media, MediaContext(meta=[{"source": "turned.png"}, {"source": "before_a.png"}])
    )
    assert [tuple(x.shape) for x in before] == [(3, 4, 8), (3, 8, 12)]
    (folder / "broken.png").write_bytes(b"no picture")
    with pytest.raises(
        ValueError,
        match="the picture before editing .*broken.png cannot be read: UnidentifiedImageError",
    ):
        reward.sources(media, MediaContext(meta=[{"source": "broken.png"}] * 2))


def test_a_missing_column_names_the_setting_and_a_source_that_nobody_sees_is_refused():
    with pytest.raises(
        ValueError,
        match='column "image": set source=meta to read it from the image that each prompt names',
    ):
        rewards.check_needs({"vlm_logit": {"edit": True}}, ("meta", "group"))
    with pytest.raises(
        ValueError, match="reward.vlm_logit.source=meta would not be used: .* without edit=true"
    ):
        rewards.load("vlm_logit", source="meta")


def test_a_source_of_16_bits_is_seen_over_its_whole_range(tmp_path):
    """Half of 65535 is level 128, where a reader that clips would show white."""
    Image.fromarray(np.full((8, 8), 32896, np.uint16)).save(tmp_path / "deep.png")
    seen = []

    def answer(body, n):
        seen.append(levels(body))
        return Answer("", first={"4": 1.0})

    with serving(answer) as server:
        reward = rewards.load("vlm_logit", **NAMED, base_url=server.url, folder=str(tmp_path))
        reward(torch.zeros(1, 3, 8, 8), ["a"], MediaContext(meta=[{"source": "deep.png"}]))
    assert seen == [[128, 0]]
