"""Replies of judges: well-formed ones read as the references do, broken ones are never a number."""

import contextlib
import time

import pytest

from flowrl.rewards.judge import replies as r

MISS = pytest.raises(r.UnreadableReply)


# --- Final Score


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Final Score: 4", 4.0),
        ("Final Score:2.33", 2.33),
        ("ocean (location): 0\nclouds (object): 1\nFinal Score: 3.5\n", 3.5),
        ("**Final Score:** 4", 4.0),
        ("**Final Score**: **4.5**.", 4.5),
        ("```\nFinal Score: 4\n```", 4.0),
        ("final score = 4", 4.0),
        ("Final Score (1-5): 4", 4.0),
        ("Final Score: 4/5", 4.0),
        ("Final Score: 4 out of 5, which is good", 4.0),
        ("Final Score: [4]", 4.0),
        ("Final Score：４．５", 4.5),  # full-width
        ("Final\u00a0Score:\u200b 4", 4.0),
        ("<think>Final Score: 1? No.</think>Final Score: 4", 4.0),
        ("The score after 'Final Score:' follows.\nFinal Score: 4\nFinal Score: 4.0", 4.0),
        ("Final Score: 4, 5 elements were checked", 4.0),
        ("Final Score: 4\n5 elements were checked", 4.0),
        ("Final Score: 4 - good. One of 3 objects is small.", 4.0),
        ("Final Score: 4 (out of 5)", 4.0),
        ("Final Score: 4 points on a scale from 1 to 5", 4.0),
        ("Final Score: (4)/5", 4.0),
        ("Final Score: 4 because 2 of 3 objects are there", 4.0),
        ("Final Score: 3, as only two of 4 dogs appear", 3.0),
        ("Final Score: 4 - 3 of 4 requirements met", 4.0),
        ('{"final_score": 4, "reason": "2 of 3 objects"}', 4.0),
        ("**Final Score:** 4 **(good)**</s>", 4.0),
        ("Très bien 猫🎉 Final Score: 5", 5.0),
    ],
)
def test_a_final_score_is_read_however_it_is_dressed(text, value):
    assert r.final_score(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Final Score:",
        "Final Score: X",
        "Final Score: four",
        "Score: 4",
        "Final Score: 10",  # the reference's regular expression reads 1
        "Final Score: 45",  # ... 4
        "Final Score: 0.5",
        "Final Score: 5.9",  # ... 5.9
        "Final Score: -4",
        "Final Score: −4",
        "Final Score: 4,5",
        "Final Score: 4.5.1",
        "Final Score: 4-5",
        "Final Score: 80%",
        "Final Score: 4/10",
        "Final Score: 4stars",
        "Final Score: 4 (out of 10)",
        "Final Score: 4 of 10",
        "Final Score: 4 out of ten",
        "Final Score: 3 of 5 objects are there",
        "Final Score: 2 objects are missing",
        "Final Score: 4, no, 3",
        "Final Score: 1, 2, 3, 4 or 5",
        "Final Score:\n1. Colours: 4\n2. Shapes: 5",
        "Final Score: 4/5/10",
        "Final Score: 3 points out of 10",
        "Final Score: 3 on a scale of 1 to 10",
        "Final Score (out of 10): 4",
        "Final Score (0-10): 4",
        "Final Score: 4 or 5",
        "Final Score: 4, maybe 5",
        "Final Score: 3 to 4",
        "Final Score: 3 to four",
        "Final Score: 3~4",
        "Final Score: 3 and 4",
        "Final Score: 3 4",
        "Final Score: (3 + 5)/2 = 4",
        "Final Score: 2 + 2 = 4",
        "Final Score: 2 * 2 = 4",
        "Final Score: 2*2",
        "Final Score: 4?",
        "Final Score: nan",
        "Final Score: 3\n...\nFinal Score: 4",
        "<think>Final Score: 4",
        "<think>I would say Final Score: 4</think> I cannot answer.",
        "Sorry, I cannot help with that.",
        "{" * 5000,
    ],
)
def test_a_broken_final_score_is_a_miss(text):
    with MISS:
        r.final_score(text)


