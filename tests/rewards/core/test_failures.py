"""Samples without a score are counted by why, and nothing that a reward does ends the process."""

import math
import time

import pytest
import torch

from flowrl.rewards import (
    Reward,
    RewardUnavailable,
    TooManyInvalid,
    check_valid,
    concat,
    load,
    load_set,
    reward_metrics,
    score,
)
from flowrl.rewards.core.failures import KINDS, Problem, kind_of, kinds_of
from flowrl.rewards.core.reward_set import RewardSet

MEDIA = torch.rand(4, 3, 8, 8)
PROMPTS = ["a cat", "a dog", "a fish", "a bird"]


def scored(function, media=MEDIA, **options):
    return score(media, PROMPTS, load_set({"custom": {"reward": function, **options}}))


def values(*numbers):
    return lambda media, *_: torch.tensor(numbers)[: len(media)].float()


def raises(error):
    def reward(*_):
        raise error

    return reward


class TransportError(OSError):
    """As httpx names the parent of its errors."""


class ReadTimeout(TransportError):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("weights"), "error"),
        (TimeoutError("late"), "timeout"),
        (ReadTimeout("late"), "timeout"),
        (ConnectionResetError("gone"), "server"),
        (TransportError("gone"), "server"),
        (OSError("disk"), "error"),
    ],
)
def test_an_exception_is_of_a_kind(error, kind):
    assert kind_of(error) == kind and kind in KINDS
    assert scored(raises(error)).kinds == {kind: 4}


def test_nan_pixels_and_scores_beyond_fp32_have_kinds_of_their_own():
    media = MEDIA.clone()
    media[0] = math.nan
    rewards = scored(values(1.0, math.nan, 3e38), media=media, weight=10.0)
    assert rewards.kinds == {"pixels": 1, "nan": 1, "overflow": 1}
    assert rewards.valid.tolist() == [False, True, False, False]
    assert rewards.total[[0, 2, 3]].isnan().all()
    assert "total: weight times score is beyond fp32 for 1 samples" in rewards.errors


def test_infinities_that_cancel_are_beyond_fp32_too():
    rewards = score(
        MEDIA,
        PROMPTS,
        {
            "up": {"reward": values(3e38, 1, 1, 1), "weight": 10.0},
            "down": {"reward": values(3e38, 1, 1, 1), "weight": -10.0},
        },
    )
    assert rewards.kinds == {"overflow": 1} and rewards.valid.tolist() == [False, True, True, True]


def test_a_reward_of_weight_0_counts_nowhere():
    rewards = scored(values(math.nan, 1, 1, 1), weight=0)
    assert rewards.kinds == {} and rewards.valid.all()


def test_a_reward_says_the_kinds_of_its_failures():
    class Judge(Reward):
        def __call__(self, media, prompts, context=None):
            self.problem = Problem("no score in the reply", {"reply": 2, "server": 1})
            return torch.tensor([math.nan, math.nan, math.nan, 1.0])

    rewards = scored(Judge())
    assert rewards.kinds == {"reply": 2, "server": 1}
    assert "(no score in the reply)" in rewards.errors[0]


def test_kinds_of_other_things_than_samples_stand_for_all_of_them():
    """A video's frames: five of a kind, two videos without a score."""
    assert kinds_of(Problem("x", {"reply": 4, "server": 1}), 2) == {"reply": 2}
    assert kinds_of(Problem("x", {}), 2) == kinds_of("as a text", 2) == kinds_of(None, 2)
    assert kinds_of(None, 2) == {"nan": 2}


def test_chunks_add_up_and_metrics_count_by_kind():
    both = concat([scored(raises(KeyError("x"))), scored(values(math.nan, 1, 1, 1))])
    assert both.kinds == {"error": 4, "nan": 1}
    metrics = reward_metrics(both)
    assert metrics["reward/invalid/error"] == 4 and metrics["reward/invalid/nan"] == 1
    assert metrics["reward/invalid"] == 5


def test_the_run_stops_with_the_kind_that_prevails():
    rewards = scored(raises(TimeoutError("late")))
    with pytest.raises(TooManyInvalid, match=r"4 of 4 samples .*, 4 x timeout \(the reward raised"):
        check_valid(rewards)


def test_equal_scores_have_a_deviation_of_exactly_0():
    """In fp32 the mean of 0.1 is another number than 0.1."""
    rewards = scored(lambda media, *_: torch.full((len(media),), 0.1))
    assert reward_metrics(rewards)["reward/custom/std"] == 0


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("done"), GeneratorExit()])
def test_what_would_end_the_process_is_a_failure_like_others(error):
    rewards = scored(raises(error))
    assert rewards.kinds == {"error": 4} and type(error).__name__ in rewards.errors[0]


def test_ctrl_c_is_no_failure():
    with pytest.raises(KeyboardInterrupt):
        scored(raises(KeyboardInterrupt()))


def test_a_reward_that_exits_while_it_is_loaded_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import sys; sys.exit(0)")
    with pytest.raises(ValueError, match="cannot be imported: SystemExit: 0"):
        load(f"{file}:mine")


def limited(reward, seconds):
    return RewardSet(
        rewards=load_set({"slow": reward}).rewards, weights={"slow": 1.0}, seconds=seconds
    )


def test_a_reward_that_hangs_is_named_and_not_asked_again():
    calls = []

    def hangs(media, *_):
        calls.append(len(media))
        time.sleep(1)
        return torch.zeros(len(media))

    with pytest.raises(RewardUnavailable, match='reward "slow" did not return within 0.1 seconds'):
        score(MEDIA, PROMPTS, limited(hangs, 0.1))
    assert calls == [4]


def test_a_reward_within_its_limit_scores_as_without_one():
    def honest(media, *_):
        assert not torch.is_grad_enabled()
        return media.flatten(1).std(1)

    with torch.enable_grad():
        assert torch.equal(
            score(MEDIA, PROMPTS, limited(honest, 60)).total, MEDIA.flatten(1).std(1)
        )


def test_a_limit_stays_with_what_is_taken_of_a_set():
    assert limited(values(1, 2, 3, 4), 7.0).pointwise().seconds == 7.0
