"""Suites on run folders: base and tuned model from the same noise, and what records say."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import small
from page import Page
from rich.console import Console

from flowrl import load_policy
from flowrl.data.prompts import load_prompts
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import runs
from flowrl.evaluation.suites import suite as suites
from flowrl.evaluation.suites.measure import measure
from flowrl.evaluation.suites.runs import SuiteOptions, evaluate_runs
from flowrl.report import suite_page, terminal
from flowrl.rewards import load_set
from flowrl.runtime.log import logger
from flowrl.runtime.store import run_folder

QUICK = SuiteOptions(count=2, images=3, steps=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that trained on JPEG size and read saturation beside it."""
    folder = tmp_path_factory.mktemp("suites") / "run"
    changes = {"reward.saturation.weight": "0", "optimizer.lr": "1e-2", "data.train": "shapes:eval"}
    small.trainer(folder, iterations="1", **changes).run()
    logger.handlers.clear()
    logger.propagate = True
    return folder


def test_a_run_is_compared_with_its_base_and_told_what_it_was_trained_on(run, caplog):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    assert record == json.loads((run / "suites" / "shapes.json").read_text())
    assert not (run / "suites" / "shapes.part.jsonl").exists()
    assert [row["name"] for row in record["rows"]] == ["base", "tuned"] and record["prompts"] == 2
    base, tuned = record["rows"]
    assert next(iter(tuned["scores"])) == "shapes/strict"
    assert {"shapes", "jpeg", "sharpness", "saturation"} <= tuned["scores"].keys()
    assert len(tuned["best_of"]) == 3
    assert np.shape(tuned["values"]["jpeg"]) == (2, 3)
    assert tuned["diversity"]["pixels"]["mean"] > 0
    gain = np.mean(tuned["values"]["jpeg"]) - np.mean(base["values"]["jpeg"])
    assert record["paired"]["base"]["scores"]["jpeg"]["difference"] == pytest.approx(gain, abs=1e-5)
    assert abs(gain) > 1e-6
    assert record["trained"] == ["jpeg"]
    assert any('trained on the reward "jpeg"' in w for w in record["warnings"])
    assert record["contamination"]["exact"] == 2 and "training prompts" in caplog.text
    assert record["peaks"].keys() == {"saturation", "saturation/clipped"}
    assert record["peaks"]["saturation"]["last_iteration"] == 1


def test_an_argument_that_no_setting_of_a_suite_reads_is_said(run, tmp_path, monkeypatch, caplog):
    loaded = runs.build.load_tuned

    def with_negative(cfg, weights):
        policy = loaded(cfg, weights)
        policy.prober.runner.given |= {"negative_prompt"}
        return policy

    monkeypatch.setattr(runs.build, "load_tuned", with_negative)
    for guidance, said in (("none", 1), (2.0, 0)):
        chosen = replace(QUICK, count=1, images=1, steps=1, guidance=guidance)
        evaluate_runs([run], "shapes", chosen, into={run: tmp_path / str(guidance)})
        assert caplog.text.count("negative_prompt has no effect") == said
        caplog.clear()


def test_the_base_is_the_model_before_training(run):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    policy = load_policy("shapes-sd3", lora={"rank": 2, "alpha": 2})
    prompts, how = load_prompts("shapes:eval")[::64], Sampling(steps=2, guidance="none")
    want = measure(policy, prompts, load_set({"jpeg": 1.0}), how, images=3)
    np.testing.assert_allclose(
        record["rows"][0]["values"]["jpeg"], want.values["jpeg"], rtol=0, atol=2e-4
    )


def test_several_runs_share_the_base_and_give_a_side_effect_matrix(run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("suites", "tracker"))
    named, original = [], suites.measure

    def measured(*args, setting, **how):
        named.append(setting)
        return original(*args, setting=setting, **how)

    monkeypatch.setattr(suites, "measure", measured)
    chosen = SuiteOptions(count=2, images=1, steps=1, held_out=["tiling"])
    first, second = evaluate_runs([run, other], "shapes", chosen)
    assert named == ["base", "tuned", "tuned"]
    assert first["rows"][0]["values"] == second["rows"][0]["values"]
    table = first["matrix"]
    assert table["columns"][:2] == ["shapes/strict", "shapes"]
    assert "tiling" in table["columns"]
    assert "shapes/partial" not in table["columns"]
    assert [row["run"] for row in table["rows"]] == [str(run), str(other)]
    assert table["rows"][0]["trained"] == ["jpeg"]
    changes = second["paired"]["base"]["scores"]
    assert table["rows"][1]["entries"] == [changes[column] for column in table["columns"]]
    assert first["rows"][1]["diversity"] == {}
    assert json.loads((other / "suites" / "shapes.json").read_text())["matrix"] == table


def test_the_terminal_and_the_report_show_every_part(run, tmp_path):
    (record,) = evaluate_runs([run], "shapes", QUICK)
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    for part in terminal.suite_tables(record):
        console.print(part)
    text, page = console.export_text(), Page(suite_page.section(run, []))
    for shown in (
        "shapes/strict",
        "tuned - base",
        "pixels",
        "training prompts",
        "Held-out saturation was highest",
        "single_object",
    ):
        assert shown in text and shown in page.text, shown
    assert "jpeg (trained on)" in text
    assert "sharpness (held out)" in page.text
    assert "best of 2" in text
    assert "best of N" in page.text
    assert page.tags.count("table") == 3 and page.tags.count("svg") == 1 and not page.src
    assert suite_page.section(tmp_path, []) == ""


