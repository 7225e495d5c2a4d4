"""Image rewards on videos: which frames are scored and what their scores become; and the smoothness
of motion, from pixels."""

import math

import pytest
import torch

from flowrl import rewards
from flowrl.rewards.motion_smoothness import dynamic_degree
from flowrl.rewards.video import softmin
from flowrl.types import MediaContext


def clips(*values):
    """Videos of flat 4 x 4 frames: values (B, F), a brightness a frame."""
    return torch.tensor(values)[:, :, None, None, None].expand(-1, -1, 3, 4, 4).contiguous()


def brightness(media, prompts, context=None):
    return media.flatten(1).mean(1)


def video(reward=brightness, **settings):
    return rewards.load("video", reward=reward, **settings)


# --- frames


@pytest.mark.parametrize(
    ("settings", "count", "chosen"),
    [
        ({"frames": 4}, 10, [0, 3, 6, 9]),
        ({"frames": 3}, 10, [0, 4, 9]),  # 4.5 goes to the even frame
        ({"frames": 2}, 49, [0, 48]),
        ({"frames": 1}, 49, [0]),
        ({}, 5, [0, 1, 2, 3, 4]),
        ({"frames": 6}, 48, [0, 9, 19, 28, 38, 47]),
        ({"pool": "first"}, 49, [0]),
        ({"pool": "last"}, 49, [48]),
    ],
)
def test_frames_are_spread_evenly_with_the_first_and_the_last(settings, count, chosen):
    assert video(**settings).chosen(count) == chosen


def test_pools_of_a_video_by_hand():
    """Frames 0.2, 0.4, 0.9 with temperature 0.1: softmin weights 1, e^-2, e^-7."""
    media = clips([0.2, 0.4, 0.9])
    e = [1.0, math.exp(-2), math.exp(-7)]
    expected = {
        "mean": 0.5,
        "min": 0.2,
        "max": 0.9,
        "first": 0.2,
        "last": 0.9,
        "softmin": (0.2 * e[0] + 0.4 * e[1] + 0.9 * e[2]) / sum(e),
    }
    assert {pool: video(pool=pool)(media, ["a"]).item() for pool in expected} == pytest.approx(
        expected
    )


def test_softmin_runs_from_the_worst_frame_to_the_mean_with_its_temperature():
    values = torch.tensor([[0.2, 0.4, 0.9]])
    assert softmin(values, 1e-3).item() == pytest.approx(0.2, abs=1e-6) and softmin(
        values, 1e4
    ).item() == pytest.approx(0.5, abs=1e-4)


def test_one_broken_frame_hides_in_the_mean_and_not_in_the_minimum():
    whole, broken = clips([0.8] * 8), clips([0.8] * 7 + [0.0])
    drop = {
        pool: (video(pool=pool)(whole, ["a"]) - video(pool=pool)(broken, ["a"])).item()
        for pool in ("mean", "min", "softmin")
    }
    assert (
        drop["mean"] == pytest.approx(0.1)
        and drop["min"] == pytest.approx(0.8)
        and drop["softmin"] > 0.79
    )


def test_each_frame_is_scored_once_as_a_picture_with_its_videos_prompt_and_columns():
    seen = []

    def spy(media, prompts, context):
        seen.append((media, prompts, [m["n"] for m in context.meta], context.source))
        return media.flatten(1).mean(1)

    media, source = torch.rand(2, 6, 3, 4, 4), torch.rand(2, 3, 4, 4)
    video(spy, frames=2)(media, ["a", "b"], MediaContext(meta=[{"n": 0}, {"n": 1}], source=source))
    frames, prompts, numbers, sources = seen[0]
    assert len(seen) == 1 and prompts == ["a", "a", "b", "b"] and numbers == [0, 0, 1, 1]
    assert torch.equal(frames, media[:, [0, 5]].flatten(0, 1)) and torch.equal(
        sources, source[[0, 0, 1, 1]]
    )


def test_a_frame_that_could_not_be_scored_makes_its_video_invalid_and_no_other():
    def picky(media, prompts, context):
        values = brightness(media, prompts)
        return values.masked_fill(values < 0.1, math.nan)

    media = clips([0.5, 0.0, 0.5], [0.5, 0.5, 0.5])
    for pool in ("mean", "min", "softmin", "max"):
        assert video(picky, pool=pool)(media, ["a", "a"]).isnan().tolist() == [True, False], pool
    assert video(picky, pool="first")(media, ["a", "a"]).tolist() == [0.5, 0.5]


def test_a_frame_with_an_infinite_score_is_a_failure_whatever_the_pool():
    def picky(media, prompts, context):
        values = brightness(media, prompts)
        return values.masked_fill(values < 0.1, -math.inf).masked_fill(values > 0.9, math.inf)

    media = clips([0.5, 0.0, 0.5], [0.5, 1.0, 0.5], [0.5, 0.5, 0.5])
    for pool in ("mean", "min", "softmin", "max"):
        assert video(picky, pool=pool)(media, ["a"] * 3).isnan().tolist() == [
            True,
            True,
            False,
        ], pool


