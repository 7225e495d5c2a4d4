"""The aesthetic predictors: backbones on their processors, affine heads, which head a file is."""

import logging
import urllib.request

import pytest
import tiny_clip
import torch
from safetensors.torch import save_file
from torch import nn

from flowrl import rewards
from flowrl.rewards.networks import clip as networks_clip
from flowrl.runtime.registry import find

V2, V25 = (find("flowrl.rewards", name, what="reward") for name in ("aesthetic", "aesthetic_v25"))
NAMES = ["aesthetic", "aesthetic_v25"]
WIDTH = {"aesthetic": 24, "aesthetic_v25": 32}


@pytest.fixture
def media():
    return torch.rand(4, 3, 40, 57)


@pytest.fixture(scope="session")
def backbones(tmp_path_factory):
    clip = tiny_clip.clip_folder(tmp_path_factory.mktemp("clip"))
    siglip = tiny_clip.siglip_folder(tmp_path_factory.mktemp("siglip"))
    return {"aesthetic": str(clip), "aesthetic_v25": str(siglip)}


def layers(name, width):
    """The prefix of a head's keys, and the head as its authors wrote it, dropouts included."""
    sizes = (width, 1024, 128, 64, 16, 1)
    linears = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
    rates = (0.2, 0.2, 0.1) if name == "aesthetic" else (0.5, 0.5, 0.5, 0.2)
    drops = [nn.Dropout(rate) for rate in rates]
    first = [module for pair in zip(linears, drops, strict=False) for module in pair]
    prefix = "layers" if name == "aesthetic" else "scoring_head"
    return prefix, nn.Sequential(*first, *linears[len(drops) :])


