"""GenEval: planted detections judged by hand, objects from the detector's output, loaders."""

import json

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flowrl import rewards
from flowrl.data.geneval import CLASSES, COLORS
from flowrl.rewards import geneval
from flowrl.rewards.geneval import Instance, Sizes, _kept, instances
from flowrl.rewards.networks import detector as networks_detector
from flowrl.rewards.networks.detector import DetectedObject, readings
from flowrl.types import MediaContext

NAMES = ("partial", "partial_fixed", "strict", "official")


def at(x, y, color=None, size=10.0, score=0.9):
    """An object of size x size px around (x, y)."""
    return DetectedObject((x - size / 2, y - size / 2, x + size / 2, y + size / 2), score, color)


def clause(name, count=1, **more):
    return {"class": name, "count": count, **more}


def judged(found, include, exclude=()):
    out = readings(found, {"include": list(include), "exclude": list(exclude)})
    return tuple(round(out[name], 6) for name in NAMES)


# --- planted detections, (partial, partial_fixed, strict, official) by hand


def test_one_object_that_is_there_is_right_in_every_reading():
    assert judged({"dog": [at(50, 50)]}, [clause("dog")]) == (1, 1, 1, 1)
    assert judged({}, [clause("dog")]) == (0, 0, 0, 0)
    assert judged({"cat": [at(50, 50)]}, [clause("dog")]) == (0, 0, 0, 0)


def test_counts_earn_one_minus_the_relative_error_and_too_many_still_pass_the_benchmark():
    def dogs(n):
        return {"dog": [at(20 * i, 0) for i in range(n)]}

    four = [clause("dog", 4)]
    assert judged(dogs(3), four) == (0.75, 0.75, 0, 0)  # 1 - 1/4
    assert judged(dogs(5), four) == (0.75, 0.75, 0, 1)
    assert judged(dogs(5), four, [clause("dog", 5)]) == (0.75, 0.75, 0, 0)  # 5 are excluded
    assert judged(dogs(9), four) == (-0.25, 0, 0, 1)  # 1 - 5/4, and floored at 0


def test_a_missing_object_costs_half_of_a_prompt_for_two():
    include = [clause("dog"), clause("cat")]
    assert judged({"dog": [at(0, 0)]}, include) == (0.5, 0.5, 0, 0)
    assert judged({"dog": [at(0, 0)], "cat": [at(30, 0)]}, include) == (1, 1, 1, 1)


def test_colours_earn_the_share_that_is_right_once_the_count_is():
    include = [clause("cup", 2, color="red")]
    assert judged({"cup": [at(0, 0, "red"), at(20, 0, "red")]}, include) == (1, 1, 1, 1)
    assert judged({"cup": [at(0, 0, "red"), at(20, 0, "blue")]}, include) == (
        0.75,
        0.75,
        0,
        0,
    )  # (1 + 1/2) / 2
    assert judged({"cup": [at(0, 0, "red")]}, include) == (0.25, 0.25, 0, 0)  # (1/2 + 0) / 2


def test_the_benchmark_judges_the_colour_of_the_most_confident_only():
    cups = {"cup": [at(0, 0, "red", score=0.95), at(20, 0, "blue", score=0.4)]}
    assert judged(cups, [clause("cup", 1, color="red")]) == (
        0,
        0,
        0,
        1,
    )  # counts: 1 - |1-2|/1 = 0, then a 0
    assert judged(cups, [clause("cup", 1, color="blue")]) == (0, 0, 0, 0)


def test_a_wrong_position_earns_a_zero_and_a_one_from_the_server_and_a_zero_here():
    include = [clause("dog"), clause("cat", position=["left of", 0])]
    right, wrong = {"dog": [at(80, 0)], "cat": [at(0, 0)]}, {"dog": [at(0, 0)], "cat": [at(80, 0)]}
    assert judged(right, include) == (1, 1, 1, 1)  # [1, 1, 1]
    assert judged(wrong, include) == (0.75, round(2 / 3, 6), 0, 0)  # [1, 1, 0, 1] and [1, 1, 0]


def test_a_position_whose_target_did_not_match_earns_one_zero():
    include, third = [clause("dog"), clause("cat", position=["left of", 0])], round(1 / 3, 6)
    assert judged({"cat": [at(0, 0)]}, include) == (third, third, 0, 0)  # [0, 1, 0]
    assert judged({"dog": [at(80, 0)]}, include) == (third, third, 0, 0)  # [1, 0, 0]
    # Two dogs: the count fails, so the cat has no target in the server; the benchmark takes the
    # first dog.
    found = {"dog": [at(80, 0), at(90, 0)], "cat": [at(0, 0)]}
    assert judged(found, include) == (third, third, 0, 1)


