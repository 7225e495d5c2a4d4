"""The reward's own noise, and what is said before a run and in it: scores that differ by less
within a group teach noise."""

import math

import pytest
import small
import torch
from planted import SHAPES, brightness, check, planted

from flowrl import rewards
from flowrl.advantages import group_relative
from flowrl.rewards import RewardBug
from flowrl.rewards.checks import check as reward_checks
from flowrl.rewards.checks import examples
from flowrl.training import loop
from flowrl.types import MediaContext


@pytest.fixture(scope="module")
def pictures():
    return examples.shapes(4)


def last_bits(media, prompts, context):
    return torch.sin(1e4 * media.flatten(1).sum(1))


# --- noise


def media_of(pictures):
    return (
        torch.stack([s.media for s in pictures]),
        [s.prompt for s in pictures],
        MediaContext(meta=[s.meta for s in pictures]),
    )


def test_noise_is_in_units_of_the_score_and_small_for_a_smooth_reward(pictures):
    media, prompts, context = media_of(pictures)
    one, hundred = (
        reward_checks.noise(
            planted(lambda m, p, c, k=k: k * brightness(m)), media, prompts, context
        )
        for k in (1, 100)
    )
    assert (
        hundred == pytest.approx(100 * one, rel=1e-3) and 1e-5 < one < 5e-3
    )  # half a percent of brightness is .005 at most
    assert reward_checks.noise(SHAPES, media, prompts, context) == 0.0


def test_a_reward_of_the_last_bits_is_nothing_but_noise(pictures):
    finding = check(planted(last_bits), pictures)["noise"]
    assert (
        finding.verdict == "warn" and 0.4 < finding.value < 1.6
    )  # the difference of two unrelated sines: 1


def test_a_shift_that_all_share_is_no_noise():
    seen = []
    jumpy = planted(lambda m, p, c: seen.append(1) or torch.full((len(m),), float(len(seen))))
    assert (
        reward_checks.noise(jumpy, torch.full((4, 3, 8, 8), 0.6), [""] * 4) == 0.0
        and len(seen) == 4
    )


def test_noise_of_one_pixel_has_the_deviation_that_it_is_drawn_with():
    """Grey 128: JPEG leaves it; dither moves it by -1, 0 or 1 level, variance 2/3; brightness by -1
    or 1, variance 1."""
    media = torch.full((800, 3, 1, 1), 128 / 255)
    expected = math.sqrt((0 + 2 / 3 + 1) / 3)
    assert reward_checks.noise(
        planted(lambda m, p, c: 255 * m[:, 0, 0, 0]), media, [""] * 800
    ) == pytest.approx(expected, rel=0.05)


# --- spread


def test_spread_within_groups_by_hand():
    """Groups (0, 2): variance 2; (1, 1): none, left out; (0, nan, 4): variance 8; (7,): alone. Root
    of (2 + 8) / 2."""
    scores = torch.tensor([0.0, 2.0, 1.0, 1.0, 0.0, math.nan, 4.0, 7.0])
    group = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3])
    assert reward_checks.group_spread(scores, group) == pytest.approx(math.sqrt(5))
    assert reward_checks.group_spread(torch.ones(4), torch.tensor([0, 0, 1, 1])) == 0.0


def test_the_warning_comes_below_the_noise_only_and_states_the_correlation():
    assert (
        reward_checks.spread_warning("clip", 0.02, 0.03) is None
        and reward_checks.spread_warning("jpeg", 0.0, 0.0) is None
    )
    sentence = reward_checks.spread_warning("clip", 0.02, 0.016)
    assert (
        sentence.startswith('reward "clip": scores within a group differ by 0.016')
        and "correlate by about 0.47" in sentence
    )
    assert "correlate by about 0.00" in reward_checks.spread_warning("clip", 0.02, 0.002)
    assert "correlate by about 0.00" in reward_checks.spread_warning("clip", 0.02, 0.0)


