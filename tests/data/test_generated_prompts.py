"""Prompt generators: GenEval's tasks in the benchmark's numbers, text to be drawn, checklists; the
same everywhere, training apart."""

import hashlib
import json
import re
from collections import Counter

import everyday as generator
import pytest
from open_clip.tokenizer import SimpleTokenizer

from flowrl.data import checklists, everyday, geneval, ocr
from flowrl.rewards.networks import detector
from flowrl.shapes.prompts import find

TRAIN, EVAL = geneval.train_prompts(), geneval.eval_prompts()


# --- GenEval


def test_geneval_eval_has_the_benchmarks_size_of_every_task():
    assert Counter(p["tag"] for p in EVAL) == geneval.HELD_OUT and len(EVAL) == 553
    assert len({p["prompt"] for p in EVAL}) == 553


def test_geneval_training_tasks_come_in_flow_grpos_ratio():
    count = Counter(p["tag"] for p in TRAIN)
    ratio = {"position": 7, "counting": 5, "color_attr": 3, "colors": 1, "two_object": 1}
    assert {task: count[task] / 300 for task in count} == ratio


def test_no_held_out_combination_is_trained_on_in_either_order_of_words():
    def asked(prompt):
        """What a prompt asks for, whatever the order: clauses as a set, a position seen from both
        sides."""
        mirror = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        things = frozenset((c["class"], c["count"], c.get("color")) for c in prompt["include"])
        where = [(c["class"], *c["position"][:1]) for c in prompt["include"] if "position" in c]
        others = [(prompt["include"][0]["class"], mirror[relation]) for _, relation in where]
        return things, frozenset(where + others)

    held = {asked(p) for p in EVAL}
    assert len(held) == 553 and not held & {asked(p) for p in TRAIN}


def test_geneval_prompts_can_be_judged_and_say_what_their_clauses_say():
    for p in TRAIN + EVAL:
        assert detector.complaint(p) is None
        assert p["task"] == p["tag"]
        assert p["prompt"].startswith("a photo of ")
        for clause in p["include"]:
            named = geneval.plural(clause["class"]) if clause["count"] > 1 else clause["class"]
            assert named in p["prompt"] and clause.get("color", "") in p["prompt"]
            assert clause.get("position", [""])[0] in p["prompt"]


def test_a_counting_prompt_excludes_one_more_and_a_position_points_at_the_second_object():
    six = next(p for p in TRAIN if p["tag"] == "counting" and p["include"][0]["count"] == 3)
    name = six["include"][0]["class"]
    assert six["prompt"] == f"a photo of three {geneval.plural(name)}"
    assert six["exclude"] == [{"class": name, "count": 4}]
    place = next(p for p in TRAIN if p["tag"] == "position")
    second, first = place["include"]
    (relation, target), named = first["position"], geneval.with_article
    words = f"{named(first['class'])} {relation} {named(second['class'])}"
    assert place["prompt"] == f"a photo of {words}" and target == 0


def test_people_have_no_colours_and_pairs_are_not_counted():
    asked = [(p["tag"], c["class"]) for p in TRAIN + EVAL for c in p["include"]]
    colored = {name for tag, name in asked if tag in ("colors", "color_attr")}
    assert "person" not in colored and "dog" in colored
    assert not {name for tag, name in asked if tag == "counting"} & set(geneval.UNCOUNTED)


@pytest.mark.parametrize(
    ("name", "many"),
    [
        ("dog", "dogs"),
        ("bus", "buses"),
        ("knife", "knives"),
        ("person", "people"),
        ("bench", "benches"),
        ("toothbrush", "toothbrushes"),
        ("wine glass", "wine glasses"),
        ("sheep", "sheep"),
        ("computer mouse", "computer mice"),
    ],
)
def test_plurals_are_english(name, many):
    assert geneval.plural(name) == many


def test_generated_prompts_are_the_same_on_every_machine():
    def digest(prompts):
        return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]

    found = [digest(made) for made in (EVAL, TRAIN, ocr.eval_prompts(), ocr.train_prompts())]
    drawn = ["b04cc7bb4e1f7776", "d3f214bc6046a871"]
    assert found == ["8709b19b849822ec", "edbdb81007fc9a77", *drawn]


# --- text


def test_a_text_prompt_holds_its_text_between_its_only_double_quotes():
    for p in ocr.train_prompts() + ocr.eval_prompts():
        assert p["prompt"].split('"')[1:] == [p["text"], p["prompt"].split('"')[2]]
        assert p["text"].strip()


def test_no_held_out_text_is_trained_on_and_every_kind_is_in_both():
    train, held = ocr.train_prompts(), ocr.eval_prompts()
    assert (len(train), len(held)) == (3960, 1018)
    assert not {p["text"].lower() for p in train} & {p["text"].lower() for p in held}
    assert {p["task"] for p in train} == {p["task"] for p in held} == set(ocr.KINDS)
    assert {p["task"] for p in held[:64]} == set(ocr.KINDS)


# --- everyday

