"""Suites and prompt files: read as benchmarks publish them, refused in one sentence."""

import json
from dataclasses import replace

import pytest

from flowrl.config.compose import options
from flowrl.config.load import load_config
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import prompt_files, runs
from flowrl.evaluation.suites import suite as suites
from flowrl.rewards.core.find import check_settings
from flowrl.rewards.core.questions import complaint

WORLDS = ("shapes", "stickers")
HEAD = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    "question_natural_language"
)
DPG = f"""{HEAD}
b,A cup on a table,,1,0,entity,whole,entity - whole (cup),Is there a cup?
b,A cup on a table,,2,"1, 3",relation,spatial,"relation - spatial (cup, table, on)",Is it on it?
b,A cup on a table,,3,0,entity,whole,entity - whole (table),Is there a table?
a,"A red, red rose",,1,0,attribute,color,attribute - color (red),Is it red?
"""
POINTS = (
    '{"Primary Categories": "Art", "Testpoints": ["Style", "Attribute - Color"], "Testpoint'
    ' Description": ["ink", "red ink"]}'
)


@pytest.mark.parametrize(
    "name", ["shapes", "geneval", "ocr", "drawbench", "dpg", "unigenbench", "partiprompts"]
)
def test_every_suite_that_ships_is_readable_and_names_rewards_that_exist(name):
    suite = suites.load(name)
    assert name in options("suite") and suite.headline.partition("/")[0] in suite.rewards
    for label, entry in {**suite.rewards, **suite.held_out}.items():
        own = entry if isinstance(entry, dict) else {}
        check_settings(label, own, what=name, prefix="")
    assert suite.prompts or "https://" in suite.origin


@pytest.mark.parametrize("name", [n for n in options("suite") if n.startswith(WORLDS)])
def test_suites_of_the_worlds_fit_their_prompts(name, tmp_path):
    """Suites of edits have the source in their prompts, and refuse prompts without."""
    task = suites.prepare(name, suites.load(name))
    assert task.prompts and task.suite.headline.partition("/")[0] in task.rewards.rewards
    if name.endswith("_edit"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": task.prompts[0]["prompt"]}))
        own = task.suite.model_copy(update={"prompts": str(tmp_path / "a.jsonl")})
        with pytest.raises(ValueError, match='needs the context column "source"'):
            suites.prepare(name, own)


def test_prompts_with_the_same_pictures_continue_a_stopped_evaluation():
    task = suites.prepare("shapes_edit", suites.load("shapes_edit"))
    sampling = Sampling(steps=2, guidance="none")
    again = [{**row, "image": row["image"].copy()} for row in task.prompts]
    other = [{**row, "image": row["image"].rotate(90)} for row in task.prompts]
    first, same, changed = (
        runs._key(replace(task, prompts=prompts), load_config(), sampling, None)
        for prompts in (task.prompts, again, other)
    )
    assert first == same != changed


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("geneva", None, 'unknown suite "geneva"; did you mean "geneval"?'),
        ("gone.yaml", None, 'unknown suite "gone.yaml"; there is no such file'),
        ("a.yaml", "prompt: b", 'unknown setting "prompt"; did you mean "prompts"'),
        ("a.yaml", "images: 0", "images=0: input should be greater than 0"),
        (
            "a.yaml",
            "rewards: {jpg: 1}\nprompts: shapes:eval",
            'unknown reward "jpg"; did you mean "jpeg"',
        ),
        (
            "a.yaml",
            "prompts: shapes:evil",
            'unknown data "shapes:evil"; did you mean "shapes:eval"',
        ),
        ("a.yaml", "metric: shapes/strict", "metric=shapes/strict is not one of its rewards"),
        ("a.yaml", "held_out: {jpeg: {}}", "names jpeg among rewards and among held_out"),
        (
            "a.yaml",
            "rewards: {r: {name: 'g.py:f'}}\nprompts: shapes:eval",
            "r compares the members of a group",
        ),
        (
            "a.yaml",
            "prompts: shapes:eval\naggregate: category_mean",
            "category_mean needs a category",
        ),
        (
            "a.yaml",
            "prompts: ocr:eval\ncategory: tag\naggregate: category_mean",
            'carries no "tag", by which',
        ),
        (
            "a.yaml",
            "prompts: ocr:eval\ncategory: checklist",
            'has no checklist whose every question names its "dimension"',
        ),
        (
            "a.yaml",
            "rewards: {shapes: 1}\nprompts: ocr:eval",
            'reads "include" of each prompt, which',
        ),
        (
            "a.yaml",
            "prompts: a.csv\norigin: https://x.org/p.csv",
            "no prompt file a.csv; download https://x.org/p.csv and give it with",
        ),
        ("a.yaml", "prompts: hf:owner/file.csv", "should be hf:owner/repo/file"),
        ("drawbench", None, "ships no prompts: download https://docs.google.com"),
        (
            "partiprompts",
            None,
            "PartiPrompts.tsv of https://huggingface.co/datasets/nateraw/parti-prompts, which"
            " is not here",
        ),
    ],
)
def test_a_wrong_suite_is_one_sentence(tmp_path, monkeypatch, name, content, sentence):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(ConnectionError())
    )
    (tmp_path / "g.py").write_text(
        "import flowrl\n\n@flowrl.reward(needs=['group'])\ndef f(media, prompts, context): ...\n"
    )
    if content is not None:
        (tmp_path / name).write_text(
            f"title: a\n{content}\n" + "rewards: {jpeg: 1}" * ("rewards" not in content)
        )
    with pytest.raises(ValueError) as error:
        suites.prepare(name, suites.load(name))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_table_keeps_the_columns_that_the_suite_names(tmp_path):
    (tmp_path / "a.csv").write_text('Category,PROMPTS\nColors,"A red, red rose"\nText,\n')
    (tmp_path / "b.tsv").write_text(
        'Prompt\tCategory\tNote\n"Hi" on a sign\tText\t\na "b\tText\tx\n'
    )
    read = {"suite": "s", "origin": "", "columns": {"prompt": "Prompts", "kind": "Category"}}
    assert prompt_files.load(str(tmp_path / "a.csv"), **read) == [
        {"prompt": "A red, red rose", "kind": "Colors"}
    ]
    read["columns"] = {"prompt": "Prompt"}
    found = prompt_files.load(str(tmp_path / "b.tsv"), **read)
    assert [row["prompt"] for row in found] == ['"Hi" on a sign', 'a "b']
    with pytest.raises(ValueError, match='b.tsv has no column "Categry"; did you mean "Category"'):
        read["columns"] = {"prompt": "Prompt", "kind": "Categry"}
        prompt_files.load(str(tmp_path / "b.tsv"), **read)
    (tmp_path / "c.txt").write_text("one\ntwo\n")  # any suite takes a plain list
    assert len(prompt_files.load(str(tmp_path / "c.txt"), **read)) == 2


