"""PickScore: transformers' own logit on the reference's processor, its scales, its gradient."""

import json

import pytest
import tiny_clip
import torch
from tiny_clip import PROMPTS

from flowrl import rewards


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tiny_clip.clip_folder(tmp_path_factory.mktemp("pickscore")))


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


def test_scores_do_not_depend_on_batch_mates_chunks_or_the_order_of_prompts(pickscore, media):
    whole = pickscore()(media, PROMPTS)
    alone = torch.cat([pickscore()(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    assert torch.allclose(whole, alone, atol=1e-4) and torch.allclose(
        whole, pickscore(chunk=3)(media, PROMPTS), atol=1e-4
    )
    assert torch.allclose(pickscore()(media.flip(0), PROMPTS[::-1]), whole.flip(0), atol=1e-4)
    repeated = pickscore()(media[[0, 0, 1]], ["a cat", "a dog", "a cat"])
    assert (
        torch.allclose(repeated[0], whole[0], atol=1e-4) and abs(repeated[0] - repeated[1]) > 1e-3
    )


def test_a_video_scores_the_mean_of_its_frames(pickscore, media):
    frames = pickscore()(media, ["a cat", "a cat", "a dog", "a dog"])
    assert torch.allclose(
        pickscore()(media.view(2, 2, 3, 40, 57), ["a cat", "a dog"]),
        frames.view(2, 2).mean(1),
        atol=1e-4,
    )


def test_the_gradient_passes_where_pictures_are_not_rounded_and_is_refused_where_they_are(
    pickscore, media
):
    free, x = pickscore(rounding=False), media.clone().requires_grad_()
    free(x, PROMPTS).sum().backward()
    assert free.differentiable and bool((x.grad.abs().amax((1, 2, 3)) > 0).all())
    assert all(p.grad is None for p in free.towers.parameters())
    with pytest.raises(
        ValueError,
        match=(
            "pickscore as it is loaded rounds pictures and gives no gradient; load it with"
            " rounding=False"
        ),
    ):
        pickscore()(x, PROMPTS)
    assert not pickscore().differentiable


def test_floats_score_nearly_as_bytes_do_on_a_photograph(pickscore):
    photo = tiny_clip.photo()
    rounded, exact = pickscore()(photo, ["a cat"]), pickscore(rounding=False)(photo, ["a cat"])
    assert torch.allclose(rounded, exact, atol=0.1)


def test_an_empty_prompt_is_refused(pickscore, media):
    spec = {"pickscore": {"reward": pickscore(), "weight": 1.0}}
    said = 'reward "pickscore" reads the prompt, and that of sample 1 is empty'
    with pytest.raises(ValueError, match=said):
        rewards.score(media, ["a cat", " ", "a", "b"], spec)


def test_a_missing_model_or_tokenizer_says_where_to_put_it(folder):
    needs, put = "pickscore needs yuvalkirstain/PickScore_v1", "reward.pickscore.weights=/path/to"
    with pytest.raises(ValueError, match=f"{needs}.*set {put}/the folder"):
        rewards.load("pickscore")
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
