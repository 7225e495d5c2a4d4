"""Conditions travel with prompts: columns of files, through encoding, sampling and rewards."""

import json
import sys

import pytest
import torch
from PIL import Image
from zoo import cases
from zoo.case import PROMPTS, picture

import flowrl
from flowrl.data import conditions
from flowrl.data.prompts import example, load_prompts
from flowrl.training.checks import check_conditions


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
        ({"image": "https://there/1.png"}, '"image" is a URL, which is not fetched'),
        ({"image": ""}, "\"image\" is ''; give the path of a file"),
        ({"image": 3}, '"image" is 3; give the path of a file'),
    ],
)
def test_a_condition_that_is_no_file_is_named_with_its_line(tmp_path, row, said):
    with pytest.raises(ValueError, match=said):
        load_prompts(written(tmp_path, "prompts.jsonl", [{"prompt": "a", **row}]))


def test_another_picture_of_the_same_path_is_read_anew(tmp_path, monkeypatch):
    """Saved again, or named from another working directory."""
    found = []
    for folder, color in (("a", "red"), ("a", "lime"), ("b", "blue")):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        Image.new("RGB", (2, 2), color).save("0.png")
        found.append(conditions.load("image", "0.png").getpixel((0, 0)))
    assert found == [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert conditions.load("image", "0.png") is conditions.load("image", "0.png")


def test_an_unreadable_picture_is_one_sentence(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"bad.png cannot be read"):
        conditions.load("image", str(tmp_path / "bad.png"))
    with pytest.raises(ValueError, match=r"none.png cannot be read: it does not exist"):
        conditions.loaded({"image": str(tmp_path / "none.png")})


def test_pictures_that_cannot_be_read_are_named_with_their_line_before_a_model_loads(
    tmp_path, monkeypatch
):
    rows = [{"prompt": "a", "image": "1.png"}, {"prompt": "b", "image": "torn.png"}]
    path = written(tmp_path, "prompts.jsonl", rows[:1])
    (tmp_path / "torn.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(ValueError, match='line 2: "image": .*torn.png cannot be read'):
        load_prompts(path)
    monkeypatch.setitem(sys.modules, "av", None)  # not installed
    (tmp_path / "moving.mp4").write_bytes(b"any")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "video": "moving.mp4"}))
    said = r'line 1: "video": reading moving.mp4 needs .*\[video\]'
    with pytest.raises(ValueError, match=said):
        load_prompts(path)


def test_a_jpeg_that_was_cut_off_is_found_by_its_end(tmp_path):
    Image.effect_noise((64, 64), 90).convert("RGB").save(tmp_path / "whole.jpg")
    content = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    rows = [{"prompt": "a", "image": "whole.jpg"}]
    assert load_prompts(written(tmp_path, "prompts.jsonl", rows))
    with pytest.raises(ValueError, match='line 1: "image": .*cut.jpg cannot be read: it was cut'):
        load_prompts(written(tmp_path, "prompts.jsonl", [{"prompt": "a", "image": "cut.jpg"}]))


def test_all_prompts_have_conditions_of_the_same_names(tmp_path):
    rows = [{"prompt": "a", "image": "1.png"}, {"prompt": "b", "image": None}]
    found = load_prompts(written(tmp_path, "prompts.jsonl", rows))
    conditions.check_alike(found[:1] * 2)
    conditions.check_alike([{"prompt": "a"}, {"prompt": "b", "tag": 3}])
    for order in (found, found[::-1]):
        with pytest.raises(ValueError, match='prompt "a" has image, and prompt "b" has none; give'):
            conditions.check_alike(order)


def test_source_code_is_no_list_of_prompts(tmp_path):
    (tmp_path / "mine.py").write_text("def texts(): ...")
    with pytest.raises(ValueError, match="say what in the file gives them, .*mine.py:NAME"):
        load_prompts(str(tmp_path / "mine.py"))


def test_kinds_are_told_by_arguments_and_sizes(tmp_path):
    wide = Image.new("RGB", (32, 16))
    wide.save(tmp_path / "wide.png")
    rows = [
        {"prompt": "a", "image": "1.png"},
        {"prompt": "b", "image": "2.png"},
        {"prompt": "c", "image": "wide.png"},
        {"prompt": "d", "image": "2.png", "negative_prompt": "blur"},
        {"prompt": "e", "image": ["1.png", "wide.png"]},
    ]
    found = load_prompts(written(tmp_path, "prompts.jsonl", rows))
    assert conditions.kinds(found) == [0, 2, 3, 4]
    assert conditions.kinds([{"image": wide}, {"image": picture(1)}, {}, {}]) == [0, 1, 2]


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


