"""The rewards win_rate and rank: failed answers, ties, groups, settings that cannot work."""

import contextlib
import math

import pytest
import torch
from comparisons import Judge, brightness, context, pictures, win_rate

import flowrl
from flowrl import rewards
from flowrl.rewards.judge.compare import win_rates

# --- win rates


def test_a_win_is_the_others_loss_and_a_failed_pair_is_nobodys():
    """Sample 0 beats 1, meets 2 at 0.25; pair (1, 2) failed: rates 1.25 / 2, 0 / 1, 0.75 / 1."""
    pairs = torch.tensor([[0, 1], [0, 2], [1, 2]])
    assert win_rates(pairs, torch.tensor([1.0, 0.25, math.nan]), 3).tolist() == [0.625, 0.0, 0.75]
    lost = win_rates(pairs, torch.tensor([math.nan, 0.25, math.nan]), 3)
    assert lost.isnan().tolist() == [False, True, False] and lost[[0, 2]].tolist() == [0.25, 0.75]


def test_a_strict_order_of_eight_gives_sevenths_and_ties_give_halves():
    values = torch.linspace(0, 1, 8)
    order = torch.randperm(8)
    out = win_rate()(pictures(*values[order].tolist()), ["a"] * 8, context(*[0] * 8))
    assert torch.allclose(out, order / 7)
    tied = win_rate()(pictures(0.5, 0.5, 0.25, 1.0), ["a"] * 4, context(0, 0, 0, 0))
    # (0.5 + 1 + 0) / 3 for the two that tie
    assert tied.tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.3}, {"opponents": 2}])
def test_the_rates_of_a_group_sum_to_half_its_size(settings):
    """Each pair hands out exactly one win.

    With sampled pairs only where all members met equally often: here 2 each.
    """
    media = torch.rand(12, 3, 4, 4)
    out = win_rate(**settings)(media, ["a"] * 6 + ["b"] * 6, context(*[0] * 6, *[1] * 6))
    assert torch.allclose(out.view(2, 6).sum(1), torch.tensor([3.0, 3.0]), atol=1e-6)


def test_win_rates_see_only_the_order_of_a_proxys_scores():
    media, group = torch.rand(10, 3, 4, 4), context(*[0] * 5, *[1] * 5)
    plain = win_rate()(media, ["a"] * 10, group)
    for transform in (lambda s: s.mul(20).exp(), lambda s: 1000 * s - 3, lambda s: s**3):
        assert torch.equal(
            plain,
            win_rate(lambda m, p, c, t=transform: t(brightness(m, p)))(media, ["a"] * 10, group),
        )
    assert not torch.equal(plain, win_rate(temperature=0.1)(media, ["a"] * 10, group))


def test_groups_do_not_touch_each_other_wherever_their_members_lie():
    media = torch.rand(6, 3, 4, 4)
    for settings in ({}, {"judge": Judge()}, {"judge": Judge(), "opponents": 1}):
        reward = win_rate(**settings)
        mixed = reward(media, ["a", "b", "a", "b", "a", "b"], context(0, 1, 0, 1, 0, 1))
        alone = reward(media[::2], ["a"] * 3, context(0, 0, 0))
        assert torch.equal(mixed[::2], alone)


def test_a_sample_that_no_judge_could_compare_is_invalid_and_the_others_are_not():
    media = pictures(0.1, 0.4, 0.6, 0.8)
    out = rewards.score(
        media, ["a"] * 4, {"w": {"reward": win_rate(Judge(blind=0.2))}}, context(0, 0, 0, 0)
    )
    assert out.valid.tolist() == [False, True, True, True]
    # e.g. 0.4 against 0.6 and 0.8: (0.45 + 0.40) / 2
    assert out.total[1:].tolist() == pytest.approx([0.425, 0.5, 0.575])
    failed = win_rate(
        lambda m, p, c: brightness(m, p).masked_fill(m.flatten(1).mean(1) < 0.2, math.nan)
    )
    assert failed(media, ["a"] * 4, context(0, 0, 0, 0)).isnan().tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_a_reward_that_can_compare_is_asked_for_pairs_and_its_needs_are_the_win_rates():
    class Both(rewards.Reward):
        name, scale, needs, reads, reads_prompt, video = (
            "both",
            "never called",
            frozenset({"source"}),
            frozenset({"k"}),
            True,
            "no",
        )
        compare = Judge().compare

        def complaint(self, meta):
            return "is odd" if meta["k"] else None

    reward = win_rate(Both())
    assert reward(pictures(0.2, 0.6), ["a", "a"], context(0, 0)).tolist() == pytest.approx(
        [0.4, 0.6]
    )
    assert reward.needs == {"group", "source"}
    assert reward.reads == {"k"}
    assert reward.reads_prompt
    assert reward.video == "no"
    assert reward.complaint({"k": 1}) == "is odd" and reward.complaint({"k": 0}) is None


