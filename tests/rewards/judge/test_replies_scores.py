"""Critiques with a score for each aspect, and scores made of token probabilities."""

import math

import pytest

from flowrl.rewards.judge import replies as r

MISS = pytest.raises(r.UnreadableReply)


# --- critiques

CRITIQUE = """# User Request Analysis
The user wants 1. a red cube and 2. a ball.
# Detailed Judgement
1. Text Faithfulness:
## Justification: Everything is there. A Score: 4 would need the shadow too.
## Score: 3.5
2. Physical and Visual Quality:
## Justification: Slight blur.
## Score: 2.9 (minor flaws)
3. Text Rendering:
## Justification: No text was asked for.
## Score: N/A
# Summary: Good. Score: 1
1. Text Faithfulness:
## Score: 1

# User Request Refinement:
## Refinement Comments: Say where the light comes from.
## Refined Request: "A red cube * 2 and a ball,
lit from the left."
"""


def test_a_critique_gives_each_aspect_that_has_a_number():
    assert r.aspects(CRITIQUE) == {"text_faithfulness": 3.5, "physical_quality": 2.9}


def test_aspects_are_clamped_and_found_in_other_layouts():
    """A number outside 1 to 4 is clamped, as the reference does; one on another scale is a miss."""
    bold = "**1. Text Faithfulness**\n**Score:** 7\n**2. Image Faithfulness:**\n### Score: 0.2\n"
    bold += "### 4. Text Rendering (if any)\n## Score: 3/4\n"
    assert r.aspects(bold) == {
        "text_faithfulness": 4.0,
        "image_faithfulness": 1.0,
        "text_rendering": 3.0,
    }
    assert r.aspects("Text Faithfulness:\nwell. Score: 3\n") == {"text_faithfulness": 3.0}
    assert r.aspects("1. Text Faithfulness:\n## Score: [ float score ]\n## Score: 2.5\n") == {
        "text_faithfulness": 2.5
    }
    assert r.aspects(
        "# Analysis\nText Faithfulness:\nA dog.\n# Judgement\nText Faithfulness:\n## Score: 2"
    ) == {"text_faithfulness": 2.0}


def test_a_critique_that_was_cut_counts_only_with_its_summary():
    """Its first aspect alone would be the mean of all: 4 of 4 for a picture of bad quality."""
    cut = (
        "1. Text Faithfulness:\n## Score: 4\n2. Physical and Visual Quality:\n## Justification:"
        " cut of"
    )
    with pytest.raises(
        r.UnreadableReply, match='no number or N/A after "Score:" of Physical and Visual Quality'
    ):
        r.aspects(cut)
    first = cut.partition("\n2.")[0]
    assert r.aspects(first) == {"text_faithfulness": 4.0}  # an aspect that is not named is as N/A
    with pytest.raises(r.UnreadableReply, match="no summary"):
        r.aspects(first, cut=True)
    assert r.aspects(f"{first}\n# Summary: fi", cut=True) == {"text_faithfulness": 4.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The image is fine.",
        "# Summary: 1. Text Faithfulness:\n## Score: 3",
        (
            "1. Text Faithfulness:\n## Score: N/A\n2. Physical and Visual Quality:\n## Score: n/a"
            " (none)"
        ),
        "1. Text Faithfulness:\n## Score: good",
        "1. Text Faithfulness:\n## Score: 3/10",
        "1. Text Faithfulness:\n## Score: 4\n2. Physical and Visual Quality:\n## Score: 2/10",
        "1. Text Faithfulness:\n## Score: 4\n2. Physical and Visual Quality:\n## Score: good",
        "1. Text Faithfulness:\n## Score: N/A\n1. Text Faithfulness:\n## Score: 4",
        "1. Text Faithfulness:\n## Score: 3\n1. Text Faithfulness:\n## Score: 4",
        "<think>1. Text Faithfulness:\n## Score: 3",
    ],
)
def test_a_critique_without_a_score_or_with_two_is_a_miss(text):
    with MISS:
        r.aspects(text)


def test_the_refined_request_keeps_its_lines_and_marks():
    assert r.refined_request(CRITIQUE) == "A red cube * 2 and a ball,\nlit from the left."
    assert r.refined_request("**Refined Request:** a dog\n# End") == "a dog"
    assert r.refined_request("## Refined Request: N/A") is None
    assert r.refined_request("## Refined Request:\n") is None
    assert r.refined_request("no such section") is None


# --- token probabilities


def logs(**tokens):
    return {token: math.log(p) for token, p in tokens.items()}


def test_the_expected_digit_is_renormalised_over_the_digits():
    first = {
        "4": math.log(0.5),
        "5": math.log(0.25),
        " 3": math.log(0.05),
        "▁3": math.log(0.05),
        "The": math.log(0.1),
        "9": math.log(0.05),
    }
    assert r.digit_mean(first, 5) == pytest.approx((4 * 0.5 + 5 * 0.25 + 3 * 0.1) / 0.85)
    assert r.digit_mean(logs(**{"0": 1.0}), 5) == 0.0  # a real 0, not a failure
    with pytest.raises(
        r.UnreadableReply,
        match="first token has probability 0 to be a digit from 0 to 5; most likely are 'The' 0.9",
    ):
        r.digit_mean(logs(The=0.9), 5)
    with MISS:
        r.digit_mean(logs(**{"4": 0.001, "The": 0.9}), 5)
    with pytest.raises(r.UnreadableReply, match="no token log-probabilities"):
        r.digit_mean({}, 5)


def test_the_share_of_yes():
    assert r.yes_share(logs(Yes=0.6, No=0.2, yes=0.1)) == pytest.approx(0.75)
    assert r.yes_share(
        logs(Yes=0.6, No=0.2, yes=0.1, **{" NO": 0.1}), variants=True
    ) == pytest.approx(0.7)
    assert r.yes_share(logs(Yes=0.6)) == 1.0 and r.yes_share(logs(No=0.6)) == 0.0
    with pytest.raises(r.UnreadableReply, match="variants=true counts other spellings"):
        r.yes_share(logs(yes=0.9, no=0.1))
    with MISS:
        r.yes_share(logs(Maybe=1.0), variants=True)


@pytest.mark.parametrize("logprob", [0.5, 1000.0, math.inf])
def test_a_log_probability_above_zero_is_a_miss(logprob):
    with pytest.raises(r.UnreadableReply, match="the token 'Yes' the log-probability .* above 0"):
        r.yes_share({"Yes": logprob, "No": -1.0})
    assert r.yes_share({"Yes": 1e-6, "No": -math.inf}) == 1.0  # rounding