def head_file(path, name, width):
    """A random head in the published layout -> the module that it holds, in eval mode."""
    torch.manual_seed(1)
    prefix, head = layers(name, width)
    state = {f"{prefix}.{key}": value for key, value in head.state_dict().items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return head.eval()


def write(folder, name):
    """Settings of a tiny predictor in this folder."""
    make = tiny_clip.clip_folder if name == "aesthetic" else tiny_clip.siglip_folder
    make(folder)
    head_file(folder / "head.pth", name, WIDTH[name])
    return {"weights": str(folder / "head.pth"), "backbone": str(folder)}


@pytest.fixture
def load(backbones, tmp_path):
    def loaded(name, **settings):
        if "weights" not in settings:
            head_file(tmp_path / "head.pth", name, WIDTH[name])
        places = {"weights": str(tmp_path / "head.pth"), "backbone": backbones[name]}
        return rewards.load(name, **places | settings)

    return loaded


def reference(name, folder, head, media, side=None):
    """Each step by transformers and the layered head: processor, embedding, unit length, MLP."""
    from transformers import CLIPModel, SiglipVisionModel

    kind, own = ("clip", 32) if name == "aesthetic" else ("siglip", 28)
    processor = tiny_clip.processor(kind, side or own)
    pixels = torch.as_tensor(processor(tiny_clip.pil(media), return_tensors="pt")["pixel_values"])
    with torch.no_grad():
        if name == "aesthetic":
            out = CLIPModel.from_pretrained(folder).eval().get_image_features(pixel_values=pixels)
        else:
            out = SiglipVisionModel.from_pretrained(folder).eval()(pixel_values=pixels)
        embedding = getattr(out, "pooler_output", out)
        return head(embedding / embedding.norm(dim=-1, keepdim=True))[:, 0]


# --- heads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_head_collapses_into_one_affine_map_equal_to_its_layers(name, suffix, tmp_path):
    width = {"aesthetic": 768, "aesthetic_v25": 1152}[name]
    head = head_file(tmp_path / f"head.{suffix}", name, width)
    x = nn.functional.normalize(torch.randn(64, width), dim=-1)
    if name == "aesthetic":
        collapsed = V2._head(V2.Settings(weights=str(tmp_path / f"head.{suffix}")), width)
    else:
        collapsed = V25._head(str(tmp_path / f"head.{suffix}"), width)
    with torch.no_grad():
        assert (collapsed(x) - head(x)).abs().max() < 1e-6
    assert not collapsed.weight.requires_grad
    assert sum(p.numel() for p in collapsed.parameters()) == width + 1


@pytest.mark.parametrize(("name", "count"), [("aesthetic", 927_969), ("aesthetic_v25", 1_321_185)])
def test_heads_have_the_published_number_of_parameters_and_names_of_layers(name, count):
    prefix, head = layers(name, {"aesthetic": 768, "aesthetic_v25": 1152}[name])
    assert sum(p.numel() for p in head.parameters()) == count
    places = {f"{prefix}.{key}".split(".")[1] for key in head.state_dict()}
    assert places == {"0", "2", "4", "6", "7" if name == "aesthetic" else "8"}


def test_probe_reads_a_head_at_three_unit_vectors():
    """Weights 1..4, bias 10: at (.5, .5, .5, .5) 15; at (.5, -.5, .5, -.5) 9; at the first axis
    11."""
    head = nn.Linear(4, 1)
    head.weight.data, head.bias.data = torch.arange(1.0, 5.0)[None], torch.tensor([10.0])
    assert networks_clip.probe(head) == pytest.approx([15.0, 9.0, 11.0])


def test_only_a_head_that_is_not_the_published_one_is_warned_about(caplog):
    """The three published answers fix bias + a sum, bias + an alternating sum and bias + the first
    weight; here bias = 5.236646."""
    bias, (level, alternating, first) = 5.236646, V2.PUBLISHED
    root = 768**0.5
    even, odd = (level + alternating - 2 * bias) * root / 2, (level - alternating) * root / 2
    head = nn.Linear(768, 1)
    weight = torch.zeros(768)
    weight[0], weight[1] = first - bias, odd
    weight[2] = even - weight[0]
    head.weight.data, head.bias.data = weight[None], torch.tensor([bias])
    with caplog.at_level(logging.WARNING, "flowrl"):
        networks_clip.warn_unpublished("aesthetic", head, V2.PUBLISHED, "x.pth")
        assert caplog.text == ""
        head.bias.data += 0.01
        networks_clip.warn_unpublished("aesthetic", head, V2.PUBLISHED, "x.pth")
    assert (
        "x.pth is not the published head (three fixed inputs give 4.8933, 5.3203, 4.5551;"
        " published: 4.8833, 5.3103, 4.5451)" in caplog.text
    )


def test_the_sister_head_with_relus_is_refused_by_its_keys(load, tmp_path):
    sizes = (24, 1024, 128, 64, 16, 1)
    state = {}
    for i, place in enumerate((0, 3, 6, 9, 11)):
        for key, value in nn.Linear(sizes[i], sizes[i + 1]).state_dict().items():
            state[f"layers.{place}.{key}"] = value
    torch.save(state, tmp_path / "relu.pth")
    right = r"sac\+logos\+ava1-l14-linearMSE.pth"
    said = f"relu.pth is a head with ReLUs .*0, 3, 6, 9, 11.*{right}"
    with pytest.raises(ValueError, match=said):
        load("aesthetic", weights=str(tmp_path / "relu.pth"))


def test_heads_of_the_wrong_version_are_refused(load, tmp_path):
    torch.save(nn.Linear(24, 1).state_dict(), tmp_path / "v1.pth")
    said = "v1.pth does not fit ModuleDict: 10 keys missing .*2 unknown keys .bias, weight"
    with pytest.raises(ValueError, match=said):
        load("aesthetic", weights=str(tmp_path / "v1.pth"))
    said = "head.pth does not fit Linear: 2 keys missing .bias, weight.; 10 unknown keys"
    with pytest.raises(ValueError, match=said):
        load("aesthetic", version="v1")
    head_file(tmp_path / "head.pth", "aesthetic", 32)
    said = "head.pth does not fit ModuleDict: 10 keys missing .scoring_head.0.bias"
    with pytest.raises(ValueError, match=said):
        load("aesthetic_v25", weights=str(tmp_path / "head.pth"))


def test_the_hubs_copy_of_the_head_is_found_by_its_own_name(load, tmp_path, media, monkeypatch):
    """trl-lib/ddpo-aesthetic-predictor holds LAION's tensors, layers.0 to layers.7, as
    aesthetic-model.pth; a clone of it is a folder."""
    head_file(tmp_path / "aesthetic-model.pth", "aesthetic", WIDTH["aesthetic"])
    expected = load("aesthetic")(media, [""] * 4)
    assert torch.equal(load("aesthetic", weights=str(tmp_path))(media, [""] * 4), expected)
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.hf_hub_download",
        lambda *a, **_: asked.append(a) or str(tmp_path / "aesthetic-model.pth"),
    )
    for weights in ("trl-lib/ddpo-aesthetic-predictor", None):
        assert torch.equal(load("aesthetic", weights=weights)(media, [""] * 4), expected)
    assert asked == [("trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth")] * 2


# --- scores


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(40, 57), (32, 35), (16, 16), (300, 111)])
def test_scores_are_those_of_processor_and_layered_head(load, backbones, tmp_path, name, size):
    media, head = torch.rand(4, 3, *size), head_file(tmp_path / "head.pth", name, WIDTH[name])
    expected = reference(name, backbones[name], head, media)
    assert torch.allclose(load(name)(media, [""] * 4), expected, atol=1e-5)
    assert expected.std() > 1e-4


