"""Runs of algorithm=opd: they resume bit for bit, know their teachers, and learn."""

import json
import shutil

import pytest
import small
import yaml

from flowrl.config.build import load_tuned, newest_of, trained
from flowrl.training.loop import Trainer

TASKS = ("counting", "position")


@pytest.fixture(scope="module", autouse=True)
def known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(small.ALGORITHMS, "opd", {})
        yield


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Words of a run with two teachers of drawn LoRA, and prompts of two tasks."""
    place = tmp_path_factory.mktemp("teachers")
    given = small.taught(place, TASKS)
    rows = [{"prompt": f"{n} circles", "task": TASKS[n % 2]} for n in range(1, 9)]
    data = place / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given |= {"data__train": str(data), "data__eval": "null"}
    usual = {"batch__group": "1", "batch__prompts": "4", "optimizer__eps": "1e-3"}
    return {**given, **usual, "algorithm__route": "task", "iterations": "3"}


def trainer(path, words, **changes):
    return small.trainer(path, "opd", **{**words, **changes})


def test_a_run_resumes_bit_for_bit_and_knows_its_teachers(words, tmp_path):
    made = trainer(tmp_path / "whole", words)
    logged = [it.metrics for it in made]
    made.save()
    assert all(m["policy/rows"] == 12 and m["policy/grad_norm"] > 0 for m in logged)
    assert not any("reward/total" in m for m in logged)  # no reward counts
    assert all(m["policy/teacher_distance"] > 0 and m["nfe/reference"] > 12 for m in logged)
    assert not any("teacher" in name for name in small.weights(tmp_path / "whole"))
    cut = trainer(tmp_path / "cut", words)
    next(iter(cut))
    cut.save()
    rest = Trainer(resume=tmp_path / "cut")
    assert len(list(rest)) == 2
    rest.save()
    assert small.same(tmp_path / "whole", tmp_path / "cut")
    # another teacher under the same name is another run
    config = tmp_path / "cut" / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    one, two = (tree["algorithm"]["teachers"][task] for task in TASKS)
    one["adapter"] = two["adapter"]
    with pytest.raises(ValueError, match=r"teachers\.counting\.adapter"):
        Trainer(tree, resume=tmp_path / "cut")


@pytest.mark.long
def test_a_run_on_noisy_steps_with_a_whole_teacher_learns(words, tmp_path):
    """The base model as the teacher of a student that starts elsewhere: it comes back."""
    own = "algorithm__teachers__base__"
    changes = {key: None for key in words if key.startswith("algorithm__teachers")}
    changes |= {f"{own}model": "shapes-sd3", f"{own}guidance": "none", "sampler__eta": "0.7"}
    start = words["algorithm__teachers__counting__adapter"] + "/lora"
    changes |= {"train__init_lora": start, "train__lora__rank": "3", "optimizer__lr": "0.003"}
    made = trainer(tmp_path / "run", words, **changes, iterations="12")
    distance = [it.metrics["policy/teacher_distance"] for it in made]
    assert made.parts.setup.plan.trained.tolist() == [True] * 3 + [False]
    assert sum(distance[-3:]) < 0.9 * sum(distance[:3])
    assert "weights of algorithm.teachers.base" in made.parts.identity["networks"]


def test_a_student_is_sampled_without_its_teachers_and_trained_with_them_alone(words, tmp_path):
    """And without the LoRA that it started from."""
    own = "algorithm__teachers__counting__adapter"
    moved = shutil.copytree(words[own], tmp_path / "teacher")
    start = {"train__init_lora": str(moved), "train__lora__rank": "3"}
    made = trainer(tmp_path / "run", {**words, **start, own: str(moved)})
    next(iter(made))
    made.save()
    made.finish()
    shutil.rmtree(moved)
    found = [trained(tmp_path / "run", {}), load_tuned(made.cfg, newest_of(tmp_path / "run"))]
    assert all(policy.state().keys() == made.policy.state().keys() for policy in found)
    with pytest.raises(ValueError, match="teacher"):
        Trainer(resume=tmp_path / "run")
    with pytest.raises(ValueError, match="counting.adapter=.*teacher does not exist.*; give the"):
        trainer(tmp_path / "new", {**words, own: str(moved)})
