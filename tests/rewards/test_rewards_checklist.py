"""The checklist reward: weights and parents by hand, judges that fail, and code answers that say
what the strict verifiers say."""

import contextlib
import itertools
import json
import math

import pytest
import torch

from flowrl import rewards
from flowrl.data import checklists
from flowrl.data import geneval as geneval_prompts
from flowrl.rewards.core.failures import RewardBug
from flowrl.rewards.core.questions import complaint
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.networks import detector
from flowrl.rewards.networks.detector import DetectedObject
from flowrl.shapes import verify
from flowrl.shapes.agreement import ERRORS, plant
from flowrl.shapes.prompts import all_prompts, find, scene
from flowrl.shapes.scenes import render
from flowrl.types import MediaContext


class Judge(Reward):
    """Answers questions from a table, and keeps what it was asked; a question's answer may depend
    on the picture's brightness."""

    name, scale = "judge", "what the table says"

    def __init__(self, table):
        super().__init__()
        self.table, self.asked = table, []

    def answer(self, media, questions):
        self.asked += questions
        said = [self.table[q] for q in questions]
        return torch.tensor(
            [s(float(m.mean())) if callable(s) else s for s, m in zip(said, media, strict=True)]
        )


def ask(question, weight=1.0, parent=None, **more):
    return {"question": question, "weight": weight, "parent": parent, **more}


def context(*lists):
    return MediaContext(meta=[{"checklist": questions} for questions in lists])


def scored(table, *lists, media=None, **settings):
    reward = rewards.load("checklist", answerer=Judge(table), **settings)
    media = torch.rand(len(lists), 3, 8, 8) if media is None else media
    return reward(media, ["a picture"] * len(lists), context(*lists)).tolist()


# --- weights and parents


def test_the_score_is_the_weighted_mean_of_the_answers():
    table = {"a": 1.0, "b": 0.0, "c": 0.6}
    assert scored(
        table,
        [ask("a"), ask("b")],
        [ask("a", 3), ask("b", 1)],
        [ask("a", 2), ask("c", 1), ask("b", 0)],
    ) == pytest.approx([0.5, 0.75, 2.6 / 3])


def test_a_parent_below_one_half_zeroes_its_children_and_theirs():
    table = {"yes": 1.0, "no": 0.49, "half": 0.5}
    assert scored(table, [ask("no"), ask("yes", parent=0)]) == pytest.approx([0.245])
    assert scored(table, [ask("half"), ask("yes", parent=0)]) == pytest.approx([0.75])
    assert scored(table, [ask("no"), ask("yes", parent=0), ask("yes", parent=1)]) == pytest.approx(
        [0.49 / 3]
    )
    assert scored(table, [ask("yes"), ask("no"), ask("yes", parent=[0, 1])]) == pytest.approx(
        [1.49 / 3]
    )
    assert scored(table, [ask("yes"), ask("half"), ask("yes", parent=[0, 1])]) == pytest.approx(
        [2.5 / 3]
    )


def test_binary_counts_answers_as_yes_or_no():
    assert scored(
        {"a": 0.51, "b": 0.49}, [ask("a"), ask("b"), ask("b")], binary=True
    ) == pytest.approx([1 / 3])


def test_an_answer_that_failed_makes_its_sample_nan_whatever_its_weight_or_parent():
    table = {"yes": 1.0, "no": 0.0, "lost": math.nan}
    values = scored(
        table,
        [ask("yes")],
        [ask("yes"), ask("lost")],
        [ask("yes"), ask("lost", 0)],
        [ask("no"), ask("lost", parent=0)],
        binary=True,
    )
    assert values[0] == 1 and all(math.isnan(value) for value in values[1:])


# --- judges


def test_each_question_is_asked_once_about_its_own_picture_in_chunks(monkeypatch):
    monkeypatch.setattr("flowrl.rewards.checklist.AT_ONCE", 2)
    media = torch.stack([torch.full((3, 8, 8), level) for level in (0.2, 0.8)])
    judge = Judge({"bright?": lambda mean: mean, "dark?": lambda mean: 1 - mean, "yes": 1.0})
    reward = rewards.load("checklist", answerer=judge)
    lists = [[ask("bright?"), ask("dark?"), ask("yes")], [ask("bright?")]]
    values = reward(media, ["", ""], context(*lists))
    assert values.tolist() == pytest.approx([2 / 3, 0.8])
    assert sorted(judge.asked) == [
        "bright?",
        "bright?",
        "dark?",
        "yes",
    ]
    assert reward.last_answers[0] == pytest.approx([0.2, 0.8, 1.0])
    assert reward.last_answers[1] == pytest.approx([0.8])


