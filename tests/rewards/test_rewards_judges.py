"""rationalrewards, vlm_logit, vlm_yesno: what they ask, and how replies become scores."""

import hashlib
import math

import pytest
import torch
from judge_server import Answer, pictures, serving, words
from judges import FLAT, PROMPTS, levels, loader

from flowrl import rewards
from flowrl.rewards import rationalrewards
from flowrl.types import MediaContext


@pytest.fixture
def load(tmp_path):
    return loader(tmp_path)


# --- rationalrewards

CRITIQUE = """# User Request Analysis\nA cat.\n# Detailed Judgement
1. Text Faithfulness:\n## Justification: good\n## Score: {tf}
2. Physical and Visual Quality:\n## Justification: fair\n## Score: 2.5
3. Text Rendering:\n## Justification: none\n## Score: N/A
# Summary: fine
# User Request Refinement:\n## Refinement Comments: more light
## Refined Request: a cat in the sun"""


def test_a_critique_becomes_its_mean_less_one_over_three(load):
    def script(body, n):
        if "red" in words(body):
            return "no idea"
        return CRITIQUE.format(tf=4 if "cat" in words(body) else 9)  # 9 is clamped to 4

    with serving(script) as server:
        judge = load("rationalrewards", server, template="critique")
        out, parts = judge(FLAT, PROMPTS), judge.parts(FLAT[:2], PROMPTS[:2])
        assert judge.refine(FLAT[:2], PROMPTS[:2]) == ["a cat in the sun"] * 2
    assert out[:2].tolist() == pytest.approx([((4 + 2.5) / 2 - 1) / 3] * 2) and math.isnan(out[2])
    assert parts.keys() == {"text_faithfulness", "physical_quality"}
    assert parts["text_faithfulness"].tolist() == [4.0, 4.0]
    assert parts["physical_quality"].tolist() == [2.5, 2.5]
    assert len(server.requests) == 3 + 0  # parts and refine read the same critiques
    body = next(body for body in server.requests if "{prompt}" in words(body))
    system, question = body["messages"]
    assert system == {"role": "system", "content": "You judge."}
    assert [part["type"] for part in question["content"]] == ["text", "image_url", "text"]
    assert words(body) == "Request a {prompt} of <image>: see <image>. Judge."
    assert body["model"] == "RationalRewards-8B-T2I"
    assert (body["temperature"], body["max_tokens"]) == (0.1, 2048)


def test_an_edit_is_shown_after_its_source_and_a_reply_without_aspects_is_no_score(load):
    faithful = "2. Image Faithfulness:\n## Score: 4\n3. Physical"
    reply = CRITIQUE.format(tf=1).replace("2. Physical", faithful)
    context = MediaContext(source=FLAT.flip(0))
    with serving(reply) as server:
        judge = load("rationalrewards", server, template="edit", task="edit")
        out = judge(FLAT, PROMPTS, context)
        assert judge.needs == {"source"} and out.tolist() == pytest.approx([(7.5 / 3 - 1) / 3] * 3)
        assert judge.refine(FLAT, PROMPTS, context)[0]
    seen = sorted(levels(body) for body in server.requests[:3])
    assert seen == [[51, 153], [102, 102], [153, 51]]
    assert server.requests[0]["model"] == "RationalRewards-8B-Edit"
    with serving("2. Image Faithfulness:\n## Score: 4\n# Summary: fine") as server:
        judge = load("rationalrewards", server, template="critique")
        assert judge(FLAT, PROMPTS).isnan().all()
    said = "none of the aspects text_faithfulness, physical_quality, text_rendering has a score"
    assert said in judge.problem


def test_a_critique_that_was_cut_is_no_score_and_no_refined_request(load):
    """Cut after the first aspect it would score (4 - 1) / 3 = 1.

    Cut in the request, the picture of half a prompt would be made.
    """
    whole = CRITIQUE.format(tf=4)
    with serving(Answer(whole.partition("\n2.")[0], finish="length")) as server:
        judge = load("rationalrewards", server, template="critique")
        assert judge(FLAT, PROMPTS).isnan().all()
        assert "no summary" in judge.problem and "max_tokens=2048" in judge.problem
    with serving(Answer(whole[:-5], finish="length")) as server:
        judge = load("rationalrewards", server, template="critique")
        assert judge(FLAT, PROMPTS).tolist() == pytest.approx([(3.25 - 1) / 3] * 3)
        assert judge.refine(FLAT, PROMPTS) == [None] * 3


def test_a_request_without_a_refinement_refines_to_nothing(load):
    def script(body, n):
        if "cat" in words(body):
            return Answer(status=400, raw=b"")
        return "1. Text Faithfulness:\n## Score: 3"

    with serving(script) as server:
        judge = load("rationalrewards", server, template="critique")
        assert judge.refine(FLAT, PROMPTS) == [None] * 3


