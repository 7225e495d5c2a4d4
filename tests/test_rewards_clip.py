"""The clip reward: the cosine of the two towers, its ways from media to the network, its gradient, its settings."""

import json

import pytest
import torch
from PIL import Image

from flowrl import rewards
from flowrl.registry import find

PROMPTS = ["a cat", "a dog", "two red circles", "a blue square"]


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """Name of a two-layer open_clip architecture with 32 x 32 inputs."""
    import open_clip

    folder = tmp_path_factory.mktemp("clip")
    vision = {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32}
    text = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    (folder / "flowrl-tiny.json").write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder)
    return "flowrl-tiny"


@pytest.fixture
def clip(tiny_clip):
    """Loads the tiny CLIP with the same random weights every time."""

    def load(**settings):
        torch.manual_seed(0)
        return rewards.load("clip", model=tiny_clip, pretrained=None, **settings)

    return load


def test_clip_is_the_cosine_of_the_two_towers(clip, media):
    import open_clip

    reward = clip(transform="pil")
    pictures = [Image.fromarray((m * 255).round().byte().permute(1, 2, 0).numpy()) for m in media]
    with torch.no_grad():
        image = reward.model.encode_image(torch.stack([reward.preprocess(p) for p in pictures]))
        text = reward.model.encode_text(open_clip.tokenize(PROMPTS))
    expected = torch.nn.functional.cosine_similarity(image, text)
    out = reward(media, PROMPTS)
    assert out.shape == (4,) and out.dtype == torch.float32
    assert torch.allclose(out, expected, atol=1e-6)


def test_clip_on_tensors_follows_the_models_own_preprocessing(clip):
    smooth = torch.nn.functional.interpolate(torch.rand(4, 3, 6, 8), (48, 64), mode="bicubic").clamp(0, 1)
    own, tensor = clip(transform="pil"), clip(transform="tensor")
    pixels = [reward._pixels(smooth) for reward in (own, tensor)]
    assert (pixels[0] - pixels[1]).abs().mean() < 1 / 255 / 0.26  # less than one byte
    assert torch.allclose(own(smooth, PROMPTS), tensor(smooth, PROMPTS), atol=2e-3)


def test_clip_bilinear_is_torchvisions_resize_and_crop(clip):
    from torchvision.transforms import functional as F

    reward, wide = clip(transform="tv_bilinear", rounding=False), torch.rand(2, 3, 48, 64)
    expected = F.center_crop(F.resize(wide, 32, F.InterpolationMode.BILINEAR, antialias=True), 32)
    expected = F.normalize(expected, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    assert torch.equal(reward._pixels(wide), expected)
    assert not torch.allclose(reward._pixels(wide), clip(rounding=False)._pixels(wide), atol=1e-2)


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [32, (24, 40)])
def test_clip_tensor_geometry_equals_pil_geometry(mode, size):
    from open_clip.transform import image_transform

    ramp = torch.linspace(0, 1, 64).expand(3, 48, 64) * torch.linspace(0.2, 1, 48)[:, None]
    preprocess = image_transform(size, is_train=False, resize_mode=mode, fill_color=128)
    picture = Image.fromarray((ramp * 255).round().byte().permute(1, 2, 0).numpy())
    out = find("flowrl.rewards", "clip", what="reward")._tensor_transform(preprocess, 0)((ramp * 255).round()[None] / 255)[0]
    assert out.shape == preprocess(picture).shape
    assert (out - preprocess(picture)).abs().max() < 2 / 255 / 0.26


def test_clip_repeats_itself_and_does_not_depend_on_batch_mates(clip, media):
    reward = clip()
    whole = reward(media, PROMPTS)
    assert torch.equal(whole, reward(media, PROMPTS))
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    assert torch.allclose(whole, alone, atol=1e-6)
    assert torch.allclose(whole, clip(chunk=3)(media, PROMPTS), atol=1e-6)


