"""docs/your_own_module.md: its files and commands, in a folder outside the repository, run as the
page says; and its two examples, small."""

import contextlib
import copy
import importlib
import json
import re
import runpy
import shlex
import sys

import numpy as np
import pytest
import small
import small_flow
import torch
from pages import PAGES

import flowrl
from flowrl.report import run_page
from flowrl.rewards import RewardBug

PAGE = PAGES["docs/your_own_module.md"]
FILES = {m[1]: m[2] for m in re.finditer(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S)}
BASH = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [shlex.split(line)[1:] for block in BASH for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, and a run of its script and of its commands in it."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    with contextlib.chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root / "mine"))
        runpy.run_path("mine/run.py", run_name="__main__")
        yield root
    sys.modules.pop("clouds", None)


@pytest.fixture(scope="module")
def said(folder):
    """What the page's commands print."""
    results = {words[0]: small.invoke(*words) for words in COMMANDS}
    assert all(result.exit_code == 0 for result in results.values()), results
    return {name: result.output for name, result in results.items()}


def rewards(run):
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    return {row["name"]: row["metrics"]["placed"]["mean"] for row in rows}


def test_the_script_aligns_the_module_and_the_commands_do_the_same(folder, said):
    live, named = (rewards(folder / "runs" / name) for name in ("clouds", "named"))
    assert live["before"] < -0.5 and live["after"] > -0.2
    assert live == pytest.approx({name: named[name] for name in live}, rel=1e-3)
    assert "evaluate, 20 steps, guidance none, seed 0" in named
    assert "Net: tried at 4 sigmas" in said["check"] and "wrong rows" in said["check"]


def test_media_are_kept_and_drawn(folder, said):
    samples = folder / "runs" / "named" / "samples"
    for name in ("before", "after"):
        with np.load(samples / f"{name}.npz") as stored:
            assert stored["media"].shape == (2, 32, 3)
    assert (samples / "before_after.png").is_file()
    page = (folder / "runs/named/report.html").read_text()
    assert page.count('<figure class="pair ') == 2 and page.count("data:image/webp") >= 4


def test_a_run_generates_what_it_trained(folder, said):
    assert said["generate"].split() == ["cloud-0.npy", "cloud-1.npy"]
    left, right = (np.load(folder / f"cloud-{k}.npy")[:, 0].mean() for k in (0, 1))
    assert left < 0 < right


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["generate", "runs/named", "on the left", "-o", "a.tif"], 'the suffix is ".tif"'),
        (["generate", "runs/named", "up", "-o", "a.npy"], 'cond failed on the prompts "up"'),
        (["generate", "runs/named", "up", "--lora", "runs/named"], "a run and has weights of its"),
        (
            ["generate", "mine/clouds.py:policy", "up", "--lora", "runs/named"],
            "where a run trained all weights, the run as the model",
        ),
        (
            ["generate", "mine/clouds.py:policy", "up", "--pipeline", "height=8"],
            "the model is a Policy already; give height where it is made",
        ),
        (
            ["generate", "runs/clouds", "on the left", "-o", "a.npy"],
            "policy (Net) was a live object",
        ),
        (["check", "mine/clouds.py:policy"], "flowrl check --prompts take two that it knows"),
        (["check", "shapes-sd3", "--prompts", "mine/clouds.py:texts"], "leave --prompts out"),
        (
            ["train", "model=mine/clouds.py:policy", "reward=mine/clouds.py:placed"],
            "which trains all its weights: leave lora= out, or in a config set train.mode=full",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(folder, said, words, text):
    data = (
        ["data=mine/clouds.py:texts", "output=runs/none", "batch.prompts=2"]
        if words[0] == "train"
        else []
    )
    result = small.invoke(*words, *data)
    found = " ".join(result.output.split())
    assert result.exit_code == 2 and text in found and "Traceback" not in found


def test_a_reward_of_pictures_is_refused_when_the_run_starts(folder, said):
    words = ["model=mine/clouds.py:policy", "train.mode=full", "data=mine/clouds.py:texts"]
    result = small.invoke("train", *words, "reward=jpeg", "batch.prompts=2", "output=runs/jpeg")
    found = " ".join(result.output.split())
    assert result.exit_code == 1 and "Traceback" not in found
    assert 'reward "jpeg" takes images (B, 3, H, W) or videos' in found
    assert "media has shape (8, 32, 3); give a reward for such media" in found


def test_a_reward_of_another_shape_is_named(folder):
    clouds = importlib.import_module("clouds")

    def flat(media, prompts, context=None):
        return media.mean(2)

    with pytest.raises(
        RewardBug, match='reward "flat": returned a float32 tensor of shape .8, 32.'
    ):
        flowrl.train(
            {**settings("flat"), "algorithm": "nft"},
            policy=clouds.policy(),
            rewards=flat,
            prompts={"train": clouds.texts()},
        )


def test_what_was_made_is_not_lost_to_a_suffix(folder, said):
    for words, name in (([], "out.npy"), (["-o", "cloud.png"], "cloud.npy")):
        result = small.invoke("generate", "runs/named", "on the left", *words)
        assert result.exit_code == 0 and result.output.split()[-1] == name
    assert np.load(folder / "cloud.npy").shape == (32, 3)


@pytest.mark.parametrize("shape", [(7,), (2, 2, 2, 2, 2)])
def test_what_nothing_draws_has_a_report(folder, shape):
    class Any(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x, t, cond):
            return self.scale * x

    def large(media, prompts, context=None):
        return media.flatten(1).mean(1)

    name = f"any-{len(shape)}"
    flowrl.train(
        settings(name),
        policy=flowrl.load_policy(Any(), shape=shape),
        rewards=large,
        prompts={"train": ["a", "b"], "eval": ["a"]},
    )
    page = run_page.build(folder / "runs" / name).read_text()
    assert "samples/before.npz" in page and "are not drawn" in " ".join(page.split())


def settings(name):
    return {
        "algorithm": "nft",
        "batch": {"prompts": 2, "group": 4, "updates": 1},
        "sampler": {"steps": 4, "guidance": "none"},
        "eval": {"every": 0, "images": 2, "steps": 2},
        "iterations": 1,
        "trackers": [],
        "output": f"runs/{name}",
    }


@pytest.mark.long
@pytest.mark.parametrize(("name", "label"), [("motion", "retrieval"), ("trajectory", "safe")])
def test_an_example_gains_on_trained_prompts(tmp_path, name, label):
    torch.set_num_threads(1)
    module = importlib.import_module(name)
    example = module.example()
    result = small_flow.run(
        example,
        copy.deepcopy(module.pretrained(0, updates=500)),
        "nft",
        seed=0,
        iterations=15,
        output=tmp_path / "run",
    )
    found = small_flow.means(result, label)
    assert found.keys() == {"trained", "others"}
    before, after = found["trained"]
    assert after > before + 0.03
    assert (tmp_path / "run/samples/before_after.png").is_file()
