"""UnifiedReward: what it asks, how replies become scores, and what a failed one becomes."""

import json
import math

import numpy as np
import pytest
import torch
from judge_server import Answer, pictures, serving, words
from judges import FLAT, LEVELS, PROMPTS, levels, loader

from flowrl import rewards
from flowrl.rewards import unifiedreward
from flowrl.types import MediaContext


@pytest.fixture
def load(tmp_path):
    return loader(tmp_path)


# --- points


def test_point_v15_is_the_final_score_over_five_of_a_512_square(load):
    def script(body, n):
        return f"Final Score: {1 + PROMPTS.index(words(body)[14:-10])}"

    with serving(script) as server:
        out = load("unifiedreward", server, concurrency=1)(FLAT, PROMPTS)
    assert torch.equal(out, torch.tensor([0.2, 0.4, 0.6])) and out.dtype == torch.float32
    assert words(server.requests[1]) == "<image>Judge [a {prompt} of <image>]. Thanks."
    assert [levels(body) for body in server.requests] == [[51], [102], [153]]
    assert pictures(server.requests[0])[0].size == (512, 512)
    assert server.requests[0]["model"] == "UnifiedReward"
    assert server.requests[0]["temperature"] == 0.0


def test_a_score_in_the_line_where_a_reply_was_cut_is_none(load):
    """ "Final Score: 3" may have become 3.5."""
    with serving(Answer("Two dogs.\nFinal Score: 3", finish="length")) as server:
        assert load("unifiedreward", server)(FLAT, PROMPTS).isnan().all()
    with serving(Answer("Final Score: 3\nBecause two do", finish="length")) as server:
        out = load("unifiedreward", server)(FLAT, PROMPTS)
        assert out.tolist() == pytest.approx([0.6] * 3)


@pytest.mark.parametrize(
    ("variant", "reply", "score", "parts"),
    [
        ("mix_score", "dog (animal): 1\nFinal Score: 2.33", 2.33, {}),
        (
            "mix_semantic",
            "Alignment Score (1-5): 4\nStyle Score (1-5): 2",
            4.0,
            {"alignment": 4.0, "style": 2.0},
        ),
        (
            "point_v2",
            "Alignment Score (1-5): 4\nCoherence Score (1-5): 2\nStyle Score (1-5): 3",
            3.0,
            {"alignment": 4.0, "coherence": 2.0, "style": 3.0},
        ),
    ],
)
def test_point_variants_read_their_own_format(load, variant, reply, score, parts):
    with serving(reply) as server:
        judge = load("unifiedreward", server, variant=variant)
        assert judge(FLAT, PROMPTS).tolist() == pytest.approx([score] * 3)
        found = {name: part.tolist() for name, part in judge.parts(FLAT, PROMPTS).items()}
        assert found == {name: [value] * 3 for name, value in parts.items()}
    assert len(server.requests) == 3  # parts read the replies that were kept
    assert pictures(server.requests[0])[0].size == (12, 8)


def test_an_axis_that_is_missing_is_nan_and_not_the_mean_of_the_batch(load):
    def script(body, n):
        style = "" if "cat" in words(body) else "\nStyle Score (1-5): 1"
        return "Alignment Score (1-5): 5" + style

    with serving(script) as server:
        axes = ["alignment", "style"]
        out = load("unifiedreward", server, variant="point_v2", axes=axes)(FLAT, PROMPTS)
    assert math.isnan(out[0]) and out[1:].tolist() == [3.0, 3.0]


def test_a_failed_reply_is_nan_never_zero_and_batch_mates_keep_their_scores(load):
    def script(body, n):
        replies = {"a cat": "Final Score: 5", "two red circles": "I like it"}
        return replies.get(words(body)[14:-10], Answer(status=500, raw=b""))

    with serving(script) as server:
        judge = load("unifiedreward", server)
        out = judge(FLAT, PROMPTS)
        alone = judge(FLAT[:1], PROMPTS[:1])
        scored = rewards.score(FLAT, PROMPTS, {"judge": judge})
    assert out.isnan().tolist() == [False, True, True] and out[0] == alone[0] == 1.0
    assert scored.valid.tolist() == [True, False, False]
    assert scored.errors == ["judge: NaN or inf for 2 of 3 samples (it answers 500 (3 tries))"]


