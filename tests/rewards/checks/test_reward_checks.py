"""Reward checks: each finds the reward that was planted for it, and leaves good rewards alone."""

import math
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from planted import SHAPES, brightness, check, planted, tried

import flowrl
from flowrl import rewards
from flowrl.rewards.checks import check as reward_checks
from flowrl.rewards.checks import contract, examples
from flowrl.rewards.checks.attacks import attacked, videos
from flowrl.rewards.checks.subject import Subject
from flowrl.runtime.terminal import Terminal


@pytest.fixture(scope="module")
def pictures():
    return examples.shapes(8)


@pytest.fixture(scope="module")
def moving():
    return examples.shapes(2, frames=4)


# --- good rewards


def test_the_strict_verifier_of_shapes_passes_everything(pictures):
    found = check(rewards.load("shapes", reading="strict"), pictures)
    assert not reward_checks.failed(found.values())
    assert {name for name, f in found.items() if f.verdict == "warn"} <= {"videos"}
    for attribute in ("colour", "shape", "count", "relation", "swap"):
        assert found[f"right prompt, {attribute}"].value == 1.0
    assert (
        found["right picture"].value
        == found["prompt-swap matrix"].value
        == found["false positives and negatives"].value
        == 1.0
    )
    assert found["noise"].value == found["mirror image"].value == found["batch mates"].value == 0.0


def test_jpeg_is_warned_of_blank_pictures_by_design_and_fails_nothing(pictures):
    found = check(rewards.load("jpeg"), pictures)
    assert not reward_checks.failed(found.values())
    assert {name for name, f in found.items() if f.verdict == "warn"} == {
        "attack: white",
        "attack: black",
        "attack: blurred",
    }
    white = found["attack: white"].value
    honest = Subject(rewards.load("jpeg"), pictures, "cpu").honest.median()
    assert white > float(honest) and f"{white:.3g}" in found["attack: white"].says
    assert found["right prompt"].verdict == "note" and "right picture" not in found


def test_a_cheap_check_scores_at_most_eight_samples_some_six_times(pictures):
    """Samples of training, of which nothing is known."""
    scored, unknown = [], [replace(s, near_misses=()) for s in pictures * 2]
    watched = planted(lambda m, p, c: scored.append(len(m)) or brightness(m))
    found = check(watched, unknown, cheap=True)
    assert list(found) == ["contract", "determinism", "batch mates", "noise"]
    assert sum(scored) == 3 * 8 + 3 + 3 * 8


def test_a_reward_that_remembers_what_it_said_is_asked_anew(pictures):
    """Chance behind a store of earlier scores, as a run's journal is one, would seem to repeat
    itself."""

    class Remembering(rewards.Reward):
        name, store, asleep = "dice", {}, False

        def __call__(self, media, prompts, context=None):
            store = {} if self.asleep else self.store
            return torch.stack(
                [store.setdefault(float(m.double().sum()), torch.rand(())) for m in media]
            )

        @contextmanager
        def uncached(self):
            self.asleep = True
            yield
            self.asleep = False

    reward = Remembering()
    media, prompts = torch.stack([p.media for p in pictures]), [p.prompt for p in pictures]
    assert torch.equal(reward(media, prompts), reward(media, prompts))
    found = check(reward, pictures)
    assert found["determinism"].verdict == "fail" and not reward.asleep


def test_a_plain_function_can_be_checked(pictures):
    found = check(brightness, pictures)
    assert found["determinism"].verdict == "ok" and found["attack: white"].verdict == "warn"


# --- contract, determinism, batch mates


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, p, c: brightness(m).double(), "a float64 tensor"),
        (lambda m, p, c: brightness(m)[:, None], r"shape \(8, 1\)"),
        (lambda m, p, c: brightness(m).tolist(), "list"),
        (lambda m, p, c: brightness(m).to("meta"), "on meta"),
    ],
)
def test_a_broken_contract_fails_and_nothing_else_is_asked(pictures, function, said):
    (finding,) = reward_checks.check(planted(function), pictures)
    assert (
        finding.verdict == "fail"
        and re.search(said, finding.says)
        and reward_checks.failed([finding])
    )


def test_scores_outside_the_declared_range_break_the_contract(pictures):
    @flowrl.reward(range=(0.0, 1.0))
    def of_bytes(media, prompts, context=None):
        return 255 * brightness(media)

    (finding,) = reward_checks.check(of_bytes, pictures)
    assert (
        finding.verdict == "fail"
        and "declares a range of 0 to 1, and 8 of 8 scores are outside" in finding.says
    )
    assert check(planted(brightness, range=(0.0, math.inf)), pictures)["range"].verdict == "ok"
    assert "range" not in check(planted(brightness), pictures)


def test_a_range_that_only_attacks_leave_is_found_and_rounding_leaves_none(pictures):
    most = float(brightness(torch.stack([s.media for s in pictures])).max())
    finding = check(planted(brightness, range=(0.0, most + 0.01)), pictures)["range"]  # white is 1
    assert finding.verdict == "fail" and "scores are outside" in finding.says
    assert (
        check(planted(lambda m, p, c: brightness(m) * (1 + 1e-6), range=(0.0, 1.0)), pictures)[
            "range"
        ].verdict
        == "ok"
    )