@pytest.mark.parametrize("filler", [" ", "1 of ", "a", "no ", "(", "for 3 ", "scale ", "\n", "$'"])
def test_a_long_reply_is_read_in_time_that_grows_with_its_length(filler):
    started = time.perf_counter()
    for text in (f"Final Score: 4 {filler * 20_000}", f"Final Score:{filler * 20_000}4"):
        with contextlib.suppress(r.UnreadableReply):
            r.final_score(text)
    assert time.perf_counter() - started < 2  # one run of spaces took minutes where it is squared


def test_scales_differ_by_reference():
    assert r.final_score("Final Score: 0.5", 0, 5) == 0.5  # MixGRPO
    assert r.final_score("Final Score: 7", 1, 10) == 7.0  # old video template
    with pytest.raises(r.UnreadableReply, match="Final Score 7 is outside 1 to 5"):
        r.final_score("Final Score: 7")
    with pytest.raises(r.UnreadableReply, match=r"contradictory .* \(3.0 and 4.0\)"):
        r.final_score("Final Score: 3 Final Score: 4")


# --- named scores

THREE = "Alignment Score (1-5): 2.4036\nCoherence Score (1-5): 3.0987\nStyle Score (1-5): 3.3889\n"


def test_three_named_scores_are_read_and_missing_ones_left_out():
    names = ["Alignment", "Coherence", "Style", "Physics"]
    assert r.named_scores(THREE, names) == {
        "alignment": 2.4036,
        "coherence": 3.0987,
        "style": 3.3889,
    }
    assert r.named_scores("**Style Score:** 3/5", names) == {"style": 3.0}
    assert r.named_scores("Alignment Score (1-5): X\nStyle Score (1-5):", names) == {}
    assert r.named_scores("Alignment Score:\n Image 1: 0.4\n Image 2: 0.6", names) == {}
    with MISS:
        r.named_scores("Alignment Score (1-5): 7", names)
    with MISS:
        r.named_scores(THREE + "Style Score (1-5): 1", names)


def test_labels_are_not_found_inside_longer_words():
    text = "visual quality: 4\ntemporal consistency: 3\nfactual consistency: 2\n"
    labels = ("visual quality", "temporal consistency", "dynamic degree", "factual consistency")
    assert r.labelled_scores(text, labels, 1, 4) == {
        "visual quality": 4,
        "temporal consistency": 3,
        "factual consistency": 2,
    }
    assert r.labelled_scores("META = 1, OA = 2", ["TA", "OA"], 0, 2) == {"OA": 2}


# --- edits


@pytest.mark.parametrize(
    "text",
    [
        '{"reasoning": "ok", "score": [20, 12.5]}',
        '```json\n{"reasoning": "ok",\n "score": [20, 12.5],\n}\n```',
        'Here you are: {"score": [20, 12.5]} Anything else?',
        '<think>{"score": [1, 1]}</think>{"reasoning": "braces } in { text", "score": [20, 12.5]}',
    ],
)
def test_two_edit_scores_are_read_from_json(text):
    assert r.edit_scores(text) == (20.0, 12.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"score": 20}',
        '{"score": [20]}',
        '{"score": [20, 12, 3]}',
        '{"score": ["20", null]}',
        '{"score": [true, false]}',
        '{"score": [NaN, 2]}',
        '{"score": [26, 2]}',
        '{"score": [-1, 2]}',
        '{"score": [20, 12',
        "score = [20, 12]",
        '{"score": [1, 2]} {"score": [3, 4]}',
        "[" * 100_000,
        '{"a":' * 3_000,
    ],
)
def test_broken_edit_scores_are_a_miss(text):
    with MISS:
        r.edit_scores(text)


# --- pairs


