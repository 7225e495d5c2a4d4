"""VideoAlign: three tokens, z-scores, frame sampling, LoRA beside the base weights, the reference's
checkpoint layout."""

import hashlib
import json
import os

import pytest
import torch
from test_rewards_vlm import make_base, make_state
from torch import nn

from flowrl import rewards
from flowrl.rewards.networks import vlm
from flowrl.runtime.registry import find

videoalign = find("flowrl.rewards", "videoalign", what="reward")
RUBRIC = (
    "\nLook: <|VQ_reward|>\nEND\n\nMotion: <|MQ_reward|>\nEND\n\nPrompt - {text_prompt}\nText:"
    " <|TA_reward|>\nEND\n"
)
PROMPTS = ["a cat runs", "two red circles slowly cross"]
RANK, ALPHA = 4, 8
CONFIG = {
    "data_config": {
        "fps": 2.0,
        "num_frames": None,
        "max_frame_pixels": 200704,
        "sample_type": "uniform",
    },
    "peft_lora_config": {
        "lora_enable": True,
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "use_rslora": False,
    },
}


def make_checkpoint(
    folder, base, *, rows=1, lora=True, constants=None, name="model.pth", step=11352
):
    """A folder as KwaiVGI/VideoReward, with peft's names of transformers 4.45."""
    state = make_state(base, 266)
    torch.manual_seed(3)
    out = {}
    for key, value in state.items():
        adapted = lora and key.startswith("model.layers.") and "_proj" in key
        out |= with_lora(key, value) if adapted else {f"base_model.model.{key}": value}
    out["base_model.model.rm_head.weight"] = torch.randn(rows, 32)
    target = folder / f"checkpoint-{step}"
    target.mkdir(parents=True)
    torch.save(out, target / name)
    config = CONFIG | {"model_config": {"output_dim": rows, "use_special_tokens": True}}
    if constants:
        config["inference_config"] = constants
    (folder / "model_config.json").write_text(json.dumps(config))
    return out


def with_lora(key, value):
    """A tensor of the decoder in peft's names, a weight with its two factors."""
    layer, _, kind = f"base_model.model.{key}".rpartition(".")
    out = {f"{layer}.base_layer.{kind}": value}
    if kind == "weight":
        rows, columns = value.shape
        out[f"{layer}.lora_A.default.weight"] = 0.3 * torch.randn(RANK, columns)
        out[f"{layer}.lora_B.default.weight"] = 0.3 * torch.randn(rows, RANK)
    return out


def write(folder):
    """Settings of a tiny VideoReward in this folder."""
    base = make_base(folder / "base")
    make_checkpoint(folder, base)
    (folder / "rubric.txt").write_text(RUBRIC)
    return {
        "weights": str(folder),
        "base": str(base),
        "template": str(folder / "rubric.txt"),
        "dtype": "float32",
        "clip_fps": 4.0,
    }


def known(monkeypatch):
    """The tiny network's rubric is taken for the published one."""
    monkeypatch.setattr(videoalign, "RUBRIC", hashlib.sha256(RUBRIC.encode()).hexdigest()[:16])
    monkeypatch.setattr(videoalign, "LOW", 4 * 28 * 28)  # small frames keep these tests quick


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("videoalign"))


@pytest.fixture
def load(files, monkeypatch):
    known(monkeypatch)
    return lambda **settings: rewards.load("videoalign", **files | settings)


@pytest.fixture
def media():
    return torch.rand(2, 8, 3, 56, 84)


