"""nsfw: a tiny random safety checker in the published layout; its flags are those of diffusers' own
forward."""

import functools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from shape_tables import linear, norm, random_state
from torchvision.transforms import functional as T

from flowrl import rewards
from flowrl.data.media import from_pil
from flowrl.rewards import nsfw
from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped

SIDE, DIM = 32, 16
CONFIG = {
    "_name_or_path": "clip-vit-large-patch14/",
    "architectures": ["StableDiffusionSafetyChecker"],
    "initializer_factor": 1.0,
    "logit_scale_init_value": 2.6592,
    "model_type": "clip",
    "projection_dim": DIM,
    "torch_dtype": "float32",
    "text_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 50000,
    },
    "vision_config": {
        "dropout": 0.0,
        "hidden_size": 32,
        "intermediate_size": 64,
        "model_type": "clip_vision_model",
        "image_size": SIDE,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": 8,
    },
}


def shapes():
    """Every key of the published model.safetensors and its shape, at the tiny sizes."""
    v, width = "vision_model.vision_model", 32
    out = {
        f"{v}.embeddings.class_embedding": (width,),
        f"{v}.embeddings.patch_embedding.weight": (width, 3, 8, 8),
        f"{v}.embeddings.position_embedding.weight": (17, width),
        "visual_projection.weight": (DIM, width),
    }
    linears = [(f"self_attn.{p}_proj", width, width) for p in ("k", "v", "q", "out")]
    linears += [("mlp.fc1", 64, width), ("mlp.fc2", width, 64)]
    for layer in (f"{v}.encoder.layers.{i}" for i in range(2)):
        for name, rows, columns in linears:
            out |= linear(f"{layer}.{name}", rows, columns)
        out |= norm(f"{layer}.layer_norm1", width) | norm(f"{layer}.layer_norm2", width)
    out |= norm(f"{v}.pre_layrnorm", width) | norm(f"{v}.post_layernorm", width)
    return out | {"concept_embeds": (17, DIM), "special_care_embeds": (3, DIM)}


@functools.cache
def crops():
    """24 crops of a photograph, bright and dark, with a few of noise: (24, 3, 40, 48)."""
    from matplotlib import cbook
    from PIL import Image

    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = from_pil(Image.open(file).resize((256, 300)))
    g = torch.Generator().manual_seed(3)
    dark = [
        photo[0, :, 10 * i : 10 * i + 40, 8 * i : 8 * i + 48] * (0.4 + 0.025 * i) for i in range(20)
    ]
    return torch.stack([*dark, *torch.rand(4, 3, 40, 48, generator=g)])


@pytest.fixture
def photos():
    return crops()


def write(folder):
    """A folder in the published layout; about a quarter of the photos are unsafe by its thresholds.

    A third need special care.
    """
    from safetensors.torch import save_file

    state = random_state(shapes(), 0.1)
    state["vision_model.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    state |= {
        "concept_embeds_weights": torch.zeros(17),
        "special_care_embeds_weights": torch.zeros(3),
    }
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(state, folder / "model.safetensors")
    checker, _ = nsfw.load_checker(str(folder))
    pixels = normalized(pil_cropped(crops(), SIDE, floor=True))
    with torch.no_grad():
        picture = F.normalize(checker.visual_projection(checker.vision_model(pixels)[1]))
    for name, above in (("concept", 0.985), ("special_care", 0.85)):
        cosines = picture @ F.normalize(state[f"{name}_embeds"]).T
        state[f"{name}_embeds_weights"] = cosines.quantile(above, dim=0)
    save_file(state, folder / "model.safetensors")
    return {"weights": str(folder)}, state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("safety_checker")
    return folder, write(folder)[1]


@pytest.fixture
def load(checkpoint):
    return lambda **settings: rewards.load("nsfw", **{"weights": str(checkpoint[0]), **settings})


def test_a_picture_is_unsafe_where_diffusers_blacks_it_out(load, photos):
    reward = load()
    _, flags = reward.model(normalized(pil_cropped(photos, SIDE, floor=True)), photos.clone())
    assert 3 <= sum(flags) <= 21
    assert reward(photos, [""] * 24).tolist() == [-float(flag) for flag in flags]


def test_special_care_lowers_the_thresholds_by_a_hundredth(load, photos):
    reward = load()
    pixels = normalized(pil_cropped(photos, SIDE, floor=True))
    with_care = nsfw.excess(reward.model, pixels)
    reward.model.special_care_embeds_weights += 10
    difference = with_care - nsfw.excess(reward.model, pixels)
    hits = int((difference[:, 0] > 0.005).sum())
    assert 3 <= hits <= 21
    torch.testing.assert_close(
        difference[difference[:, 0] > 0.005], torch.full((hits, 17), 0.01), atol=1e-6, rtol=0
    )