def test_colour_and_position_of_one_clause_share_one_zero_in_the_server_and_have_one_each_here():
    include = [clause("dog"), clause("cat", color="black", position=["left of", 0])]
    assert judged({"dog": [at(80, 0)]}, include) == (
        round(1 / 3, 6),
        0.25,
        0,
        0,
    )  # [1, 0, 0] and [1, 0, 0, 0]
    white = {"dog": [at(80, 0)], "cat": [at(0, 0, "white")]}
    assert judged(white, include) == (
        round(2 / 3, 6),
        0.5,
        0,
        0,
    )  # [1, 1, 0], the position is not looked at; [1, 1, 0, 0]
    there = {"dog": [at(0, 0)], "cat": [at(80, 0, "black")]}
    assert judged(there, include) == (0.8, 0.75, 0, 0)  # [1, 1, 1, 0, 1] and [1, 1, 1, 0]


def test_a_position_must_hold_for_all_pairs():
    include = [clause("dog", 2), clause("cat", position=["above", 0])]
    cat = {"cat": [at(0, 0)]}
    assert judged(cat | {"dog": [at(0, 60), at(10, 80)]}, include) == (1, 1, 1, 1)
    assert judged(cat | {"dog": [at(0, 60), at(0, -60)]}, include) == (0.75, round(2 / 3, 6), 0, 0)


def test_other_objects_cost_nothing_unless_they_are_excluded():
    found = {"dog": [at(0, 0)], "cat": [at(30, 0)]}
    assert judged(found, [clause("dog")]) == (1, 1, 1, 1)
    assert judged(found, [clause("dog")], [clause("cat")]) == (1, 1, 1, 0)
    assert judged(found, [clause("dog")], [clause("cat", 2)]) == (1, 1, 1, 1)


def test_relations_shrink_the_offset_by_a_tenth_of_both_sizes_and_divide_by_its_length_before():
    # sizes 10 and 10: 2 px come off each component. (40, 30) -> (38, 28) / 50 = (.76, .56): both
    assert networks_detector.relations(at(40, 30), at(0, 0)) == {"right of", "below"}
    # (40, 26) -> (38, 24) / 47.7 = (.797, .503); (40, 25) -> (38, 23) / 47.2 = (.806, .488)
    assert networks_detector.relations(at(40, 26), at(0, 0)) == {"right of", "below"}
    assert networks_detector.relations(at(40, 25), at(0, 0)) == {"right of"}
    assert networks_detector.relations(at(-40, -25), at(0, 0)) == {"left of"}
    # 3 px apart: (1, 0) / 3 = 1/3; 4 px: 2/4 is not beyond 1/2; 5 px: 3/5 is. Shrunk lengths would
    # give 1 each time
    assert [networks_detector.relations(at(d, 0), at(0, 0)) for d in (1, 3, 4, 5)] == [
        set(),
        set(),
        set(),
        {"right of"},
    ]


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "include=None, which should be a list"),
        ({"include": [{"class": "dog"}]}, "count should be a whole number"),
        ({"include": [{"shape": "circle", "count": 1}]}, 'like {"class": "dog"'),
        (
            {"include": [{"class": "dgo", "count": 1}]},
            'class "dgo", which GenEval cannot detect; did you mean "dog"',
        ),
        ({"include": [{"class": "dog", "count": 1, "color": "grey"}]}, 'color "grey"'),
        (
            {"include": [{"class": "dog", "count": 1, "position": ["left of", 0]}]},
            "an earlier clause",
        ),
        ({"include": [{"class": "dog", "count": 1}], "exclude": {"class": "dog"}}, "exclude="),
    ],
)
def test_clauses_that_cannot_be_judged_are_named(meta, said):
    assert said in networks_detector.complaint(meta)


# --- from the network's output to objects


def logits(*classes, classes_in_all=4):
    """(Q, classes + 1): query i is of class classes[i] with odds e^8 against each other one, and
    "nothing" is the last."""
    return torch.stack(
        [8.0 * F.one_hot(torch.tensor(c), classes_in_all + 1) for c in classes]
    ).float()