def test_samples_that_cannot_be_scored_are_counted_and_none_at_all_fails(pictures):
    (some,) = tried(
        contract.contract,
        planted(lambda m, p, c: torch.tensor([math.nan, math.inf] + [1.0] * 6)),
        pictures,
    )
    assert (some.verdict, some.value) == ("warn", 2.0) and "2 of 8" in some.says

    def broken(m, p, c):
        raise OSError("no weights")

    (none,) = reward_checks.check(planted(broken), pictures)
    assert none.verdict == "fail" and "8 of 8" in none.says and "no weights" in none.says


def test_a_reward_that_draws_is_not_deterministic(pictures):
    found = check(
        planted(lambda m, p, c: brightness(m) + 0.1 * torch.rand(len(m))), pictures, cheap=True
    )
    assert found["determinism"].verdict == "fail" and 0.01 < found["determinism"].value < 0.1
    assert found["batch mates"].verdict == "note"


def test_differences_of_a_rounding_are_none(pictures):
    found = check(
        planted(lambda m, p, c: brightness(m) * (1 + 1e-6 * torch.rand(()))), pictures, cheap=True
    )
    assert found["determinism"].verdict == found["batch mates"].verdict == "ok"


@pytest.mark.parametrize(
    "function",
    [lambda v: v - v.mean(), lambda v: v / v.amax(), lambda v: v.argsort().argsort().float()],
)
def test_a_reward_that_is_normalised_by_its_batch_fails(pictures, function):
    *_, finding = reward_checks.check(planted(lambda m, p, c: function(brightness(m))), pictures)
    assert (
        finding.name == "batch mates" and finding.verdict == "fail" and "alone" in finding.says
    )  # other answers would mean little


def test_a_reward_that_depends_on_the_place_in_the_batch_fails(pictures):
    finding = check(
        planted(lambda m, p, c: brightness(m) + 0.1 * torch.arange(len(m))), pictures, cheap=True
    )["batch mates"]
    assert finding.verdict == "fail" and "in another order" in finding.says


def test_a_reward_that_fails_for_single_samples_fails(pictures):
    finding = check(
        planted(lambda m, p, c: brightness(m) / float(len(m) > 1)), pictures, cheap=True
    )["batch mates"]
    assert (
        finding.verdict == "fail"
        and finding.value == math.inf
        and "is there or not" in finding.says
    )


def test_a_picture_reward_that_breaks_on_videos_is_told_to_say_so(pictures):
    (bug,) = tried(videos, planted(lambda m, p, c: m.mean((1, 2, 3))), pictures)
    assert bug.verdict == "warn" and 'video = "no"' in bug.says and "shape (2, 64)" in bug.says
    assert tried(videos, planted(brightness), pictures)[0].verdict == "ok"
    assert tried(videos, planted(brightness, video="no"), pictures) == []


# --- spread and gradient


def test_a_constant_reward_fails_and_one_that_only_tells_near_misses_apart_does_not(pictures):
    constant = check(planted(lambda m, p, c: torch.full((len(m),), 0.3)), pictures)["spread"]
    assert constant.verdict == "fail" and "scores are 0.3" in constant.says
    assert check(rewards.load("shapes", reading="strict"), pictures[:2])["spread"].verdict == "ok"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda m, p, c: brightness(m.detach()), "does not come: RuntimeError"),
        (lambda m, p, c: brightness(m.detach()) + 0 * brightness(m), "is 0 for 2 of 2 samples"),
        (lambda m, p, c: brightness(m) * torch.arange(len(m)), "is 0 for 1 of 2 samples"),
        (lambda m, p, c: brightness((m - m.detach()).sqrt()), "are NaN or inf"),
        (lambda m, p, c: brightness(2 * m - m.detach()), "relative difference"),  # twice the truth
        (
            lambda m, p, c: brightness(m) + brightness(m.detach().square()),
            "relative difference",
        ),  # a part is missing
    ],
)
def test_a_gradient_that_is_declared_but_blocked_or_wrong_fails(pictures, function, said):
    (finding,) = tried(contract.gradient, planted(function, differentiable=True), pictures)
    assert finding.verdict == "fail" and said in finding.says


def test_a_true_gradient_agrees_with_a_finite_difference(pictures, moving):
    smooth = planted(
        lambda m, p, c: (m.square().flatten(1).mean(1) - 0.3).tanh(), differentiable=True
    )
    (finding,) = tried(contract.gradient, smooth, pictures)
    assert finding.verdict == "ok" and finding.value < 0.01
    assert tried(contract.gradient, rewards.load("sharpness"), pictures)[0].value < 0.01
    assert tried(contract.gradient, rewards.load("motion_smoothness"), moving)[0].verdict == "ok"


