"""Examples at real scale: a dry run of each, with a tiny pipeline of its model's class in place of
its weights, tiny rewards in place of theirs, and a budget of its real network in few layers."""

import json
from dataclasses import dataclass, field
from dataclasses import replace as changed

import long
import pytest
import small
import test_rewards_aesthetic as aesthetic
import test_rewards_dynamics as dynamics
import test_rewards_editreward as editreward
import test_rewards_videoalign as videoalign
import thin
import zoo
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from pages import PAGES, ROOT
from zoo.case import picture

from flowrl.training.budget import fit, planner
from flowrl.training.budget.roofline import of_cuda

FOLDER = ROOT / "scripts" / "examples" / "real_scale"
# sizes of a sample, of which the tiny networks make many in a second
SMALL = {"height": 32, "width": 32}
SHORT = {**SMALL, "num_frames": 5, "max_sequence_length": 12}
ALIKE = ["model.dtype=fp32", "train.precision=no", "model.self_check=false", "sampler.steps=3"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """What stands in for the downloads of an example."""

    case: str  # tiny pipeline of its model's class
    call: dict  # small arguments of the pipeline's call
    reward: str  # reward of the file
    tests: object  # module of the reward's tests, whose `write` makes its files
    words: list = field(default_factory=list)  # other words of the command line
    prompts: list = field(default_factory=list)  # lines of its prompt file; empty: those that ship


EXAMPLES = {
    "sd15_aesthetic": Example(
        case="sd15",
        call=SMALL,
        reward="aesthetic",
        tests=aesthetic,
        prompts=[{"prompt": "cat"}, {"prompt": "dog"}],
    ),
    "wan_videoalign": Example(case="wan21", call=SHORT, reward="videoalign", tests=videoalign),
    "qwen_edit_editreward": Example(
        case="qwen_edit_plus",
        call={"height": 128, "width": 128},
        reward="editreward",
        tests=editreward,
        words=["model.offload=none", "model.encoders=stay"],
        prompts=[{"prompt": f"make it {k}", "image": f"{k}.png"} for k in range(2)],
    ),
    "cosmos_inverse_dynamics": Example(
        case="cosmos25",
        call={**SHORT, "max_sequence_length": 32},
        reward="inverse_dynamics",
        tests=dynamics,
        prompts=[
            {"prompt": f"it moves {k}", "image": f"{k}.png", "actions": [0, 1, 0, 1]}
            for k in range(2)
        ],
    ),
}


def settings(own, folder):
    """Files that the reward asks for, in this folder -> its settings."""
    if own.reward == "inverse_dynamics":
        (folder / "idm.py").write_text(own.tests.FILE)
        return {"model": f"{folder / 'idm.py'}:Fixed", "weights": "null"}
    beside = [own.reward] if own.reward == "aesthetic" else []
    return own.tests.write(folder, *beside)


def words(own, folder):
    """The command's words beside the file."""
    given = [f"reward.{own.reward}.{key}={v}" for key, v in settings(own, folder).items()]
    if own.prompts:
        for k in range(2):
            picture(k + 1, 64).save(folder / f"{k}.png")
        lines = [json.dumps(prompt) for prompt in own.prompts]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        given.append(f"data.train={folder / 'prompts.jsonl'}")
    call = [f"model.pipeline.{key}={value}" for key, value in own.call.items()]
    batch = ["batch.prompts=2", "batch.group=2", "batch.updates=1", f"output={folder / 'run'}"]
    return [*given, *call, *batch, *ALIKE, *own.words]


def shallow(monkeypatch):
    """Budgets read the real architectures with few layers, and this machine has a GPU for them."""
    read = planner.read

    def small_of(source):
        known = read(source)
        parts = {part: {**config, **thin.fewer(config)} for part, config in known.parts.items()}
        return changed(known, parts=parts)

    monkeypatch.setattr(planner, "read", small_of)
    monkeypatch.setattr(fit, "this_gpu", lambda: of_cuda("NVIDIA H100 80GB HBM3", 79.1))
    monkeypatch.setattr(fit, "LARGE", 0)


def test_every_example_is_tried():
    assert {path.stem for path in FOLDER.iterdir()} == {*EXAMPLES}


@pytest.mark.parametrize("name", long.but([*EXAMPLES], {*EXAMPLES} - {"wan_videoalign"}))
def test_a_dry_run_prints_its_budget_and_tries_prompts_and_rewards(name, tmp_path, monkeypatch):
    own = EXAMPLES[name]
    shallow(monkeypatch)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 256**2)
    case = zoo.cases()[own.case]
    monkeypatch.setattr("flowrl.policy.load._pretrained", lambda *_: case.make())
    if hasattr(own.tests, "known"):
        own.tests.known(monkeypatch)
    done = small.invoke("train", str(FOLDER / f"{name}.yaml"), *words(own, tmp_path), "--dry-run")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "budget" in said and "GB in the phase" in said
    assert "trying the rewards on 4 samples" in said and "Nothing was written" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_it_is_and_that_only_the_dry_run_was_run(name):
    head = (FOLDER / f"{name}.yaml").read_text().partition("\ndefaults:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    path = f"scripts/examples/real_scale/{name}.yaml"
    assert f"flowrl budget {path}" in head and f"flowrl train {path} --dry-run" in head
    assert any(f"flowrl train {path} --dry-run" in text for text in PAGES.values())
    assert "arXiv:" in head and "Download first:" in head and "Other than" in head
    assert "Only the dry run was run: no weights were trained" in head