def test_a_guided_base_is_shown_where_the_run_has_one(run, tmp_path):
    guided = tmp_path / "guided"
    shutil.copytree(run, guided, ignore=shutil.ignore_patterns("suites", "tracker"))
    text, own = (guided / "config.yaml").read_text(), "baseline_guidance: null"
    assert own in text
    (guided / "config.yaml").write_text(text.replace(own, "baseline_guidance: 3.0"))
    (record,) = evaluate_runs([guided], "shapes", SuiteOptions(count=2, images=1, steps=1))
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
    (record,) = evaluate_runs([copy], "shapes", SuiteOptions(count=1, images=1, steps=1))
    assert record["checkpoint"] == "step-000001"
    assert runs.checkpoint.latest(copy).name == "step-000002"


def test_files_that_hold_rewards_are_part_of_what_an_evaluation_depends_on(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1"), two.write_text("b = 1")
    named = {
        "rewards": {f"{one}:score": 1.0, "checklist": {"answer": f"{two}:answer"}},
        "held_out": {"gone.py:x": {}, "jpeg": {}},
    }
    assert runs.python_files(named) == [one, two]


def test_peaks_are_of_rewards_that_were_not_trained_on():
    def row(held, **setting):
        return {"metrics": {"held": {"mean": held}, "own/x": {"mean": 0.0}}, **setting}

    rows = [
        row(1.0, name="before", iteration=0, guidance="none"),
        row(9.0, name="before, guided", iteration=0, guidance=3.0),
        row(3.0, name="after", iteration=2, guidance="none"),  # of a run that went on to 3
        row(9.0, name="other"),
    ]
    last = {"iteration": 3, "eval/held": 2.0, "eval/own": 2.0, "eval/total": 2.0}
    metrics = [{"iteration": 1}, {"iteration": 2}, last]
    evaluation = {"rows": rows}
    folder = run_folder.RunFolder(path=None, config="", metrics=metrics, evaluation=evaluation)
    found = runs.peaks(folder, {"own"}, "none")
    assert found == {"held": {"iteration": 2, "value": 3.0, "last_iteration": 3, "last": 2.0}}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"best_of": 8},
            "--best-of 8 needs at least 8 images a prompt, and this evaluation makes 4; add"
            " --images 8",
        ),
        ({"held_out": ["jpge"]}, 'unknown reward "jpge"; did you mean "jpeg"'),
        (
            {"held_out": ["tiling=0.5"]},
            "--held-out tiling=0.5: a suite reads each reward by itself, so its weight says"
            " nothing",
        ),
        ({"held_out": ["tiling.tile=2"]}, 'reward "tiling": unknown setting "tile"'),
        (
            {"rewards": ["jpge.quality=80"]},
            'reads no reward of that name (--held-out adds one); did you mean "jpeg"',
        ),
        ({"rewards": ["jpeg"]}, "--reward jpeg sets nothing; give NAME.SETTING=VALUE"),
        ({"rewards": ["jpeg=0.5"]}, "--reward jpeg=0.5: a suite reads each reward by itself"),
        ({"rewards": ["jpeg.qualty=80"]}, 'unknown setting "qualty"; did you mean "quality"'),
        ({"rewards": ["jpeg.quality"]}, 'reward "jpeg.quality" should be NAME'),
        (
            {"prompts": "gone.jsonl"},
            "there is no prompt file gone.jsonl; download https://github.com/djghosh13/geneval",
        ),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(run, monkeypatch, options, sentence):
    monkeypatch.setattr(runs.build, "load_tuned", None)
    name = "geneval" if "prompts" in options else "shapes"
    with pytest.raises(ValueError) as error:
        evaluate_runs([run], name, SuiteOptions(**options))
    assert sentence in str(error.value)


def test_a_folder_that_is_no_run_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        evaluate_runs([run, tmp_path], "shapes", QUICK)
    with pytest.raises(ValueError, match="metric=shapes/stricter was not measured; did you mean"):
        (tmp_path / "s.yaml").write_text(
            "title: t\nprompts: shapes:eval\nrewards: {shapes: 1}\nmetric: shapes/stricter"
        )
        evaluate_runs([run], str(tmp_path / "s.yaml"), SuiteOptions(count=1, images=1, steps=1))


def test_a_reward_that_scores_no_sample_is_named_with_its_reason(run, tmp_path, caplog):
    (tmp_path / "own.py").write_text(
        "import flowrl\n\n\n@flowrl.reward\ndef fails(media, prompts, context=None):\n"
        "    raise ValueError('the source shows nothing')\n"
    )
    (tmp_path / "s.yaml").write_text(
        f"title: t\nprompts: shapes:eval\nrewards: {{'{tmp_path}/own.py:fails': 1}}\n"
        f"metric: {tmp_path}/own.py:fails/strict"
    )
    with pytest.raises(ValueError, match='own.py:fails" scored none of the samples; the warning'):
        evaluate_runs([run], str(tmp_path / "s.yaml"), SuiteOptions(count=1, images=1, steps=1))
    assert re.search("not scored: .*fails: ValueError: the source shows nothing", caplog.text)