def test_a_critics_two_texts_are_compared_too(tmp_path, monkeypatch):
    (tmp_path / "t").write_text("{prompt}: <image>")
    (tmp_path / "s").write_text("Judge.")
    paths = {"template": str(tmp_path / "t"), "system": str(tmp_path / "s")}
    with pytest.raises(ValueError, match="expected 733d99af3f475d0c"):
        rewards.load("rationalrewards", **paths)
    sha256 = hashlib.sha256(b"{prompt}: <image>").hexdigest()
    monkeypatch.setitem(rationalrewards.TEXTS, "t2i", (sha256,))
    with pytest.raises(ValueError, match="expected 2fa66ca8679e6eed"):
        rewards.load("rationalrewards", **paths)
    monkeypatch.setitem(rationalrewards.SYSTEMS, "t2i", (hashlib.sha256(b"Judge.").hexdigest(),))
    assert rewards.load("rationalrewards", **paths).system == "Judge."
    said = "needs its model's own prompt text: save the system prompt of Flow-Factory"
    with pytest.raises(ValueError, match=said):
        rewards.load("rationalrewards", template=paths["template"])


# --- token probabilities


def test_vlm_logit_is_the_expected_digit_over_five(load):
    def script(body, n):
        sure = {"4": 0.5, "5": 0.3, "3": 0.1, "I": 0.1}
        return Answer("4", first=sure if "cat" in words(body) else {"Well": 0.99, "4": 0.001})

    with serving(script) as server:
        out = load("vlm_logit", server)(FLAT, PROMPTS)
    assert out[0] == pytest.approx((4 * 0.5 + 5 * 0.3 + 3 * 0.1) / 0.9 / 5)
    assert out[1:].isnan().all()
    body = server.requests[0]
    assert (body["logprobs"], body["top_logprobs"], body["max_tokens"]) == (True, 20, 1)
    assert 'How well does this image show "' in words(body) and words(body).startswith("<image>")


def test_vlm_logit_shows_the_source_of_an_edit_and_its_requirement(load):
    metas = [{"requirement": said} for said in ("keep {prompt}", "", 3)]
    context = MediaContext(source=FLAT.flip(0), meta=metas)
    question = "Do {prompt}, with {requirement}!"
    with serving(Answer("9", first={"9": 0.5, "0": 0.5})) as server:
        judge = load("vlm_logit", server, edit=True, top=9, question=question)
        assert (judge.needs, judge.reads) == ({"source", "meta"}, {"requirement"})
        assert judge(FLAT, PROMPTS, context).tolist() == pytest.approx([0.5] * 3)
        context.meta[1].clear()
        said = r'"a \{prompt\} of <image>" has none; give every prompt a "requirement"'
        with pytest.raises(ValueError, match=f"the meta of {said}"):
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
        plain = {"Yes": 0.6, "No": 0.2}
        return Answer("Yes", first=plain if "cat" in words(body) else {"yes": 0.9, "no": 0.1})

    with serving(script) as server:
        judge = load("vlm_yesno", server)
        out = judge(FLAT, PROMPTS)
        assert out[0] == pytest.approx(0.75) and out[1:].isnan().all()
        answers = judge.answer(FLAT[:2], ["Is there a cat?", "Is it red?"])
        assert answers[0] == pytest.approx(0.75) and math.isnan(answers[1])
        assert answers.dtype == torch.float32
        question = "Is it a beautiful image?"
        loose = load("vlm_yesno", server, variants=True, question=question, instruction="")
        assert loose(FLAT, PROMPTS).tolist() == pytest.approx([0.9] * 3) and not loose.reads_prompt
    asked = {words(body) for body in server.requests}
    assert '<image>Does this image show "a cat"? Answer Yes or No.' in asked
    assert "<image>Is it red? Answer Yes or No." in asked
    assert f"<image>{question}" in asked


def test_a_server_without_log_probabilities_is_named_as_the_cause(load):
    with serving("Yes") as server:
        judge = load("vlm_yesno", server)
        assert judge(FLAT, PROMPTS).isnan().all()
        assert "the server sent no token log-probabilities" in judge.problem


def test_a_video_is_one_question_with_several_frames(load):
    video = torch.linspace(0, 1, 20)[None, :, None, None, None].expand(2, 20, 3, 8, 8).contiguous()
    with serving(Answer("Yes", first={"Yes": 0.5, "No": 0.5, "5": 0.0001, "0": 0.2})) as server:
        assert load("vlm_yesno", server, frames=4)(video, ["a cat", "a dog"]).tolist() == [0.5, 0.5]
        load("vlm_logit", server, frames=3)(video, ["a cat", "a dog"])
    assert [len(pictures(body)) for body in server.requests] == [4, 4, 3, 3]


# --- the contract


@pytest.mark.parametrize("name", ["vlm_yesno", "vlm_logit", "unifiedreward", "rationalrewards"])
def test_a_judge_repeats_itself_and_is_not_a_network(load, name):
    first = {"Yes": 0.6, "No": 0.3, "4": 0.05}
    reply = "Final Score: 3\n1. Text Faithfulness:\n## Score: 3"
    with serving(Answer(reply, first=first)) as server:
        judge = load(name, server, template="critique" if name == "rationalrewards" else "question")
        with judge.uncached():
            assert torch.equal(judge(FLAT, PROMPTS), judge(FLAT, PROMPTS))
        assert not judge.differentiable and len(server.requests) == 6
        assert not any(isinstance(value, torch.nn.Module) for value in vars(judge).values())
        assert judge.to("cpu") is judge and judge(FLAT, PROMPTS).isfinite().all()
        assert len(server.requests) == 6  # kept replies
