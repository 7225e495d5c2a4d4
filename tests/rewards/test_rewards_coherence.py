"""Foresight coherence: the weights of the worst windows by hand, metamorphic videos under an
analytic world, and V-JEPA 2 as the world."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from flowrl import rewards
from flowrl.rewards.coherence import Coherence, Settings
from flowrl.rewards.video import softmin

TINY = {
    "patch_size": 8,
    "crop_size": 16,
    "frames_per_clip": 8,
    "tubelet_size": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "mlp_ratio": 2.0,
    "pred_hidden_size": 24,
    "pred_num_attention_heads": 2,
    "pred_num_hidden_layers": 2,
    "pred_num_mask_tokens": 2,
    "pred_mlp_ratio": 2.0,
    "num_pooler_layers": 1,
}


def coherence(world, **settings):
    return Coherence(
        Settings(**{"window": 4, "context": 2, "stride": 1, "rounding": False, **settings}), world
    )


# --- the formula


def planned(scores):
    """A world whose i-th window has the cosine scores[i], by the brightness of its first frame: i /
    10."""

    def world(clips, context):
        number = (clips[:, 0].mean((1, 2, 3)) * 10).round().long()
        angle = torch.tensor(scores).acos()[number]
        predicted = torch.stack([angle.cos(), angle.sin()], -1)[:, None]
        return predicted, torch.tensor([1.0, 0.0]).expand_as(predicted)

    return world


def counted(frames):
    return (torch.arange(frames) / 10)[None, :, None, None, None].expand(1, frames, 3, 2, 2)


def test_severity_weights_by_hand():
    """Cosines 0.9, 0.5, 0.8 at tau = 0.2: weights e^0.5, e^2.5, e^1 over their sum."""
    e = [math.exp(0.5), math.exp(2.5), math.exp(1.0)]
    expected = (0.9 * e[0] + 0.5 * e[1] + 0.8 * e[2]) / sum(e)
    reward = coherence(planned([0.9, 0.5, 0.8]), tau=0.2)
    assert reward.windows(counted(6))[0].tolist() == pytest.approx([0.9, 0.5, 0.8])
    assert reward(counted(6), ["a"]).item() == pytest.approx(expected)
    parts = reward.parts(counted(6), ["a"])
    assert parts["mean"].item() == pytest.approx(2.2 / 3)
    assert parts["worst"].item() == pytest.approx(0.5)
    assert parts["dynamic"].item() == pytest.approx(0.1)


def test_small_tau_is_the_worst_window_and_large_tau_the_mean():
    scores = [0.9, 0.5, 0.8]
    small = coherence(planned(scores), tau=1e-3)(counted(6), ["a"])
    large = coherence(planned(scores), tau=1e3)(counted(6), ["a"])
    assert small.item() == pytest.approx(0.5, abs=1e-5)
    assert large.item() == pytest.approx(2.2 / 3, abs=1e-4)


def test_a_window_far_above_the_mean_is_not_pushed_higher():
    """dR/ds_i = w_i (1 - (s_i - R) / tau): 0.9 lies more than tau above R, and raising it takes
    weight from the others' side."""
    s = torch.tensor([[0.9, 0.5, 0.8]], requires_grad=True)
    r = softmin(s, 0.2)
    slope = torch.autograd.grad(r, s)[0]
    weights = (-s / 0.2).softmax(1)
    assert torch.allclose(slope, weights * (1 - (s - r) / 0.2)) and slope[0, 0] < 0 < slope[0, 1]


@pytest.mark.parametrize(
    ("frames", "stride", "starts"),
    [(4, 2, [0]), (8, 2, [0, 2, 4]), (9, 2, [0, 2, 4, 5]), (7, 10, [0, 3]), (6, 1, [0, 1, 2])],
)
def test_windows_slide_by_the_stride_and_the_last_ends_at_the_last_frame(frames, stride, starts):
    seen = []

    def spy(clips, context):
        seen.extend((clips[:, 0, 0, 0, 0] * 10).round().long().tolist())
        assert clips.shape[1] == 4 and context == 2
        return torch.ones(len(clips), 1, 2), torch.ones(len(clips), 1, 2)

    score = coherence(spy, stride=stride, chunk=2)(counted(frames), ["a"]).item()
    assert score == pytest.approx(1.0)
    assert seen == starts