def test_an_image_is_scored_as_without_the_wrapper():
    media = torch.rand(3, 3, 16, 16)
    assert torch.equal(video("jpeg")(media, [""] * 3), rewards.load("jpeg")(media, [""] * 3))
    jpeg = rewards.load("jpeg", scale="ddpo")
    wrapped = video("jpeg", reward_settings={"scale": "ddpo"}, frames=3)
    film = torch.rand(2, 3, 3, 16, 16)
    assert (
        torch.allclose(wrapped(film, ["", ""]), jpeg(film, ["", ""]))
        and wrapped.scale == f"{jpeg.scale} (mean over frames)"
    )


def test_batch_mates_do_not_change_a_score():
    media = torch.rand(4, 5, 3, 16, 16)
    for reward in (video("jpeg", frames=3, pool="softmin"), rewards.load("motion_smoothness")):
        together = reward(media, ["a"] * 4)
        alone = torch.cat([reward(media[i : i + 1], ["a"]) for i in range(4)])
        assert torch.allclose(together, alone, atol=1e-6)


class Picky(rewards.Reward):
    """An image reward with every attribute that a wrapper has to pass on."""

    name, scale = "picky", "brightness, 0 to 1"
    needs, reads, reads_prompt, video, differentiable = (
        frozenset({"meta"}),
        frozenset({"k"}),
        True,
        "no",
        True,
    )

    def __call__(self, media, prompts, context=None):
        return media.flatten(1).mean(1)

    def complaint(self, meta):
        return "is odd" if meta["k"] else None

    def expect(self, prompts):
        self.expected = prompts

    def parts(self, media, prompts, context=None):
        return {"red": media[:, 0].flatten(1).mean(1)}


def test_what_the_image_reward_needs_reads_and_refuses_the_video_reward_does_too():
    reward = video(Picky())
    assert (
        reward.needs == {"meta"}
        and reward.reads == {"k"}
        and reward.reads_prompt
        and reward.video == "yes"
        and reward.differentiable
    )
    assert reward.complaint({"k": 1}) == "is odd" and not video().differentiable
    reward.expect(["a", "b"])
    assert reward.inner.expected == ["a", "b"]
    out = rewards.score(
        clips([0.25, 0.75]), ["a"], {"v": {"reward": reward}}, MediaContext(meta=[{"k": 0}])
    )
    assert out.total.tolist() == [0.5]


def test_parts_of_the_image_reward_are_pooled_as_its_score():
    media = clips([0.2, 0.4, 0.9])
    media[:, :, 0] = torch.tensor([0.6, 0.1, 0.2])[None, :, None, None]
    assert video(Picky(), pool="min").parts(media, ["a"])["red"].tolist() == pytest.approx([0.1])
    assert video(Picky()).parts(media, ["a"])["red"].tolist() == pytest.approx([0.3])
    assert video(Picky()).parts(media[:, 0], ["a"])["red"].tolist() == pytest.approx([0.6])


def test_the_gradient_reaches_the_frames_that_were_scored():
    media = torch.rand(2, 6, 3, 4, 4, requires_grad=True)
    video(Picky(), frames=2)(media, ["a", "a"]).sum().backward()
    assert (media.grad[:, [0, 5]] == 1 / (2 * 48)).all() and not media.grad[:, 1:5].any()