def test_an_excess_counts_once_it_rounds_to_more_than_0_at_three_decimals():
    assert nsfw.unsafe(torch.tensor([-0.1, 0.0, 0.0004, 0.0006, 0.1])).tolist() == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_picture_that_cannot_be_judged_is_not_called_safe(load, photos, monkeypatch):
    """A concept or a picture has no number; in a video one such frame makes all of it unknown."""
    assert nsfw.unsafe(torch.tensor([math.nan, 0.1, -0.1])).isnan().tolist() == [True, False, False]
    real = nsfw.excess

    def break_excess(dim, index):
        def broken(model, pixels):
            return real(model, pixels).index_fill(dim, torch.tensor([index]), math.nan)

        monkeypatch.setattr(nsfw, "excess", broken)

    break_excess(1, 4)
    for reading in ("flag", "margin"):
        assert load(reading=reading)(photos[:3], [""] * 3).isnan().all()
    break_excess(0, 0)
    assert load()(photos[:3], [""] * 3).isnan().tolist() == [True, False, False]
    assert load()(photos[None, :3], [""]).isnan().tolist() == [True]
    for name, values in load().parts(photos[:3], [""] * 3).items():
        assert values.isnan().tolist() == [True, False, False], name
    broken = load()
    broken.model.special_care_embeds_weights[0] = math.nan
    monkeypatch.setattr(nsfw, "excess", real)
    assert broken(photos[:3], [""] * 3).isnan().all()


def test_parts_are_the_flag_the_count_of_concepts_and_the_margin_left(load, photos):
    reward = load()
    parts, excess = (
        reward.parts(photos, [""] * 24),
        nsfw.excess(reward.model, normalized(pil_cropped(photos, SIDE, floor=True))),
    )
    assert torch.equal(parts["unsafe"], -reward(photos, [""] * 24))
    assert (
        torch.equal(parts["concepts"], (excess.round(decimals=3) > 0).sum(1).float())
        and parts["concepts"].max() > 1
    )
    torch.testing.assert_close(parts["margin"], -excess.amax(1))
    assert torch.equal(parts["unsafe"] == 1, parts["margin"].round(decimals=3) < 0)
    margin = load(reading="margin")
    assert (
        torch.equal(margin(photos, [""] * 24), parts["margin"]) and "positive safe" in margin.scale
    )


def test_a_video_is_as_unsafe_as_its_worst_frame(load, photos):
    for reading in ("flag", "margin"):
        reward = load(reading=reading)
        frames = reward(photos, [""] * 24).view(6, 4)
        assert torch.equal(reward(photos.view(6, 4, 3, 40, 48), [""] * 6), frames.amin(1))
    mixed = load()(photos, [""] * 24).view(6, 4)
    assert bool((mixed.amin(1) < mixed.amax(1)).any())


def test_only_the_margin_without_rounding_has_a_gradient_and_it_is_right(load, photos):
    assert [load(**s).differentiable for s in ({}, {"rounding": False}, {"reading": "margin"})] == [
        False
    ] * 3
    with pytest.raises(
        ValueError, match="gives no gradient; load it with reading=margin, rounding=False"
    ):
        load()(photos[:1].clone().requires_grad_(), [""])
    reward = load(reading="margin", rounding=False)
    x = (0.1 + 0.8 * photos[:3]).requires_grad_()
    reward(x, [""] * 3).sum().backward()
    assert reward.differentiable and bool((x.grad.abs().amax((1, 2, 3)) > 0).all())
    model, direction, h = reward.model.double(), torch.randn_like(x).double(), 1e-5

    def margin(y):
        return -_double(model, normalized(cropped(y, SIDE))).amax(1)

    y = x.detach().double()
    with torch.no_grad():
        numeric = (margin(y + h * direction) - margin(y - h * direction)).sum() / (2 * h)
    torch.testing.assert_close((x.grad.double() * direction).sum(), numeric, rtol=1e-3, atol=1e-6)


def _double(model, pixels):
    picture = F.normalize(model.visual_projection(model.vision_model(pixels)[1]))
    return picture @ F.normalize(model.concept_embeds).T - model.concept_embeds_weights


def test_older_layouts_load_to_the_same_scores(load, checkpoint, photos, tmp_path):
    """A torch file beside the config; names with one vision_model, as transformers 5 writes them; a
    path to the file itself."""
    folder, state = checkpoint
    expected = load(reading="margin")(photos[:4], [""] * 4)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    short = {
        key.replace("vision_model.vision_model.", "vision_model."): value
        for key, value in state.items()
    }
    torch.save(short, tmp_path / "pytorch_model.bin")
    assert torch.equal(
        load(reading="margin", weights=str(tmp_path))(photos[:4], [""] * 4), expected
    )
    assert torch.equal(
        load(reading="margin", weights=str(folder / "model.safetensors"))(photos[:4], [""] * 4),
        expected,
    )


def test_what_is_missing_or_does_not_fit_is_one_sentence(load, checkpoint, tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="there is no such file or folder .*pytorch_model.bin"):
        load(weights=str(tmp_path))
    save_file(
        {key: value for key, value in checkpoint[1].items() if key != "concept_embeds"},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        ValueError,
        match=r"does not fit StableDiffusionSafetyChecker: 1 keys missing \(concept_embeds\)",
    ):
        load(weights=str(tmp_path))


@pytest.mark.hub
def test_the_published_checker_shows_a_portrait_and_agrees_with_diffusers():
    from matplotlib import cbook
    from PIL import Image

    reward = rewards.load("nsfw")
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = from_pil(Image.open(file))
    pictures = torch.cat([photo, T.adjust_brightness(photo, 0.5), torch.rand_like(photo)])
    _, flags = reward.model(normalized(pil_cropped(pictures, 224, floor=True)), pictures.clone())
    assert reward(pictures, [""] * 3).tolist() == [-float(flag) for flag in flags] and not flags[0]
    assert reward.parts(photo, [""])["margin"] > 0
