"""vr_thinker: dialogues in which the judge asks for frames; broken ones, endless ones, and the
limit on pictures."""

import json
import math

import numpy as np
import pytest
import torch
from judge_server import Answer, pictures, serving, words

from flowrl import rewards
from flowrl.types import MediaContext

SIDE, F = 8, 12
DARK = (
    torch.arange(F)[None, :, None, None, None].expand(2, F, 3, SIDE, SIDE) / 255
)  # frame i has level i
BRIGHT = DARK + 100 / 255


def load(server, **settings):
    return rewards.load("vr_thinker", **server.settings(), **settings)


def call(*frames):
    request = json.dumps({"name": "select_frames", "arguments": {"target_frames": frames}})
    return (
        "<think>closer</think><recommend answer>OA = 0</recommend"
        f" answer><tool_call>{request}</tool_call>"
    )


def answer(oa, ta=0):
    return (
        f"<snapshot>seen</snapshot><think>sure</think><answer>TA = {ta}, MQ = 0, VQ = 1, OA = {oa},"
        " CF = 1</answer>"
    )


def levels(body):
    return [int(np.asarray(image)[0, 0, 0]) for image in pictures(body)]


def turn(body):
    return sum(message["role"] == "assistant" for message in body["messages"])


def scripted(*replies):
    """The t-th reply of every dialogue; the last one for ever."""
    return lambda body, n: replies[min(turn(body), len(replies) - 1)]


# --- pairs


@pytest.mark.parametrize(("oa", "p"), [(1, 1.0), (2, 0.0), (0, 0.5)])
def test_the_overall_answer_is_the_preference(oa, p):
    with serving(answer(oa)) as server:
        judge = load(server)
        out = judge.compare(DARK, BRIGHT, ["a cat", "a dog"])
    assert out.tolist() == [p, p] and out.dtype == torch.float32 and judge.video == "only"


def test_it_first_sees_some_frames_of_both_and_is_told_the_numbers(monkeypatch):
    monkeypatch.setattr("flowrl.rewards.vr_thinker.WORKSPACE", 8)
    with serving(answer(1)) as server:
        load(server, initial=3, images=11, turns=4).compare(DARK[:1], BRIGHT[:1], ["a {turns} cat"])
    body = server.requests[0]
    places = np.linspace(0, F - 1, 8, dtype=int)  # of twelve frames, eight can be asked for
    first = [int(places[i]) for i in np.linspace(0, 7, 3, dtype=int)]
    assert levels(body) == first + [100 + i for i in first]
    asked = words(body)
    assert "same caption: a {turns} cat" in asked and "You see 3 frames of each" in asked
    assert "frames 1 to 8 belong to Video 1" in asked and "frames 9 to 16 to Video 2" in asked
    assert "up to 5 others" in asked and "reply 4 times" in asked


def test_frames_that_it_asks_for_are_shown_in_the_next_turn():
    with serving(scripted(call(2, 14, 2), answer(2))) as server:
        assert load(server, initial=2).compare(DARK[:1], BRIGHT[:1], ["a cat"]).tolist() == [0.0]
    first, second = server.requests
    assert levels(first) == [0, 11, 100, 111]
    assert levels(second) == [
        0,
        11,
        100,
        111,
        1,
        101,
    ]  # frame 2 is the second of Video 1, frame 14 the second of Video 2
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert words(second, 1) == call(2, 14, 2) and words(second).startswith(
        "After selecting frames: Here are the selected frames 2, 14."
    )


def test_dialogues_of_different_length_run_side_by_side_in_order():
    def script(body, n):
        cat = "a cat" in words(body, 0)
        return answer(1) if turn(body) == (1 if cat else 3) else call(1 + turn(body))

    with serving(script) as server:
        assert load(server).compare(DARK, BRIGHT, ["a dog", "a cat"]).tolist() == [1.0, 1.0]
    assert len(server.requests) == 4 + 2


# --- the limit on pictures