# --- an analytic world: drag


def drag(clips, context):
    """A world in which velocity halves every frame: positions (mean brightness) after the context
    are foreseen from its last two.

    Features of a frame: its position as a point on a circle, so that the cosine is that of the
    error.
    """
    at = clips.mean((2, 3, 4))
    last, speed = at[:, context - 1], at[:, context - 1] - at[:, context - 2]
    steps = torch.arange(1, clips.shape[1] - context + 1)
    foreseen = last[:, None] + speed[:, None] * (1 - 0.5**steps)
    return (torch.stack([(6 * x).cos(), (6 * x).sin()], -1) for x in (foreseen, at[:, context:]))


def test_frozen_shuffled_and_reversed_videos_under_a_world_with_drag():
    """Positions 0.1 + 0.6 (1 - 0.5^t) obey the world; reversed they speed up; a frozen video is
    foreseen as well as any."""
    at = 0.1 + 0.6 * (1 - 0.5 ** torch.arange(8.0))
    video = at[None, :, None, None, None].expand(1, 8, 3, 2, 2)
    reward = coherence(drag)
    score = {
        "real": reward(video, ["a"]).item(),
        "frozen": reward(video[:, :1].expand_as(video), ["a"]).item(),
        "reversed": reward(video.flip(1), ["a"]).item(),
        "shuffled": reward(video[:, [4, 0, 6, 1, 7, 2, 5, 3]], ["a"]).item(),
    }
    assert score["real"] == pytest.approx(1.0, abs=1e-5)
    assert score["reversed"] < 0.5 and score["shuffled"] < 0.5
    assert score["frozen"] == pytest.approx(1.0, abs=1e-6)  # why the part "dynamic" is shown
    assert reward.parts(video[:, :1].expand_as(video), ["a"])["dynamic"].item() == 0.0


def test_one_violation_costs_more_than_its_share_of_the_windows():
    at = (0.1 + 0.6 * (1 - 0.5 ** torch.arange(12.0)))[None].repeat(2, 1)
    at[1, 8] -= 0.2  # one frame jumps
    video = at[:, :, None, None, None].expand(2, 12, 3, 2, 2)
    reward = coherence(drag)
    fine, broken = reward(video, ["a", "a"]).tolist()
    mean = reward.parts(video, ["a", "a"])["mean"].tolist()
    assert fine - broken > 1.5 * (mean[0] - mean[1]) > 0


def test_batch_mates_and_chunks_do_not_change_a_score():
    media = torch.rand(3, 7, 3, 4, 4)
    together = coherence(drag)(media, ["a"] * 3)
    assert torch.allclose(together, coherence(drag, chunk=64)(media, ["a"] * 3), atol=1e-6)
    alone = torch.cat([coherence(drag)(media[i : i + 1], ["a"]) for i in range(3)])
    assert torch.allclose(together, alone, atol=1e-6) and together.std() > 0


def test_rounding_scores_what_a_saved_video_shows():
    media = torch.rand(2, 7, 3, 4, 4)
    saved = (media * 255).round() / 255
    assert torch.equal(
        coherence(drag, rounding=True)(media, ["a"] * 2), coherence(drag)(saved, ["a"] * 2)
    )


# --- V-JEPA 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random V-JEPA 2 as transformers saves it: config.json and model.safetensors."""
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("vjepa2")
    model = VJEPA2Model(VJEPA2Config(**TINY))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def jepa(checkpoint):
    return rewards.load(
        "coherence", weights=str(checkpoint), window=8, context=4, stride=2, rounding=False
    )


