"""The algorithm that docs/extending.md adds to the repository: its blocks, as they stand on the
page, are found, trained and tested like what ships."""

import importlib
import importlib.util
import re
import shutil
import sys

import config_reference
import pytest
import small
import torch
from pages import PAGES, ROOT, commands
from test_commands import check_run
from test_docs import SECTIONS
from toy import ToyPolicy, advantages_of, gradient, rewards_of, roll_out

import flowrl.algorithms
import flowrl.configs
from flowrl.algorithms.grpo import GRPO, GRPOConfig
from flowrl.config import load, schema
from flowrl.config.compose import ConfigError
from flowrl.runtime import registry

PAGE = PAGES["docs/extending.md"].partition("\n## A new algorithm in the repository\n")[2]
FILES = {
    m[1]: m[3] for m in re.finditer(r"^`([\w/.]+)`:\n\n(`{3,})\w+\n(.*?)^\2$", PAGE, re.M | re.S)
}


@pytest.fixture(scope="module", autouse=True)
def checkout(tmp_path_factory):
    """A folder with the page's files; while it is there, modules and configs are looked for in it
    too."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", root / "configs")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    importlib.invalidate_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            flowrl.algorithms,
            "__path__",
            [*flowrl.algorithms.__path__, str(root / "flowrl" / "algorithms")],
        )
        patch.setattr(flowrl.configs, "__path__", [str(root / "configs")])
        patch.setitem(small.ALGORITHMS, "rloo", {})
        yield root
    sys.modules.pop("flowrl.algorithms.rloo", None)
    vars(flowrl.algorithms).pop("rloo", None)


def make(**options):
    algorithm = registry.find("flowrl.algorithms", "rloo", what="algorithm").ALGORITHM
    return algorithm(algorithm.Config(**options))


def test_the_page_holds_one_file_of_each_kind_and_names_are_enough_to_find_them():
    assert list(FILES) == [
        "flowrl/algorithms/rloo.py",
        "configs/algorithm/rloo.yaml",
        "tests/algorithms/test_rloo.py",
        "docs/algorithms/rloo.md",
    ]
    assert "rloo" in registry.choices("flowrl.algorithms") and "rloo" in schema.options("algorithm")
    cfg = load.load_config(None, ["algorithm=rloo", "algorithm.kl_weight=0.1"])
    assert (
        cfg.algorithm["adv_clip"] == 1e6
        and cfg.algorithm["kl_weight"] == 0.1
        and cfg.algorithm["std"] is None
    )
    with pytest.raises(ConfigError, match="algorithm.std"):
        load.load_config(None, ["algorithm=rloo", "algorithm.std=group"])


def test_the_baseline_leaves_one_out_and_failed_samples_too():
    """Group 0: 1, 2, 6 -> 1 - 4, 2 - 3.5, 6 - 1.5. Group 1, interleaved: 0, failed, 4 -> 0 - 4,
    NaN, 4 - 0. Group 2: one sample."""
    rewards = rewards_of([1.0, 0.0, 2.0, torch.nan, 6.0, 4.0, 9.0])
    adv = make(adv_clip=1e6).leaf_advantages(rewards, torch.tensor([0, 1, 0, 1, 0, 1, 2]))
    assert adv.tolist() == pytest.approx([-3.0, -4.0, -1.5, torch.nan, 4.5, 4.0, 0.0], nan_ok=True)


def test_its_first_gradient_is_grpos_without_division_times_n_over_n_minus_one():
    policy, reward = ToyPolicy(0.1), rewards_of(torch.randn(24))
    gradients = []
    for algorithm in (make(adv_clip=1e6), GRPO(GRPOConfig(std=None, adv_clip=1e6))):
        policy.zero_grad()
        rollout = roll_out(policy, algorithm)
        rows = algorithm.columns(
            rollout, advantages_of(algorithm, rollout, reward), seed=0, iteration=0
        )
        algorithm.loss(algorithm.score(policy, rollout, rows), rows).loss.backward()
        gradients.append(gradient(policy.net))
    own, grpo = gradients
    assert torch.allclose(own, grpo * 8 / 7, rtol=1e-3, atol=1e-5) and float(own.abs().max()) > 1e-2


def test_it_trains_with_the_loop_and_logs_what_its_page_says(tmp_path):
    made = small.trainer(
        tmp_path / "run", "rloo", iterations="2", data__eval="null", algorithm__kl_weight="0.1"
    )
    before = {name: p.detach().clone() for name, p in made.parts.weights.parameters.items()}
    for it in made:
        assert it.metrics["policy/rows"] == 2 * 2 * 3  # prompts x group x steps before the last
        assert (
            it.metrics["policy/log_ratio"] < 1e-5
        )  # one update an iteration: weights are those of the rollout
    assert (
        it.metrics["policy/kl"] > 0
        and "policy/clip_fraction" not in it.metrics
        and "policy/winner_gain" in it.metrics
    )
    assert any(
        not torch.equal(p, before[name]) for name, p in made.parts.weights.parameters.items()
    )
    assert [line["iteration"] for line in small.lines(tmp_path / "run")] == [1, 2]


def test_the_tests_of_the_page_pass(checkout):
    path = checkout / "tests/algorithms/test_rloo.py"
    spec = importlib.util.spec_from_file_location("test_rloo", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(found) == 2
    for test in found:
        test()


def test_commands_compose_and_their_plans_fit_the_batch():
    page = FILES["docs/algorithms/rloo.md"]
    found = [*commands("docs/extending.md", PAGE), *commands("docs/algorithms/rloo.md", page)]
    assert sum(words[0] == "train" for _, words in found) == 4
    for where, words in found:
        check_run(where, words)
    assert re.findall(r"^## (.+)$", page, re.M) == SECTIONS


def test_the_configuration_page_takes_it_up():
    page = config_reference.pages()["algorithm.md"]
    text = page.split("## algorithm.name = rloo\n")[1].split("\n## ")[0]
    own = "| `algorithm.std` | `null` | null | Advantages are not divided by a spread. |"
    assert own in text and text.count("| `algorithm.") == 1
    assert (
        "[of methods that train denoising steps](#options-of-methods-that-train-denoising-steps)"
        in text
    )