@pytest.mark.parametrize(
    ("spread", "low", "high"),
    [(0.1, 0.085, 0.1), (0.5, 0.40, 0.46), (1.0, 0.66, 0.72), (10.0, 0.99, 1.0)],
)
def test_advantages_of_a_spread_below_the_noise_are_mostly_noise(spread, low, high):
    """Groups of 8, z-scored: correlation of the advantages that are trained on with those of scores
    without noise."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(40_000) // 8
    truth = spread * torch.randn(40_000, generator=generator)
    seen = truth + torch.randn(40_000, generator=generator)
    both = torch.stack(
        [group_relative(r, group, std="group", eps=1e-8, clip=100.0) for r in (truth, seen)]
    )
    correlation = float(torch.corrcoef(both)[0, 1])
    assert low < correlation < high and correlation == pytest.approx(
        spread / math.hypot(spread, 1), rel=0.1
    )


@pytest.mark.parametrize("true", [0.2, 0.5, 0.9])
def test_the_correlation_that_is_warned_of_is_the_one_there_is(true):
    """Scores whose noise has deviation 1: what a run sees is their spread, and the change between
    two scorings of one picture."""
    generator = torch.Generator().manual_seed(0)
    truth = true * torch.randn(200_000, generator=generator)
    once, again = (truth + torch.randn(200_000, generator=generator) for _ in range(2))
    sentence = reward_checks.spread_warning("clip", float((again - once).std()), float(once.std()))
    stated = float(sentence.split("correlate by about ")[1].split(" ")[0])
    assert stated == pytest.approx(
        float(torch.corrcoef(torch.stack([truth, once]))[0, 1]), abs=0.03
    )


# --- before training


def before(spec, pictures):
    """What is said of the first chunk of a run: two groups of four, each the picture of the prompt
    and three near misses."""
    members = [
        (s, media)
        for s in pictures[:2]
        for media in (s.media, *(miss.media for miss in s.near_misses[:3]))
    ]
    context = MediaContext(meta=[s.meta for s, _ in members], group=torch.tensor([0] * 4 + [1] * 4))
    media, prompts = torch.stack([m for _, m in members]), [s.prompt for s, _ in members]
    return reward_checks.before_training(rewards.load_set(spec), media, prompts, context)


def test_good_rewards_are_passed_over_in_silence(pictures):
    said, noise = before(
        {"jpeg": 1.0, "shapes": 1.0, "rank": rewards.load("rank", reward=SHAPES)}, pictures
    )
    assert (
        said == []
        and noise.keys() == {"jpeg", "shapes", "rank"}
        and noise["jpeg"] > 0 == noise["shapes"]
    )


def test_a_reward_normalised_by_its_batch_stops_the_run(pictures):
    with pytest.raises(
        RewardBug,
        match=(
            'reward "mine": a score changes by up to .* alone: it depends on the rest of the batch'
        ),
    ):
        before({"mine": planted(lambda m, p, c: brightness(m) - brightness(m).mean())}, pictures)


def test_a_reward_that_leaves_its_declared_range_stops_the_run(pictures):
    with pytest.raises(
        RewardBug,
        match='reward "mine": it declares a range of 0 to 0.5, and . of 8 scores are outside',
    ):
        before({"mine": planted(brightness, range=(0.0, 0.5))}, pictures)


def test_a_reward_that_draws_is_warned_of(pictures):
    said, _ = before(
        {"dice": planted(lambda m, p, c: brightness(m) + torch.rand(len(m)))}, pictures
    )
    assert said[0].startswith('reward "dice": two equal calls differ by up to')


def test_scores_within_a_group_that_differ_by_less_than_the_noise_are_warned_of():
    scored, group = (
        {
            "bits": torch.linspace(0, 0.01, 16),
            "jpeg": torch.linspace(0, 0.01, 16),
        },
        torch.arange(16) // 8,
    )
    said = reward_checks.below_noise({"bits": 1.0, "jpeg": 1e-3}, scored, group)
    assert said.keys() == {"bits"} and said["bits"].startswith(
        'reward "bits": scores within a group differ by 0.00163'
    )
    assert "correlate by about 0.00" in said["bits"]


def test_a_reward_that_is_only_measured_is_not_asked(pictures):
    calls = []
    watched = planted(lambda m, p, c: calls.append(len(m)) or torch.rand(len(m)))
    said, noise = before({"jpeg": 1.0, "dice": {"reward": watched, "weight": 0}}, pictures)
    assert said == [] and noise.keys() == {"jpeg"} and calls == []


def none_of(media, prompts, context):
    return torch.full((len(media),), math.nan)


def too_short(media, prompts, context):
    raise ValueError("give at least 3 frames")


@pytest.mark.parametrize(
    ("reward", "why"),
    [(none_of, "NaN or inf for 8 of 8 samples"), (too_short, "ValueError: give at least 3 frames")],
)
def test_a_reward_that_can_score_none_of_the_first_samples_stops_the_run(reward, why, pictures):
    with pytest.raises(RewardBug, match=f'"none": 8 of 8 could not be scored; {why}.*=false if'):
        before({"jpeg": 1.0, "none": planted(reward)}, pictures)


def test_members_that_are_alone_in_the_chunk_are_left_out_for_a_reward_that_compares(pictures):
    media, prompts, context = media_of(pictures)
    one_each = MediaContext(meta=context.meta, group=torch.arange(4))
    ranks = rewards.load_set({"rank": rewards.load("rank", reward="jpeg")})
    assert reward_checks.before_training(ranks, media, prompts, one_each) == ([], {})


# --- in a run


def test_a_reward_that_no_run_can_train_on_is_refused_before_any_evaluation(tmp_path):
    scored = []

    def centred(media, prompts, context):
        scored.append(len(media))
        return brightness(media) - brightness(media).mean()

    made = small.trainer(
        tmp_path / "run",
        batch__group="4",
        guard__check_rewards="true",
        eval__baseline_guidance="2.0",
    )
    small.use_rewards(made, rewards.load_set({"centred": centred}))
    with pytest.raises(
        RewardBug,
        match='reward "centred": a score changes by up to .*: it depends on the rest of the batch',
    ):
        made.run()
    # two groups of four, and single ones; held-out images come in fours
    assert set(scored) == {8, 1}
    files = {"config.yaml", "environment.json", "history.jsonl", "run.lock"}
    assert {p.name for p in made.path.iterdir()} == files


def test_trying_the_rewards_changes_no_number_of_a_run(tmp_path):
    for name in ("true", "false"):
        small.trainer(tmp_path / name, iterations="1", guard__check_rewards=name).run()
    tried, untried = tmp_path / "true", tmp_path / "false"
    assert small.same(tried, untried) and small.lines(tried)[0]["nfe/rollout"] == 4 * 4
    assert small.values(tried, "before") == small.values(untried, "before")


def test_the_samples_that_rewards_are_tried_on_are_the_runs_first(tmp_path):
    seen = []
    made = small.trainer(
        tmp_path / "run", data__eval="null", iterations="1", guard__check_rewards="true"
    )
    spy = planted(
        lambda m, p, c: seen.append((m.clone(), list(p), c.group.tolist())) or brightness(m)
    )
    small.use_rewards(made, rewards.load_set({"seen": spy}))
    list(made)
    (first, prompts, group), (trained, again, _) = seen[0], seen[-1]
    assert group == [0, 0, 1, 1] and prompts == again and torch.allclose(first, trained, atol=1e-5)


def test_a_motion_without_frames_enough_is_refused_by_a_dry_run(tmp_path):
    changes = dict.fromkeys(("model", "data", "reward"), "shapes_motion") | {"model": "shapes-wan"}
    changes |= {"model__pipeline__num_frames": "2", "guard__check_rewards": "true"}
    words = small.words(tmp_path / "run", **changes)
    result = small.invoke("train", *words, "--dry-run")
    text = " ".join(result.output.split())
    assert result.exit_code == 2 and not (tmp_path / "run" / "config.yaml").exists()
    assert "the pipeline makes num_frames=1, and was asked for num_frames=2" in text
    assert 'reward "shapes_motion": 4 of 4 could not be scored; ValueError: "' in text


def narrowing(factor):
    """Brightness, which training may lose (factor[0] = 0), and last bits worth 0.001."""
    return rewards.load_set(
        {"narrow": planted(lambda m, p, c: factor[0] * brightness(m) + 1e-3 * last_bits(m, p, c))}
    )


def test_a_spread_that_falls_below_the_noise_is_warned_of_once(tmp_path, caplog):
    factor = [1.0]
    made = small.trainer(
        tmp_path / "run",
        data__eval="null",
        batch__group="4",
        iterations="4",
        guard__check_rewards="true",
    )
    small.use_rewards(made, narrowing(factor))
    for it in made:
        assert caplog.text.count('reward "narrow": scores within a group differ by') == (
            it.number > 2
        )
        assert made.noise_watch.noise.keys() == ({"narrow"} if it.number < 3 else set())
        factor[0] = float(it.number < 2)


def test_the_noise_outlives_a_resume(tmp_path, caplog):
    factor = [1.0]
    made = small.trainer(
        tmp_path / "run",
        data__eval="null",
        batch__group="4",
        iterations="1",
        guard__check_rewards="true",
    )
    small.use_rewards(made, narrowing(factor))
    made.run()
    again = loop.Trainer(
        small.config(
            made.path,
            data__eval="null",
            batch__group="4",
            iterations="3",
            guard__check_rewards="true",
        ),
        resume=made.path,
    )
    assert (
        again.noise_watch.noise == made.noise_watch.noise
        and 2e-4 < again.noise_watch.noise["narrow"] < 1e-2
    )
    small.use_rewards(again, narrowing(factor))
    factor[0] = 0.0
    list(again)
    assert caplog.text.count('reward "narrow": scores within a group differ by') == 1


def test_groups_that_are_all_flat_do_not_use_up_the_warning():
    group = torch.tensor([0, 0, 1, 1])
    assert (
        reward_checks.below_noise({"a": 0.05}, {"a": torch.tensor([1.0, 1.0, 0.0, 0.0])}, group)
        == {}
    )
    assert list(
        reward_checks.below_noise({"a": 0.05}, {"a": torch.tensor([0.5, 0.501, 0.2, 0.201])}, group)
    ) == ["a"]
