"""Conditions travel with prompts: columns of files, through encoding, sampling and rewards."""

import json

import pytest
import torch
from PIL import Image
from zoo import cases
from zoo.case import PROMPTS, picture

import flowrl
from flowrl.data import conditions
from flowrl.data.prompts import example, load_prompts


def written(folder, name, rows):
    for k in (1, 2):
        picture(k).save(folder / f"{k}.png")
    path = folder / name
    if name.endswith(".csv"):
        head = list(rows[0])
        cells = [",".join(f'"{row[key]}"' for key in head) for row in rows]
        path.write_text("\n".join([",".join(head), *cells]))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.csv"])
def test_columns_of_pictures_are_paths_from_the_file_and_are_loaded_once(tmp_path, name):
    rows = [
        {"prompt": "a", "image": "1.png", "negative_prompt": "blur"},
        {"prompt": "b", "image": "2.png", "negative_prompt": "noise"},
    ]
    found = load_prompts(written(tmp_path, name, rows))
    assert [row["image"] for row in found] == [str(tmp_path / "1.png"), str(tmp_path / "2.png")]
    own = conditions.of(found)
    assert [c["negative_prompt"] for c in own] == ["blur", "noise"]
    assert own[0]["image"].tobytes() == picture(1).tobytes()
    assert conditions.of(found)[0]["image"] is own[0]["image"]
    assert conditions.files(found) == [tmp_path / "1.png", tmp_path / "2.png"]
    assert set(example(str(tmp_path / name))) == {"image", "negative_prompt"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "none.png"}, r'line 1: "image" names .*none.png, which is no file'),
        ({"image": ["1.png", "none.png"]}, '"image" names .*none.png'),
        ({"conditions": {"mask_image": "none.png"}}, '"mask_image" names'),
        ({"conditions": 3}, '"conditions" should be arguments by name'),
        ({"image": {"bytes": "x"}}, '"image" holds a picture; save it as a file'),
    ],
)
def test_a_condition_that_is_no_file_is_named_with_its_line(tmp_path, row, said):
    with pytest.raises(ValueError, match=said):
        load_prompts(written(tmp_path, "prompts.jsonl", [{"prompt": "a", **row}]))


def test_an_unreadable_picture_is_one_sentence(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad.png cannot be read"):
        conditions.load("image", str(tmp_path / "bad.png"))
    with pytest.raises(ValueError, match=r"none.png cannot be read: it does not exist"):
        conditions.loaded({"image": str(tmp_path / "none.png")})


def test_arguments_of_the_call_that_take_pictures_are_loaded_from_paths(tmp_path):
    picture(1).save(tmp_path / "1.png")
    given = conditions.loaded({"image": str(tmp_path / "1.png"), "height": 16})
    assert given["image"].tobytes() == picture(1).tobytes() and given["height"] == 16


def test_rewards_see_the_source_at_the_size_of_the_media(tmp_path):
    rows = [{"prompt": "a", "image": "1.png"}, {"prompt": "b", "image": ["2.png", "1.png"]}]
    found = load_prompts(written(tmp_path, "prompts.jsonl", rows))
    context = conditions.context_of(found, torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    assert context.source.shape == (2, 3, 8, 8)
    assert context.source.min() >= 0 and context.source.max() <= 1
    whole = conditions.context_of(found, torch.rand(2, 5, 3, 16, 16)).source
    pixels = torch.tensor(list(picture(2).getdata())).T.reshape(3, 16, 16) / 255
    assert torch.allclose(whole[1], pixels, atol=1e-6)
    assert conditions.context_of([{}, found[0]], torch.rand(2, 3, 8, 8)).source is None
    assert conditions.context_of(found, torch.rand(2, 7)).source is None  # media of another shape


@pytest.fixture(scope="module")
def editor():
    case = cases()["flux_kontext"]
    own = case.conditions
    return flowrl.load_policy(case.make(), example=own[0], **case.call), own


def test_prompts_keep_their_own_pictures(editor):
    policy, own = editor
    media = flowrl.generate(policy, list(PROMPTS), steps=2, seed=0, conditions=list(own))
    swapped = flowrl.generate(policy, list(PROMPTS), steps=2, seed=0, conditions=list(own)[::-1])
    alone = flowrl.generate(policy, PROMPTS[0], steps=2, seed=0, conditions=[own[0]])
    assert torch.allclose(media[0], alone[0], atol=1e-5)
    assert not torch.allclose(media[0], swapped[0], atol=1e-3)


def test_what_the_call_does_not_take_is_named(editor):
    policy, own = editor
    with pytest.raises(ValueError, match="FluxKontextPipeline takes no argument 'mask'"):
        policy.encode(list(PROMPTS), [{**c, "mask": picture(1)} for c in own])
    with pytest.raises(ValueError, match="1 conditions for 2 prompts"):
        policy.encode(list(PROMPTS), list(own[:1]))
    plain = cases()["flux"]
    text = flowrl.load_policy(plain.make(), **plain.call)
    with pytest.raises(ValueError, match="FluxPipeline takes no argument 'image'"):
        text.encode(list(PROMPTS), [{"image": Image.new("RGB", (8, 8))}] * 2)


EDITS = """
import torch
import flowrl

@flowrl.reward(scale="minus the distance from the source, in [-1, 0]", needs=["source"])
def faithful(media, prompts, context=None):
    return -(media - context.source).abs().flatten(1).mean(1)
"""


def test_a_run_trains_an_editor_on_its_pictures_and_knows_them(tmp_path):
    case = cases()["flux_kontext"]
    case.make().save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(EDITS)
    rows = [{"prompt": p, "image": f"{k}.png"} for k, p in enumerate(PROMPTS, 1)]
    data = written(tmp_path, "prompts.jsonl", rows)
    words = [
        f"model={tmp_path}/model",
        *(f"+model.pipeline.{k}={v}" for k, v in case.call.items()),
        f"reward={tmp_path}/mine.py:faithful",
        "algorithm=flow_grpo",
        "data=file",
        f"data.train={data}",
        "data.eval=null",
        "eval.baseline_guidance=null",
        "sampler.guidance=none",
        "sampler.steps=4",
        "batch.prompts=2",
        "batch.group=2",
        "batch.updates=1",
        "trackers=[]",
        "iterations=1",
        f"output={tmp_path}/run",
    ]
    it = next(iter(flowrl.Trainer(flowrl.load_config(None, words))))
    assert it.metrics["policy/grad_norm"] > 0 and -1 < it.metrics["reward/total"] < 0
    picture(3).resize((18, 18)).save(tmp_path / "1.png")
    again = flowrl.load_config(None, words)
    with pytest.raises(ValueError, match="images of the data"):
        flowrl.Trainer(again, resume=tmp_path / "run")
    (tmp_path / "text.txt").write_text("\n".join(PROMPTS))
    words = [w for w in words if not w.startswith(("data.train", "output"))]
    with pytest.raises(ValueError, match='needs the context column "source"'):
        flowrl.Trainer(
            flowrl.load_config(None, [*words, f"data.train={tmp_path}/text.txt", "output=x"])
        )