def test_v1_is_one_linear_layer_and_vbench_divides_by_ten(load, backbones, tmp_path, media):
    head = nn.Linear(24, 1)
    torch.save(head.state_dict(), tmp_path / "v1.pth")
    v1 = load("aesthetic", version="v1", weights=str(tmp_path / "v1.pth"))
    assert torch.allclose(
        v1(media, [""] * 4), reference("aesthetic", backbones["aesthetic"], head, media), atol=1e-5
    )
    vbench = load("aesthetic", version="v1", weights=str(tmp_path / "v1.pth"), scale="vbench")
    assert torch.allclose(vbench(media, [""] * 4) * 10, v1(media, [""] * 4), atol=1e-6)
    assert "over 10" in vbench.scale


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("aesthetic", {}, "aesthetic-model.pth of trl-lib/ddpo-.*.weights=/path/to/aes"),
        ("aesthetic", {"version": "v1"}, "head sa_0_4_vit_l_14_linear.pth: download it.*.weights="),
        ("aesthetic_v25", {}, r"head aesthetic_predictor_v2_5.pth \(AGPL-3.0\).*=/path/to/it"),
    ],
)
def test_missing_heads_and_backbones_say_what_to_fetch(backbones, tmp_path, name, settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load(name, backbone=backbones[name], **settings)
    head_file(tmp_path / "head.pth", name, WIDTH[name])
    said = f"{name} needs .*set reward.{name}.backbone=/path/to/the folder"
    with pytest.raises(ValueError, match=said):
        rewards.load(name, weights=str(tmp_path / "head.pth"))


# --- parity with the published networks


@pytest.mark.hub
def test_the_published_v2_head_answers_its_goldens_and_rates_a_photograph(caplog):
    with caplog.at_level(logging.WARNING, "flowrl"):
        reward = rewards.load("aesthetic")
    assert "not the published head" not in caplog.text
    assert networks_clip.probe(reward.head) == pytest.approx(V2.PUBLISHED, abs=1e-5)
    assert float(reward.head.bias) == pytest.approx(5.236646, abs=1e-5)
    assert float(reward.head.weight.norm()) == pytest.approx(17.9956, abs=1e-3)
    photo, noise = reward(tiny_clip.photo(), [""]), reward(torch.rand(1, 3, 512, 512), [""])
    assert 4 < float(photo) < 7 and float(photo) > float(noise)


def fetched(url, path):
    """A head that lies in its authors' repository, outside the hub."""
    try:
        urllib.request.urlretrieve(url, path)
    except OSError as error:
        pytest.skip(f"the head cannot be fetched: {error}")
    return path


@pytest.mark.hub
def test_the_published_v1_head_rates_a_photograph_as_the_one_layer_that_it_is(tmp_path):
    """LAION publishes no rating of a picture: the same by transformers' own processor and forward,
    in the head's range."""
    place = "https://github.com/LAION-AI/aesthetic-predictor/raw/main"
    path = fetched(f"{place}/sa_0_4_vit_l_14_linear.pth", tmp_path / "v1.pth")
    head = nn.Linear(768, 1)
    head.load_state_dict(torch.load(path, weights_only=True))
    reward = rewards.load("aesthetic", version="v1", weights=str(path))
    pictures = torch.cat([tiny_clip.photo(), torch.rand(1, 3, 600, 512)])
    photo, noise = out = reward(pictures, [""] * 2)
    expected = reference("aesthetic", V2.Settings().backbone, head, pictures, 224)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=0)
    assert 4 < float(photo) < 7 and float(photo) > float(noise)
    vbench = rewards.load("aesthetic", version="v1", scale="vbench", weights=str(path))
    assert torch.allclose(vbench(pictures, [""] * 2), out / 10)


@pytest.mark.hub
def test_the_published_v25_head_answers_its_goldens_and_rates_a_photograph(tmp_path, caplog):
    place = "https://github.com/discus0434/aesthetic-predictor-v2-5/raw/main/models"
    path = fetched(f"{place}/aesthetic_predictor_v2_5.pth", tmp_path / "v25.pth")
    with caplog.at_level(logging.WARNING, "flowrl"):
        reward = rewards.load("aesthetic_v25", weights=str(path))
    assert "not the published head" not in caplog.text
    assert networks_clip.probe(reward.head) == pytest.approx(V25.PUBLISHED, abs=1e-5)
    assert float(reward.head.bias) == pytest.approx(1.939038, abs=1e-5)
    assert float(reward.head.weight.norm()) == pytest.approx(25.4523, abs=1e-3)
    photo, noise = reward(tiny_clip.photo(), [""]), reward(torch.rand(1, 3, 512, 512), [""])
    assert 3 < float(photo) < 8 and float(photo) > float(noise)