def test_every_weight_of_the_checkpoint_arrives_and_is_frozen(checkpoint, jepa):
    from safetensors.torch import load_file

    stored, loaded = load_file(str(checkpoint / "model.safetensors")), jepa.world.model.state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[key], loaded[key]) for key in stored)
    assert {
        "encoder.embeddings.patch_embeddings.proj.weight",
        "predictor.embeddings.mask_tokens",
        "predictor.proj.weight",
    } <= stored.keys()
    assert not any(p.requires_grad for p in jepa.world.parameters())
    assert not jepa.world.training
    assert jepa.video == "only"


def test_pixels_are_those_of_v_jepas_own_processor(jepa):
    from transformers import VJEPA2VideoProcessor

    clip = (torch.rand(1, 4, 3, 40, 56) * 255).round() / 255
    processor = VJEPA2VideoProcessor(crop_size=16)
    expected = processor((clip[0] * 255).to(torch.uint8), return_tensors="pt")[
        "pixel_values_videos"
    ]
    ours = jepa.world.pixels(clip)
    assert processor.size["shortest_edge"] == 18
    assert (
        ours.shape
        == expected.shape
        == (
            1,
            4,
            3,
            16,
            16,
        )
    )
    assert (
        ours - expected
    ).abs().max() < 1.01 / 255 / 0.224  # the processor rounds to bytes after the resize


def test_the_prediction_does_not_see_its_target_as_transformers_own_context_mask_lets_it(jepa):
    one, other = torch.rand(2, 8, 3, 16, 16).split(1)
    other = torch.cat([one[:, :4], other[:, 4:]], 1)  # the same past, another future
    (foreseen, real), (again, changed) = jepa.world(one, 4), jepa.world(other, 4)
    assert torch.equal(foreseen, again) and not torch.allclose(real, changed, atol=1e-2)
    masks = {"context_mask": [torch.arange(8)[None]], "target_mask": [torch.arange(8, 16)[None]]}
    leaky = [
        jepa.world.model(jepa.world.pixels(clip), **masks).predictor_output.last_hidden_state
        for clip in (one, other)
    ]
    assert (leaky[0] - leaky[1]).abs().max() > 1e-4


def test_the_predictor_is_asked_for_the_tokens_after_the_context_in_their_places(jepa):
    """8 frames are 4 tubelets of 2 x 2 patches: tokens 0..7 are the past, 8..15 the future; equal
    to transformers' predictor by hand."""
    clip = torch.rand(2, 8, 3, 16, 16)
    model, pixels = jepa.world.model, jepa.world.pixels(clip)
    past = model.encoder(pixel_values_videos=pixels[:, :4]).last_hidden_state
    places = [torch.arange(8).repeat(2, 1)], [torch.arange(8, 16).repeat(2, 1)]
    expected = model.predictor(
        encoder_hidden_states=past, context_mask=places[0], target_mask=places[1]
    ).last_hidden_state
    whole = model.get_vision_features(pixels)
    predicted, actual = jepa.world(clip, 4)
    assert predicted.shape == actual.shape == (2, 8, 32)
    assert torch.allclose(predicted, F.layer_norm(expected, (32,)))
    assert torch.allclose(actual, F.layer_norm(whole[:, 8:], (32,)))
    assert torch.allclose(
        jepa.windows(clip)[:, 0], F.cosine_similarity(predicted, actual, dim=-1).mean(1)
    )


def test_layer_normalised_tokens_make_the_mean_of_cosines_the_cosine_of_all_tokens(jepa):
    predicted, actual = jepa.world(torch.rand(2, 8, 3, 16, 16), 4)
    flat = F.cosine_similarity(predicted.flatten(1), actual.flatten(1))
    assert torch.allclose(flat, F.cosine_similarity(predicted, actual, dim=-1).mean(1), atol=1e-4)