@pytest.mark.parametrize(
    ("text", "p"),
    [
        ("Image 1 is better than Image 2.", 1.0),
        ("Image 2 is better than Image 1.", 0.0),
        ("Both images are equally good.", 0.5),
        ("video 1 is slightly better than video 2", 1.0),
        ("In short: **Image 2** is better.", 0.0),
        ("Edited Image 2 is better", 0.0),
        ("edited image 1 is BETTER", 1.0),
        ("<think>Image 1 is better?</think> Image 2 is better than Image 1.", 0.0),
        ("It is a tie.", 0.5),
        ("<answer>Image 1 is better</answer>", 1.0),
        ("While Image 1 does not show the cat, Image 2 is better.", 0.0),
        ("I would say Image 1 is better because Image 2 is not red.", 1.0),
    ],
)
def test_a_verdict_is_read_from_a_sentence(text, p):
    assert r.verdict(text) == p


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Image 1 is not better.",
        "Image 3 is better.",
        "Image 1 is better aligned. Image 2 is better drawn.",
        "Image 1 is better. Both images are equally good.",
        "It is hard to say whether image 1 is better",
        "I am not sure that Image 1 is better",
        "I don’t think that Image 1 is better.",
        "Image 1 is better?",
        "Image 1 is better if colours count.",
        "That Image 1 is better is not true.",
        "The images are not equally good.",
        "Image 2 might be right, and perhaps Image 2 is better.",
        "better",
    ],
)
def test_a_verdict_that_says_nothing_or_two_things_is_a_miss(text):
    with MISS:
        r.verdict(text)


@pytest.mark.parametrize(
    ("text", "p"),
    [
        (
            (
                "<think>Image 2 is better in colour. Total 39 to 31.</think>\n<answer>Image 1 is"
                " better</answer>"
            ),
            1.0,
        ),
        ("<think>...</think><Answer>\nVideo 2 is better\n</Answer>", 0.0),
        ("<answer>Image 2</answer>", 0.0),
        ("<think>x</think><answer>Image 2 is better", 0.0),
        ("<answer>Image 1 is better</answer> I repeat: <answer>Image 1 is better.</answer>", 1.0),
        ("<answer>Both images are equally good</answer>", 0.5),
    ],
)
def test_a_think_verdict_is_what_stands_in_the_answer_tags(text, p):
    assert r.tagged_verdict(text) == p


@pytest.mark.parametrize(
    "text",
    [
        # no tags: the reference falls back to the whole text, where image 1 wins whenever it is
        # named
        "Image 1 is better",
        "<think>Image 1 is better</think>",
        "<answer></answer>",
        "<answer>Image 1 is",
        "<answer>Image 1 is better</answer><answer>Image 2 is better</answer>",
        "<think><answer>Image 1 is better</answer>",
        "<recommend answer>Image 1 is better</recommend answer>",
    ],
)
def test_a_think_reply_without_one_answer_is_a_miss(text):
    with MISS:
        r.tagged_verdict(text)


PAIR = (
    "Alignment Score:\n Image 1: 0.4357\n Image 2: 0.5643\n\nStyle Score:\n Image 1: 0.9\n Image 2:"
    " 0.1\n"
)


def test_relative_scores_are_probabilities_of_the_first():
    assert r.pair_scores(PAIR, ["Alignment", "Style"]) == {"alignment": 0.4357, "style": 0.9}
    assert r.pair_scores("**Style Score**: Video 1: 0.25, Video 2: 0.75", ["Style"]) == {
        "style": 0.25
    }
    with pytest.raises(r.UnreadableReply, match="no Coherence Score of both"):
        r.pair_scores(PAIR, ["Alignment", "Coherence"])
    with pytest.raises(r.UnreadableReply, match="0.9 and 0.9 do not add up to 1"):
        r.pair_scores("Style Score:\n Image 1: 0.9\n Image 2: 0.9", ["Style"])
    with MISS:
        r.pair_scores("Style Score:\n Image 1: 9\n Image 2: 1", ["Style"])