def test_the_oldest_pictures_are_left_out_and_the_opening_ones_never():
    with serving(scripted(call(1, 2, 3), call(4, 5), call(6, 7, 8), answer(1))) as server:
        judge = load(server, initial=1, images=6)
        assert judge.compare(DARK[:1], BRIGHT[:1], ["a cat"]).tolist() == [1.0]
    assert [levels(body) for body in server.requests] == [
        [0, 100],
        [0, 100, 0, 1, 2],
        [0, 100, 1, 2, 3, 4],
        [0, 100, 4, 5, 6, 7],
    ]
    last = server.requests[3]
    assert "(Frames 1, 2, 3 are no longer shown.)" in words(
        last, 2
    ) and "(Frames 4 are no longer shown.)" in words(last, 4)
    assert "no longer" not in words(last, 6)


def test_no_request_ever_holds_more_pictures_than_allowed():
    generator = np.random.default_rng(0)

    def script(body, n):
        return call(*generator.integers(1, 2 * F + 1, generator.integers(1, 5)).tolist())

    with serving(script) as server:
        out = load(server, initial=2, images=9, turns=12, concurrency=1).compare(
            DARK[:1], BRIGHT[:1], ["a cat"]
        )
    assert out.isnan().all() and len(server.requests) == 12
    shown = [len(pictures(body)) for body in server.requests]
    assert max(shown) == 9 and shown[0] == 4


def test_a_limit_below_what_is_shown_at_first_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            "images=8: 8 pictures are shown at first, so none could be asked for; set images"
            " above 8"
        ),
    ):
        rewards.load("vr_thinker", images=8)
    assert rewards.load("vr_thinker", images=10).most == 2
    assert rewards.load("vr_thinker", images=10, mode="pointwise").most == 6


# --- broken and endless dialogues


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (call(0), "There are frames 1 to 24; 0 is out of range."),
        (call(3, 25), "25 is out of range"),
        (call(-1), "-1 is out of range"),
        (call(*range(1, 10)), "9 frames are too many; ask for 8 at most"),
        (call(), "Ask for frames by a tool call, or give the answer"),
        ("Hm, let me think.", "Ask for frames by a tool call, or give the answer"),
        ("", "Ask for frames by a tool call"),
        (
            '<tool_call>{"name": "select_frames", "arguments": {"target_frames": [1,',
            "That could not be read: a tool call without a readable",
        ),
        ('{"target_frames": ["first"]}', "frame 'first' is not a whole number"),
        ("<answer>Video 1 is better</answer>", "That could not be read: no OA score"),
        ("<answer>OA = 3</answer>", "OA = 3 is neither 0, 1 nor 2"),
        ("<answer>OA = 1.5</answer>", "OA = 1.5 is neither 0, 1 nor 2"),
        ("<answer>OA = 1</answer><answer>OA = 2</answer>", "two different answers"),
    ],
)
def test_a_broken_reply_is_answered_with_the_reason_and_may_be_mended(reply, said):
    with serving(scripted(reply, answer(1))) as server:
        assert load(server).compare(DARK[:1], BRIGHT[:1], ["a cat"]).tolist() == [1.0]
    assert said in words(server.requests[1]) and len(pictures(server.requests[1])) == 8


@pytest.mark.parametrize(
    "reply",
    [call(3), "Hm.", answer(7), "<think>" * 500, "<recommend answer>OA = 1</recommend answer>"],
)
def test_a_dialogue_that_never_ends_is_cut_and_fails(reply, caplog):
    with serving(reply) as server:
        out = load(server, turns=3).compare(DARK, BRIGHT, ["a cat", "a dog"])
    assert out.isnan().all() and len(server.requests) == 2 * 3
    assert "no answer in turns=3 replies" in caplog.text
    assert (
        words(max(server.requests, key=turn))
        .removesuffix("<image>")
        .endswith("This is your last reply: give the answer now.")
    )


def test_a_server_that_breaks_in_the_middle_fails_that_dialogue_only():
    def script(body, n):
        if "a cat" in words(body, 0) and turn(body) == 1:
            return Answer(status=500, raw=b"")
        return call(1) if turn(body) == 0 else answer(2)

    with serving(script) as server:
        out = load(server).compare(DARK, BRIGHT, ["a cat", "a dog"])
    assert math.isnan(out[0]) and out[1] == 0.0


