"""PickScore: transformers' own logit on the reference's processor, its scales, its gradient."""

import json

import pytest
import tiny_clip
import torch
from tiny_clip import PROMPTS

from flowrl import rewards


def write(folder):
    """Settings of a tiny PickScore in this folder."""
    return dict.fromkeys(("weights", "tokenizer"), str(tiny_clip.clip_folder(folder)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("pickscore"))["weights"]


@pytest.fixture
def media():
    return torch.rand(4, 3, 40, 57)


@pytest.fixture
def pickscore(folder):
    return lambda **settings: rewards.load(
        "pickscore", weights=folder, tokenizer=folder, **settings
    )


def reference(weights, media, prompts, tokenizer, side):
    """The model card's steps, each by transformers: processor, tokenizer, features, unit length,
    exp(logit_scale) * cosine."""
    from transformers import CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(weights).eval()
    words = CLIPTokenizer.from_pretrained(tokenizer)(
        prompts, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        image = model.get_image_features(
            **tiny_clip.processor("clip", side)(tiny_clip.pil(media), return_tensors="pt")
        )
        text = model.get_text_features(**words)
    image, text = (getattr(out, "pooler_output", out) for out in (image, text))
    return model.logit_scale.exp() * torch.cosine_similarity(image, text)


@pytest.mark.parametrize("size", [(32, 32), (32, 35), (40, 57), (16, 24), (300, 111)])
def test_pickscore_is_the_temperature_times_the_cosine_as_its_model_card_computes_it(
    pickscore, folder, size
):
    media = torch.rand(4, 3, *size)
    expected = reference(folder, media, PROMPTS, folder, 32)
    assert expected.abs().max() > 5 and torch.allclose(
        pickscore()(media, PROMPTS), expected, atol=1e-4
    )


def test_scales_are_those_of_the_peers(pickscore, media):
    raw = pickscore()(media, PROMPTS)
    assert torch.allclose(pickscore(scale="flow_grpo")(media, PROMPTS), raw / 26, atol=1e-6)
    assert torch.allclose(pickscore(scale="mix_grpo")(media, PROMPTS), (raw - 18) / 8, atol=1e-5)
    cosine = pickscore(scale="cosine")(media, PROMPTS)
    assert (
        torch.allclose(cosine, raw / torch.tensor(4.6052).exp(), atol=1e-6)
        and cosine.abs().max() < 1
    )
    said = [pickscore(scale=scale).scale.partition(",")[0] for scale in ("flow_grpo", "mix_grpo")]
    assert said == ["PickScore / 26", "(PickScore - 18) / 8"]


def test_a_missing_tokenizer_says_where_to_put_it(folder):
    needs, put = "pickscore needs laion/CLIP-ViT-H-14", "reward.pickscore.tokenizer=/path/to"
    with pytest.raises(ValueError, match=f"{needs}.*set {put}/the folder"):
        rewards.load("pickscore", weights=folder)


def test_another_tokenizer_is_refused(folder, tmp_path):
    said = f"reward.pickscore.tokenizer={tmp_path} holds no vocabulary of a tokenizer; add"
    with pytest.raises(ValueError, match=f"{said} tokenizer.json or vocab.json and merges.txt of"):
        rewards.load("pickscore", weights=folder, tokenizer=str(tmp_path))
    vocabulary = {"a</w>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    said = "has 3 tokens, and the network 49408; give the network's own tokenizer"
    with pytest.raises(ValueError, match=f"{tmp_path} {said}"):
        rewards.load("pickscore", weights=folder, tokenizer=str(tmp_path))


@pytest.mark.hub
def test_the_published_model_scores_a_photograph_as_its_model_card_does():
    reward, photo = rewards.load("pickscore"), tiny_clip.photo()
    prompts = [
        "a portrait photograph of a navy officer in uniform",
        "a bowl of ramen on a wooden table",
    ]
    good, bad = reward(photo.expand(2, -1, -1, -1), prompts).tolist()
    assert 18 < good < 24 and good > bad + 2
    card = reference(
        "yuvalkirstain/PickScore_v1",
        photo,
        prompts[:1],
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        224,
    )
    assert abs(good - float(card)) < 0.01