def test_a_win_rate_may_judge_videos_by_an_image_reward():
    reward = rewards.load(
        "win_rate", judge="video", judge_settings={"reward": brightness, "pool": "min"}
    )
    out = reward(
        clips([0.9, 0.1], [0.4, 0.4], [0.3, 0.3]),
        ["a"] * 3,
        MediaContext(group=torch.zeros(3, dtype=torch.int64)),
    )
    assert out.tolist() == [0.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "video works on another reward: set reward.video.reward"),
        (
            {"reward": "rank", "reward_settings": {"reward": "jpeg"}},
            '"rank" does not score single pictures; put it outside',
        ),
        ({"reward": "reference"}, '"reference" does not score single pictures'),
        (
            {"reward": "reference", "reward_settings": {"key": None}},
            '"reference" does not score single pictures',
        ),
        ({"reward": "motion_smoothness"}, '"motion_smoothness" does not score single pictures'),
        ({"reward": "jpeg", "frames": 0}, "frames=0"),
        ({"reward": "jpeg", "pool": "median"}, "pool='median'"),
    ],
)
def test_video_settings_that_cannot_work_are_one_sentence(settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("video", **settings)


# --- motion smoothness


def smooth(media, **settings):
    return rewards.load("motion_smoothness", **settings)(media, ["a"] * len(media))


def moving(frames=8, side=32, speed=1.0, width=4.0):
    """A Gaussian blob that crosses the picture, (1, F, 3, side, side)."""
    x = torch.arange(side, dtype=torch.float32)
    centre = side / 4 + speed * torch.arange(frames)
    line = (-((x[None] - centre[:, None]) ** 2) / (2 * width**2)).exp()
    return line[None, :, None, None].expand(1, frames, 3, side, side).contiguous()


def test_smoothness_of_three_frames_by_hand():
    """0.1, 0.3, 0.6: steps 0.2 and 0.3, m = 0.25, e = |0.3 - 0.35| = 0.05."""
    media = clips([0.1, 0.3, 0.6])
    assert smooth(media, floor=0.05).item() == pytest.approx((0.25 - 0.05) / (0.25 + 0.05))
    assert smooth(media, measure="interpolation", floor=0).item() == pytest.approx(0.95)
    assert smooth(media, measure="interpolation", floor=0.05).item() == pytest.approx(
        0.95 * 0.25 / 0.30
    )
    parts = rewards.load("motion_smoothness").parts(media, ["a"])
    assert parts["dynamic"].item() == pytest.approx(0.25) and parts[
        "error"
    ].item() == pytest.approx(0.05)


def test_a_steady_change_is_smooth_and_one_that_is_undone_is_not():
    fade, flicker = clips([0.0, 0.2, 0.4, 0.6, 0.8]), clips([0.2, 0.4, 0.2, 0.4, 0.2])
    assert smooth(fade, floor=1e-6).item() == pytest.approx(1.0, abs=1e-4)
    assert smooth(flicker, floor=1e-6).item() == pytest.approx(0.0, abs=1e-6)


def test_independent_noise_has_the_smoothness_of_its_closed_form():
    """Steps have deviation sqrt(2), second differences sqrt(6): e / m = sqrt(6) / 2 / sqrt(2) =
    sqrt(3) / 2."""
    noise = 0.5 + 0.05 * torch.randn(1, 40, 3, 32, 32)
    assert smooth(noise, floor=1e-6).item() == pytest.approx(1 - math.sqrt(3) / 2, abs=2e-3)


def test_a_frozen_video_is_not_rewarded_unless_one_asks_for_vbenchs_reading():
    frozen = torch.rand(2, 1, 3, 8, 8).expand(2, 6, 3, 8, 8)
    assert smooth(frozen).tolist() == [0.0, 0.0] and smooth(
        frozen, measure="interpolation"
    ).tolist() == [0.0, 0.0]
    assert smooth(frozen, measure="interpolation", floor=0).tolist() == [1.0, 1.0]
    assert (
        dynamic_degree(frozen).tolist() == [0.0, 0.0]
        and dynamic_degree(clips([0.0, 0.5, 0.0])).item() == 0.5
    )


def test_shuffled_frames_score_lower_and_reversed_ones_the_same():
    media = moving()
    shuffled = media[:, [3, 0, 6, 1, 7, 2, 5, 4]]
    assert smooth(media).item() > 0.6 and smooth(shuffled).item() < 0.3
    assert smooth(media.flip(1)).item() == pytest.approx(smooth(media).item(), abs=1e-6)
    jittered = media.clone()
    jittered[:, 4] = media[:, 2]  # one frame out of order
    assert smooth(jittered).item() < smooth(media).item() - 0.1


def test_motion_below_the_floor_is_paid_in_proportion():
    slow = clips([0.5, 0.5 + 1 / 255, 0.5 + 2 / 255])
    assert smooth(slow, floor=1 / 255).item() == pytest.approx(0.5, abs=1e-4) and smooth(
        slow, floor=9 / 255
    ).item() == pytest.approx(0.1, abs=1e-4)


def test_a_sharp_edge_that_moves_two_pixels_a_frame_is_not_smooth():
    """A pixel flips in one step."""
    at = torch.cat([torch.full((2,), 8), torch.arange(8, 25, 2), torch.full((2,), 24)])
    line = (torch.arange(32)[None] < at[:, None]).float()
    media = line[None, :, None, None].expand(1, len(at), 3, 32, 32)
    assert smooth(media, floor=1e-9).item() == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_of_smoothness_is_that_of_finite_differences():
    reward = rewards.load("motion_smoothness")
    x, direction = (
        torch.rand(2, 5, 3, 4, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 5, 3, 4, 4, dtype=torch.float64),
    )
    slope = (torch.autograd.grad(reward(x, ["", ""]).sum(), x)[0] * direction).sum()
    with torch.no_grad():
        numeric = (
            reward(x + 1e-6 * direction, ["", ""]) - reward(x - 1e-6 * direction, ["", ""])
        ).sum() / 2e-6
    assert (
        reward.differentiable and slope.abs() > 1e-3 and torch.allclose(slope, numeric, rtol=1e-5)
    )


@pytest.mark.parametrize(
    ("settings", "shape", "said"),
    [
        ({}, (1, 2, 3, 8, 8), "looks at a frame and its two neighbours; the videos have 2 frames"),
        (
            {"floor": 0},
            None,
            "measure=relative divides by the motion, so a still needs floor above 0",
        ),
        ({"measure": "flow"}, None, "measure='flow'"),
    ],
)
def test_what_smoothness_cannot_measure_is_one_sentence(settings, shape, said):
    with pytest.raises(ValueError, match=said):
        smooth(torch.rand(shape or (1, 4, 3, 8, 8)), **settings)


def test_smoothness_is_of_videos_only():
    with pytest.raises(ValueError, match='reward "m" takes videos, and the media are images'):
        rewards.score(torch.rand(2, 3, 8, 8), ["", ""], {"m": {"name": "motion_smoothness"}})
