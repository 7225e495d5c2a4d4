"""Comparing the members of a group: pairs, comparators, biased judges."""

import math

import pytest
import torch
from comparisons import Judge, brightness, context, pictures, win_rate

from flowrl import rewards
from flowrl.rewards.judge.compare import ask, from_pointwise, pairs_of, win_rates
from flowrl.types import MediaContext

# --- pairs


def test_every_pair_of_every_group_is_asked_once():
    pairs = pairs_of({7: [0, 2, 5], 3: [1, 3]})
    assert pairs.tolist() == [[0, 2], [0, 5], [2, 5], [1, 3]]
    assert len(pairs_of({0: list(range(8))})) == 8 * 7 // 2


@pytest.mark.parametrize(
    ("size", "opponents", "count"),
    [(8, 3, 12), (8, 1, 4), (7, 1, 4), (7, 2, 7), (8, 7, 28), (8, 50, 28)],
)
def test_a_sample_of_the_pairs_has_about_so_many_of_each_member_and_leaves_out_none(
    size, opponents, count
):
    pairs = pairs_of({5: list(range(size))}, opponents=opponents)
    met = torch.bincount(pairs.flatten(), minlength=size)
    assert len(pairs) == count == len(set(map(tuple, pairs.tolist())))
    assert met.min() >= max(1, min(opponents, size - 1) - 1)
    assert met.max() <= min(opponents, size - 1) + 1


def test_which_pairs_are_asked_depends_on_group_and_places_only():
    one = pairs_of({5: list(range(10))}, opponents=2)
    assert torch.equal(one, pairs_of({5: list(range(10))}, opponents=2))
    moved = pairs_of({1: [0, 1], 5: list(range(20, 30))}, opponents=2)
    assert torch.equal(moved[1:], one + 20)
    assert not torch.equal(one, pairs_of({6: list(range(10))}, opponents=2))


# --- scores as a comparator


def test_scores_compare_as_one_half_and_nothing():
    judge = from_pointwise(brightness)
    assert judge.prefer(torch.tensor([2.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])).tolist() == [
        1.0,
        0.5,
        0.0,
    ]
    out = judge.compare(pictures(0.8, 0.2), pictures(0.2, 0.8), ["", ""], None)
    assert out.tolist() == [1.0, 0.0] and out.dtype == torch.float32


def test_a_temperature_gives_bradley_terry_probabilities():
    out = from_pointwise(brightness, temperature=0.5).prefer(
        torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    )
    assert out.tolist() == pytest.approx([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(2))])


def test_a_score_that_failed_decides_nothing():
    for judge in (
        from_pointwise(brightness),
        from_pointwise(brightness, temperature=1.0),
    ):
        assert (
            judge.prefer(
                torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([1.0, math.nan, math.inf])
            )
            .isnan()
            .all()
        )


def test_an_infinite_score_marks_a_failure_and_wins_and_loses_nothing():
    for judge in (from_pointwise(brightness), from_pointwise(brightness, temperature=1.0)):
        assert (
            judge.prefer(
                torch.tensor([math.inf, 0.5, -math.inf]), torch.tensor([0.5, -math.inf, math.inf])
            )
            .isnan()
            .all()
        )
    dazzled = win_rate(
        lambda m, p, c: brightness(m, p).masked_fill(brightness(m, p) > 0.5, math.inf)
    )
    out = dazzled(pictures(0.9, 0.4, 0.2), ["a"] * 3, context(0, 0, 0))
    assert out[0].isnan() and out[1:].tolist() == [1.0, 0.0]


def test_a_pointwise_judge_scores_each_sample_once():
    calls = []

    def counted(media, prompts, context):
        calls.append(len(media))
        return brightness(media, prompts)

    win_rate(counted)(pictures(0.1, 0.2, 0.3, 0.4), ["a"] * 4, context(0, 0, 0, 0))
    assert calls == [4]


# --- asking a judge


def test_asking_both_ways_removes_the_bias_for_what_is_shown_first():
    """Brightness 0.2, 0.4, 0.8: p(0,1) = 0.45, p(0,2) = 0.35, p(1,2) = 0.4; the first gets 0.2."""
    media, pairs = pictures(0.2, 0.4, 0.8), torch.tensor([[0, 1], [0, 2], [1, 2]])
    asked = {
        swap: ask(Judge(bias=0.2), media, ["a"] * 3, None, pairs, swap=swap)
        for swap in (False, True)
    }
    assert asked[False].tolist() == pytest.approx([0.65, 0.55, 0.60])
    assert asked[True].tolist() == pytest.approx([0.45, 0.35, 0.40])
    fair = win_rates(pairs, asked[True], 3)
    assert fair.tolist() == pytest.approx([0.4, 0.475, 0.625])
    biased = win_rates(pairs, asked[False], 3)  # the order of asking, not the pictures
    assert biased.tolist() == pytest.approx([0.6, 0.475, 0.425])


def test_swap_turns_a_judge_that_always_takes_the_first_into_ties():
    class First:
        def compare(self, media_a, media_b, prompts, context):
            return torch.ones(len(prompts))

    media, group = pictures(0.1, 0.5, 0.9), context(0, 0, 0)
    assert win_rate(First())(media, ["a"] * 3, group).tolist() == [1.0, 0.5, 0.0]
    assert win_rate(First(), swap=True)(media, ["a"] * 3, group).tolist() == [0.5, 0.5, 0.5]


def test_chunks_of_pairs_give_the_same_answers_and_keep_prompts_and_context_beside_their_pair():
    media, prompts = pictures(0.1, 0.2, 0.3, 0.6), ["a cat", "a dog", "a cat", "a dog"]
    columns = MediaContext(
        group=torch.tensor([0, 1, 0, 1]), meta=[{"n": n} for n in range(4)], source=media
    )
    whole, parts = Judge(), Judge()
    expected = win_rate(whole, swap=True)(media, prompts, columns)
    assert torch.equal(win_rate(parts, swap=True, chunk=1)(media, prompts, columns), expected)
    assert len(whole.calls) == 2 and len(parts.calls) == 4
    for a, _, texts, rows in parts.calls:
        assert rows.source.flatten(1).mean(1).tolist() == a
        assert texts == [prompts[rows.meta[0]["n"]]]
        assert rows.group.tolist() == [["a cat", "a dog"].index(texts[0])]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (torch.zeros(1, 1), r"torch.float32 of shape \(1, 1\)"),
        (torch.zeros(1).double(), "torch.float64"),
        (torch.tensor([1.5]), "values from 1.5 to 1.5"),
        ([0.5], "list"),
    ],
)
def test_an_answer_that_is_no_probability_stops_the_run(answer, said):
    class Liar:
        def compare(self, media_a, media_b, prompts, context):
            return answer

    with pytest.raises(
        rewards.RewardBug,
        match=f"Liar.compare returned {said}.*expected float32 probabilities of shape",
    ):
        rewards.score(
            pictures(0.1, 0.2), ["a", "a"], {"w": {"reward": win_rate(Liar())}}, context(0, 0)
        )
