"""What a reader and a second network say of samples that the verifier of shapes judges."""

import argparse
import json
from itertools import compress

import contact_sheet
import pytest
import second_reading
import torch

import flowrl
from flowrl.data.prompts import load_prompts
from flowrl.scenes import shapes as small
from flowrl.scenes import world
from flowrl.shapes import scenes
from flowrl.types import MediaContext

SHEETS = sorted(path.stem for path in contact_sheet.FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", SHEETS)
def test_a_reader_agrees_with_the_verifier_on_samples_of_an_embedded_model(name, capsys):
    contact_sheet.read(name)
    said = capsys.readouterr().out
    assert float(said.partition("agrees on ")[2].split()[0]) >= 0.95 and "of 200" in said


def test_agreement_names_the_samples_that_one_alone_calls_right():
    assert contact_sheet.agreement("0110", {1, 3}) == ([2], [3])
    with pytest.raises(SystemExit, match="samples 0 to 3, and none 4"):
        contact_sheet.agreement("0110", {4})


def test_a_sheet_shows_an_edit_beside_its_source_and_a_video_as_a_square():
    edit = load_prompts("shapes_edit:eval")[0]
    sample = torch.zeros(3, 64, 64)
    both = contact_sheet.shown(sample, edit)
    assert both.shape == (3, 64, 129) and both[..., :64].max() == 1 and not both[..., 65:].any()
    video = torch.arange(9.0)[:, None, None, None].expand(9, 3, 64, 64)
    square = contact_sheet.shown(video, {})
    assert square.shape == (3, 195, 195)
    assert [square[0, y, x].item() for y in (0, 65, 130) for x in (0, 65, 130)] == [*range(9)]


def test_drawn_objects_are_as_their_rows_say():
    pictures, table = second_reading.drawn(96, torch.Generator().manual_seed(0))
    assert pictures.shape == (96, 3, 64, 64)
    exact, near = table[:, 5:] >= 0, table[:, 5:] >= -1
    clear = exact.any(1)
    assert 0.5 < clear.float().mean() < 0.9 and exact.sum(1).max() == 1
    assert (near & ~exact).any(1).float().mean() > 0.1 and not (exact & ~near).any()
    found, right = small.detect(pictures), []
    for (picture, x, y, _, color), *shapes in zip(
        table[:, :5].tolist(), exact.tolist(), near.tolist(), strict=True
    ):
        own, like = (
            {f"{second_reading.COLORS[int(color)]} {s}" for s in compress(scenes.SHAPES, some)}
            for some in shapes
        )
        here = [o for o in found[int(picture)].objects if abs(o.x - x) < 3 and abs(o.y - y) < 3]
        asked = [o for o in here if not own or ({o.name}, {*o.like}) == (own, like)]
        right.append(any(o.name for o in asked))
    marks = torch.tensor(right)
    assert marks[clear].float().mean() > 0.95 and marks[~clear].float().mean() < 0.1


def test_half_of_the_drawn_pictures_are_those_that_a_vae_decodes(monkeypatch):
    texts = [row["prompt"] for row in load_prompts("shapes_edit:eval")[:24]]
    drawn = torch.stack([small.render(small.EDITS.pair(text, 0)[0]) for text in texts])
    decoded = second_reading.decoded(drawn, torch.Generator().manual_seed(0))
    names = [[o.name for o in one.objects] for one in small.detect(drawn)]
    others = [[o.name for o in one.objects] for one in small.detect(decoded.clamp(0, 1))]
    same = sum(a == b for a, b in zip(names, others, strict=True))
    assert 6 <= same < 22  # some errors of the latents are seen, and some are not

    monkeypatch.setattr(second_reading, "decoded", lambda pictures, g: torch.zeros_like(pictures))
    pictures, _ = second_reading.drawn(6, torch.Generator().manual_seed(0))
    assert (pictures.flatten(1).amax(1) > 0.5).tolist() == [False] * 3 + [True] * 3


def test_the_network_reads_drawn_edits_and_motions():
    second = second_reading.Second()
    texts = [row["prompt"] for row in load_prompts("shapes_motion:eval")[:24]]
    scenes = [small.MOTIONS.frames(text, i) for i, text in enumerate(texts)]
    videos = torch.stack([torch.stack([small.render(s) for s in one]) for one in scenes])
    asked = [row["prompt"] for row in load_prompts("shapes_edit:eval")[:24]]
    pairs = [small.EDITS.pair(text, i) for i, text in enumerate(asked)]
    sources, results = (
        torch.stack([small.render(pair[side]) for pair in pairs]) for side in (0, 1)
    )
    cases = ((videos, texts, MediaContext()), (results, asked, MediaContext(source=sources)))
    for media, said, context in cases:
        assert sum(second.strict(media, said, context)) >= 22
        assert sum(second.strict(media.roll(1, 0), said, context)) <= 2


@pytest.mark.parametrize("name", ["second", "second_edit"])
def test_a_run_can_have_the_second_reading_beside_its_reward(name):
    source = "shapes:eval" if name == "second" else "shapes_edit:eval"
    rows = [row for row in load_prompts(source) if row["task"] in ("colors", "remove")][:8]
    texts = [row["prompt"] for row in rows]
    if name == "second":
        color, shape = texts[0].split()[1:]
        scene = world.Scene((world.Placed(f"{color} {shape}", 30, 30, 16),))
        media, before = small.render(scene).expand(8, -1, -1, -1), None
    else:
        pairs = [small.EDITS.pair(text, i) for i, text in enumerate(texts)]
        before = torch.stack([small.render(one) for one, _ in pairs])
        media = torch.stack([small.render(pairs[0][1]), *before[1:]])
    context = MediaContext(meta=rows, source=before)
    own = {f"scripts/embedded/second_reading.py:{name}": {}}
    total = flowrl.score(media, texts, own, context).total.tolist()
    asked = texts if name == "second" else range(8)
    assert total == [float(one == asked[0]) for one in asked]


def test_the_network_calls_pale_objects_unclear():
    image = small.render(small.EDITS.pair("remove the red circle", 0)[1])
    pale = 1 - 0.3 * (1 - image)
    found = second_reading.Second().detect(torch.stack([image, pale]))
    assert [[o.name is not None for o in one.objects] for one in found] == [[True], [False]]


def test_two_readings_of_a_run_are_compared(tmp_path, capsys):
    values = {"shapes/strict": [1, 1, 0, 0], "second": [1, 0, 0, 0], "jpeg": [0.5] * 4}
    row = {"name": "after", "values": values}
    (tmp_path / "evaluation.json").write_text(json.dumps({"rows": [row]}))
    second_reading.agree(argparse.Namespace(runs=[tmp_path]))
    said = capsys.readouterr().out
    assert said.endswith("verifier 0.500, network 0.250, same verdict on 0.750 of 4\n")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "evaluation.json should have two readings, and has none; train with the words"),
        ({}, "two readings, and has none"),
        ({"rows": [{"name": "a", "values": {"s/strict": [1]}}]}, "and has s/strict; train"),
        ({"rows": 1}, "evaluation.json.*rows.*evaluate again"),
    ],
)
def test_a_run_without_two_readings_is_refused(tmp_path, record, said):
    if record is not None:
        (tmp_path / "evaluation.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=said):
        second_reading.agree(argparse.Namespace(runs=[tmp_path]))