@pytest.mark.parametrize(
    ("count", "clip_fps", "fps", "expected"),
    [
        (81, 16, 2, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (16, 16, 2, [0, 5, 10, 15]),
        (33, 8, 2, [0, 5, 9, 14, 18, 23, 27, 32]),
        (3, 16, 2, [0, 2]),
        (5, 1, 2, [0, 1, 3, 4]),
    ],
)
def test_frames_are_spread_evenly_two_a_second_an_even_number_at_least_four(
    count, clip_fps, fps, expected
):
    """81 frames at 16 a second: 81 / 16 * 2 = 10.1 -> 10 frames, linspace(0, 80, 10) rounded; a
    second of video still gives 4."""
    assert videoalign.sampled(count, clip_fps, fps) == expected


def test_one_number_is_read_at_each_of_the_three_tokens(load, media):
    reward = load(z_score=False, rounding=False)
    chosen = media[:, [0, 2, 5, 7]]  # 8 frames at 4 a second are 2 seconds: 4 frames
    states = reward.vlm.hidden(
        [[video] for video in chosen], [RUBRIC.format(text_prompt=p) for p in PROMPTS], kind="video"
    )
    expected = (states * reward.head.weight[0]).sum(-1)
    parts = reward.parts(media, PROMPTS)
    assert states.shape == (2, 3, 32) and list(parts) == ["VQ", "MQ", "TA"]
    assert torch.allclose(torch.stack(list(parts.values()), 1), expected, atol=1e-5)
    out = reward(media, PROMPTS)
    assert (
        out.shape == (2,)
        and out.dtype == torch.float32
        and torch.allclose(out, expected.sum(1), atol=1e-5)
    )


def test_a_head_of_three_rows_gives_its_diagonal(load, files, tmp_path, media):
    make_checkpoint(tmp_path, files["base"], rows=3)
    reward = load(weights=str(tmp_path), z_score=False)
    states = {}
    original = reward.vlm.hidden
    reward.vlm.hidden = lambda *a, **k: states.setdefault("h", original(*a, **k))
    parts = reward.parts(media[:1], PROMPTS[:1])
    for i, dim in enumerate(("VQ", "MQ", "TA")):
        assert torch.allclose(parts[dim], states["h"][:, i] @ reward.head.weight[i], atol=1e-5)


def test_z_scores_use_the_published_constants_unless_the_checkpoint_has_its_own(
    load, files, tmp_path, media
):
    """VQ (x - 3.6757) / 2.2476, MQ (x - 1.1646) / 1.3811, TA (x - 2.8105) / 2.5121; overall is
    their sum."""
    raw, reward = load(z_score=False).parts(media, PROMPTS), load()
    scored = reward.parts(media, PROMPTS)
    for dim, mean, std in [("VQ", 3.6757, 2.2476), ("MQ", 1.1646, 1.3811), ("TA", 2.8105, 2.5121)]:
        assert torch.allclose(scored[dim], (raw[dim] - mean) / std, atol=1e-5)
    assert torch.allclose(reward(media, PROMPTS), sum(scored.values()), atol=1e-5)
    make_checkpoint(
        tmp_path, files["base"], constants={**videoalign.Z_SCORE, "VQ_mean": 1.0, "VQ_std": 2.0}
    )
    other = load(weights=str(tmp_path)).parts(media, PROMPTS)
    assert torch.allclose(other["VQ"], (raw["VQ"] - 1) / 2, atol=1e-5) and torch.allclose(
        other["MQ"], scored["MQ"], atol=1e-5
    )


def test_chosen_aspects_are_summed(load, media):
    parts = load().parts(media, PROMPTS)
    assert torch.allclose(load(dims=["VQ"])(media, PROMPTS), parts["VQ"], atol=1e-5)
    reward = load(dims=("VQ", "MQ"))
    assert torch.allclose(reward(media, PROMPTS), parts["VQ"] + parts["MQ"], atol=1e-5)
    assert reward.scale == "sum of z-scored VQ, MQ by VideoReward"


def test_lora_adds_alpha_over_rank_times_b_a_to_every_decoder_layer(load, files, tmp_path, media):
    """The same scores as a checkpoint without LoRA whose weights are W + (8 / 4) B A."""
    state = make_checkpoint(tmp_path / "lora", files["base"])
    merged = {}
    for key, value in state.items():
        if key.endswith(".base_layer.weight"):
            stem = key.removesuffix(".base_layer.weight")
            value = (
                value
                + ALPHA
                / RANK
                * state[f"{stem}.lora_B.default.weight"]
                @ state[f"{stem}.lora_A.default.weight"]
            )
        if ".lora_" not in key:
            merged[key.replace(".base_layer.", ".").removeprefix("base_model.model.")] = value
    make_checkpoint(tmp_path / "plain", files["base"], lora=False)
    torch.save(merged, tmp_path / "plain" / "checkpoint-11352" / "model.pth")
    beside, inside = load(weights=str(tmp_path / "lora")), load(weights=str(tmp_path / "plain"))
    assert any("lora_A" in key for key in beside.vlm.state_dict()) and not any(
        "lora" in key for key in inside.vlm.state_dict()
    )
    assert torch.allclose(beside(media, PROMPTS), inside(media, PROMPTS), atol=1e-4)
    without = dict(merged)
    without |= {
        key.replace(".base_layer.", ".").removeprefix("base_model.model."): v
        for key, v in state.items()
        if ".base_layer." in key
    }
    torch.save(without, tmp_path / "plain" / "checkpoint-11352" / "model.pth")
    assert (
        load(weights=str(tmp_path / "plain"))(media, PROMPTS) - beside(media, PROMPTS)
    ).abs().min() > 1e-3


def test_the_order_of_frames_changes_a_score(load, media):
    difference = load()(media, PROMPTS) - load()(media.flip(1), PROMPTS)
    assert difference.abs().min() > 1e-4


def test_frames_are_resized_as_bytes_into_the_allowed_area(load, media, monkeypatch):
    seen = []
    reward = load()
    reward.max_pixels = 4 * 28 * 28
    original = reward.vlm.hidden
    reward.vlm.hidden = lambda videos, *a, **k: seen.extend(videos) or original(videos, *a, **k)
    reward(media[:1], PROMPTS[:1])
    frames = seen[0][0]
    assert frames.shape == (4, 3, 28, 56) and torch.allclose(
        (frames * 255).round() / 255, frames, atol=1e-7
    )
    monkeypatch.undo()
    assert videoalign.LOW == 100352
    assert tuple(
        vlm.fitted(media[0, :1], low=videoalign.LOW, high=vlm.PIXELS, by="bytes").shape[-2:]
    ) == (280, 392)


def test_without_rounding_the_gradient_reaches_the_frames_that_are_seen(load, media):
    x = media[:1].clone().requires_grad_()
    load(rounding=False)(x, PROMPTS[:1]).sum().backward()
    moved = x.grad[0].abs().amax((1, 2, 3)) > 0
    assert moved.tolist() == [i in (0, 2, 5, 7) for i in range(8)]


def test_the_last_checkpoint_of_a_folder_is_used(load, files, tmp_path, media):
    make_checkpoint(tmp_path, files["base"])
    newer = torch.load(tmp_path / "checkpoint-11352" / "model.pth")
    newer["base_model.model.rm_head.weight"] = torch.zeros(1, 32)
    (tmp_path / "checkpoint-20000").mkdir()
    torch.save(newer, tmp_path / "checkpoint-20000" / "model.pth")
    assert load(weights=str(tmp_path), z_score=False)(media, PROMPTS).tolist() == [0.0, 0.0]


def test_what_is_wrong_is_one_sentence(load, files, media, tmp_path):
    with pytest.raises(ValueError, match="videoalign needs at least 2 frames, and the video has 1"):
        load()(media[:, :1], PROMPTS)
    with pytest.raises(
        ValueError, match="expected model_config.json and checkpoint-<step>/model.pth in it"
    ):
        load(weights=str(tmp_path))
    with pytest.raises(ValueError, match="dims"):
        load(dims=["XQ"])
    state = make_checkpoint(tmp_path, files["base"])
    state.pop("base_model.model.rm_head.weight")
    torch.save(state, tmp_path / "checkpoint-11352" / "model.pth")
    with pytest.raises(ValueError, match="holds no head rm_head.weight with 1 or 3 rows"):
        load(weights=str(tmp_path))
    with pytest.raises(
        ValueError,
        match=(
            "save the literal DETAILED_PROMPT_WITH_SPECIAL_TOKEN of .* set"
            " reward.videoalign.template"
        ),
    ):
        load(template=None)


@pytest.mark.hub
def test_videoalign_sees_that_a_still_has_no_motion():
    """Needs FLOWRL_VIDEOALIGN_RUBRIC, the path of the rubric, which says that static videos get a
    low motion score."""
    rubric = os.environ.get("FLOWRL_VIDEOALIGN_RUBRIC")
    if not rubric:
        pytest.skip("FLOWRL_VIDEOALIGN_RUBRIC names no file")
    reward = rewards.load("videoalign", template=rubric)
    noise = nn.functional.interpolate(torch.rand(1, 3, 8, 24), (256, 768), mode="bicubic").clamp(
        0, 1
    )
    moving = torch.stack([noise[0, :, :, 8 * i : 8 * i + 448] for i in range(32)])
    parts = reward.parts(
        torch.stack([moving, moving[:1].expand_as(moving)]), ["colours drift to the left"] * 2
    )
    assert parts["MQ"][0] > parts["MQ"][1] and all(
        bool(value.abs().max() < 10) for value in parts.values()
    )