PARTS = [everyday.train_prompts(), everyday.eval_prompts()]
DAILY = [row for part in PARTS for row in part]


def test_everyday_is_what_its_parts_give_and_a_fifth_of_every_task_is_held_out():
    made = generator.TARGET.read_text(encoding="utf-8")
    assert made == "".join(f"{json.dumps(row)}\n" for row in generator.prompts())
    train, held = (Counter(row["task"] for row in part) for part in PARTS)
    assert len(DAILY) == 1000 and held == {task: n / 4 for task, n in train.items()}
    assert {row["task"] for row in PARTS[1][:32]} == set(generator.COUNTS)


def test_no_pair_of_a_held_out_prompt_is_trained_on_in_meta_or_in_words():
    train, held = ({tuple(pair) for row in part for pair in row["pairs"]} for part in PARTS)
    assert len(train) > 800 and len(held) > 300 and not train & held
    for row in DAILY:  # what meta says of a prompt stands in it
        text = row["prompt"].lower()
        for subject, said in row["pairs"]:
            assert said.lower() in text and subject[:3].lower() in text, row
    trained_on = " ".join(row["prompt"].lower() for row in PARTS[0])
    held_out = [f"{said} {subject}".lower() for subject, said in held]
    assert not [words for words in held_out if f" {words} " in trained_on]


def test_no_two_everyday_prompts_differ_by_word_order_alone():
    words = [tuple(sorted(re.findall(r"\w+", row["prompt"].lower()))) for row in DAILY]
    assert len(set(words)) == 1000
    texts = [{row["text"].lower() for row in part if "text" in row} for part in PARTS]
    assert len(texts[1]) > 10 and not texts[0] & texts[1]


def test_everyday_prompts_are_plain_english_that_clip_reads_whole():
    encode = SimpleTokenizer().encode
    for prompt in (row["prompt"] for row in DAILY):
        assert prompt.isascii() and prompt == " ".join(prompt.split()) and prompt[0].isupper()
        assert 8 <= len(encode(prompt)) + 2 <= 77
        words = prompt.lower().replace('"', "").split()
        assert not [word for word, after in zip(words, words[1:], strict=False) if word == after]
        for article, after in zip(words, words[1:], strict=False):
            assert article not in ("a", "an") or (article == "an") == (after[0] in "aeiou"), prompt


def test_everyday_varies_subjects_styles_and_light():
    starts = Counter(
        re.match(r"(.*?) (?:of|showing) ", row["prompt"])[1]
        for row in DAILY
        if " of " in row["prompt"]
    )
    subjects = Counter(subject for row in DAILY for subject, _ in row["pairs"])
    assert len(subjects) > 150 and max(subjects.values()) < 60 and len(starts) > 30


# --- checklists


def texts(questions):
    return [q["question"] for q in questions]


def test_the_checklist_of_a_counting_prompt_asks_for_number_colour_and_nothing_else():
    questions = checklists.from_shapes(find("three red circles"))
    assert texts(questions) == [
        "Are there exactly three circles?",
        "Are all circles red?",
        "Is the rest of the picture empty, with no other object in it?",
    ]
    assert [q["parent"] for q in questions] == [None, 0, None]
    assert [q["args"] for q in questions] == [
        {"shape": "circle", "count": 3},
        {"shape": "circle", "color": "red", "count": 3},
        {"count": 3},
    ]


def test_two_clauses_of_one_shape_are_told_apart_by_their_colours():
    questions = checklists.from_shapes(find("a red circle and a blue circle"), by="vlm")
    assert texts(questions)[:2] == [
        "Is there exactly one red circle?",
        "Is there exactly one blue circle?",
    ]
    assert all(q["check"] == "vlm" and "args" not in q for q in questions) and len(questions) == 3


def test_a_position_question_stands_on_both_count_questions():
    questions = checklists.from_shapes(find("a red circle left of a blue square"))
    place = next(q for q in questions if q["check"] == "shapes_position")
    assert place["question"] == "Is the red circle left of the blue square?"
    assert texts([questions[i] for i in place["parent"]]) == [
        "Is there exactly one circle?",
        "Is there exactly one square?",
    ]


def test_the_checklist_of_a_geneval_prompt_follows_its_clauses():
    prompt = {
        "include": [
            {"class": "dog", "count": 1},
            {"class": "cup", "count": 2, "color": "red", "position": ["above", 0]},
        ],
        "exclude": [{"class": "cat", "count": 1}, {"class": "cup", "count": 3}],
    }
    questions = checklists.from_geneval(prompt)
    assert texts(questions) == [
        "Is there exactly one dog?",
        "Are there exactly two cups?",
        "Are all cups red?",
        "Are the red cups above the dog?",
        "Are there no cats?",
    ]
    assert [q["parent"] for q in questions] == [None, None, 1, [2, 0], None]


def test_writing_a_checklist_does_not_change_its_prompt():
    before = dict(EVAL[0])
    assert checklists.from_geneval(EVAL[0]) and EVAL[0] == before
