"""Pipelines of classes that diffusers does not have, from a user's file: every command, a resumed
run, and the live object."""

import json
import re
import shutil
import sys
from pathlib import Path

import own_pipelines
import pytest
import small
import torch
from diffusers import DiffusionPipeline
from PIL import Image

import flowrl
from flowrl.policy import UnreplayableError
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.policy.replay import hints

TEXTS = ["a red circle", "two blue squares"]
# the name of the factory -> words of its hints
HINTED = {"usual": [], "unusual": ["model.hints=mine.py:HINTS"]}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with the user's file, and no hints but what ships."""
    shutil.copy(own_pipelines.__file__, tmp_path / "mine.py")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hints, "_HINTS", dict(hints._HINTS))
    return tmp_path


def settings(**more):
    return {
        "sampler__guidance": "pipeline",
        "train__lora__rank": "2",
        "train__lora__alpha": "4",
        "optimizer__lr": "1e-2",
        "model__self_check": None,  # as by default: it runs
        **more,
    }


def words(name, output, **more):
    own = [f"model=mine.py:{name}", *HINTED[name]]
    data = ["data=file", "data.train=texts.txt", "data.eval=texts.txt"]
    return [*own, *data, *small.words(output, "flow_grpo", **settings(**more))]


def done(*arguments):
    result = small.invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def checks(monkeypatch):
    """The self-checks that were run."""
    seen, real = [], PipelinePolicy.self_check
    monkeypatch.setattr(
        PipelinePolicy, "self_check", lambda policy: seen.append(real(policy)) or seen[-1]
    )
    return seen


@pytest.mark.parametrize("name", HINTED)
def test_a_pipeline_of_ones_own_goes_through_every_command(mine, checks, name):
    own = [f"mine.py:{name}", *(["--hints", "mine.py:HINTS"] if HINTED[name] else [])]
    printed = done("check", *own)
    call = {"usual": "3 * out[0] - 2 * out[1]", "unusual": "y = field("}[name]
    assert call in printed and "(swapped prompts must differ)" in printed

    checks.clear()
    done("train", *words(name, "whole", iterations="3"))
    assert len(checks) == 1 and max(checks[0].errors.values()) <= 1e-4
    done("train", *words(name, "parts", iterations="2"))
    before = small.weights("parts")
    done("train", "--resume", "parts", "iterations=3")
    whole, parts = small.weights("whole"), small.weights("parts")
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)
    moved = [k for k in whole if k.startswith("policy/") and not torch.equal(whole[k], before[k])]
    assert any("lora_A" in k for k in moved) and any("lora_B" in k for k in moved)

    done("evaluate", "whole", "--steps", 3)
    rows = json.loads(Path("whole/evaluation.json").read_text())["rows"]
    assert rows[-1]["name"].startswith("evaluate, 3 steps")
    for file, more in {"base.png": [], "tuned.png": ["--lora", "whole"]}.items():
        done("generate", *own, TEXTS[0], "--steps", 4, *more, "-o", file)
    base, tuned = (Image.open(file).convert("RGB") for file in ("base.png", "tuned.png"))
    assert base.size == (16, 16) and base.tobytes() != tuned.tobytes()


@pytest.mark.parametrize("name", HINTED)
def test_the_live_pipeline_trains_as_the_file_does(mine, checks, name):
    done("train", *words(name, "named", iterations="1", data__eval="null"))
    hinted = {"model__hints": "mine.py:HINTS"} if HINTED[name] else {}
    how = settings(iterations="1", data__eval="null", **hinted)
    cfg = small.config("live", "flow_grpo", **how)
    flowrl.train(cfg, policy=getattr(own_pipelines, name)(), prompts=TEXTS)
    named, live = small.weights("named"), small.weights("live")
    assert len(checks) == 2 and named.keys() == live.keys()
    assert all(torch.equal(named[k], live[k]) for k in named)


def test_a_hint_that_is_missing_or_names_no_network_is_asked_for(mine):
    refused = small.invoke("train", "model=mine.py:unusual", *small.NAMED, "output=run")
    assert refused.exit_code == 2 and not Path("run").exists()
    asked = "has no component named transformer* or unet*; name its networks, among field, vae,"
    assert asked in " ".join(refused.output.split())
    with pytest.raises(ValueError, match='no network "feild"; did you mean "field"'):
        flowrl.load_policy(own_pipelines.unusual(), hints={"denoisers": ["feild"]})


def test_a_network_that_takes_one_time_for_all_rows_is_told_what_it_is_given():
    class OneTime(own_pipelines.Field):
        def forward(self, state, words, clock):
            return super().forward(state, words, clock.reshape(()))

    pipe = own_pipelines.unusual()
    pipe.register_modules(field=own_pipelines.drawn(OneTime()))
    policy = flowrl.load_policy(pipe, hints=own_pipelines.HINTS)
    with pytest.raises(UnreplayableError, match=r"given a time for each row, \(n,\), fails with"):
        policy.self_check()


class Unscheduled(DiffusionPipeline):
    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)

    def __call__(self, prompt, num_inference_steps=4, output_type="pt", return_dict=True):
        return (torch.rand(len(prompt), 3, 8, 8),)


def test_a_pipeline_without_a_scheduler_is_refused():
    with pytest.raises(UnreplayableError, match='has no component named "scheduler"'):
        flowrl.load_policy(Unscheduled(own_pipelines.Net()))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (None, r"is made of UsualPipeline, own_pipelines.Net \(transformer\), own_pipelines.Dec"),
        ({"_class_name": ["pipeline", "Mine"]}, "is made of Mine, which diffusers 0"),
        ({"_class_name": "FluxPipelin"}, "is made of FluxPipelin, which"),
        ({}, 'its model_index.json names no pipeline, "_class_name"'),
        (
            {"_class_name": "FluxPipeline", "transformer": ["gone_package", "Net"]},
            r"is made of gone_package.Net \(transformer\), which",
        ),
    ],
)
def test_a_folder_with_code_of_its_own_is_refused_with_what_to_do(
    tmp_path, monkeypatch, index, said
):
    folder = tmp_path / "saved"
    if index is None:
        own_pipelines.usual().save_pretrained(folder)
        monkeypatch.delitem(sys.modules, "own_pipelines")
        monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("helpers")])
    else:
        folder.mkdir()
        (folder / "model_index.json").write_text(json.dumps(index))
    result = small.invoke("check", folder)
    line = " ".join(result.output.split())
    assert result.exit_code == 2 and re.search(said, line) and "Traceback" not in line
    assert "_class_name" in said or "give model=path/to/file.py:NAME" in line