def test_a_gradient_lost_in_the_rounding_of_scores_and_one_that_is_not_declared_are_notes(pictures):
    (flat,) = tried(
        contract.gradient,
        planted(lambda m, p, c: 1e4 + 1e-3 * brightness(m), differentiable=True),
        pictures,
    )
    assert flat.verdict == "note" and "too flat" in flat.says
    assert tried(contract.gradient, planted(brightness), pictures)[0].verdict == "note"


# --- replies of a judge


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [(lambda text: math.nan, "ok"), (lambda text: 0.0 if text.strip() else math.nan, "fail")],
)
def test_a_reply_that_says_nothing_must_not_be_a_score(pictures, answer, verdict):
    (finding,) = tried(contract.replies, planted(brightness, read_reply=answer), pictures)
    assert finding.verdict == verdict
    if verdict == "fail":
        assert "5 of 8 replies" in finding.says and "'.' is 0" in finding.says


class Talkative:
    """A judge of pairs that takes every reply for a tie."""

    def compare(self, media_a, media_b, prompts, context=None):
        return (brightness(media_a) > brightness(media_b)).float()

    def read_reply(self, text):
        return 0.5


def test_a_judge_of_pairs_is_asked_for_replies_that_say_nothing_through_the_win_rate(pictures):
    found = check(rewards.load("win_rate", judge=Talkative()), pictures[:2])["replies"]
    assert (
        found.verdict == "fail"
        and "8 of 8 replies that say nothing are scores: '' is 0.5" in found.says
    )


def test_a_reward_without_replies_is_not_asked_for_them(pictures):
    assert tried(contract.replies, planted(brightness), pictures) == []


# --- rewards that compare the members of a group


def test_ranks_by_a_good_reward_pass_and_by_a_bad_one_are_warned_of(pictures):
    good = check(rewards.load("rank", reward=SHAPES), pictures[:3])
    assert {f.verdict for f in good.values()} <= {"ok", "note"} and good[
        "right picture, colour"
    ].value == 1.0
    bad = check(rewards.load("rank", reward=planted(brightness)), pictures)
    assert (
        bad["attack: white"].verdict == "warn"
        and bad["attack: white"].value == 1.0
        and bad["batch mates"].verdict == "ok"
    )


def test_a_group_reward_that_looks_at_other_groups_fails(pictures):
    leaky = planted(lambda m, p, c: brightness(m) / brightness(m).sum(), needs=frozenset({"group"}))
    finding = check(leaky, pictures)["batch mates"]
    assert finding.verdict == "fail" and "without other groups" in finding.says


# --- noise and blank pictures above honest ones


def flatness(media, prompts=None, context=None):
    """Highest for a blank picture."""
    return -media.flatten(1).std(1)


def test_a_reward_of_quality_fails_on_blank_pictures_above_honest_ones_and_any_other_is_warned(
    pictures,
):
    for quality, verdict in ((True, "fail"), (False, "warn")):
        reward = flowrl.reward(quality=quality)(
            lambda media, prompts, context=None: flatness(media)
        )
        found = check(reward, pictures)
        assert found["attack: white"].verdict == found["attack: black"].verdict == verdict
        assert (
            found["attack: noise"].verdict == "ok" and found["attack: blurred"].verdict == "warn"
        )  # softer, and no blank
        assert reward_checks.failed(found.values()) == quality


def test_noise_above_honest_pictures_fails_a_reward_of_quality_and_what_is_made_of_it(pictures):
    rough = planted(lambda m, p, c: m.diff(dim=-1).abs().flatten(1).mean(1), quality=True)
    assert {f.name: f.verdict for f in tried(attacked, rough, pictures)}["attack: noise"] == "fail"
    for wrapped in (rewards.load("rank", reward=rough), rewards.load("video", reward=rough)):
        assert check(wrapped, pictures[:2])["attack: noise"].verdict == "fail"
    assert rewards.load("preference").quality


# --- what is shown


def test_one_example_is_too_few(pictures):
    with pytest.raises(
        ValueError, match="1 examples: a reward is compared over pictures; give at least 2"
    ):
        reward_checks.check(SHAPES, pictures[:1])


def test_the_table_shows_every_finding():
    findings = [
        reward_checks.Finding(name="contract", verdict="ok", value=8.0, says="8 numbers"),
        reward_checks.Finding(name="right prompt, [x]", verdict="fail", says="[not markup]"),
    ]
    console = Terminal(width=120)
    with console.capture() as captured:
        console.print(reward_checks.table(findings))
    shown = captured.get()
    assert all(
        word in shown
        for word in ("contract", "ok", "8 numbers", "right prompt, [x]", "fail", "[not markup]")
    )
    assert reward_checks.failed(findings) and not reward_checks.failed(findings[:1])


def test_a_rounding_below_the_end_of_its_range_is_not_outside():
    reward = planted(lambda m, p, c: torch.full((len(m),), -1e-9) + torch.arange(len(m)) * 1e-12)
    reward.range = (0.0, 1.0)
    assert check(reward, examples.shapes(2))["contract"].verdict == "ok"