def test_a_videos_score_is_that_of_its_windows_and_not_of_its_batch_mates(jepa):
    media = torch.rand(2, 11, 3, 20, 24)
    together = jepa(media, ["a", "a"])
    assert jepa.windows(media).shape == (2, 3)
    assert together.dtype == torch.float32
    assert together.abs().max() <= 1
    alone = torch.cat([jepa(media[i : i + 1], ["a"]) for i in range(2)])
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=1e-4)
    assert torch.equal(together, jepa(media, ["b", "b"]))


def test_the_gradient_through_v_jepa_is_that_of_finite_differences(checkpoint):
    settings = {"weights": str(checkpoint), "window": 8, "context": 4}
    assert not rewards.load("coherence", **settings).differentiable
    reward = rewards.load("coherence", **settings, rounding=False)
    assert reward.differentiable
    reward.world.double()
    media = torch.rand(1, 10, 3, 16, 16, requires_grad=True)
    direction = torch.randn(1, 10, 3, 16, 16)
    slope = (torch.autograd.grad(reward(media, ["a"]).sum(), media)[0] * direction).sum()
    step = 1e-2 * direction
    with torch.no_grad():
        numeric = (reward(media + step, ["a"]) - reward(media - step, ["a"])).sum() / 2e-2
    assert slope.abs() > 1e-4 and torch.allclose(slope, numeric, rtol=0.05)


# --- bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 4, "context": 4}, "context=4 leaves nothing of window=4 to predict"),
        ({"tau": 0}, "tau=0"),
        (
            {"window": 7},
            "reads 2 frames at a time, and window=7, context=4; both must be multiples of it",
        ),
        (
            {"weights": "/nowhere/vjepa2"},
            "coherence.weights=/nowhere/vjepa2: there is no such file or folder",
        ),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(checkpoint, settings, said):
    with pytest.raises(ValueError, match=said):
        own = {"weights": str(checkpoint), "window": 8, "context": 4}
        rewards.load("coherence", **own | settings)


def test_a_checkpoint_of_something_else_is_refused_with_the_keys(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    state = load_file(str(checkpoint / "model.safetensors"))
    kept = {key: value for key, value in state.items() if not key.startswith("predictor.proj")}
    save_file(kept, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    lost = r"\(predictor.proj.bias, predictor.proj.weight"
    said = f"does not fit VJEPA2Model: 2 keys missing {lost}"
    with pytest.raises(ValueError, match=said):
        rewards.load("coherence", weights=str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="reward.coherence.weights=.* cannot be loaded"):
        rewards.load("coherence", weights=str(tmp_path))


def test_videos_shorter_than_the_window_are_refused_with_what_to_set():
    said = "window=4 is longer than the videos, which have 3 frames; set a window of at most 3"
    with pytest.raises(ValueError, match=said):
        coherence(drag)(counted(3), ["a"])
    with pytest.raises(ValueError, match='reward "c" takes videos, and the media are images'):
        rewards.score(torch.rand(2, 3, 8, 8), ["", ""], {"c": {"reward": coherence(drag)}})


# --- the real model


@pytest.mark.hub
def test_the_published_v_jepa_foresees_steady_motion_better_than_a_jump():
    """No score is published for PFC; the model must rank a pattern that moves on over one that is
    swapped for noise half way."""
    reward = rewards.load("coherence")
    config = json.loads(
        (
            rewards._weights.path_of("facebook/vjepa2-vitl-fpc64-256", reward="coherence")
            / "config.json"
        ).read_text()
    )
    assert config["hidden_size"] == 1024 and config["crop_size"] == 256
    wide = F.interpolate(torch.rand(1, 3, 16, 32), (256, 512), mode="bicubic").clamp(0, 1)
    moving = torch.stack([wide[0, :, :, 4 * t : 4 * t + 256] for t in range(16)])
    jump = torch.cat([moving[:8], torch.rand(8, 3, 256, 256)])
    steady, broken = reward(torch.stack([moving, jump]), ["", ""]).tolist()
    assert steady > broken + 0.1
