"""A module of tokens that a config names by its file: train, evaluate and generate by commands."""

import json

import masked
import numpy as np
import pytest
import small

FILE = masked.__file__
NAMED = [
    f"model={FILE}:policy",
    "train.mode=full",
    f"reward={FILE}:counted",
    f"data.train={FILE}:texts",
    f"data.eval={FILE}:texts",
    "batch.prompts=3",
    "batch.group=8",
    "sampler.steps=4",
    "eval.steps=4",
    "eval.images=6",
    "eval.every=0",
    "optimizer.lr=3e-2",
    "ema.decay=0",
    "guard.check_rewards=false",
    "trackers=[]",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of UniGRPO on the module, by the command."""
    folder = tmp_path_factory.mktemp("tokens") / "run"
    words = ["algorithm=unigrpo", "algorithm.draws=2", "iterations=8", f"output={folder}"]
    result = small.invoke("train", *NAMED, *words)
    assert result.exit_code == 0, result.output
    assert f"flowrl generate {folder} zero --steps 4" in result.output  # 28 are too many
    return folder


def means(run):
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    return {row["name"]: row["metrics"]["counted"]["mean"] for row in rows}


def test_a_run_learns_and_is_evaluated_again_with_its_trained_weights(run):
    found = means(run)
    assert found["after"] > found["before"] + 0.2
    result = small.invoke("evaluate", run, "--steps", 4)
    assert result.exit_code == 0, result.output
    (again,) = [value for name, value in means(run).items() if name not in found]
    assert again == found["after"]  # the same prompts, noise, steps and weights
    assert (run / "report.html").is_file()


def test_a_solver_of_flows_is_refused_at_the_start(tmp_path):
    words = ["algorithm=unigrpo", "eval.solver=dpm2", f"output={tmp_path / 'run'}", "--dry-run"]
    result = small.invoke("train", *NAMED, *words)
    assert result.exit_code == 2 and "eval.solver=dpm2 solves the ODE of flows" in result.output


def test_a_run_generates_tokens_of_its_prompts(run, tmp_path):
    """Integers of the vocabulary, none of them masked, and more of the right one than untrained."""
    made = {}
    for name, source in (("trained", run), ("untrained", f"{FILE}:policy")):
        place = tmp_path / f"{name}.npy"
        words = ["zero", "two", "--steps", 4, "--guidance", "none", "--output", place]
        result = small.invoke("generate", source, *words)
        assert result.exit_code == 0, result.output
        made[name] = np.stack([np.load(tmp_path / f"{name}-{k}.npy") for k in (0, 1)])
        assert made[name].shape == (2, 4, 4)
        assert set(np.unique(made[name])) <= set(range(masked.VALUES))
    share = {
        name: np.mean([(x[k] == w).mean() for k, w in enumerate((0, 2))])
        for name, x in made.items()
    }
    assert share["trained"] > share["untrained"] + 0.2