def test_unreadable_replies_are_nan_however_few_and_the_first_reason_is_kept(load):
    with serving("No.") as server:
        judge = load("unifiedreward", server)
        assert judge(FLAT[:1], PROMPTS[:1]).isnan().all() and judge(FLAT, PROMPTS).isnan().all()
        scored = rewards.score(FLAT, PROMPTS, {"judge": judge})
        assert len(server.requests) == 1 + 3 + 3  # asked once each, not sample by sample again
    reason = """no number after "Final Score:" in the reply 'No.'"""
    assert scored.errors == [f"judge: NaN or inf for 3 of 3 samples ({reason})"]
    with serving("Final Score: 3") as server:
        judge.judge = load("unifiedreward", server).judge
        assert not judge(FLAT, PROMPTS).isnan().any() and judge.problem is None


def test_a_server_that_is_gone_ends_scoring_instead_of_invalidating_everything(load):
    with (
        serving(Answer(status=503, raw=b"")) as server,
        pytest.raises(rewards.RewardUnavailable, match="answered none of 3 questions"),
    ):
        rewards.score(FLAT, PROMPTS, {"judge": load("unifiedreward", server)})


def test_edits_are_judged_beside_the_source_and_weighted(load):
    context = MediaContext(source=FLAT.flip(0))
    with serving('{"reasoning": "fine", "score": [20, 10]}') as server:
        judge = load("unifiedreward", server, variant="edit_instruction", weights=(3.0, 1.0))
        assert judge.needs == {"source"} and judge(FLAT, PROMPTS, context).tolist() == [17.5] * 3
        parts = {k: v.tolist() for k, v in judge.parts(FLAT, PROMPTS, context).items()}
        assert parts == {"success": [20.0] * 3, "restraint": [10.0] * 3}
        quality = load("unifiedreward", server, variant="edit_quality", template="quality")
        assert quality(FLAT, ["", "", ""]).tolist() == [15.0] * 3
        assert not quality.reads_prompt and not quality.needs
        with pytest.raises(ValueError, match=r"give MediaContext\(source=\.\.\.\)"):
            judge(FLAT, PROMPTS)
    seen = sorted(levels(body) for body in server.requests[:3])
    assert seen == [[51, 153], [102, 102], [153, 51]]
    assert words(server.requests[3]) == "<image>How natural is it?"


def test_a_video_is_shown_as_evenly_spaced_frames(load):
    video = torch.linspace(0, 1, 40)[None, :, None, None, None].expand(1, 40, 3, 8, 8).contiguous()
    byte = [round(255 * i / 39) for i in range(40)]
    reply = "visual quality: 4\ntemporal consistency: 3\ndynamic degree: 2\nFinal Score: 7"
    with serving(reply) as server:
        judge = load("unifiedreward", server, variant="point_video")
        assert judge.video == "only" and judge(video, ["a cat"]).tolist() == [7.0]
        assert judge.parts(video, ["a cat"])["temporal_consistency"].tolist() == [3.0]
    reply = "Alignment Score (1-5): 3\nPhysics Score (1-5): 5\nStyle Score (1-5): 1"
    with serving(reply) as second:
        axes = ["alignment", "physics", "style"]
        judge = load("unifiedreward", second, variant="point_v2", axes=axes)
        assert judge(video, ["a cat"]).tolist() == [3.0]
    assert levels(server.requests[0]) == [byte[i] for i in np.linspace(0, 39, 8, dtype=int)]
    assert levels(second.requests[0]) == [byte[int(i * 40 / 16)] for i in range(16)]


# --- pairs


def brighter(body, n):
    """Prefers the brighter of the last two pictures."""
    first, second = levels(body)[-2:]
    if first == second:
        return "Both images are equally good."
    return f"Image {1 if first > second else 2} is better."


@pytest.mark.parametrize("variant", ["pair_v1", "think", "edit_pair"])
def test_pair_variants_say_which_is_better(load, variant):
    def script(body, n):
        said = brighter(body, n)
        if variant == "think":
            return f"<think>Image 1 is better?</think><answer>{said}</answer>"
        return said

    context = MediaContext(source=FLAT[[0, 0, 0]])
    with serving(script) as server:
        judge = load("unifiedreward", server, variant=variant)
        out = judge.compare(FLAT, FLAT[[1, 1, 1]], PROMPTS, context)
    assert out.tolist() == [0.0, 0.5, 1.0] and out.dtype == torch.float32
    before = [51] if variant == "edit_pair" else []
    seen = sorted(levels(body) for body in server.requests)
    assert seen == [[*before, level, 102] for level in LEVELS]


