"""The clip reward: cosines, ways from media to the network, gradients, presets, settings."""

import logging

import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_clip import PROMPTS

from flowrl import rewards
from flowrl.rewards.core import tokens
from flowrl.runtime.registry import find

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
MODULE = find("flowrl.rewards", "clip", what="reward")


@pytest.fixture
def media():
    return torch.rand(4, 3, 16, 16)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Name of a two-layer open_clip architecture with 32 x 32 inputs."""
    return tiny_clip.open_clip_name(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tiny CLIP in the layout of openai/clip-vit-large-patch14."""
    return tiny_clip.clip_folder(tmp_path_factory.mktemp("hub"), eos=2)


@pytest.fixture
def clip(tiny):
    """Loads the tiny CLIP of open_clip with the same random weights every time."""

    def load(**settings):
        torch.manual_seed(0)
        return rewards.load("clip", model=tiny, pretrained=None, **settings)

    return load


def test_clip_is_the_cosine_of_the_two_towers(clip, media):
    import open_clip
    from open_clip.transform import image_transform

    reward, preprocess = clip(transform="pil"), image_transform(32, is_train=False)
    pixels = torch.stack([preprocess(picture) for picture in tiny_clip.pil(media)])
    with torch.no_grad():
        image = reward.towers.model.encode_image(pixels)
        text = reward.towers.model.encode_text(open_clip.tokenize(PROMPTS))
    expected = torch.nn.functional.cosine_similarity(image, text)
    out = reward(media, PROMPTS)
    assert out.shape == (4,) and out.dtype == torch.float32
    assert torch.allclose(out, expected, atol=1e-6)


def test_clip_on_tensors_follows_the_models_own_preprocessing(clip):
    coarse = torch.rand(4, 3, 6, 8)
    smooth = torch.nn.functional.interpolate(coarse, (48, 64), mode="bicubic").clamp(0, 1)
    own, tensor = clip(transform="pil"), clip(transform="tensor")
    pixels = [reward.pixels(smooth) for reward in (own, tensor)]
    assert (pixels[0] - pixels[1]).abs().mean() < 1 / 255 / 0.26  # less than one byte
    assert torch.allclose(own(smooth, PROMPTS), tensor(smooth, PROMPTS), atol=2e-3)


def test_clip_bilinear_is_torchvisions_resize_and_crop(clip):
    from torchvision.transforms import functional as F

    reward, wide = clip(transform="tv_bilinear", rounding=False), torch.rand(2, 3, 48, 64)
    expected = F.center_crop(F.resize(wide, 32, F.InterpolationMode.BILINEAR, antialias=True), 32)
    expected = F.normalize(expected, MEAN, STD)
    assert torch.allclose(reward.pixels(wide), expected, atol=1e-6)
    assert not torch.allclose(reward.pixels(wide), clip(rounding=False).pixels(wide), atol=1e-2)


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("size", [32, (24, 40)])
def test_clip_tensor_geometry_equals_pil_geometry(mode, size):
    from open_clip.transform import image_transform

    ramp = torch.linspace(0, 1, 64).expand(3, 48, 64) * torch.linspace(0.2, 1, 48)[:, None]
    preprocess = image_transform(size, is_train=False, resize_mode=mode, fill_color=128)
    picture = Image.fromarray((ramp * 255).round().byte().permute(1, 2, 0).numpy())
    out = MODULE._on_tensors(preprocess)((ramp * 255).round()[None] / 255)[0]
    assert out.shape == preprocess(picture).shape
    assert (out - preprocess(picture)).abs().max() < 2 / 255 / 0.26


@pytest.mark.parametrize("transform", ["tensor", "tv_bilinear"])
def test_clip_without_rounding_has_the_gradient_of_finite_differences(clip, media, transform):
    reward = clip(transform=transform, rounding=False)
    reward.towers.double()
    # Enlarged, it overshoots, but does not reach a clamp.
    x = (0.3 + 0.4 * media[:2]).double().requires_grad_()
    direction = torch.randn_like(x)
    assert reward.differentiable
    slope = (torch.autograd.grad(_double(reward, x).sum(), x)[0] * direction).sum()
    step = 1e-4 * direction
    with torch.no_grad():
        numeric = (_double(reward, x + step) - _double(reward, x - step)).sum() / 2e-4
    assert slope.abs() > 1e-4 and torch.allclose(slope, numeric, rtol=1e-4)


def _double(reward, x):
    return (reward.towers.image(reward.pixels(x)) * reward.towers.text(PROMPTS[:2], "cpu")).sum(-1)


