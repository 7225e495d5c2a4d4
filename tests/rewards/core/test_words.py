"""Rewards in words, as the command line gives them: NAME, NAME=WEIGHT, NAME.SETTING=VALUE."""

import pytest

from flowrl.rewards import parse_words


def test_words_name_rewards_with_weights_and_settings():
    assert parse_words(["jpeg", "jpeg.quality=80", "clip=0.5"]) == {
        "jpeg": {"weight": 1.0, "quality": 80},
        "clip": {"weight": 0.5},
    }
    assert parse_words(
        ["win_rate.judge_settings.a=1", "win_rate.judge_settings.b=[2]", "win_rate"]
    ) == {"win_rate": {"weight": 1.0, "judge_settings": {"a": 1, "b": [2]}}}
    assert parse_words(["my/file.py:red.floor=0.5", "my/file.py:red=2"]) == {
        "red": {"weight": 2.0, "name": "my/file.py:red", "floor": 0.5}
    }


@pytest.mark.parametrize(
    "words", [["=3"], ["jpeg="], ["jpeg=a"], ["jpeg.quality"], ["jpeg.quality={"]]
)
def test_words_of_another_form_are_refused(words):
    with pytest.raises(
        ValueError, match=r"should be NAME, NAME=WEIGHT such as jpeg=0.5, or NAME.SETTING=VALUE"
    ):
        parse_words(words)


@pytest.mark.parametrize(
    "words", [["jpeg", "jpeg"], ["jpeg", "jpeg=2"], ["jpeg.quality=80", "jpeg.quality=70"]]
)
def test_words_that_say_a_thing_twice_are_refused(words):
    with pytest.raises(
        ValueError, match="is given twice; give each reward one weight, and each setting one value"
    ):
        parse_words(words)