def test_clip_pairs_each_image_with_its_own_prompt(clip, media):
    reward = clip()
    assert torch.allclose(reward(media, PROMPTS).flip(0), reward(media.flip(0), PROMPTS[::-1]), atol=1e-6)
    assert not torch.allclose(reward(media, PROMPTS), reward(media, PROMPTS[::-1]), atol=1e-3)
    repeated = reward(media[[0, 0, 1]], ["a cat", "a dog", "a cat"])
    assert torch.allclose(repeated[0], reward(media[:1], ["a cat"])[0], atol=1e-6) and repeated[0] != repeated[1]


def test_clip_of_a_video_is_the_mean_over_its_frames(clip, media):
    reward = clip()
    frames = reward(media, ["a cat", "a cat", "a dog", "a dog"])
    assert torch.allclose(reward(media.view(2, 2, 3, 16, 16), ["a cat", "a dog"]), frames.view(2, 2).mean(1), atol=1e-6)


@pytest.mark.parametrize("transform", ["tensor", "tv_bilinear"])
def test_clip_without_rounding_has_the_gradient_of_finite_differences(clip, media, transform):
    reward = clip(transform=transform, rounding=False)
    reward.model.double()
    x = media[:2].double().requires_grad_()
    direction = torch.randn_like(x)
    assert reward.differentiable
    slope = (torch.autograd.grad(_double(reward, x).sum(), x)[0] * direction).sum()
    h = 1e-4
    with torch.no_grad():
        numeric = (_double(reward, x + h * direction) - _double(reward, x - h * direction)).sum() / (2 * h)
    assert slope.abs() > 1e-4 and torch.allclose(slope, numeric, rtol=1e-4)


def _double(reward, x):
    image = reward.model.encode_image(reward._pixels(x), normalize=True)
    text = reward.model.encode_text(reward.tokenizer(PROMPTS[:2]), normalize=True)
    return (image * text).sum(-1)


def test_clip_gradient_reaches_every_image_and_no_weight(clip, media):
    reward, x = clip(rounding=False), media.requires_grad_()
    reward(x, PROMPTS).sum().backward()
    assert bool((x.grad.abs().amax((1, 2, 3)) > 0).all())
    assert all(p.grad is None for p in reward.model.parameters())


@pytest.mark.parametrize("settings", [{}, {"transform": "pil", "rounding": False}])
def test_clip_that_rounds_refuses_to_pretend_it_has_a_gradient(clip, media, settings):
    reward = clip(**settings)
    assert not reward.differentiable
    with pytest.raises(ValueError, match="gives no gradient.*transform=tensor, rounding=False"):
        reward(media.requires_grad_(), PROMPTS)


def test_rounding_scores_what_a_saved_png_would_show(clip, media):
    as_saved = (media * 255).round() / 255
    assert torch.equal(clip(rounding=True)(media, PROMPTS), clip(rounding=False)(as_saved, PROMPTS))
    assert not torch.equal(clip(rounding=True)(media, PROMPTS), clip(rounding=False)(media, PROMPTS))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "ViT-B32"}, 'unknown CLIP model "ViT-B32"; did you mean "ViT-B-32"'),
        ({"pretrained": "laion2b_s34b_b79"}, 'did you mean "laion2b_s34b_b79k"'),
        ({"pretrained": "openai"}, "use model=ViT-B-32-quickgelu"),
        ({"modeel": "ViT-B-32"}, 'unknown setting "modeel"; did you mean "model"'),
        ({"transform": "hf"}, "transform='hf'"),
    ],
)
def test_clip_settings_are_checked_before_anything_is_downloaded(settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("clip", **settings)


def test_clip_weights_load_from_a_file(clip, tiny_clip, media, tmp_path):
    first = clip()
    torch.save(first.model.state_dict(), tmp_path / "weights.pt")
    torch.manual_seed(1)
    again = rewards.load("clip", model=tiny_clip, pretrained=str(tmp_path / "weights.pt"))
    assert torch.equal(first(media, PROMPTS), again(media, PROMPTS))