def test_pils_transform_has_no_gradient_whatever_the_rounding(clip, media):
    reward = clip(transform="pil", rounding=False)
    assert not reward.differentiable
    with pytest.raises(ValueError, match="gives no gradient.*transform=tensor, rounding=False"):
        reward(media.requires_grad_(), PROMPTS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "ViT-B32"}, 'unknown CLIP model "ViT-B32"; did you mean "ViT-B-32"'),
        ({"pretrained": "laion2b_s34b_b79"}, 'did you mean "laion2b_s34b_b79k"'),
        ({"pretrained": "openai"}, "use model=ViT-B-32-quickgelu"),
        ({"modeel": "ViT-B-32"}, 'unknown setting "modeel"; did you mean "model"'),
        ({"transform": "hf"}, "transform='hf'"),
        (
            {"preset": "shapes", "pretrained": "/nowhere"},
            'pretrained=/nowhere would not be used: the CLIP "local-dir:.*leave it out',
        ),
        (
            {"model": "local-dir:/nowhere", "pretrained": "openai"},
            'pretrained=openai would not be used: the CLIP "local-dir:/nowhere"',
        ),
        (
            {"model": "openai/clip-vit-base-patch32", "pretrained": "x.pt"},
            'not be used: the CLIP "openai/clip-vit-base-patch32" has',
        ),
    ],
)
def test_clip_settings_are_checked_before_anything_is_downloaded(settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("clip", **settings)


def test_clip_weights_load_from_a_file(clip, tiny, media, tmp_path):
    first = clip()
    torch.save(first.towers.model.state_dict(), tmp_path / "weights.pt")
    torch.manual_seed(1)
    again = rewards.load("clip", model=tiny, pretrained=str(tmp_path / "weights.pt"))
    assert torch.equal(first(media, PROMPTS), again(media, PROMPTS))


def test_clip_pixels_that_a_bicubic_overshoots_are_clamped_as_pil_clamps_them(clip):
    squares = (torch.rand(1, 3, 8, 8) > 0.5).float()
    edges = squares.repeat_interleave(16, -1).repeat_interleave(16, -2)
    white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
    pixels, by_pil = clip(rounding=False).pixels(edges), clip(transform="pil").pixels(edges)
    assert torch.allclose(pixels.amax((0, 2, 3)), white, atol=1e-6)
    assert (pixels - by_pil).abs().max() < 4 / 255 / 0.26  # PIL rounds twice


# --- CLIPs of transformers


def logits(folder, media, prompts, *, side=32, padding="longest"):
    """What transformers' own processor (on PIL images), tokenizer and forward give."""
    from transformers import CLIPModel, CLIPTokenizer

    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": 77, "return_tensors": "pt"}
    pictures = tiny_clip.processor("clip", side)(tiny_clip.pil(media), return_tensors="pt")
    with torch.no_grad():
        out = model(**tokenizer(prompts, padding=padding, **cut), **pictures)
    return out.logits_per_image.diagonal()


@pytest.mark.parametrize("size", [(16, 16), (40, 57), (32, 35), (100, 33)])
def test_a_folder_of_transformers_scores_as_its_own_processor_and_forward(folder, size):
    media = torch.rand(4, 3, *size)
    reward = rewards.load("clip", model=str(folder), transform="pil")
    assert torch.allclose(reward(media, PROMPTS), logits(folder, media, PROMPTS) / 100, atol=1e-5)


def test_flow_factory_is_the_processor_and_nft_the_bilinear_resize_of_one_network(folder):
    from torchvision.transforms import functional as F

    coarse = torch.rand(4, 3, 9, 9)
    media = torch.nn.functional.interpolate(coarse, (57, 80), mode="bicubic").clamp(0, 1)
    flow_factory, nft = (
        rewards.load("clip", preset=name, pretrained=str(folder))
        for name in ("flow_factory", "nft")
    )
    expected = logits(folder, media, PROMPTS) / 100
    assert torch.allclose(flow_factory(media, PROMPTS), expected, atol=1e-5)
    bilinear = F.center_crop(F.resize((media * 255).round() / 255, 32, antialias=True), 32)
    expected = F.normalize(bilinear, MEAN, STD)
    assert torch.allclose(nft.pixels(media), expected, atol=1e-6)
    image, text = nft.towers.image(expected), nft.towers.text(PROMPTS, "cpu")
    assert torch.allclose(nft(media, PROMPTS), (image * text).sum(-1), atol=1e-6)
    assert not torch.allclose(nft(media, PROMPTS), flow_factory(media, PROMPTS), atol=1e-4)


def test_a_prompt_padded_to_the_context_or_to_its_batch_is_the_same_embedding(folder, media):
    padded = [logits(folder, media, PROMPTS, padding=how) for how in ("max_length", "longest")]
    assert torch.allclose(*padded, atol=1e-4)  # logits: a hundred times the cosine


def test_old_and_new_configurations_of_the_end_token_are_one_text_tower(folder, media, tmp_path):
    new = tiny_clip.clip_folder(tmp_path, eos=49407)
    scores = [rewards.load("clip", model=str(f))(media, PROMPTS) for f in (folder, new)]
    assert torch.equal(*scores)


def test_transformers_and_open_clip_cut_words_into_the_same_tokens(folder):
    import open_clip

    texts = ["A photo of two dogs, running!", "red   circle\non GREEN", "isn't it 1234 naïve?"]
    ours = rewards.load("clip", model=str(folder)).towers
    ids = open_clip.tokenize(texts)
    for text, row, length in zip(texts, ids, ours.lengths(texts), strict=True):
        assert ours.tokenizer(text)["input_ids"] == row[:length].tolist()
        assert row[length:].sum() == 0


# --- presets, scale, prefix, long prompts


def test_presets_name_networks_and_weights_that_open_clip_knows():
    import open_clip

    presets = MODULE.PRESETS
    names = {"nft", "flow_factory", "mix_grpo", "dance_grpo", "imagereward", "hessel", "shapes"}
    assert set(presets) == names and presets["nft"]["transform"] == "tv_bilinear"
    assert presets["flow_factory"]["transform"] == presets["mix_grpo"]["transform"] == "pil"
    for name, side in {"mix_grpo": 378, "imagereward": 224, "hessel": 224}.items():
        preset = presets[name]
        config = open_clip.get_model_config(preset["model"])
        weights = open_clip.get_pretrained_cfg(preset["model"], preset["pretrained"])
        assert config["vision_cfg"]["image_size"] == side
        assert config["quick_gelu"] is weights["quick_gelu"] is True
    # DanceGRPO's loader puts weights for 378 pixels into this network.
    dance = open_clip.get_model_config(presets["dance_grpo"]["model"])
    assert dance["vision_cfg"]["image_size"] == 224 and "quick_gelu" not in dance


@pytest.fixture
def preset(clip, tiny, tmp_path, monkeypatch):
    """Loads a preset with the tiny network, its weights from a file."""

    def load(name):
        path = tmp_path / "weights.pt"
        torch.save(clip(transform="pil").towers.model.state_dict(), path)
        monkeypatch.setitem(MODULE.PRESETS, name, MODULE.PRESETS[name] | {"model": tiny})
        return rewards.load("clip", preset=name, pretrained=str(path))

    return load


def test_a_preset_takes_its_weights_from_a_file(clip, preset, media):
    dance = preset("dance_grpo")
    assert torch.equal(dance(media, PROMPTS), clip(transform="pil")(media, PROMPTS))
    assert not dance.differentiable


def test_a_preset_with_its_weights_from_a_file_keeps_its_tags_preprocessing(preset, monkeypatch):
    def squash(model, tag):
        return {"resize_mode": "squash", "interpolation": "bicubic"} if tag == "dfn5b" else {}

    dance = preset("dance_grpo")
    monkeypatch.setattr("open_clip.get_pretrained_cfg", squash)
    mix, wide = preset("mix_grpo"), torch.rand(2, 3, 32, 64)
    assert torch.allclose(mix.pixels(wide), torch.cat([mix.pixels(w[None]) for w in wide]))
    assert mix.pixels(wide).shape[-2:] == (32, 32)
    flat = wide.clone()
    flat[..., :16] = flat[..., 48:] = 0  # a crop would not see it
    assert not torch.allclose(mix.pixels(wide), mix.pixels(flat), atol=0.1)
    assert torch.allclose(dance.pixels(wide)[..., 2:-2], dance.pixels(flat)[..., 2:-2], atol=0.05)


def test_hessels_score_is_two_and_a_half_times_the_positive_cosine(clip, preset, media):
    hessel = preset("hessel")
    cosine = clip(transform="pil")(media, [f"A photo depicts {prompt}" for prompt in PROMPTS])
    assert torch.allclose(hessel(media, PROMPTS), 2.5 * cosine.clamp(min=0), atol=1e-6)
    assert hessel.value(torch.tensor([-0.3, 0.0, 0.2])).tolist() == pytest.approx([0.0, 0.0, 0.5])
    assert "2.5" in hessel.scale


def test_a_preset_refuses_settings_that_would_change_it(folder):
    with pytest.raises(ValueError, match="clip.preset=nft fixes what transform='pil' would change"):
        rewards.load("clip", preset="nft", pretrained=str(folder), transform="pil")
    said = "fixes what model='ViT-B-32', scale='hessel' would change"
    with pytest.raises(ValueError, match=said):
        rewards.load("clip", preset="flow_factory", model="ViT-B-32", scale="hessel")
    same = rewards.load("clip", preset="nft", pretrained=str(folder), transform="tv_bilinear")
    assert same.settings.model == str(folder)


def test_long_prompts_are_counted_once_and_cut(clip, folder, media, caplog, monkeypatch):
    long = "cat " * 100
    for load in (clip, lambda: rewards.load("clip", model=str(folder))):
        monkeypatch.setattr(tokens, "_told", set())
        caplog.clear()
        reward = load()
        with caplog.at_level(logging.WARNING, "flowrl"):
            cut = reward(media, ["a cat", long, long, "a dog"])
            reward(media, [long] * 4)
        said = [record.message for record in caplog.records if record.name == "flowrl"]
        assert len(said) == 1
        assert "clip reads 77 tokens of a prompt: 1 of the first 3 are longer (up to" in said[0]
        assert torch.allclose(cut[1], reward(media, ["cat " * 75] * 4)[1], atol=1e-6)


def test_tokens_of_open_clips_tokenizer_of_transformers_are_counted_too(clip, folder):
    from open_clip.tokenizer import HFTokenizer

    towers = clip().towers
    assert towers.lengths(["a cat", "cat " * 100]) == [4, 102]
    towers.tokenizer = HFTokenizer(str(folder), context_length=8)
    assert towers.lengths(["a cat", "cat " * 100]) == [4, 102]


# --- what is missing or does not fit


@pytest.mark.parametrize(
    ("settings", "what", "setting"),
    [
        ({"preset": "nft"}, "openai/clip-vit-large-patch14", "pretrained=/path/to/the folder"),
        ({"preset": "dance_grpo"}, "model.bin of apple/DFN5B", "pretrained=/path/to/open_clip_py"),
        ({"preset": "mix_grpo"}, "model.bin of apple/DFN5B", "pretrained=/path/to/open_clip_py"),
        ({}, "model.bin of laion/CLIP-ViT-B-32-laion2B", "pretrained=/path/to/open_clip_py"),
        ({"model": "hf-hub:nobody/no"}, "nobody/no", "model=local-dir:/path/to/the folder"),
    ],
)
def test_weights_that_cannot_be_fetched_are_named_with_where_to_put_them(
    settings, what, setting, caplog
):
    with pytest.raises(ValueError, match=f"clip needs .*{what}.*set reward.clip.{setting}"):
        rewards.load("clip", **settings)
    assert not caplog.records  # open_clip logs an error of its own


def test_a_model_that_nobody_knows_is_named():
    with pytest.raises(ValueError, match="clip.model=/nowhere/clip: there is no such file or"):
        rewards.load("clip", model="/nowhere/clip")
    with pytest.raises(ValueError, match='unknown CLIP model "ViT-B/32"; did you mean "ViT-B-32"'):
        rewards.load("clip", model="ViT-B/32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda s: s.pop("visual_projection.weight"),
            r"1 keys missing \(visual_projection.weight\)",
        ),
        (lambda s: s.update({"extra.weight": torch.ones(1)}), r"1 unknown keys \(extra.weight\)"),
        (
            lambda s: s.update({"logit_scale": torch.ones(2)}),
            r"1 tensors of another shape \(logit_scale \(2,\) instead of \(\)\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_keys(folder, tmp_path, change, said):
    state = load_file(folder / "model.safetensors")
    own_names = {
        "vision_model.pre_layrnorm.weight",
        "text_model.encoder.layers.1.self_attn.k_proj.bias",
    }
    assert own_names <= state.keys()  # as in OpenAI's file
    change(state)
    for name in ("config.json", "vocab.json", "merges.txt", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"does not fit CLIPModel: {said}"):
        rewards.load("clip", model=str(tmp_path))


# --- parity with the published networks


@pytest.mark.hub
@pytest.mark.parametrize(
    "name", ["nft", "flow_factory", "mix_grpo", "dance_grpo", "imagereward", "hessel"]
)
def test_published_presets_tell_right_from_wrong_on_a_photo(name):
    right = "a portrait photograph of a navy officer in uniform"
    wrong = "a bowl of ramen on a wooden table"
    photos = tiny_clip.photo().expand(2, -1, -1, -1)
    good, bad = rewards.load("clip", preset=name)(photos, [right, wrong]).tolist()
    if name == "hessel":
        good, bad = good / 2.5, bad / 2.5
    assert good > bad + 0.08 and 0.15 < good < 0.45


@pytest.mark.hub
def test_nft_on_openais_network_is_a_hundredth_of_the_logit():
    photo, prompt = tiny_clip.photo(), "a portrait of a woman in uniform"
    flow_factory = rewards.load("clip", preset="flow_factory")(photo, [prompt])
    expected = logits(MODULE.VIT_L14, photo, [prompt], side=224) / 100
    assert torch.allclose(flow_factory, expected, atol=1e-4)