def test_a_picture_of_another_size_is_refused_before_a_run(editor):
    policy, own = editor
    rows = [{"prompt": p, **c} for p, c in zip(PROMPTS, own, strict=True)]
    read = frozenset({"prompt"})
    check_conditions(policy, rows, read)
    with pytest.raises(ValueError, match='conditions of prompt "wide": .* of all prompts one size'):
        wide = {"prompt": "wide", "image": Image.new("RGB", (32, 16))}
        check_conditions(policy, [*rows, wide], read)
    with pytest.raises(ValueError, match='prompt "no": .*takes no argument .mask_image'):
        check_conditions(policy, [{"prompt": "no", "mask_image": picture(1), **own[0]}], read)


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


def test_what_generate_is_given_is_checked(editor, tmp_path):
    policy, own = editor
    texts = list(PROMPTS)
    for given, said in (
        ([own[0]], "conditions is 1 entries; give one mapping of arguments for each of the 2"),
        (own[0], "conditions is a dict"),
        ([own[0], None], "conditions is a list"),
        ([own[0], {"image": picture(2), "strength": 1}], "takes no argument 'strength'"),
        ([own[0], {}], "some of these prompts have the condition image and others have not"),
        ([{"image": str(tmp_path / "no.png")}] * 2, "no.png cannot be read: it does not exist"),
    ):
        with pytest.raises(ValueError, match=said):
            flowrl.generate(policy, texts, steps=1, conditions=given)
    records = [{"prompt": t, **c} for t, c in zip(texts, own, strict=True)]
    with pytest.raises(ValueError, match="the prompts bring conditions, and conditions= gives"):
        flowrl.generate(policy, records, steps=1, conditions=list(own))
    with pytest.raises(ValueError, match=r'the prompts have "imgae", .*; "image" is one: rename'):
        flowrl.generate(policy, [{"prompt": "a", "imgae": picture(1)}], steps=1)
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match=f"steps={wrong} should be a whole number from 1"):
            flowrl.generate(policy, "a", steps=wrong)
    picture(1).save(tmp_path / "1.png")
    by_path = flowrl.generate(policy, "a", steps=1, conditions=[{"image": tmp_path / "1.png"}])
    in_memory = flowrl.generate(policy, "a", steps=1, conditions=[{"image": picture(1)}])
    assert torch.equal(by_path, in_memory)


def test_prompts_with_and_without_a_condition_are_refused_in_any_order():
    case = cases()["sd15"]
    policy = flowrl.load_policy(case.make(), **case.call)
    for given in ([{}, {"negative_prompt": "blur"}], [{"negative_prompt": "blur"}, {}]):
        said = "prompts have the condition negative_prompt and other"
        with pytest.raises(ValueError, match=said):
            flowrl.generate(policy, ["a", "b"], steps=1, conditions=given)
    negative = [{"negative_prompt": text} for text in ("", "blur")]
    both = flowrl.generate(policy, ["a", "b"], steps=2, conditions=negative)
    alone = flowrl.generate(policy, "a", steps=2, conditions=[{"negative_prompt": ""}])
    assert torch.allclose(both[0], alone[0], atol=1e-4)
    with pytest.raises(ValueError, match="guidance_scale is one for all prompts: the sampler"):
        flowrl.generate(policy, "a", conditions=[{"guidance_scale": 1.5}])


def test_a_picture_that_the_pipeline_needs_is_asked_for():
    case = cases()["wan_i2v"]
    call = {k: v for k, v in case.call.items() if k != "image"}
    with pytest.raises(ValueError, match="WanImageToVideoPipeline needs 'image': a column of the"):
        flowrl.load_policy(case.make(), **call)


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
    again = flowrl.load_config(None, words)
    flowrl.Trainer(again, resume=tmp_path / "run")  # nothing changed
    picture(3).resize((18, 18)).save(tmp_path / "1.png")
    with pytest.raises(ValueError, match="images of the data"):
        flowrl.Trainer(again, resume=tmp_path / "run")
    (tmp_path / "text.txt").write_text("\n".join(PROMPTS))
    words = [w for w in words if not w.startswith(("data.train", "output"))]
    with pytest.raises(ValueError, match='needs the context column "source"'):
        flowrl.Trainer(
            flowrl.load_config(None, [*words, f"data.train={tmp_path}/text.txt", "output=x"])
        )


def test_a_list_of_pictures_for_a_video_is_one_video_of_these_frames(tmp_path):
    for k in range(3):
        Image.new("RGB", (4, 4), (k, 0, 0)).save(tmp_path / f"{k}.png")
    frames = conditions.load("control_video", [str(tmp_path / f"{k}.png") for k in range(3)])
    assert [frame.getpixel((0, 0)) for frame in frames] == [(k, 0, 0) for k in range(3)]
