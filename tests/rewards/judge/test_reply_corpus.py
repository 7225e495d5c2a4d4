"""Replies as judges write them, with their right readings; each line was read by a person.

A line of replies/<judge>.jsonl holds a reply and its `reading`: the reward's score, or null where
the reply says nothing, two things, or something on another scale. The `first` of a line are the
probabilities of a first token.
"""

import json
import math
from pathlib import Path

import pytest
from judges import TEXTS

from flowrl import rewards
from flowrl.rewards.judge.replies import UnreadableReply, digit_mean, yes_share

REPLIES = Path(__file__).parent / "replies"
JUDGES = sorted(path.stem for path in REPLIES.glob("*.jsonl"))


def corpus(judge):
    lines = (REPLIES / f"{judge}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """judge -> a function of a line of its corpus -> the score, NaN where there is none."""
    folder = tmp_path_factory.mktemp("texts")
    for name, content in TEXTS.items():
        (folder / name).write_text(content)
    texts = {"template": str(folder / "question"), "own_template": True}
    critic = texts | {"template": str(folder / "critique"), "system": str(folder / "system")}

    def written(name, setting=None, **settings):
        variants = {row.get("variant") for row in corpus(name)}
        loaded = {
            v: rewards.load(name, **settings, **({setting: v} if setting else {})) for v in variants
        }
        return lambda row: loaded[row.get("variant")].read_reply(row["reply"])

    return {
        "unifiedreward": written("unifiedreward", "variant", **texts),
        "rationalrewards": written("rationalrewards", **critic),
        "vr_thinker": written("vr_thinker", "mode"),
        "vlm_logit": lambda row: of_token(row, lambda first: digit_mean(first, 5) / 5),
        "vlm_yesno": lambda row: of_token(
            row, lambda first: yes_share(first, variants=row["variant"] == "variants")
        ),
    }


def of_token(row, read):
    try:
        return read({token: math.log(p) for token, p in row["first"].items()})
    except UnreadableReply:
        return math.nan


def right(value, reading):
    return math.isnan(value) if reading is None else abs(value - reading) < 1e-5


@pytest.mark.parametrize("judge", JUDGES)
def test_every_reply_has_its_right_reading(readers, judge):
    found = [(row, readers[judge](row)) for row in corpus(judge)]
    wrong = [(row, value) for row, value in found if not right(value, row["reading"])]
    assert not wrong, f"{len(wrong)} of {len(found)}: {wrong[:3]}"


@pytest.mark.parametrize("judge", JUDGES)
def test_a_corpus_holds_two_hundred_replies_and_forty_that_say_nothing(judge):
    rows = corpus(judge)
    asked = {json.dumps({**row, "reading": 0}) for row in rows}
    assert len(asked) == len(rows) >= 200
    assert sum(row["reading"] is None for row in rows) >= 40