def test_parts_do_not_ask_again_and_give_all_and_the_share_of_yes():
    judge = Judge({"yes": 0.9, "no": 0.1, "lost": math.nan})
    reward = rewards.load("checklist", answerer=judge)
    media, where = (
        torch.rand(3, 3, 8, 8),
        context([ask("yes"), ask("yes")], [ask("yes", 9), ask("no")], [ask("lost")]),
    )
    reward(media, [""] * 3, where)
    parts = reward.parts(media, [""] * 3, where)
    assert len(judge.asked) == 5
    assert parts["all"][:2].tolist() == [1, 0] and parts["yes"][:2].tolist() == [1, 0.5]
    assert parts["all"][2].isnan() and parts["yes"][2].isnan()
    reward(media + 0.001, [""] * 3, where)
    assert len(judge.asked) == 10  # other pictures


def test_within_uncached_every_question_is_asked_and_the_judge_is_told(tmp_path):
    class Telling(Judge):
        told = ()

        def begin(self, run):
            self.told += (run,)

        @contextlib.contextmanager
        def uncached(self):
            self.told += ("in",)
            yield
            self.told += ("out",)

    judge = Telling({"yes": 0.9})
    reward = rewards.load("checklist", answerer=judge)
    media, where = torch.rand(1, 3, 8, 8), context([ask("yes")])
    reward(media, [""], where)
    reward.begin(tmp_path)
    with reward.uncached():
        reward(media, [""], where)
        reward(media, [""], where)
    assert len(judge.asked) == 3 and judge.told == (tmp_path, "in", "out")
    reward(media, [""], where)
    assert len(judge.asked) == 3


def test_why_a_judge_failed_is_told_with_its_samples(monkeypatch):
    monkeypatch.setattr("flowrl.rewards.checklist.AT_ONCE", 1)
    judge = Judge({"lost": math.nan, "yes": 1.0})
    judge.problem = "it is asleep"
    reward = rewards.load("checklist", answerer=judge)
    scores = rewards.score(
        torch.rand(2, 3, 8, 8), ["a", "b"], {"c": reward}, context([ask("lost")], [ask("yes")])
    )
    assert scores.errors == ["c: NaN or inf for 1 of 2 samples (it is asleep)"]


def test_of_a_video_evenly_spaced_frames_are_asked_about_and_averaged():
    media = (torch.arange(8) / 10).view(1, 8, 1, 1, 1).expand(1, 8, 3, 4, 4)
    judge = Judge({"how bright?": lambda mean: mean})
    reward = rewards.load("checklist", answerer=judge, frames=2)
    assert reward(media, [""], context([ask("how bright?")])).item() == pytest.approx(
        (0.2 + 0.6) / 2
    )
    assert len(judge.asked) == 2


def test_a_judge_may_be_named_by_a_file(tmp_path):
    (tmp_path / "judge.py").write_text(
        "import torch\nfrom flowrl.rewards import Reward\n\n\nclass Bright(Reward):\n    name,"
        " scale = 'bright', 'mean'\n\n    def answer(self, media, questions):\n        return"
        " media.mean((1, 2, 3))\n"
    )
    reward = rewards.load("checklist", answerer=f"{tmp_path}/judge.py:Bright")
    assert reward(
        torch.full((1, 3, 4, 4), 0.25), [""], context([ask("bright?")])
    ).item() == pytest.approx(0.25)


@pytest.mark.parametrize("said", [torch.tensor([1.0, 0.5]), torch.tensor([1.5]), [1.0]])
def test_a_judge_that_breaks_its_contract_stops_the_run(said):
    judge = Judge({})
    judge.answer = lambda media, questions: said
    reward = rewards.load("checklist", answerer=judge)
    with pytest.raises(RewardBug, match=r"expected a tensor \(1,\) in \[0, 1\]"):
        reward(torch.rand(1, 3, 8, 8), [""], context([ask("a")]))


def test_answers_are_written_to_the_log(tmp_path):
    path = tmp_path / "answers.jsonl"
    scored({"a": 0.0, "b": 1.0}, [ask("a"), ask("b", parent=0)], [ask("b")], log=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["score"] for line in lines] == [0, 1] and lines[0]["prompt"] == "a picture"
    assert lines[0]["answers"][1] == {
        "question": "b",
        "answer": 1.0,
        "counted": 0.0,
        "zeroed": True,
    }