def test_soft_and_hierarchical_pairs(load):
    shares = {"Alignment": (0.8, 0.2), "Coherence": (0.4, 0.6), "Style": (0.3, 0.7)}
    lines = (f"{axis} Score:\n Image 1: {a}\n Image 2: {b}" for axis, (a, b) in shares.items())
    with serving("\n".join(lines)) as server:
        soft = load("unifiedreward", server, variant="pair_v2")
        assert soft.compare(FLAT, FLAT, PROMPTS).tolist() == pytest.approx([0.5] * 3)
        soft = load("unifiedreward", server, variant="pair_v2", axes=["alignment"])
        assert soft.compare(FLAT, FLAT, PROMPTS, None).tolist() == pytest.approx([0.8] * 3)
    winners = ["Image 1", "Image 2", "Image 2", "Image 2"]  # a fourth category does not count
    categories = [{"name": str(i), "cat_winner": name} for i, name in enumerate(winners)]
    with serving(json.dumps({"categories": categories, "winner": "Image 1"})) as server:
        flex = load("unifiedreward", server, variant="flex")
        assert flex.compare(FLAT, FLAT, PROMPTS).tolist() == pytest.approx([(1 + 1 / 3) / 2] * 3)
        flex = load("unifiedreward", server, variant="flex", weights=(1.0, 3.0))
        assert flex.compare(FLAT, FLAT, PROMPTS).tolist() == pytest.approx([(1 + 3 / 3) / 4] * 3)


def test_two_videos_are_shown_one_after_the_other(load):
    first, second = (torch.full((1, 3, 3, 8, 8), level) for level in (0.2, 0.6))
    with serving("<answer>Video 2 is better</answer>") as server:
        judge = load("unifiedreward", server, variant="think")
        assert judge.compare(first, second, ["a cat"]).tolist() == [0.0]
    assert levels(server.requests[0]) == [51] * 3 + [153] * 3


def test_a_pair_that_failed_is_nan_and_never_a_tie(load):
    def script(body, n):
        return "I cannot decide" if "cat" in words(body) else "Image 1 is better."

    with serving(script) as server:
        judge = load("unifiedreward", server, variant="pair_v1")
        out = judge.compare(FLAT, FLAT, PROMPTS)
        assert math.isnan(out[0]) and out[1:].tolist() == [1.0, 1.0]
        alone = judge.compare(FLAT[:1], FLAT[:1], PROMPTS[:1])
        assert alone.isnan().all()  # no exception even if all failed


def test_a_pair_variant_is_the_judge_of_win_rate_and_scores_nothing_alone(load):
    with serving(brighter) as server:
        judge = load("unifiedreward", server, variant="pair_v1")
        said = "which of two is better and scores none alone; make it the judge of win_rate"
        with pytest.raises(ValueError, match=f"variant=pair_v1 says {said}"):
            judge(FLAT, PROMPTS)
        context = MediaContext(group=torch.zeros(3, dtype=torch.long))
        rate = rewards.load("win_rate", judge=judge)(FLAT, ["a cat"] * 3, context)
        assert not hasattr(load("unifiedreward", server), "compare")
    assert rate.tolist() == [0.0, 0.5, 1.0]


# --- its own text, its settings


@pytest.mark.parametrize("variant", ["point_v15", "mix_score", "mix_semantic"])
def test_the_models_own_text_is_asked_for_and_compared(variant, tmp_path):
    said = r"needs its model's own prompt text: save .*\.py of the reference's repository as a text"
    with pytest.raises(ValueError, match=said):
        rewards.load("unifiedreward", variant=variant)
    file = tmp_path / "t"
    file.write_text("my own {prompt}")
    sha256 = unifiedreward.VARIANTS[variant].sha256[0]
    with pytest.raises(ValueError, match=f"sha256 .* expected {sha256}"):
        rewards.load("unifiedreward", variant=variant, template=str(file))
    own = rewards.load("unifiedreward", variant=variant, template=str(file), own_template=True)
    assert own.template == "my own {prompt}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"variant": "point_v3"}, "variant='point_v3'"),
        ({"weights": (0.0, 0.0)}, "two weights of 0 or more"),
        ({"axes": []}, "axes"),
        ({"base_url": "nowhere"}, "write http://HOST:PORT/v1"),
        ({"temprature": 1}, 'unknown setting "temprature"; did you mean "temperature"'),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("unifiedreward", **settings)