# --- Flex

FLEX = """{"prompt": "a cat", "categories": [
 {"name": "A. Semantics", "cat_winner": "Image 1",
  "dims": [{"name": "subject", "score_1": 8, "score_2": 2}]},
 {"name": "B. Quality", "dims": [], "cat_winner": "Image 2"},
 {"name": "C. Aesthetics", "dims": [], "cat_winner": "Image 1"},
 {"name": "D. Own", "dims": [], "cat_winner": "Image 2"}], "reason": "...", "winner": "Image 1"}"""


def test_flex_gives_the_winner_and_the_first_three_categories():
    expected = {"A. Semantics": 1.0, "B. Quality": 0.0, "C. Aesthetics": 1.0, "overall": 1.0}
    assert r.flex(FLEX) == expected
    assert r.flex(f"```json\n{FLEX[:-1]},\n}}\n```") == expected
    assert r.flex('{"winner": "Video 2"}') == {"overall": 0.0}
    assert r.flex('{"winner": "Tie", "categories": "none"}') == {"overall": 0.5}
    assert r.flex('{"winner": 1, "categories": [{"cat_winner": "Image 1/2"}, 7]}') == {
        "category 1": None,
        "overall": 1.0,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        FLEX[:-30],
        '{"winner": "Image 1/2"}',
        '{"winner": null}',
        '{"winner": "Image 3"}',
        '{"winner": "not equally good"}',
        '{"winner": "Image 1"} {"winner": "Image 2"}',
    ],
)
def test_flex_without_one_winner_is_a_miss(text):
    with MISS:
        r.flex(text)


# --- requests for frames


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        (
            (
                '<tool_call> { "name": "select_frames", "arguments": { "target_frames": [12, 16,'
                " 88] } } </tool_call>"
            ),
            [12, 16, 88],
        ),
        (
            (
                '<think>hm</think><recommend answer>OA = 1</recommend answer>{"target_frames": [3,'
                " 3, 1]}"
            ),
            [3, 1],
        ),
        ('```json\n{"frames": [2.0, "5",]}\n```', [2, 5]),
        ('{"frames": 4}', [4]),
        ("<frames>3, 7 9</frames>", [3, 7, 9]),
        ('{"target_frames": [-1, 0, 999]}', [-1, 0, 999]),
        ("no request at all", None),
        ('{"answer": 1}', None),
    ],
)
def test_a_request_for_frames_is_read(text, frames):
    assert r.frame_request(text) == frames


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "select_frames", "arguments": {"target_frames": [12,',
        '<tool_call>{"name": "crop_image", "arguments": {"bbox": [0, 1]}}</tool_call>',
        '{"target_frames": [1.5]}',
        '{"target_frames": [true]}',
        '{"target_frames": ["first"]}',
        '{"target_frames": [1e999]}',
        "<frames>the first</frames>",
        "<frames></frames>",
        "I call select_frames now",
    ],
)
def test_a_broken_request_for_frames_is_a_miss(text):
    with MISS:
        r.frame_request(text)


def test_a_final_answer_ends_a_dialogue_and_a_provisional_one_does_not():
    assert r.final_answer("<think>..</think><answer> OA = 2 </ answer>", str) == "OA = 2"
    assert r.final_answer("<Final Answer>OA = 2</Final Answer>", str) == "OA = 2"
    assert r.final_answer("<recommend answer>OA = 2</recommend answer>", str) is None
    assert r.final_answer("so \\boxed{1}", str) == "OA = 1"
    assert r.final_answer("\\boxed{1} <tool_call>{}</tool_call>", str) is None
    assert r.final_answer("\\boxed{1}, so \\boxed{1}", str) == "OA = 1"
    for two in (
        "<answer>OA = 1</answer><answer>OA = 2</answer>",
        "\\boxed{1} is wrong, \\boxed{2}",
    ):
        with pytest.raises(r.UnreadableReply, match="two different answers"):
            r.final_answer(two, str)
