"""HPSv2: the cosine of a checkpoint in its published layout, its own preprocessing, and which of
the two models a file is."""

import hashlib
import logging

import pytest
import tiny_clip
import torch
from tiny_clip import PROMPTS
from torchvision.transforms import functional as F

from flowrl import rewards
from flowrl.runtime.registry import find

MODULE = find("flowrl.rewards", "hpsv2", what="reward")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return tiny_clip.open_clip_name(tmp_path_factory.mktemp("hps"))


def write(folder, tiny):
    """Both files as xswu/HPSv2 holds them: torch dicts with the weights under "state_dict" beside
    other entries."""
    import open_clip

    for seed, name in enumerate(("HPS_v2_compressed.pt", "HPS_v2.1_compressed.pt")):
        torch.manual_seed(seed)
        model = open_clip.CLIP(**open_clip.get_model_config(tiny))
        torch.save({"epoch": 1, "name": "hps", "state_dict": model.state_dict()}, folder / name)
    return {"weights": str(folder)}


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("weights")
    write(folder, tiny)
    return folder


@pytest.fixture
def hpsv2(tiny, folder, monkeypatch):
    monkeypatch.setattr(MODULE.REWARD, "architecture", tiny)
    return lambda **settings: rewards.load("hpsv2", **{"weights": str(folder)} | settings)


@pytest.fixture
def media():
    return torch.rand(4, 3, 40, 57)


def reference_pixels(image, side=32, antialias=True):
    """HPSv2's transform of a PIL image: tensor, longest side, centred zeros, normalisation."""
    x = F.to_tensor(image)
    scale = side / max(x.shape[1:])
    height, width = round(x.shape[1] * scale), round(x.shape[2] * scale)
    x = F.resize(x, [height, width], F.InterpolationMode.BICUBIC, antialias=antialias)
    left, top = (side - width) // 2, (side - height) // 2
    canvas = torch.zeros(3, side, side)
    canvas[:, top : top + height, left : left + width] = x
    return F.normalize(canvas, MEAN, STD)


@pytest.mark.parametrize("size", [(40, 57), (57, 40), (64, 64), (16, 9), (300, 31)])
@pytest.mark.parametrize("antialias", [True, False])
def test_pixels_are_those_of_the_references_transform(hpsv2, size, antialias):
    media = torch.rand(3, 3, *size)
    images = tiny_clip.pil(media)
    expected = torch.stack([reference_pixels(image, antialias=antialias) for image in images])
    assert torch.allclose(hpsv2(antialias=antialias).pixels(media), expected, atol=1e-5)


def test_padding_is_black_before_normalisation_and_the_whole_picture_is_seen(hpsv2):
    pixels = hpsv2().pixels(torch.ones(1, 3, 16, 64))
    black, white = (
        torch.tensor([(v - m) / s for m, s in zip(MEAN, STD, strict=True)]) for v in (0, 1)
    )
    assert torch.allclose(pixels[0, :, :12].amax((1, 2)), black, atol=1e-5)
    assert torch.allclose(pixels[0, :, 20:].amin((1, 2)), black, atol=1e-5)
    assert torch.allclose(pixels[0, :, 12:20], white[:, None, None].expand(3, 8, 32), atol=1e-5)


def test_antialiasing_is_a_difference_that_scores_show(hpsv2):
    photo = tiny_clip.photo()
    on, off = (hpsv2(antialias=flag).pixels(photo) for flag in (True, False))
    assert (on - off).abs().mean() > 0.02
    scores = [hpsv2(antialias=flag)(photo, ["a cat"]) for flag in (True, False)]
    assert not torch.allclose(*scores, atol=1e-5)


@pytest.mark.parametrize("version", ["v2", "v2.1"])
def test_the_score_is_the_cosine_under_the_checkpoint(hpsv2, tiny, folder, media, version):
    import open_clip

    model = open_clip.CLIP(**open_clip.get_model_config(tiny)).eval()
    file = torch.load(folder / f"HPS_{version}_compressed.pt", weights_only=True)
    model.load_state_dict(file["state_dict"])
    pixels = torch.stack([reference_pixels(image) for image in tiny_clip.pil(media)])
    with torch.no_grad():
        image, text = model.encode_image(pixels), model.encode_text(open_clip.tokenize(PROMPTS))
    scores = hpsv2(version=version)(media, PROMPTS)
    assert torch.allclose(scores, torch.cosine_similarity(image, text), atol=1e-5)


def test_the_two_versions_do_not_score_alike(hpsv2, media):
    scores = [hpsv2(version=version)(media, PROMPTS) for version in ("v2", "v2.1")]
    assert not torch.allclose(*scores, atol=1e-3)


def test_a_file_that_is_neither_published_model_is_warned_about(hpsv2, caplog):
    with caplog.at_level(logging.WARNING, "flowrl"):
        hpsv2()
    assert "4067542e34ba2553a738c5ac6c1d75c0: its scores may not compare" in caplog.text


def test_the_other_published_version_is_refused(hpsv2, folder, monkeypatch, caplog):
    files = {version: folder / f"HPS_{version}_compressed.pt" for version in ("v2", "v2.1")}
    md5 = {version: hashlib.md5(file.read_bytes()).hexdigest() for version, file in files.items()}
    monkeypatch.setattr(MODULE, "MD5", md5)
    with caplog.at_level(logging.WARNING, "flowrl"):
        hpsv2(version="v2")
    assert caplog.text == ""
    said = (
        "HPS_v2_compressed.pt is HPS v2, and reward.hpsv2.version=v2.1; set reward.hpsv2.version=v2"
    )
    with pytest.raises(ValueError, match=said):
        hpsv2(weights=str(folder / "HPS_v2_compressed.pt"))


def test_a_missing_or_foreign_checkpoint_is_one_sentence(hpsv2, tmp_path):
    said = (
        r"hpsv2 needs HPS_v2.1_compressed.pt of xswu/HPSv2.*set"
        r" reward.hpsv2.weights=/path/to/HPS_v2.1"
    )
    with pytest.raises(ValueError, match=said):
        hpsv2(weights="xswu/HPSv2")
    torch.save({"state_dict": {"visual.proj": torch.ones(2)}}, tmp_path / "x.pt")
    said = r"x.pt does not fit CLIP: \d+ keys missing .*1 tensors of another shape \(visual.proj"
    with pytest.raises(ValueError, match=said):
        hpsv2(weights=str(tmp_path / "x.pt"))


def test_the_published_architecture_is_open_clips_vit_h_14():
    import open_clip

    config = open_clip.get_model_config(MODULE.REWARD.architecture)
    assert config["embed_dim"] == 1024 and "quick_gelu" not in config
    sizes = {"image_size": 224, "layers": 32, "width": 1280, "head_width": 80, "patch_size": 14}
    assert config["vision_cfg"] == sizes
    sizes = {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24}
    assert config["text_cfg"] == sizes


@pytest.mark.hub
@pytest.mark.parametrize(("version", "low", "high"), [("v2", 0.24, 0.31), ("v2.1", 0.20, 0.40)])
def test_the_published_models_score_a_photograph_in_their_range(version, low, high):
    right = "a portrait photograph of a navy officer in uniform"
    wrong = "a bowl of ramen on a wooden table"
    photos = tiny_clip.photo().expand(2, -1, -1, -1)
    good, bad = rewards.load("hpsv2", version=version)(photos, [right, wrong]).tolist()
    assert low < good < high and good > bad + 0.02