def test_the_judge_moves_with_the_reward():
    moved = []

    class Moving(rewards.Reward):
        def to(self, device):
            moved.append(device)
            return self

    reward = win_rate(Moving())
    assert reward.to("meta") is reward and moved == ["meta"]


class Paid(rewards.Reward):
    """A reward with a store of answers and a reason why the last call failed."""

    name, scale = "paid", "brightness, NaN below 0.2"

    def __init__(self):
        super().__init__()
        self.run, self.fresh = None, False

    def __call__(self, media, prompts, context=None):
        values = brightness(media, prompts)
        self.problem = "sample 0: no credit" if bool((values < 0.2).any()) else None
        return values.masked_fill(values < 0.2, math.nan)

    def begin(self, run):
        self.run = run

    @contextlib.contextmanager
    def uncached(self):
        self.fresh = True
        yield
        self.fresh = False


@pytest.mark.parametrize(
    ("name", "setting"), [("win_rate", "judge"), ("rank", "reward"), ("video", "reward")]
)
def test_a_reward_around_another_hands_on_its_run_fresh_answers_and_the_reason_of_a_failure(
    name, setting, tmp_path
):
    inner = Paid()
    outer = rewards.load(name, **{setting: inner})
    outer.begin(tmp_path)
    with outer.uncached():
        assert inner.run == tmp_path and inner.fresh
    assert not inner.fresh
    scored = rewards.score(
        pictures(0.1, 0.4, 0.6), ["a"] * 3, {"r": {"reward": outer}}, context(0, 0, 0)
    )
    assert scored.errors == ["r: NaN or inf for 1 of 3 samples (sample 0: no credit)"]
    outer(pictures(0.4, 0.6), ["a"] * 2, context(0, 0))
    assert outer.problem is None


def test_a_comparator_that_is_no_reward_keeps_nothing(tmp_path):
    reward = win_rate(Judge())
    reward.begin(tmp_path)
    with reward.uncached():
        assert reward(pictures(0.2, 0.6), ["a", "a"], context(0, 0)).tolist() == pytest.approx(
            [0.4, 0.6]
        )
        assert reward.problem is None


def test_a_judge_may_be_named_with_its_settings_or_be_a_decorated_function():
    # the more contrast, the larger the file
    media = torch.rand(3, 3, 16, 16) * torch.tensor([1.0, 0.5, 0.1])[:, None, None, None]
    small = rewards.load("win_rate", judge="jpeg", judge_settings={"quality": 80})
    assert small(media, ["a"] * 3, context(0, 0, 0)).tolist() == [0.0, 0.5, 1.0]
    assert small.inner.settings.quality == 80

    @flowrl.reward(needs={"meta"})
    def mine(media, prompts, context=None, *, sign: int = -1):
        return sign * brightness(media, prompts)

    reward = rewards.load("win_rate", judge=mine)
    assert reward.needs == {"group", "meta"}
    assert reward(pictures(0.1, 0.9), ["a", "a"], context(0, 0)).tolist() == [1.0, 0.0]


# --- ranks


def test_rank_over_n_is_flow_factorys_reward_and_the_other_forms_are_what_they_say():
    media, group = pictures(0.3, 0.9, 0.1, 0.6), context(0, 0, 0, 0)
    out = {
        form: rewards.load("rank", reward=brightness, form=form)(media, ["a"] * 4, group)
        for form in ("flow_factory", "unit", "centred")
    }
    assert out["flow_factory"].tolist() == [0.25, 0.75, 0.0, 0.5]
    assert torch.equal(out["flow_factory"], brightness(media, []).argsort().argsort() / 4)
    assert out["unit"].tolist() == pytest.approx([1 / 3, 1.0, 0.0, 2 / 3])
    assert out["centred"].tolist() == pytest.approx([-1 / 3, 1.0, -1.0, 1 / 3])


def test_ties_share_their_mean_rank_so_that_their_place_in_the_batch_is_no_reward():
    reward = rewards.load("rank", reward=brightness)
    out = reward(pictures(0.5, 0.2, 0.5, 0.5), ["a"] * 4, context(0, 0, 0, 0))
    assert out.tolist() == [0.5, 0.0, 0.5, 0.5]  # ranks 1, 2, 3 -> 2, over 4
    assert rewards.load("rank", reward=brightness, form="centred")(
        pictures(0.5, 0.5), ["a"] * 2, context(0, 0)
    ).tolist() == [0.0, 0.0]


