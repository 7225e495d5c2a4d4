"""unifiedreward, rationalrewards, vlm_logit, vlm_yesno: what they ask, how replies become scores,
and what a failed one becomes."""

import hashlib
import math

import numpy as np
import pytest
import torch
from judge_server import Answer, pictures, serving, words

from flowrl import rewards
from flowrl.rewards import rationalrewards, unifiedreward
from flowrl.types import MediaContext

PROMPTS = ["a cat", "a {prompt} of <image>", "two red circles"]
FLAT = torch.stack(
    [torch.full((3, 8, 12), level) for level in (0.2, 0.4, 0.6)]
)  # bytes 51, 102, 153


@pytest.fixture
def load(tmp_path):
    """Loads a judge with texts of our own in place of its model's."""
    files = {
        "question": "Judge [{prompt}]. Thanks.",
        "critique": "Request {prompt}: see <image>. Judge.",
        "system": "You judge.",
    }
    files |= {"edit": "Request {prompt}: <image> became <image>.", "quality": "How natural is it?"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    def make(name, server, *, template="question", **settings):
        if name in ("unifiedreward", "rationalrewards"):
            settings |= {"template": str(tmp_path / template), "own_template": True}
        if name == "rationalrewards":
            settings |= {"system": str(tmp_path / "system")}
        return rewards.load(name, **server.settings(), **settings)

    return make


def levels(body):
    """The grey level of each picture in a request: which ones they are, in their order."""
    return [int(np.asarray(image)[0, 0, 0]) for image in pictures(body)]


# --- unifiedreward, points


def test_point_v15_is_the_final_score_over_five_of_a_512_square(load):
    with serving(
        lambda body, n: f"Final Score: {1 + PROMPTS.index(words(body)[14:-10])}"
    ) as server:
        out = load("unifiedreward", server, concurrency=1)(FLAT, PROMPTS)
    assert torch.equal(out, torch.tensor([0.2, 0.4, 0.6])) and out.dtype == torch.float32
    assert words(server.requests[1]) == "<image>Judge [a {prompt} of <image>]. Thanks."
    assert [levels(body) for body in server.requests] == [[51], [102], [153]]
    assert pictures(server.requests[0])[0].size == (512, 512)
    assert (
        server.requests[0]["model"] == "UnifiedReward" and server.requests[0]["temperature"] == 0.0
    )


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
        assert {name: part.tolist() for name, part in judge.parts(FLAT, PROMPTS).items()} == {
            k: [v] * 3 for k, v in parts.items()
        }
    assert len(server.requests) == 3  # parts read the replies that were kept
    assert pictures(server.requests[0])[0].size == (12, 8)


def test_an_axis_that_is_missing_is_nan_and_not_the_mean_of_the_batch(load):
    def script(body, n):
        return "Alignment Score (1-5): 5" + (
            "" if "cat" in words(body) else "\nStyle Score (1-5): 1"
        )

    with serving(script) as server:
        out = load("unifiedreward", server, variant="point_v2", axes=["alignment", "style"])(
            FLAT, PROMPTS
        )
    assert math.isnan(out[0]) and out[1:].tolist() == [3.0, 3.0]


def test_a_failed_reply_is_nan_never_zero_and_batch_mates_keep_their_scores(load):
    def script(body, n):
        return {"a cat": "Final Score: 5", "two red circles": "I like it"}.get(
            words(body)[14:-10], Answer(status=500, raw=b"")
        )

    with serving(script) as server:
        judge = load("unifiedreward", server)
        out = judge(FLAT, PROMPTS)
        alone = judge(FLAT[:1], PROMPTS[:1])
        scored = rewards.score(FLAT, PROMPTS, {"judge": judge})
    assert out.isnan().tolist() == [False, True, True] and out[0] == alone[0] == 1.0
    assert scored.valid.tolist() == [True, False, False]
    assert scored.errors == ["judge: NaN or inf for 2 of 3 samples (it answers 500 (3 tries))"]


def test_replies_that_cannot_be_read_are_nan_however_few_were_asked_for_and_the_first_reason_is_kept(
    load,
):
    with serving("No.") as server:
        judge = load("unifiedreward", server)
        assert judge(FLAT[:1], PROMPTS[:1]).isnan().all() and judge(FLAT, PROMPTS).isnan().all()
        scored = rewards.score(FLAT, PROMPTS, {"judge": judge})
        assert len(server.requests) == 1 + 3 + 3  # asked once each, not sample by sample again
    assert scored.errors == [
        """judge: NaN or inf for 3 of 3 samples (no number after "Final Score:" in the reply 'No.')"""
    ]
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
        assert {k: v.tolist() for k, v in judge.parts(FLAT, PROMPTS, context).items()} == {
            "success": [20.0] * 3,
            "restraint": [10.0] * 3,
        }
        quality = load("unifiedreward", server, variant="edit_quality", template="quality")
        assert (
            quality(FLAT, ["", "", ""]).tolist() == [15.0] * 3
            and not quality.reads_prompt
            and not quality.needs
        )
        with pytest.raises(ValueError, match=r"give MediaContext\(source=\.\.\.\)"):
            judge(FLAT, PROMPTS)
    assert sorted(levels(body) for body in server.requests[:3]) == [
        [51, 153],
        [102, 102],
        [153, 51],
    ]
    assert words(server.requests[3]) == "<image>How natural is it?"


def test_a_video_is_shown_as_evenly_spaced_frames(load):
    video = torch.linspace(0, 1, 40)[None, :, None, None, None].expand(1, 40, 3, 8, 8).contiguous()
    byte = [round(255 * i / 39) for i in range(40)]
    reply = "visual quality: 4\ntemporal consistency: 3\ndynamic degree: 2\nFinal Score: 7"
    with serving(reply) as server:
        judge = load("unifiedreward", server, variant="point_video")
        assert judge.video == "only" and judge(video, ["a cat"]).tolist() == [7.0]
        assert judge.parts(video, ["a cat"])["temporal_consistency"].tolist() == [3.0]
    with serving(
        "Alignment Score (1-5): 3\nPhysics Score (1-5): 5\nStyle Score (1-5): 1"
    ) as second:
        judge = load(
            "unifiedreward", second, variant="point_v2", axes=["alignment", "physics", "style"]
        )
        assert judge(video, ["a cat"]).tolist() == [3.0]
    assert levels(server.requests[0]) == [byte[i] for i in np.linspace(0, 39, 8, dtype=int)]
    assert levels(second.requests[0]) == [byte[int(i * 40 / 16)] for i in range(16)]


# --- unifiedreward, pairs


def brighter(body, n):
    """Prefers the brighter of the last two pictures."""
    first, second = levels(body)[-2:]
    return (
        "Both images are equally good."
        if first == second
        else f"Image {1 if first > second else 2} is better."
    )


@pytest.mark.parametrize("variant", ["pair_v1", "think", "edit_pair"])
def test_pair_variants_say_which_is_better(load, variant):
    def script(body, n):
        return (
            f"<think>Image 1 is better?</think><answer>{brighter(body, n)}</answer>"
            if variant == "think"
            else brighter(body, n)
        )

    context = MediaContext(source=FLAT[[0, 0, 0]])
    with serving(script) as server:
        judge = load("unifiedreward", server, variant=variant)
        out = judge.compare(FLAT, FLAT[[1, 1, 1]], PROMPTS, context)
    assert out.tolist() == [0.0, 0.5, 1.0] and out.dtype == torch.float32
    before = [[51]] if variant == "edit_pair" else [[]]
    assert sorted(levels(body) for body in server.requests) == [
        b + [level, 102] for level in (51, 102, 153) for b in before
    ]


def test_soft_and_hierarchical_pairs(load):
    axes = (
        "Alignment Score:\n Image 1: 0.8\n Image 2: 0.2\nCoherence Score:\n Image 1: 0.4\n Image 2:"
        " 0.6\n"
    )
    with serving(axes + "Style Score:\n Image 1: 0.3\n Image 2: 0.7") as server:
        assert load("unifiedreward", server, variant="pair_v2").compare(
            FLAT, FLAT, PROMPTS
        ).tolist() == pytest.approx([0.5] * 3)
        soft = load("unifiedreward", server, variant="pair_v2", axes=["alignment"])
        assert soft.compare(FLAT, FLAT, PROMPTS, None).tolist() == pytest.approx([0.8] * 3)
    names = ["Image 1", "Image 2", "Image 2", "Image 2"]
    categories = ", ".join(
        f'{{"name": "{i}", "cat_winner": "{name}"}}' for i, name in enumerate(names)
    )
    with serving(
        f'{{"categories": [{categories}], "winner": "Image 1"}}'
    ) as server:  # a fourth category does not count
        flex = load("unifiedreward", server, variant="flex")
        assert flex.compare(FLAT, FLAT, PROMPTS).tolist() == pytest.approx([(1 + 1 / 3) / 2] * 3)
        flex = load("unifiedreward", server, variant="flex", weights=(1.0, 3.0))
        assert flex.compare(FLAT, FLAT, PROMPTS).tolist() == pytest.approx([(1 + 3 / 3) / 4] * 3)


def test_two_videos_are_shown_one_after_the_other(load):
    first, second = (torch.full((1, 3, 3, 8, 8), level) for level in (0.2, 0.6))
    with serving("<answer>Video 2 is better</answer>") as server:
        assert load("unifiedreward", server, variant="think").compare(
            first, second, ["a cat"]
        ).tolist() == [0.0]
    assert levels(server.requests[0]) == [51] * 3 + [153] * 3


def test_a_pair_that_failed_is_nan_and_never_a_tie(load):
    with serving(
        lambda body, n: "I cannot decide" if "cat" in words(body) else "Image 1 is better."
    ) as server:
        judge = load("unifiedreward", server, variant="pair_v1")
        out = judge.compare(FLAT, FLAT, PROMPTS)
        assert math.isnan(out[0]) and out[1:].tolist() == [1.0, 1.0]
        assert (
            judge.compare(FLAT[:1], FLAT[:1], PROMPTS[:1]).isnan().all()
        )  # no exception even if all failed


def test_a_pair_variant_is_the_judge_of_win_rate_and_scores_nothing_alone(load):
    with serving(brighter) as server:
        judge = load("unifiedreward", server, variant="pair_v1")
        with pytest.raises(
            ValueError,
            match=(
                "variant=pair_v1 says which of two is better and scores none alone; make it the"
                " judge of win_rate"
            ),
        ):
            judge(FLAT, PROMPTS)
        rate = rewards.load("win_rate", judge=judge)(
            FLAT, ["a cat"] * 3, MediaContext(group=torch.zeros(3, dtype=torch.long))
        )
        assert not hasattr(load("unifiedreward", server), "compare")
    assert rate.tolist() == [0.0, 0.5, 1.0]


# --- whose texts they are


@pytest.mark.parametrize("variant", ["point_v15", "mix_score", "mix_semantic"])
def test_the_models_own_text_is_asked_for_and_compared(variant, tmp_path, monkeypatch):
    with pytest.raises(
        ValueError,
        match=(
            r"needs its model's own prompt text: save .*\.py of the reference's repository as a"
            r" text file"
        ),
    ):
        rewards.load("unifiedreward", variant=variant)
    file = tmp_path / "t"
    file.write_text("my own {prompt}")
    with pytest.raises(
        ValueError, match=rf"sha256 .* expected {unifiedreward.VARIANTS[variant].sha256[0]}"
    ):
        rewards.load("unifiedreward", variant=variant, template=str(file))
    assert (
        rewards.load(
            "unifiedreward", variant=variant, template=str(file), own_template=True
        ).template
        == "my own {prompt}"
    )


def test_a_critics_two_texts_are_compared_too(tmp_path, monkeypatch):
    (tmp_path / "t").write_text("{prompt}: <image>")
    (tmp_path / "s").write_text("Judge.")
    paths = {"template": str(tmp_path / "t"), "system": str(tmp_path / "s")}
    with pytest.raises(ValueError, match="expected 733d99af3f475d0c"):
        rewards.load("rationalrewards", **paths)
    monkeypatch.setitem(
        rationalrewards.TEXTS, "t2i", (hashlib.sha256(b"{prompt}: <image>").hexdigest(),)
    )
    with pytest.raises(ValueError, match="expected 2fa66ca8679e6eed"):
        rewards.load("rationalrewards", **paths)
    monkeypatch.setitem(rationalrewards.SYSTEMS, "t2i", (hashlib.sha256(b"Judge.").hexdigest(),))
    assert rewards.load("rationalrewards", **paths).system == "Judge."
    with pytest.raises(
        ValueError,
        match="needs its model's own prompt text: save the system prompt of Flow-Factory",
    ):
        rewards.load("rationalrewards", template=paths["template"])


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


# --- rationalrewards

CRITIQUE = """# User Request Analysis\nA cat.\n# Detailed Judgement
1. Text Faithfulness:\n## Justification: good\n## Score: {tf}
2. Physical and Visual Quality:\n## Justification: fair\n## Score: 2.5
3. Text Rendering:\n## Justification: none\n## Score: N/A
# Summary: fine
# User Request Refinement:\n## Refinement Comments: more light\n## Refined Request: a cat in the sun"""


def test_a_critique_becomes_its_mean_less_one_over_three(load):
    with serving(
        lambda body, n: (
            "no idea"
            if "red" in words(body)
            else CRITIQUE.format(tf=4 if "cat" in words(body) else 9)
        )
    ) as server:
        judge = load("rationalrewards", server, template="critique")
        out, parts = judge(FLAT, PROMPTS), judge.parts(FLAT[:2], PROMPTS[:2])
        assert judge.refine(FLAT[:2], PROMPTS[:2]) == ["a cat in the sun"] * 2
    assert out[:2].tolist() == pytest.approx([((4 + 2.5) / 2 - 1) / 3] * 2) and math.isnan(
        out[2]
    )  # 9 is clamped to 4
    assert {name: part.tolist() for name, part in parts.items()} == {
        "text_faithfulness": [4.0, 4.0],
        "physical_quality": [2.5, 2.5],
    }
    assert len(server.requests) == 3 + 0  # parts and refine read the same critiques
    body = next(body for body in server.requests if "{prompt}" in words(body))
    assert body["messages"][0] == {"role": "system", "content": "You judge."}
    assert [part["type"] for part in body["messages"][1]["content"]] == [
        "text",
        "image_url",
        "text",
    ]
    assert words(body) == "Request a {prompt} of <image>: see <image>. Judge."
    assert (body["model"], body["temperature"], body["max_tokens"]) == (
        "RationalRewards-8B-T2I",
        0.1,
        2048,
    )


def test_an_edit_is_shown_after_its_source_and_aspects_can_be_chosen(load):
    reply = CRITIQUE.format(tf=1).replace(
        "2. Physical", "2. Image Faithfulness:\n## Score: 4\n3. Physical"
    )
    context = MediaContext(source=FLAT.flip(0))
    with serving(reply) as server:
        judge = load("rationalrewards", server, template="edit", task="edit")
        assert judge.needs == {"source"} and judge(
            FLAT, PROMPTS, context
        ).tolist() == pytest.approx([(7.5 / 3 - 1) / 3] * 3)
        one = load(
            "rationalrewards", server, template="edit", task="edit", aspects=["image_faithfulness"]
        )
        assert one(FLAT, PROMPTS, context).tolist() == [1.0] * 3
        assert load(
            "rationalrewards", server, template="edit", task="edit", aspects=["text_rendering"]
        ).refine(FLAT, PROMPTS, context)[0]
        none = load(
            "rationalrewards", server, template="edit", task="edit", aspects=["text_rendering"]
        )
        assert (
            none(FLAT, PROMPTS, context).isnan().all()
            and "none of the aspects text_rendering has a score" in none.problem
        )
    assert sorted(levels(body) for body in server.requests[:3]) == [
        [51, 153],
        [102, 102],
        [153, 51],
    ]
    assert server.requests[0]["model"] == "RationalRewards-8B-Edit"
    with pytest.raises(
        ValueError,
        match="image_faithfulness is not an aspect of task=t2i; choose from text_faithfulness",
    ):
        rewards.load("rationalrewards", aspects=["image_faithfulness"])


def test_a_critique_that_was_cut_is_no_score_and_no_refined_request(load):
    """Cut after the first aspect it would score (4 - 1) / 3 = 1; cut in the request, the picture of
    half a prompt would be made."""
    whole = CRITIQUE.format(tf=4)
    with serving(Answer(whole.partition("\n2.")[0], finish="length")) as server:
        judge = load("rationalrewards", server, template="critique")
        assert (
            judge(FLAT, PROMPTS).isnan().all()
            and "no summary" in judge.problem
            and "max_tokens=2048" in judge.problem
        )
    with serving(Answer(whole[:-5], finish="length")) as server:
        judge = load("rationalrewards", server, template="critique")
        assert (
            judge(FLAT, PROMPTS).tolist() == pytest.approx([(3.25 - 1) / 3] * 3)
            and judge.refine(FLAT, PROMPTS) == [None] * 3
        )


def test_a_request_without_a_refinement_refines_to_nothing(load):
    with serving(
        lambda body, n: (
            Answer(status=400, raw=b"")
            if "cat" in words(body)
            else "1. Text Faithfulness:\n## Score: 3"
        )
    ) as server:
        assert (
            load("rationalrewards", server, template="critique").refine(FLAT, PROMPTS) == [None] * 3
        )


# --- token probabilities


def test_vlm_logit_is_the_expected_digit_over_five(load):
    def script(body, n):
        return Answer(
            "4",
            first=(
                {"4": 0.5, "5": 0.3, "3": 0.1, "I": 0.1}
                if "cat" in words(body)
                else {"Well": 0.99, "4": 0.001}
            ),
        )

    with serving(script) as server:
        out = load("vlm_logit", server)(FLAT, PROMPTS)
    assert (
        out[0] == pytest.approx((4 * 0.5 + 5 * 0.3 + 3 * 0.1) / 0.9 / 5) and out[1:].isnan().all()
    )
    body = server.requests[0]
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"]) == (True, 20, 1)
    assert 'How well does this image show "' in words(body) and words(body).startswith("<image>")


def test_vlm_logit_shows_the_source_of_an_edit_and_its_requirement(load):
    context = MediaContext(
        source=FLAT.flip(0),
        meta=[{"requirement": "keep {prompt}"}, {"requirement": ""}, {"requirement": 3}],
    )
    with serving(Answer("9", first={"9": 0.5, "0": 0.5})) as server:
        judge = load(
            "vlm_logit", server, edit=True, top=9, question="Do {prompt}, with {requirement}!"
        )
        assert (judge.needs, judge.reads) == ({"source", "meta"}, {"requirement"})
        assert judge(FLAT, PROMPTS, context).tolist() == pytest.approx([0.5] * 3)
        context.meta[1].clear()
        with pytest.raises(
            ValueError,
            match=(
                r'the meta of "a \{prompt\} of <image>" has none; give every prompt a "requirement"'
            ),
        ):
            judge(FLAT, PROMPTS, context)
    assert sorted(words(body) for body in server.requests) == [
        "<image><image>Do a cat, with keep {prompt}!",
        "<image><image>Do a {prompt} of <image>, with !",
        "<image><image>Do two red circles, with 3!",
    ]
    assert sorted(levels(body) for body in server.requests) == [[51, 153], [102, 102], [153, 51]]
    with pytest.raises(ValueError, match="top=9: the plain question asks for 0 to 5"):
        load("vlm_logit", server, top=9)


def test_vlm_yesno_is_the_share_of_yes_and_answers_any_question(load):
    def script(body, n):
        return Answer(
            "Yes",
            first={"Yes": 0.6, "No": 0.2} if "cat" in words(body) else {"yes": 0.9, "no": 0.1},
        )

    with serving(script) as server:
        judge = load("vlm_yesno", server)
        out = judge(FLAT, PROMPTS)
        assert out[0] == pytest.approx(0.75) and out[1:].isnan().all()
        answers = judge.answer(FLAT[:2], ["Is there a cat?", "Is it red?"])
        assert (
            answers[0] == pytest.approx(0.75)
            and math.isnan(answers[1])
            and answers.dtype == torch.float32
        )
        loose = load(
            "vlm_yesno", server, variants=True, question="Is it a beautiful image?", instruction=""
        )
        assert loose(FLAT, PROMPTS).tolist() == pytest.approx([0.9] * 3) and not loose.reads_prompt
    asked = {words(body) for body in server.requests}
    assert (
        '<image>Does this image show "a cat"? Answer Yes or No.' in asked
        and "<image>Is it red? Answer Yes or No." in asked
    )
    assert "<image>Is it a beautiful image?" in asked


def test_a_server_without_log_probabilities_is_named_as_the_cause(load):
    with serving("Yes") as server:
        judge = load("vlm_yesno", server)
        assert (
            judge(FLAT, PROMPTS).isnan().all()
            and "the server sent no token log-probabilities" in judge.problem
        )


def test_a_video_is_one_question_with_several_frames(load):
    video = torch.linspace(0, 1, 20)[None, :, None, None, None].expand(2, 20, 3, 8, 8).contiguous()
    with serving(Answer("Yes", first={"Yes": 0.5, "No": 0.5, "5": 0.0001, "0": 0.2})) as server:
        assert load("vlm_yesno", server, frames=4)(video, ["a cat", "a dog"]).tolist() == [0.5, 0.5]
        load("vlm_logit", server, frames=3)(video, ["a cat", "a dog"])
    assert [len(pictures(body)) for body in server.requests] == [4, 4, 3, 3]


# --- the contract


@pytest.mark.parametrize("name", ["vlm_yesno", "vlm_logit", "unifiedreward", "rationalrewards"])
def test_a_judge_repeats_itself_and_is_no_network(load, name):
    first = {"Yes": 0.6, "No": 0.3, "4": 0.05}
    reply = "Final Score: 3\n1. Text Faithfulness:\n## Score: 3"
    with serving(Answer(reply, first=first)) as server:
        judge = load(
            name, server, **({"template": "critique"} if name == "rationalrewards" else {})
        )
        with judge.uncached():
            assert (
                torch.equal(judge(FLAT, PROMPTS), judge(FLAT, PROMPTS)) and not judge.differentiable
            )
        assert len(server.requests) == 6
        assert not any(isinstance(value, torch.nn.Module) for value in vars(judge).values())
        assert (
            judge.to("cpu") is judge
            and judge(FLAT, PROMPTS).isfinite().all()
            and len(server.requests) == 6
        )  # kept replies