def test_an_object_has_the_box_of_its_mask_and_the_product_of_both_probabilities():
    masks = torch.full((2, 8, 8), -20.0)
    masks[0, 2:5, 1:7] = 2.0
    masks[1, 6:, :] = 20.0
    found = sorted(
        instances(logits(3, 1), masks, Sizes(picture=(8, 8), seen=(8, 8), padded=(8, 8))),
        key=lambda f: f.label,
    )
    sure = float(logits(1).softmax(-1)[0, 1])
    assert [f.label for f in found] == [1, 3]
    assert [f.box for f in found] == [
        (0, 6, 8, 8),
        (1, 2, 7, 5),
    ]
    assert found[0].score == pytest.approx(sure, abs=1e-5) and found[1].score == pytest.approx(
        sure * 0.8808, abs=1e-4
    )  # sigmoid(2)
    assert int(found[1].mask.sum()) == 18


def test_queries_of_nothing_and_faint_masks_are_no_objects():
    masks = torch.full((2, 8, 8), 20.0)
    assert instances(logits(4, 4), masks, Sizes(picture=(8, 8), seen=(8, 8), padded=(8, 8))) == []
    faint = torch.full((1, 8, 8), 0.1)  # probability 0.52: above 0.3, below 0.9
    (found,) = instances(logits(0), faint, Sizes(picture=(8, 8), seen=(8, 8), padded=(8, 8)))
    assert _kept([found], 0.3)["person"] == [found] and _kept([found], 0.9) == {}


def test_masks_are_cut_to_the_picture_before_they_are_scaled_to_it():
    masks = torch.full((1, 8, 8), -20.0)
    masks[0, 0:2, 0:4] = 20.0
    # the network saw 8 x 16 of 32 x 32 padded px; the picture is 16 x 32: mask rows 0..1 of 8 are 8
    # px of 32, all of what was seen
    (found,) = instances(logits(2), masks, Sizes(picture=(16, 32), seen=(8, 16), padded=(32, 32)))
    assert found.mask.shape == (16, 32) and found.box == (0, 0, 32, 16)


def test_of_each_class_the_sixteen_most_confident_are_kept_in_order():
    mask = torch.ones(1, 1, dtype=torch.bool)
    many = [Instance(16, 0.31 + i / 100, (0, 0, 1, 1), mask) for i in range(20)] + [
        Instance(0, 0.5, (0, 0, 1, 1), mask)
    ]
    kept = _kept(many, 0.3)
    assert [round(f.score, 2) for f in kept["dog"]] == [round(0.5 - i / 100, 2) for i in range(16)]
    assert len(kept["person"]) == 1
    assert len(_kept(many, 0.4)["dog"]) == 10  # strictly above


