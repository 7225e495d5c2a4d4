"""Evaluation suites: benchmarks' files and rules as published, intervals over prompts, and base and
tuned model from the same noise."""

import json
import shutil

import numpy as np
import pytest
import small
import tiny_clip
import torch
from rich.console import Console
from test_report import Page

from flowrl import load_policy
from flowrl.config.compose import options
from flowrl.data import prompts as data
from flowrl.evaluation import held_out
from flowrl.evaluation import record as evaluation_record
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import measure as suite_measure
from flowrl.evaluation.suites import prompt_files, runs
from flowrl.evaluation.suites import suite as suites
from flowrl.evaluation.suites.measure import Journal, measure
from flowrl.evaluation.suites.runs import Options, evaluate_runs
from flowrl.report import run_page, suite_page
from flowrl.rewards import load_set
from flowrl.runtime import run_folder
from flowrl.runtime.log import logger

QUICK = Options(count=2, images=3, steps=2)
DPG = """item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language
b,A cup on a table,,1,0,entity,whole,entity - whole (cup),Is there a cup?
b,A cup on a table,,2,"1, 3",relation,spatial,"relation - spatial (cup, table, on)",Is the cup on the table?
b,A cup on a table,,3,0,entity,whole,entity - whole (table),Is there a table?
a,"A red, red rose",,1,0,attribute,color,attribute - color (red),Is it red?
"""
POINTS = (
    '{"Primary Categories": "Art", "Testpoints": ["Style", "Attribute - Color"], "Testpoint'
    ' Description": ["ink", "red ink"]}'
)


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy("shapes-sd3", lora={"rank": 2, "alpha": 2})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that trained on JPEG size and read saturation beside it."""
    folder = tmp_path_factory.mktemp("suites") / "run"
    changes = {"reward.saturation.weight": "0", "optimizer.lr": "1e-2", "data.train": "shapes:eval"}
    small.trainer(folder, iterations="1", **changes).run()
    logger.handlers.clear()
    logger.propagate = True
    return folder


# ---------------------------------------------------------------------------
# suites and files


@pytest.mark.parametrize(
    "name", ["shapes", "geneval", "ocr", "drawbench", "dpg", "unigenbench", "partiprompts"]
)
def test_every_suite_that_ships_is_readable_and_names_rewards_that_exist(name):
    from flowrl.config.schema import check_reward_entry

    suite = suites.load(name)
    assert name in options("suite") and suite.headline.partition("/")[0] in suite.rewards
    for label, entry in {**suite.rewards, **suite.held_out}.items():
        check_reward_entry(label, {"weight": 1.0, **(entry if isinstance(entry, dict) else {})})
    assert suite.prompts or "https://" in suite.origin


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
        ("a.yaml", "metric: shapes/strict", "metric=shapes/strict is no reward of it"),
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
            (
                "PartiPrompts.tsv of https://huggingface.co/datasets/nateraw/parti-prompts, which"
                " is not here"
            ),
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
    assert prompt_files.load(str(tmp_path / "b.tsv"), **read) == [
        {"prompt": '"Hi" on a sign'},
        {"prompt": 'a "b'},
    ]
    with pytest.raises(ValueError, match='b.tsv has no column "Categry"; did you mean "Category"'):
        prompt_files.load(
            str(tmp_path / "b.tsv"), **(read | {"columns": {"prompt": "Prompt", "kind": "Categry"}})
        )
    (tmp_path / "c.txt").write_text("one\ntwo\n")  # any suite takes a plain list
    assert len(prompt_files.load(str(tmp_path / "c.txt"), **read)) == 2


def test_dpg_questions_become_checklists_with_parents_before_children(tmp_path):
    (tmp_path / "dpg.csv").write_text(DPG)
    cup, rose = prompt_files.load(str(tmp_path / "dpg.csv"), suite="dpg", origin="", form="dpg")
    assert cup["prompt"] == "A cup on a table" and rose["prompt"] == "A red, red rose"
    assert [q["question"] for q in cup["checklist"]] == [
        "Is there a cup?",
        "Is there a table?",
        "Is the cup on the table?",
    ]
    assert [q["parent"] for q in cup["checklist"]] == [None, None, [0, 1]]
    assert [q["dimension"] for q in cup["checklist"]] == [
        "entity - whole",
        "entity - whole",
        "relation - spatial",
    ]
    from flowrl.rewards.checklist import complaint

    assert complaint(cup["checklist"], judged=True) is None


def test_dpg_parents_that_are_missing_or_go_round_in_a_circle_are_left_out_and_said(
    tmp_path, caplog
):
    (tmp_path / "dpg.csv").write_text(
        DPG.replace('"1, 3"', '"1, 9"').replace("table,,3,0", "table,,3,3")
    )
    cup = prompt_files.load(str(tmp_path / "dpg.csv"), suite="dpg", origin="", form="dpg")[0]
    assert [q["parent"] for q in cup["checklist"]] == [
        None,
        None,
        [0],
    ] and "2 dependencies of questions point nowhere" in caplog.text


def test_unigenbench_test_points_become_questions_with_their_dimensions(tmp_path):
    quoted = POINTS.replace('"', '""')
    (tmp_path / "u.csv").write_text(f'index,prompt_en,sub_dims_en\n0,A crab,"{quoted}"\n')
    (crab,) = prompt_files.load(str(tmp_path / "u.csv"), suite="u", origin="", form="unigenbench")
    assert crab["category"] == "Art" and [q["dimension"] for q in crab["checklist"]] == [
        "Style",
        "Attribute - Color",
    ]
    assert "red ink" in crab["checklist"][1]["question"]
    (tmp_path / "u.csv").write_text("index,prompt,sub_dims\n0,A crab,{}\n")
    with pytest.raises(ValueError, match="u.csv, entry 2: its test points cannot be read"):
        prompt_files.load(str(tmp_path / "u.csv"), suite="u", origin="", form="unigenbench")


# ---------------------------------------------------------------------------
# measuring


def test_an_image_depends_on_its_prompt_and_number_alone_and_no_media_are_kept(policy, monkeypatch):
    prompts = data.load_prompts("shapes:eval")[20:23]
    rewards, sampling = load_set({"jpeg": 1.0}), Sampling(steps=2, guidance="none")
    whole = measure(policy, prompts, rewards, sampling, images=3)
    assert (
        whole.values["jpeg"].shape == (3, 3) and whole.nfe == 2 and whole.values.keys() == {"jpeg"}
    )
    assert whole.values["jpeg"].unique().numel() > 6 and (whole.diversity["pixels"] > 0.01).all()
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    parts = measure(
        policy, prompts, rewards, Sampling(steps=2, guidance="none", decode=1, micro=2), images=2
    )
    torch.testing.assert_close(
        parts.values["jpeg"], whole.values["jpeg"][:, :2], rtol=0, atol=2e-4
    )  # a byte of a JPEG may turn over
    other = measure(policy, prompts, rewards, Sampling(steps=2, guidance="none", seed=1), images=1)
    assert (
        other.diversity == {}
        and not torch.isclose(other.values["jpeg"], whole.values["jpeg"][:, :1], atol=1e-5).any()
    )


def test_a_stopped_evaluation_goes_on_where_it_was(policy, tmp_path, monkeypatch):
    prompts, rewards, sampling = (
        data.load_prompts("shapes:eval")[20:23],
        load_set({"jpeg": 1.0}),
        Sampling(steps=1, guidance="none"),
    )
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    path, original, calls = tmp_path / "s.part.jsonl", suite_measure._chunk, []

    def failing(*arguments):
        calls.append(arguments[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(suite_measure, "_chunk", failing)
    with pytest.raises(KeyboardInterrupt):
        measure(policy, prompts, rewards, sampling, images=2, journal=Journal(path, "k"))
    path.write_text(path.read_text() + '{"setting": "", "sta')  # cut short
    resumed = measure(policy, prompts, rewards, sampling, images=2, journal=Journal(path, "k"))
    assert len(calls) == 4 and calls[2] == calls[3]
    monkeypatch.setattr(suite_measure, "_chunk", original)
    torch.testing.assert_close(
        resumed.values, measure(policy, prompts, rewards, sampling, images=2).values, rtol=0, atol=0
    )
    assert len(path.read_text().splitlines()) == 4 and Journal(path, "another").known == {}


def test_diversity_is_the_mean_distance_of_pairs_in_pixels_and_in_the_embedding_of_a_clip(tmp_path):
    media = torch.zeros(3, 3, 64, 64)
    media[2] = 0.6  # distances 0, .6, .6
    features = suite_measure.features_of(load_set({"jpeg": 1.0}), 3)
    assert suite_measure.spread("pixels", features["pixels"](media)).item() == pytest.approx(0.4)
    assert suite_measure.features_of(load_set({"jpeg": 1.0}), 1) == {}
    rewards = load_set({"clip": {"model": tiny_clip.open_clip_name(tmp_path), "pretrained": None}})
    embed = suite_measure.features_of(rewards, 2)["clip"]
    media = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    vectors = embed(media)
    cosine = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    want = 1 - (cosine.sum() - 3) / 6
    assert suite_measure.spread("clip", vectors).item() == pytest.approx(want.item(), abs=1e-6)


def test_a_checklist_is_read_by_dimension_before_parents_zero_answers():
    prompts = [dict(p) for p in data.load_prompts("shapes:eval")[20:22]]
    args = {"shape": "circle", "count": 99}
    no, yes = (
        {"question": "?", "check": "shapes_count", "args": args},
        {"question": "?", "check": "shapes_count", "args": {"shape": "circle", "count": 0}},
    )
    prompts[0]["checklist"] = [no | {"dimension": "a"}, yes | {"dimension": "b - c", "parent": 0}]
    prompts[1]["checklist"] = [yes | {"dimension": "a"}, yes | {"dimension": "a"}]
    from flowrl.rewards import readings
    from flowrl.rollouts.velocity import meta_rows

    texts, context = meta_rows(prompts, [0, 1])
    rewards = suite_measure.by_dimension(load_set({"checklist": {"binary": True}}))
    got = {
        k: v.tolist()
        for k, v in readings(torch.zeros(2, 3, 64, 64), texts, rewards, context).items()
    }
    assert got["checklist"] == [0.0, 1.0] and got["checklist/dimension/a"] == [0.0, 1.0]
    assert got["checklist/dimension/b - c"][0] == 1.0 and np.isnan(
        got["checklist/dimension/b - c"][1]
    )


# ---------------------------------------------------------------------------
# run folders


def test_a_run_is_compared_with_its_base_and_told_what_it_was_trained_on(run, caplog):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    assert (
        record == json.loads((run / "suites" / "shapes.json").read_text())
        and not (run / "suites" / "shapes.part.jsonl").exists()
    )
    assert [row["name"] for row in record["rows"]] == ["base", "tuned"] and record["prompts"] == 2
    base, tuned = record["rows"]
    assert (
        next(iter(tuned["scores"])) == "shapes/strict"
        and {"shapes", "jpeg", "sharpness", "saturation"} <= tuned["scores"].keys()
    )
    assert (
        len(tuned["best_of"]) == 3
        and np.shape(tuned["values"]["jpeg"]) == (2, 3)
        and tuned["diversity"]["pixels"]["mean"] > 0
    )
    gain = np.mean(tuned["values"]["jpeg"]) - np.mean(base["values"]["jpeg"])
    assert (
        record["paired"]["base"]["scores"]["jpeg"]["difference"] == pytest.approx(gain, abs=1e-5)
        and abs(gain) > 1e-6
    )
    assert record["trained"] == ["jpeg"] and any(
        'trained on the reward "jpeg"' in w for w in record["warnings"]
    )
    assert record["contamination"]["exact"] == 2 and "training prompts" in caplog.text
    assert record["peaks"].keys() == {"saturation", "saturation/clipped"}
    assert record["peaks"]["saturation"]["last_iteration"] == 1


def test_the_base_is_the_model_before_training(run, policy):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    prompts = data.load_prompts("shapes:eval")
    want = measure(
        policy,
        [prompts[0], prompts[64]],
        load_set({"jpeg": 1.0}),
        Sampling(steps=2, guidance="none"),
        images=3,
    )
    torch.testing.assert_close(
        torch.tensor(record["rows"][0]["values"]["jpeg"]), want.values["jpeg"], rtol=0, atol=2e-4
    )


def test_several_runs_share_the_base_and_give_a_side_effect_matrix(run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("suites", "tracker"))
    named, original = [], suites.measure
    monkeypatch.setattr(
        suites, "measure", lambda *a, **k: named.append(k["setting"]) or original(*a, **k)
    )
    first, second = evaluate_runs(
        [run, other], "shapes", Options(count=2, images=1, steps=1, held_out=["tiling"])
    )
    assert (
        named == ["base", "tuned", "tuned"]
        and first["rows"][0]["values"] == second["rows"][0]["values"]
    )
    table = first["matrix"]
    assert (
        table["columns"][:2] == ["shapes/strict", "shapes"]
        and "tiling" in table["columns"]
        and "shapes/partial" not in table["columns"]
    )
    assert [row["run"] for row in table["rows"]] == [str(run), str(other)] and table["rows"][0][
        "trained"
    ] == ["jpeg"]
    assert table["rows"][1]["entries"] == [
        second["paired"]["base"]["scores"][c] for c in table["columns"]
    ]
    assert (
        first["rows"][1]["diversity"] == {}
        and json.loads((other / "suites" / "shapes.json").read_text())["matrix"] == table
    )


def test_the_terminal_and_the_report_show_every_part(run, tmp_path):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    for part in suite_page.tables(record):
        console.print(part)
    text, page = console.export_text(), Page(suite_page.section(run))
    for shown in (
        "shapes/strict",
        "tuned - base",
        "pixels",
        "training prompts",
        "Held-out saturation was highest",
        "single_object",
    ):
        assert shown in text and shown in page.text, shown
    assert (
        "jpeg (trained on)" in text
        and "sharpness (held out)" in page.text
        and "best of 2" in text
        and "best of N" in page.text
    )
    assert page.tags.count("table") == 3 and page.tags.count("svg") == 1 and not page.src
    assert suite_page.section(tmp_path) == ""


def test_a_guided_base_is_shown_where_the_run_has_one(run, tmp_path):
    guided = tmp_path / "guided"
    shutil.copytree(run, guided, ignore=shutil.ignore_patterns("suites", "tracker"))
    text = (guided / "config.yaml").read_text()
    assert "baseline_guidance: null" in text
    (guided / "config.yaml").write_text(
        text.replace("baseline_guidance: null", "baseline_guidance: 3.0")
    )
    (record,) = evaluate_runs([guided], "shapes", Options(count=2, images=1, steps=1))
    assert [(row["name"], row["guidance"], row["nfe"]) for row in record["rows"]] == [
        ("base", "none", 1),
        ("base, guided", 3.0, 2),
        ("tuned", "none", 1),
    ]
    assert record["paired"].keys() == {"base", "base, guided"}


def test_the_checkpoint_that_was_measured_is_the_one_that_is_named(run, tmp_path, monkeypatch):
    """A run that still goes on writes a newer one while a suite is sampled."""
    copy, real = tmp_path / "run", runs.run_suite
    shutil.copytree(run, copy)

    def going_on(*args, **kwargs):
        shutil.copytree(copy / "checkpoints" / "step-000001", copy / "checkpoints" / "step-000002")
        return real(*args, **kwargs)

    monkeypatch.setattr(runs, "run_suite", going_on)
    (record,) = evaluate_runs([copy], "shapes", Options(count=1, images=1, steps=1))
    assert (
        record["checkpoint"] == "step-000001" and runs.checkpoint.latest(copy).name == "step-000002"
    )


def test_files_that_hold_rewards_are_part_of_what_an_evaluation_depends_on(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1"), two.write_text("b = 1")
    named = {
        "rewards": {f"{one}:score": 1.0, "checklist": {"answer": f"{two}:answer"}},
        "held_out": {"gone.py:x": {}, "jpeg": {}},
    }
    assert runs.python_files(named) == [one, two]


def test_peaks_are_of_rewards_that_were_not_trained_on():
    rows = [
        {
            "name": "before",
            "iteration": 0,
            "guidance": "none",
            "metrics": {"held": {"mean": 1.0}, "own/x": {"mean": 0.0}},
        },
        {
            "name": "before, guided",
            "iteration": 0,
            "guidance": 3.0,
            "metrics": {"held": {"mean": 9.0}},
        },
        {
            "name": "after",
            "iteration": 2,
            "guidance": "none",
            "metrics": {"held": {"mean": 3.0}},
        },  # of a run that went on to 3
        {"name": "other", "metrics": {"held": {"mean": 9.0}}},
    ]
    metrics = [
        {"iteration": i, **({"eval/held": v, "eval/own": v, "eval/total": v} if v else {})}
        for i, v in ((1, None), (2, None), (3, 2.0))
    ]
    found = runs.peaks(
        run_folder.Run(path=None, config="", metrics=metrics, evaluation={"rows": rows}),
        {"own"},
        "none",
    )
    assert found == {"held": {"iteration": 2, "value": 3.0, "last_iteration": 3, "last": 2.0}}


@pytest.mark.parametrize(
    ("options", "name", "sentence"),
    [
        (
            Options(best_of=8),
            "shapes",
            (
                "--best-of 8 needs at least 8 images a prompt, and this evaluation makes 4; add"
                " --images 8"
            ),
        ),
        (Options(held_out=["jpge"]), "shapes", 'unknown reward "jpge"; did you mean "jpeg"'),
        (
            Options(held_out=["tiling=0.5"]),
            "shapes",
            (
                "--held-out tiling=0.5: a suite reads each reward by itself, so its weight says"
                " nothing"
            ),
        ),
        (Options(held_out=["tiling.tile=2"]), "shapes", 'reward "tiling": unknown setting "tile"'),
        (
            Options(rewards=["jpge.quality=80"]),
            "shapes",
            'reads no reward of that name (--held-out adds one); did you mean "jpeg"',
        ),
        (
            Options(rewards=["jpeg"]),
            "shapes",
            "--reward jpeg sets nothing; give NAME.SETTING=VALUE",
        ),
        (
            Options(rewards=["jpeg=0.5"]),
            "shapes",
            "--reward jpeg=0.5: a suite reads each reward by itself",
        ),
        (
            Options(rewards=["jpeg.qualty=80"]),
            "shapes",
            'unknown setting "qualty"; did you mean "quality"',
        ),
        (Options(rewards=["jpeg.quality"]), "shapes", 'reward "jpeg.quality" should be NAME'),
        (
            Options(prompts="gone.jsonl"),
            "geneval",
            "there is no prompt file gone.jsonl; download https://github.com/djghosh13/geneval",
        ),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    run, monkeypatch, options, name, sentence
):
    monkeypatch.setattr(runs.setup, "load_tuned", None)
    with pytest.raises(ValueError) as error:
        evaluate_runs([run], name, options)
    assert sentence in str(error.value)


def test_a_judge_of_a_suite_is_chosen_in_words_and_the_rest_of_its_settings_stay(tmp_path):
    (tmp_path / "dpg.csv").write_text(DPG)
    suite = suites.load("dpg", prompts=str(tmp_path / "dpg.csv"))
    words = [
        "checklist.answerer_settings.model=judge",
        "checklist.answerer_settings.base_url=http://localhost:1/v1",
    ]
    checklist = suites.prepare("dpg", suites.with_rewards(suite, words, ())).rewards.rewards[
        "checklist"
    ]
    assert (checklist.answerer.settings.model, checklist.answerer.settings.base_url) == (
        "judge",
        "http://localhost:1/v1",
    )
    assert checklist.settings.binary and suite.rewards == suites.load("dpg").rewards
    with pytest.raises(ValueError, match='unknown setting "mdel"; did you mean "model"'):
        suites.prepare(
            "dpg", suites.with_rewards(suite, ["checklist.answerer_settings.mdel=judge"], ())
        )


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
    red = {"name": f"{tmp_path}/a.py:red"}
    assert got.held_out == {
        "tiling": None,
        "sharpness": {"side": 9},
        "clip": {"preset": "shapes"},
        "red": red,
    }


def test_answers_of_a_checklist_about_the_first_image_of_prompts_are_kept_and_shown_beside_each_other(
    policy, tmp_path, monkeypatch
):
    question = {"check": "shapes_count", "args": {"count": 99}}
    many, none = (
        {"question": "99 <objects>?", **question},
        {
            "question": "And red?",
            "parent": 0,
            **question,
            "args": {"count": 0},
        },
    )
    prompts = [
        {"prompt": text, "checklist": [many, none]}
        for text in ("a red circle", "two blue squares", "a green triangle")
    ]
    monkeypatch.setattr(suite_measure, "CHUNK", 2)
    rewards, sampling = (
        load_set({"checklist": {}, "jpeg": {}}),
        Sampling(steps=1, guidance="none", decode=1),
    )
    got = measure(
        policy, prompts, rewards, sampling, images=2, journal=Journal(tmp_path / "j.jsonl", "k")
    )
    assert [(entry["image"], entry["prompt"]) for entry in got.answers["checklist"]] == list(
        enumerate(p["prompt"] for p in prompts)
    )
    assert got.answers.keys() == {"checklist"}
    for entry in got.answers["checklist"]:
        first, second = entry["said"]
        assert first == {
            "question": "99 <objects>?",
            "answer": 0.0,
            "counted": 0.0,
            "zeroed": False,
        }
        assert second["zeroed"] and second["counted"] == 0.0
    again = measure(
        policy, prompts, rewards, sampling, images=2, journal=Journal(tmp_path / "j.jsonl", "k")
    )
    assert again.answers == got.answers  # read from the journal


def test_the_runs_own_evaluation_keeps_the_answers_about_the_pictures_that_it_shows_and_the_report_escapes_them(
    policy, tmp_path
):
    many = {"question": "99 <b>objects</b>?", "check": "shapes_count", "args": {"count": 99}}
    none = {
        "question": "Of them, none?",
        "parent": 0,
        "check": "shapes_count",
        "args": {"count": 0},
    }
    prompts = [
        {"prompt": f"a {shape} & more", "checklist": [many, none]} for shape in ("circle", "square")
    ]
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    for name, steps in (("before", 1), ("after", 2)):
        made = held_out.evaluate(
            policy, prompts, load_set({"checklist": 1.0}), images=5, steps=steps, decode=2
        )
        assert [entry["image"] for entry in made.answers["checklist"]] == [0, 1] and len(
            made.images
        ) == 2
        evaluation_record.add_row(tmp_path, name, made, prompts)
    html = run_page.build(tmp_path).read_text()
    for shown in (
        "checklist: answers about 2 images",
        "image 1: a square & more",
        "99 <b>objects</b>?",
    ):
        assert shown in Page(html).text, shown
    assert (
        "<b>objects" not in html and html.count("counts 0: a parent is no") == 4
    )  # of two images, before and after


def test_a_folder_that_is_no_run_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        evaluate_runs([run, tmp_path], "shapes", QUICK)
    with pytest.raises(ValueError, match="metric=shapes/stricter was not measured; did you mean"):
        (tmp_path / "s.yaml").write_text(
            "title: t\nprompts: shapes:eval\nrewards: {shapes: 1}\nmetric: shapes/stricter"
        )
        evaluate_runs([run], str(tmp_path / "s.yaml"), Options(count=1, images=1, steps=1))
