"""The reward ensemble: the worst member, the mean less the spread, what it takes from members."""

import math
import re

import pytest
import torch

from flowrl import rewards
from flowrl.rewards import Reward, load
from flowrl.types import MediaContext

MEDIA = torch.tensor([[1.0, 4.0], [3.0, 3.0], [5.0, -2.0]])  # two members' values of 3 samples
NAMES = ["x"] * 3


def column(i):
    return lambda media, *_: media[:, i]


def two(**settings):
    return load("ensemble", members={"a": column(0), "b": {"reward": column(1)}}, **settings)


def test_min_is_the_worst_member_on_the_scale_that_they_share():
    """(b - 2) / 2 is 1, 0.5, -2."""
    assert two()(MEDIA, NAMES).tolist() == [1, 3, -2]
    scaled = two(shift={"b": 2}, scale={"b": 2})
    assert scaled(MEDIA, NAMES).tolist() == [1, 0.5, -2]


def test_spread_is_the_mean_less_k_population_deviations():
    """Means 2.5, 3, 1.5; deviations 1.5, 0, 3.5."""
    assert two(how="spread", k=2)(MEDIA, NAMES).tolist() == [-0.5, 3, -5.5]
    assert two(how="spread", k=0)(MEDIA, NAMES).tolist() == [2.5, 3, 1.5]


@pytest.mark.parametrize("how", ["min", "spread"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_failed_member_makes_the_sample_fail(how, value):
    media = MEDIA.clone()
    media[1, 0] = value
    assert two(how=how)(media, NAMES).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("how", ["min", "spread"])
def test_the_gradient_is_that_of_the_members_and_finite_where_they_agree(how):
    media = MEDIA.clone().requires_grad_()
    two(how=how)(media, NAMES).sum().backward()
    assert bool(media.grad.isfinite().all())
    if how == "min":
        assert media.grad[[0, 2]].tolist() == [[1, 0], [0, 1]]
    else:
        assert media.grad[1].tolist() == [0.5, 0.5]


def test_evaluation_shows_each_members_own_value():
    chosen = rewards.load_set({"safe": two(scale={"a": 2})})
    found = rewards.readings(MEDIA, NAMES, chosen, MediaContext())
    assert found["safe/a"].tolist() == [1, 3, 5] and found["safe/b"].tolist() == [4, 3, -2]


class Spy(Reward):
    """Remembers what it is told."""

    name = "spy"
    reads_prompt = True
    needs = frozenset({"meta"})
    reads = frozenset({"word"})
    differentiable = True
    quality = True
    verifies = frozenset({"count", "word"})
    range = (0.0, 4.0)

    def __init__(self):
        super().__init__()
        self.heard, self.remembers = [], True

    def __call__(self, media, prompts, context=None):
        self.problem = "it rained"
        return media.flatten(1).mean(1)

    def complaint(self, meta):
        return None if meta["word"] else "is empty"

    def expect(self, prompts):
        self.heard.append(list(prompts))

    def begin(self, run):
        self.heard.append(run)

    def uncached(self):
        return rewards.core.reward.forgetful(self)

    def to(self, device):
        self.heard.append(device)
        return self


def test_it_needs_reads_and_passes_on_what_its_members_do(tmp_path):
    spy, plain = Spy(), Spy()
    plain.verifies, plain.differentiable, plain.range = frozenset({"word"}), False, (-1.0, 9.0)
    both = load("ensemble", members={"a": spy, "b": plain}, shift={"b": 1}, scale={"b": 2})
    assert both.needs == {"meta"} and both.reads == {"word"} and both.reads_prompt
    assert both.quality and both.verifies == {"word"} and not both.differentiable
    assert both.takes == "pictures" and both.range == (-1.0, 4.0)
    assert both.complaint({"word": ""}) == "is empty" and both.complaint({"word": "a"}) is None
    both.expect(["x"])
    both.begin(tmp_path)
    assert spy.heard == plain.heard == [["x"], tmp_path] and both.to("cpu") is both
    assert plain.heard[-1] == "cpu"
    with both.uncached():
        assert not spy.remembers and not plain.remembers
    assert spy.remembers and plain.remembers
    both(torch.zeros(1, 3, 2, 2), ["x"])
    assert both.problem == "it rained"


def test_a_video_reward_makes_it_one_and_an_image_reward_does_not_go_with_it():
    moving, still = Spy(), Spy()
    moving.video, still.video = "only", "no"
    assert load("ensemble", members={"a": moving, "b": Spy()}).video == "only"
    assert load("ensemble", members={"a": still, "b": Spy()}).video == "no"
    with pytest.raises(ValueError, match="still takes images alone and moving videos alone"):
        load("ensemble", members={"still": still, "moving": moving})


def test_members_by_name_score_as_they_do_alone():
    media = torch.rand(2, 3, 16, 16)
    members = {"jpeg": 1.0, "small": {"name": "jpeg", "quality": 20}}
    out = rewards.score(media, ["x"] * 2, {"safe": {"name": "ensemble", "members": members}})
    assert torch.equal(out.total, load("jpeg")(media, ["x"] * 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "compares two rewards or more, and members names 0; write reward.ensemble.members="),
        ({"members": {"jpeg": 1}}, "members names 1"),
        ({"members": {"jpeg": 0.5, "saturation": 1}}, "write members.jpeg=1.0, and scale.jpeg"),
        (
            {"members": {"jpeg": {"gate": {"x": 1}}, "saturation": 1}},
            "gate, stratify or mode",
        ),
        ({"members": {"jpg": 1, "saturation": 1}}, 'unknown reward "jpg"; did you mean "jpeg"'),
        ({"members": {"jpeg": {"q": 1}, "saturation": 1}}, 'member jpeg: unknown setting "q"'),
        ({"members": {"jpeg": 1, "saturation": 1}, "shift": {"jpg": 1}}, "shift.jpg is of no mem"),
        ({"members": {"jpeg": 1, "saturation": 1}, "scale": {"jpeg": 0}}, "should be greater than"),
        ({"members": {"jpeg": 1, "saturation": 1}, "k": -1}, "should be greater than or equal"),
    ],
)
def test_members_that_cannot_be_compared_are_one_sentence(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load("ensemble", **settings)
    assert "\n" not in str(error.value)