def test_unit_rank_is_the_win_rate_of_a_hard_pointwise_judge():
    media = (torch.rand(12, 3, 4, 4) * 3).round() / 3  # with ties
    media[1] = media[0]
    group = context(*[0, 1, 2] * 4)
    prompts = ["a", "b", "c"] * 4
    ranks = rewards.load("rank", reward=brightness, form="unit")(media, prompts, group)
    assert torch.allclose(ranks, win_rate()(media, prompts, group))


def test_a_sample_without_a_score_takes_no_rank_from_the_others():
    def blind(media, prompts, context):
        return brightness(media, prompts).masked_fill(brightness(media, prompts) < 0.2, math.nan)

    reward = rewards.load("rank", reward=blind)
    out = reward(pictures(0.1, 0.4, 0.3, 0.1, 0.9), ["a"] * 3 + ["b"] * 2, context(0, 0, 0, 1, 1))
    assert out[:3].isnan().tolist() == [True, False, False] and out[1:3].tolist() == [0.5, 0.0]
    assert out[3:].isnan().all()  # one score alone has no rank


# --- bad input


@pytest.mark.parametrize("name", ["win_rate", "rank"])
def test_what_is_left_alone_of_a_group_is_nan_with_the_reason_and_costs_only_itself(name):
    for proxy in (brightness, *([Judge()] if name == "win_rate" else [])):
        reward = rewards.load(name, **{"judge" if name == "win_rate" else "reward": proxy})
        out = reward(pictures(0.1, 0.2, 0.3), ["a"] * 3, context(2, 2, 4))
        assert out.isnan().tolist() == [False, False, True] and out[1] > out[0]
        assert reward.problem.startswith(
            "group 4 has one member to compare; sample at least two a prompt"
        )
        assert reward(pictures(0.3), ["a"], context(4)).isnan().tolist() == [True]
        scored = rewards.score(
            pictures(0.1, 0.2, 0.3), ["a"] * 3, {"r": {"reward": reward}}, context(2, 2, 4)
        )
        assert scored.valid.tolist() == [True, True, False]
        assert scored.errors[0].startswith("r: NaN or inf for 1 of 3 samples (group 4 has one")
        assert "batch.group=2" in scored.errors[0]
        reward(pictures(0.1, 0.2), ["a"] * 2, context(2, 2))
        assert reward.problem is None


def test_groups_are_needed_and_are_of_one_prompt():
    with pytest.raises(ValueError, match=r'reward "w" needs the context column "group"'):
        rewards.score(pictures(0.1, 0.2), ["a", "a"], {"w": {"reward": win_rate()}})
    with pytest.raises(
        ValueError,
        match=r"reward win_rate compares the members of a group: give MediaContext\(group",
    ):
        win_rate()(pictures(0.1, 0.2), ["a", "a"])
    with pytest.raises(
        ValueError, match='group 0 holds two prompts, "a" and "b"; win_rate compares media of one'
    ):
        win_rate()(pictures(0.1, 0.2), ["a", "b"], context(0, 0))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        (
            "win_rate",
            {},
            (
                "win_rate works on another reward: set reward.win_rate.judge to its name, for"
                " example reward.win_rate.judge=clip"
            ),
        ),
        ("rank", {}, "rank works on another reward: set reward.rank.reward"),
        ("rank", {"reward": "clipp"}, 'unknown reward "clipp"; did you mean "clip"'),
        (
            "rank",
            {"reward": "jpeg", "reward_settings": {"qualty": 3}},
            'unknown setting "qualty"; did you mean "quality"',
        ),
        (
            "rank",
            {"reward": brightness, "reward_settings": {"a": 3}},
            r"already loaded, so \['a'\] cannot be set",
        ),
        ("rank", {"reward": 3}, "reward.rank.reward=3 is not a reward"),
        (
            "rank",
            {"reward": Judge()},
            "Judge compares and gives no score; rank by a reward, or use win_rate",
        ),
        (
            "win_rate",
            {"judge": Judge(), "temperature": 0.1},
            "temperature=0.1 is for judges that score, and Judge compares",
        ),
        ("win_rate", {"judge": "jpeg", "opponents": 0}, "opponents=0"),
        ("win_rate", {"judge": "jpeg", "temperature": -1}, "temperature=-1"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(name, settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load(name, **settings)