def test_every_turn_is_in_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    with serving(scripted(call(2), answer(2))) as server:
        load(server, log=str(log)).compare(DARK[:1], BRIGHT[:1], ["a cat"])
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert (
        [row["turn"] for row in rows] == [0, 1]
        and rows[0]["reply"] == call(2)
        and rows[0]["value"] is None
    )
    assert (
        rows[1]["question"].endswith("selected frames 2.<image>")
        and rows[1]["value"]["score"] == 0.0
    )


def test_the_older_boxed_answer_is_read_too():
    with serving(scripted(call(1) + "\n\\boxed{1}", "<think>done</think> \\boxed{2}")) as server:
        assert load(server).compare(DARK[:1], BRIGHT[:1], ["a cat"]).tolist() == [0.0]


# --- one video


def test_a_pointwise_judge_grades_one_video():
    replies = scripted(call(5), "<answer>TA = 4, VQ = 3.5, MQ = 2, OA = 3/5</answer>")
    with serving(replies) as server:
        judge = load(server, mode="pointwise", initial=2)
        assert judge(BRIGHT, ["a cat", "a dog"]).tolist() == pytest.approx([0.6, 0.6])
        parts = judge.parts(BRIGHT, ["a cat", "a dog"])
        scored = rewards.score(BRIGHT, ["a cat", "a dog"], {"thinker": judge})
    assert {name: part.tolist() for name, part in parts.items()} == {
        "ta": [4.0] * 2,
        "vq": [3.5] * 2,
        "mq": [2.0] * 2,
        "oa": [3.0] * 2,
    }
    assert scored.valid.all() and not hasattr(judge, "compare")
    assert levels(server.requests[0]) == [100, 111] and len(server.requests) == 4
    assert "frames 1 to 12, in the order of time" in " ".join(
        words(server.requests[0]).split()
    ).replace("more: frames", "frames")


def test_a_failed_grade_is_nan_beside_good_ones():
    def script(body, n):
        return "<answer>OA = 6</answer>" if "a cat" in words(body, 0) else "<answer>OA = 5</answer>"

    with serving(script) as server:
        out = load(server, mode="pointwise", turns=2)(BRIGHT, ["a cat", "a dog"])
    assert math.isnan(out[0]) and out[1] == 1.0


def test_a_pairwise_judge_scores_nothing_alone_and_judges_win_rates():
    def script(body, n):
        return answer(2 if sum(levels(body)[:4]) < sum(levels(body)[4:]) else 1)

    videos = torch.cat([BRIGHT[:1], DARK[:1]])
    with serving(script) as server:
        judge = load(server)
        with pytest.raises(
            ValueError, match="mode=pairwise says which of two is better and scores none alone"
        ):
            judge(DARK, ["a cat", "a dog"])
        out = rewards.load("win_rate", judge=judge)(
            videos, ["a cat"] * 2, MediaContext(group=torch.zeros(2, dtype=torch.long))
        )
    assert out.tolist() == [1.0, 0.0]


def test_the_models_own_instructions_replace_ours(tmp_path):
    (tmp_path / "t").write_text("Compare for {prompt}; {total} frames.")
    with serving(answer(1)) as server:
        load(server, template=str(tmp_path / "t")).compare(DARK[:1], BRIGHT[:1], ["a cat"])
        with pytest.raises(
            ValueError,
            match=(
                "there is no such file; save the instructions on the model card of"
                " qunwang13/vr-thinker"
            ),
        ):
            load(server, template=str(tmp_path / "none"))
    assert words(server.requests[0], 0) == "<image>" * 8 + "Compare for a cat; 24 frames."


# --- what a reply says


def test_a_reply_is_a_score_only_if_it_answers():
    with serving(answer(1)) as server:
        pair, point = load(server), load(server, mode="pointwise")
    assert [pair.read_reply(answer(oa)) for oa in (0, 1, 2)] == [0.5, 1.0, 0.0]
    assert point.read_reply("<answer>TA = 4, VQ = 3, MQ = 3, OA = 3.5</answer>") == pytest.approx(
        0.7
    )
    for text in (
        "",
        " ",
        "...",
        "**",
        "<answer></answer>",
        "<answer>...</answer>",
        "<answer>OA = 9</answer>",
        call(3),
    ):
        assert math.isnan(pair.read_reply(text)) and math.isnan(point.read_reply(text))
    assert rewards.load("win_rate", judge=pair).read_reply(answer(2)) == 0.0