def test_dpg_questions_become_checklists_with_parents_before_children(tmp_path):
    (tmp_path / "dpg.csv").write_text(DPG)
    cup, rose = prompt_files.load(str(tmp_path / "dpg.csv"), suite="dpg", origin="", form="dpg")
    assert cup["prompt"] == "A cup on a table" and rose["prompt"] == "A red, red rose"
    assert [(q["question"], q["parent"], q["dimension"]) for q in cup["checklist"]] == [
        ("Is there a cup?", None, "entity - whole"),
        ("Is there a table?", None, "entity - whole"),
        ("Is it on it?", [0, 1], "relation - spatial"),
    ]
    assert complaint(cup["checklist"], judged=True) is None


def test_dpg_parents_that_are_missing_or_go_round_in_a_circle_are_left_out_and_said(
    tmp_path, caplog
):
    broken = DPG.replace('"1, 3"', '"1, 9"').replace("table,,3,0", "table,,3,3")
    (tmp_path / "dpg.csv").write_text(broken)
    cup = prompt_files.load(str(tmp_path / "dpg.csv"), suite="dpg", origin="", form="dpg")[0]
    assert [q["parent"] for q in cup["checklist"]] == [None, None, [0]]
    assert "2 dependencies of questions point nowhere" in caplog.text


def test_unigenbench_test_points_become_questions_with_their_dimensions(tmp_path):
    quoted = POINTS.replace('"', '""')
    (tmp_path / "u.csv").write_text(f'index,prompt_en,sub_dims_en\n0,A crab,"{quoted}"\n')
    (crab,) = prompt_files.load(str(tmp_path / "u.csv"), suite="u", origin="", form="unigenbench")
    assert crab["category"] == "Art"
    assert [q["dimension"] for q in crab["checklist"]] == ["Style", "Attribute - Color"]
    assert "red ink" in crab["checklist"][1]["question"]
    (tmp_path / "u.csv").write_text("index,prompt,sub_dims\n0,A crab,{}\n")
    with pytest.raises(ValueError, match="u.csv, entry 2: its test points cannot be read"):
        prompt_files.load(str(tmp_path / "u.csv"), suite="u", origin="", form="unigenbench")


def test_a_judge_of_a_suite_is_chosen_in_words_and_the_rest_of_its_settings_stay(tmp_path):
    (tmp_path / "dpg.csv").write_text(DPG)
    suite = suites.load("dpg", prompts=str(tmp_path / "dpg.csv"))
    words = [
        "checklist.answerer_settings.model=judge",
        "checklist.answerer_settings.base_url=http://localhost:1/v1",
    ]
    task = suites.prepare("dpg", suites.with_rewards(suite, words, ()))
    checklist = task.rewards.rewards["checklist"]
    judge = checklist.answerer.settings
    assert (judge.model, judge.base_url) == ("judge", "http://localhost:1/v1")
    assert checklist.settings.binary and suite.rewards == suites.load("dpg").rewards
    wrong = suites.with_rewards(suite, ["checklist.answerer_settings.mdel=judge"], ())
    with pytest.raises(ValueError, match='unknown setting "mdel"; did you mean "model"'):
        suites.prepare("dpg", wrong)


def test_words_join_what_a_suite_says_of_a_reward_key_by_key(tmp_path):
    rewards = {"jpeg": 2.0, "ocr": {"name": "jpeg", "scale": "ddpo", "deep": {"a": 1, "b": 2}}}
    suite = suites.Suite(
        title="t", rewards=rewards, held_out={"tiling": None, "sharpness": {"side": 8}}
    )
    got = suites.with_rewards(
        suite,
        ["jpeg.quality=80", "ocr.deep.b=3", "sharpness.side=9"],
        ["clip.preset=shapes", f"{tmp_path}/a.py:red"],
    )
    assert got.rewards == {
        "jpeg": {"weight": 2.0, "quality": 80},
        "ocr": rewards["ocr"] | {"deep": {"a": 1, "b": 3}},
    }
    added = {"clip": {"preset": "shapes"}, "red": {"name": f"{tmp_path}/a.py:red"}}
    assert got.held_out == {"tiling": None, "sharpness": {"side": 9}, **added}