# --- loaders, on tiny random checkpoints


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """A random Mask2Former with COCO's classes in transformers' layout: config.json,
    model.safetensors. Small, and sure of what it sees."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    torch.manual_seed(0)
    swin = SwinConfig(
        image_size=32,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 1, 1],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=6,
        id2label=dict(enumerate(CLASSES)),
    )
    model = Mask2FormerForUniversalSegmentation(config)
    model.class_predictor.weight.data.mul_(60)
    folder = tmp_path_factory.mktemp("mask2former")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    import open_clip

    folder = tmp_path_factory.mktemp("clip")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (folder / "flowrl-tiny-colours.json").write_text(
        json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text})
    )
    open_clip.add_model_config(folder)
    torch.manual_seed(0)
    weights = folder / "random.pt"
    torch.save(open_clip.create_model("flowrl-tiny-colours").state_dict(), weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geneval, "CLIP", "flowrl-tiny-colours")
        patch.setattr(geneval, "SIDE", 64)
        patch.setattr(geneval, "LONGEST", 64 * 1333 / 800)
        yield str(weights)


@pytest.fixture(scope="module")
def load(detector, tiny_clip):
    def make(**settings):
        given = {"weights": str(detector), "clip_weights": tiny_clip} | settings
        return rewards.load("geneval", **given)

    return make


@pytest.fixture(scope="module")
def reward(load):
    return load()


def pictures(count=3, height=48, width=64):
    torch.manual_seed(7)
    return F.interpolate(torch.rand(count, 3, 6, 8), (height, width), mode="bilinear")


def context(*metas):
    return MediaContext(meta=list(metas))


DOG = {"include": [clause("dog")], "tag": "single_object"}


def test_the_detector_is_transformers_model_on_resized_normalised_padded_pictures(reward, detector):
    from torchvision.transforms import functional as TF
    from transformers import Mask2FormerForUniversalSegmentation

    media = (pictures(2, 40, 56) * 255).round() / 255  # times 1.6: 64 x 90, padded to 64 x 96
    model = Mask2FormerForUniversalSegmentation.from_pretrained(detector).eval()
    seen = TF.normalize(
        TF.resize(media, [64, 90], antialias=True), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    with torch.no_grad():
        out = model(pixel_values=F.pad(seen, (0, 6)))
    expected = [
        instances(a, b, Sizes(picture=(40, 56), seen=(64, 90), padded=(64, 96)))
        for a, b in zip(out.class_queries_logits, out.masks_queries_logits, strict=True)
    ]
    with torch.no_grad():
        found = reward._instances(media)
    assert sum(map(len, expected)) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert [(f.label, f.box) for f in mine] == [(f.label, f.box) for f in theirs]
        assert [f.score for f in mine] == pytest.approx([f.score for f in theirs], abs=1e-5)


def test_the_checkpoint_has_the_published_names_and_loads_whole(reward, detector):
    from safetensors.torch import load_file

    state = load_file(detector / "model.safetensors")
    block = "model.pixel_level_module.encoder.encoder.layers.0.blocks.0."
    assert {
        block + "attention.self.query.weight",
        block + "intermediate.dense.weight",
        "class_predictor.bias",
    } <= state.keys()
    own = reward.detector.state_dict()
    for name in ("class_predictor.weight", "model.transformer_module.queries_features.weight"):
        assert torch.equal(own[name], state[name])
    query = own[
        "model.pixel_level_module.encoder.swin.encoder.layers.0.blocks.0.attention.q_proj.weight"
    ]
    assert torch.equal(query, state[block + "attention.self.query.weight"])
    assert not query.requires_grad


def test_scores_do_not_depend_on_batch_mates_or_chunks(load, reward):
    media, metas = pictures(), [DOG] * 3
    whole = reward.detect(media, metas)
    alone = [found for i in range(3) for found in load(chunk=1).detect(media[i : i + 1], [DOG])]
    assert [{k: [f.box for f in v] for k, v in found.items()} for found in whole] == [
        {k: [f.box for f in v] for k, v in found.items()} for found in alone
    ]


def test_the_reward_judges_what_it_detects_in_every_reading(reward, monkeypatch):
    planted = [{"dog": [at(0, 0)]}, {"dog": [at(0, 0), at(20, 0), at(40, 0)]}]
    monkeypatch.setattr(reward, "detect", lambda frames, metas: planted)
    parts = reward.parts(pictures(2), ["a dog", "a dog"], context(DOG, DOG))
    assert {name: values.tolist() for name, values in parts.items()} == {
        "partial": [1, -1],
        "partial_fixed": [1, 0],
        "strict": [1, 0],
        "official": [1, 1],
    }
    assert reward(pictures(2), ["a dog", "a dog"], context(DOG, DOG)).tolist() == [1, -1]


def test_a_video_scores_the_mean_over_its_frames(reward, monkeypatch):
    def detect(frames, metas):
        assert len(frames) == len(metas) == 4
        return [{"dog": [at(0, 0)]}, {}, {}, {}]

    monkeypatch.setattr(reward, "detect", detect)
    media = pictures(4).view(2, 2, 3, 48, 64)
    assert reward(media, ["a dog", "a dog"], context(DOG, DOG)).tolist() == [0.5, 0]


def test_the_real_path_gives_one_number_a_sample_with_colours_named(reward):
    media = pictures()
    seen = {name for found in reward.detect(media, [DOG] * 3) for name in found}
    meta = {"include": [clause(name, color="red") for name in sorted(seen)], "tag": "colors"}
    found = reward.detect(media, [meta] * 3)
    assert seen
    assert all(f.color in COLORS for one in found for members in one.values() for f in members)
    out = reward(media, [""] * 3, context(*[meta] * 3))
    assert out.shape == (3,) and out.dtype == torch.float32 and bool(out.isfinite().all())


def test_counting_needs_more_confidence(reward):
    media = pictures()
    many = reward.detect(media, [DOG] * 3)
    few = reward.detect(media, [DOG | {"tag": "counting"}] * 3)
    for loose, tight in zip(many, few, strict=True):
        assert all(f.score > 0.9 for members in tight.values() for f in members)
        assert {
            n: [f for f in m if f.score > 0.9]
            for n, m in loose.items()
            if any(f.score > 0.9 for f in m)
        } == tight
    assert sum(len(m) for one in few for m in one.values()) < sum(
        len(m) for one in many for m in one.values()
    )


def test_a_colour_is_the_nearest_mean_of_three_templates_on_the_masked_crop(reward):
    picture = Image.effect_mandelbrot((64, 48), (-2, -1, 1, 1), 50).convert("RGB")
    mask = torch.zeros(48, 64, dtype=torch.bool)
    mask[10:30, 20:50] = True
    (color,) = reward.colors(picture, "cup", [Instance(41, 0.9, (20, 10, 50, 30), mask)])
    grey = Image.new("RGB", picture.size, "#999")
    crop = Image.composite(picture, grey, Image.fromarray(mask.numpy())).crop((20, 10, 50, 30))
    image = F.normalize(reward.clip.encode_image(reward.preprocess(crop)[None]), dim=-1)
    likeness = []
    for name in COLORS:
        texts = [
            f"a photo of a {name} cup",
            f"a photo of a {name}-colored cup",
            f"a photo of a {name} object",
        ]
        mean = F.normalize(reward.clip.encode_text(reward.tokenizer(texts)), dim=-1).mean(0)
        likeness.append(float(image @ F.normalize(mean, dim=0)))
    assert color == COLORS[max(range(10), key=lambda i: likeness[i])]


def test_as_server_shows_the_detector_a_jpeg_with_red_and_blue_swapped(load, monkeypatch):
    seen = {}
    for server in (False, True):
        one = load(as_server=server)

        def instances(frames, server=server):
            seen[server] = frames
            return [[]]

        monkeypatch.setattr(one, "_instances", instances)
        one.detect(pictures(1), [DOG])
    assert not torch.equal(seen[True], seen[False][:, [2, 1, 0]])
    assert (seen[True] - seen[False][:, [2, 1, 0]]).abs().mean() < 0.02


def test_a_prompt_without_clauses_is_refused_by_its_name(reward):
    with pytest.raises(ValueError, match='the prompt "a dog" has include=None'):
        reward(pictures(1), ["a dog"], context({"tag": "single_object"}))


def test_a_checkpoint_that_lacks_tensors_or_classes_is_refused(detector, load, tmp_path):
    from safetensors.torch import load_file, save_file

    whole, file = load_file(detector / "model.safetensors"), tmp_path / "model.safetensors"
    state = {key: value for key, value in whole.items() if key != "class_predictor.bias"}
    save_file(state, file, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((detector / "config.json").read_text())
    with pytest.raises(ValueError, match="does not fit .*: 1 keys missing .*class_predictor.bias"):
        load(weights=str(tmp_path))
    config = json.loads((detector / "config.json").read_text())
    config["id2label"] = {str(i): name for i, name in enumerate(CLASSES[1:] + CLASSES[:1])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(whole, file, metadata={"format": "pt"})
    said = "names 80 classes, expected COCO's 80, person to toothbrush"
    with pytest.raises(ValueError, match=said):
        load(weights=str(tmp_path))


def test_missing_weights_say_what_is_needed(load, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        load(weights=str(tmp_path / "nothing"))
    monkeypatch.setattr(geneval, "CLIP", "ViT-L-14-quickgelu")
    said = 'CLIP "ViT-L-14-quickgelu" and clip_weights="nonsense", which could not be loaded'
    with pytest.raises(ValueError, match=said):
        load(clip_weights="nonsense")
    said = (
        "of timm/vit_large_patch14_clip_224.openai, .* set"
        " reward.geneval.clip_weights=/path/to/open_clip"
    )
    with pytest.raises(ValueError, match=said):
        load(clip_weights="openai")


@pytest.mark.hub
def test_the_published_detector_finds_the_cat_and_calls_it_no_dog(monkeypatch):
    for name, value in {"CLIP": "ViT-L-14-quickgelu", "SIDE": 800, "LONGEST": 1333}.items():
        monkeypatch.setattr(geneval, name, value)
    skimage = pytest.importorskip("skimage.data")
    reward = rewards.load("geneval")
    cat = torch.from_numpy(skimage.chelsea()).permute(2, 0, 1)[None].float() / 255
    names = ("cat", "dog")
    metas = [{"include": [clause(name)], "tag": "single_object"} for name in names]
    prompts = [f"a photo of a {name}" for name in names]
    out = reward(cat.expand(2, -1, -1, -1), prompts, context(*metas))
    assert out.tolist() == [1, 0]