def test_what_was_answered_last_is_told_again_without_asking_and_says_what_a_parent_zeroed():
    judge = Judge({"yes": 0.9, "no": 0.25, "lost": math.nan})
    reward = rewards.load("checklist", answerer=judge)
    media, where = (
        torch.rand(2, 3, 8, 8),
        context([ask("no"), ask("yes", parent=0)], [ask("yes"), ask("lost", parent=0)]),
    )
    assert reward.told(media, where) is None
    reward(media, ["", ""], where)
    reward.parts(media, ["", ""], where)
    told = reward.told(media, where)
    assert [[(q["answer"], q["counted"], q["zeroed"]) for q in sample] for sample in told] == [
        [(0.25, 0.25, False), (0.9, 0.0, True)],
        [(0.9, 0.9, False), (None, None, False)],
    ]
    assert [q["question"] for q in told[0]] == ["no", "yes"] and len(judge.asked) == 4
    assert reward.told(media + 0.001, where) is None
    assert reward.told(media[:1], context([ask("no")])) is None
    assert len(judge.asked) == 4


# --- code


def test_a_function_of_the_users_file_answers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def brighter(image, *, than):\n    return float(image.mean()) > than\n"
    )
    check = {"check": f"{tmp_path}/mine.py:brighter"}
    questions = [
        ask("half?", args={"than": 0.5}, **check),
        ask("dim?", args={"than": 0.1}, **check),
    ]
    reward = rewards.load("checklist")
    assert reward(torch.full((1, 3, 4, 4), 0.3), [""], context(questions)).item() == 0.5
    with pytest.raises(ValueError, match='mine.py has no function "darker"'):
        reward(
            torch.rand(1, 3, 4, 4), [""], context([ask("?", check=f"{tmp_path}/mine.py:darker")])
        )


def test_on_shapes_the_score_is_one_exactly_where_the_strict_verifier_says_so():
    generator = torch.Generator().manual_seed(3)
    by_task = [
        [p for p in all_prompts() if p["task"] == task]
        for task in dict.fromkeys(p["task"] for p in all_prompts())
    ]
    drawn = []
    for number in range(60):
        members = by_task[number % len(by_task)]
        prompt = members[int(torch.randint(len(members), (), generator=generator))]
        truth = scene(prompt, generator)
        planted = [plant(prompt, truth, error, generator) for error in ERRORS]
        drawn += [
            (prompt, objects) for objects in [truth, truth[:-1], *planted] if objects is not None
        ]
    media = torch.stack([render(objects) for _, objects in drawn])
    metas = [prompt for prompt, _ in drawn]
    strict = [
        verify.strict(found, p["include"])
        for found, p in zip(verify.detect(media), metas, strict=True)
    ]
    prompts = [p["prompt"] for p in metas]
    written = rewards.load("checklist", questions="shapes")(
        media, prompts, MediaContext(meta=metas)
    )
    given = rewards.load("checklist")(
        media,
        prompts,
        MediaContext(meta=[m | {"checklist": checklists.from_shapes(m)} for m in metas]),
    )
    assert [value == 1 for value in written.tolist()] == strict
    assert 50 < sum(strict) < len(strict) - 150
    assert torch.equal(written, given)


def test_a_missing_shape_earns_no_credit_for_its_colour_or_place():
    prompt = find("a red circle left of a blue square")
    alone = [o for o in scene(prompt, torch.Generator().manual_seed(0)) if o.shape == "square"]
    reward = rewards.load("checklist", questions="shapes")
    value = reward(render(alone)[None], [prompt["prompt"]], MediaContext(meta=[prompt])).item()
    assert value == pytest.approx(
        2 / 6
    )  # the square and its colour; no circle, so no colour of it, no place; one object, not two


def detections(clause):
    """Right objects of a clause, others elsewhere, one too many, none, and wrong colours."""
    color, n = clause.get("color"), clause["count"]
    corners = [(0, 0), (50, 0), (50, 50), (0, 90)]
    boxes = [*((x, y, x + 10, y + 10) for x, y in corners), (90, 90, 99, 99)]
    right = [DetectedObject(box, 0.95, color) for box in boxes]
    other = [DetectedObject(box, 0.9, color and "none") for box in boxes[:n]]
    return [right[:n], right[1 : n + 1], right[: n + 1], [], other]


def planted_cases():
    """(prompt, what is found) for every held-out task and one prompt that excludes a kite."""
    every = geneval_prompts.eval_prompts()
    prompts = [next(p for p in every if p["tag"] == tag) for tag in geneval_prompts.HELD_OUT]
    prompts.append(prompts[0] | {"exclude": [{"class": "kite", "count": 1}]})
    cases = []
    for prompt in prompts:
        names = [clause["class"] for clause in prompt["include"]]
        for choice in itertools.product(*map(detections, prompt["include"])):
            found = {name: list(some) for name, some in zip(names, choice, strict=True) if some}
            cases += [
                (prompt, found),
                (prompt, found | {"kite": [DetectedObject((0, 0, 5, 5), 0.9)]}),
            ]
    return cases


def test_on_geneval_the_score_is_one_exactly_where_strict_holds_and_nothing_is_excluded():
    cases = planted_cases()

    class Detector(Reward):
        def detect(self, frames, metas):
            assert all(meta["include"] for meta in metas)
            return [found for _, found in cases]

    reward = rewards.load("checklist")
    reward.geneval = Detector()
    metas = [prompt | {"checklist": checklists.from_geneval(prompt)} for prompt, _ in cases]
    media, prompts = torch.rand(len(cases), 3, 4, 4), [meta["prompt"] for meta in metas]
    values = reward(media, prompts, MediaContext(meta=metas)).tolist()
    expected = [
        detector.strict(found, p["include"]) and detector.official(found, (), p.get("exclude", []))
        for p, found in cases
    ]
    assert [value == 1 for value in values] == expected
    assert 10 < sum(expected) < len(expected) / 2


def test_the_detector_is_told_the_tag_and_the_colours_that_the_questions_ask_for():
    seen = []

    class Detector(Reward):
        def detect(self, frames, metas):
            seen.extend(metas)
            return [{} for _ in metas]

    reward = rewards.load("checklist")
    reward.geneval = Detector()
    question = ask(
        "red?", check="geneval", args={"include": [{"class": "cup", "count": 1, "color": "red"}]}
    )
    meta = {"checklist": [question], "tag": "counting"}
    assert reward(torch.rand(1, 3, 4, 4), [""], MediaContext(meta=[meta])).item() == 0
    assert seen == [{"tag": "counting", "include": [{"class": "cup", "count": 1, "color": "red"}]}]


# --- bad input


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        (None, "checklist=None, which should be a list"),
        ([], "checklist=\\[\\]"),
        ([{"text": "Is there a dog?"}], 'should be like {"question"'),
        ([ask(" ")], "should be like"),
        ([ask("a", -1)], 'the question "a" the weight -1'),
        ([ask("a", math.nan)], "the weight nan"),
        ([ask("a", 0)], "weights are all 0"),
        (
            [ask("a", parent=0)],
            'the question "a" the parent 0, which should be the place, from 0, of an earlier one',
        ),
        ([ask("a"), ask("b", parent=[0, 2])], r"the parent \[0, 2\]"),
        (
            [ask("a", check="shapes_count", args=[2])],
            r'cannot check "a": args=\[2\] should be a mapping',
        ),
        ([ask("a", args="two")], 'cannot check "a": args=.two. should be a mapping'),
        (
            [ask("a", check="shapes_count", args={"count": 2, "colour": "red"})],
            "shapes_count does not take .*unexpected .* 'colour'",
        ),
        ([ask("a", check="shapes_count")], "missing a required argument: 'count'"),
        ([ask("a", check="geneval", args={"includes": []})], "geneval does not take args"),
        ([ask("a", check="nowhere/mine.py:bright")], "there is no file nowhere/mine.py"),
        (
            [ask("a", check="shapes_cont")],
            'the check \'shapes_cont\' for the question "a"; did you mean "shapes_count"',
        ),
    ],
)
def test_a_checklist_that_cannot_be_answered_is_named(questions, said):
    reward = rewards.load("checklist", answerer=Judge({}))
    with pytest.raises(ValueError, match=f'the prompt "a picture" .*{said}'):
        reward(torch.rand(1, 3, 8, 8), ["a picture"], context(questions))


def test_a_question_for_a_judge_without_one_is_named():
    assert (
        'asks a judge "a", and none is set; set reward.checklist.answerer=vlm_yesno'
        in complaint([ask("a")], judged=False)
    )
    assert complaint([ask("a")], judged=True) is None


def test_what_each_setting_reads_is_checked_before_a_run():
    assert rewards.load("checklist").reads == {"checklist"}
    shapes = rewards.load("checklist", questions="shapes")
    assert shapes.reads == {"include"}
    assert "include=None" in shapes.complaint({})
    assert shapes.complaint(find("a circle")) is None
    assert "include=None" in rewards.load(
        "checklist", questions="geneval", answerer=Judge({})
    ).complaint({})


def test_an_answerer_that_answers_nothing_or_settings_without_one_are_refused():
    said = "answerer=jpeg: it does not answer questions; choose vlm_yesno or vqascore"
    with pytest.raises(ValueError, match=said):
        rewards.load("checklist", answerer="jpeg")
    with pytest.raises(ValueError, match="answerer_settings=.* but no answerer"):
        rewards.load("checklist", answerer_settings={"url": "http://localhost"})
