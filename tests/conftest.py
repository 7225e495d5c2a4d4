"""Every test runs on one thread, so that numbers repeat, and offline; `pytest -m hub` asks the
model hub, and skips where none answers."""

import functools
import logging
import os
import re
import sys

import long
import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

LONGEST_FIRST = (  # folder and file; a minute of one core down to ten seconds
    "policy/test_zoo.py",
    "training/test_loop.py",
    "training/test_resume.py",
    "training/test_loop_rules.py",
    "repo/test_bench_algorithms.py",
    "training/test_distributed.py",
    "algorithms/test_method_refusals.py",
    "repo/test_bad_input.py",
    "algorithms/test_methods_run.py",
    "cli/test_cli.py",
    "repo/test_docs.py",
    "policy/test_policy_parts.py",
    "policy/test_policy_replay.py",
    "policy/test_policy_guidance.py",
    "policy/test_policy_coords.py",
    "training/test_reward_trial.py",
    "shapes/test_shapes.py",
    "rollouts/test_draw.py",
    "rollouts/test_scorer.py",
    "server/test_remote_dead.py",
    "repo/test_layout.py",
    "evaluation/test_suites.py",
    "evaluation/test_evaluation.py",
    "repo/test_train_shapes.py",
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not choose
def pytest_collection_modifyitems(items):
    """Tests in long.txt are long (scripts/long_tests.py). Long files start first, so that at the
    end no worker waits for another one's long file."""
    long.mark_listed(items)
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(f"{item.path.parent.name}/{item.path.name}", len(rank)))


def pytest_configure(config):
    """Before any test module imports the hub's client, which reads the variable once."""
    os.environ.setdefault("HF_HUB_OFFLINE", offline(config.option.markexpr))
    # the first backward decides whether autograd has threads: after a compiled graph it would, and
    # tests of several processes, which fork, could take no gradient
    torch.ones(1, requires_grad=True).sum().backward()


def offline(markexpr):
    """HF_HUB_OFFLINE for tests chosen by -m: "0" where it asks for those of the hub."""
    return "0" if re.search(r"\bhub\b", re.sub(r"\bnot\s*(\([^)]*\)|\w+)", "", markexpr)) else "1"


@functools.cache
def why_no_hub(endpoint=None):
    """Why no test of published weights can run; None: a hub answers (asked once)."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    url = f"{endpoint or constants.ENDPOINT}/api/models/openai/clip-vit-large-patch14"
    try:
        httpx.get(url, timeout=5, follow_redirects=True).raise_for_status()
    except httpx.HTTPError as error:
        return f"no model hub answers: {type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def a_hub_where_one_is_needed(request):
    if request.node.get_closest_marker("hub") and (reason := why_no_hub()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch):
    """Files need not reach the disk here: thousands of flushes are a good part of a minute."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session", autouse=True)
def policies_loaded_once():
    """Runs of the embedded model get copies of one policy, where a test of the session makes any:
    else the import alone would take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if build := sys.modules.get("flowrl.config.build"):
            import copies

            patch.setattr(build, "load_policy", copies.load_policy)
        yield


@pytest.fixture(scope="session", autouse=True)
def metrics_are_described():
    """No run of a test writes a metric that is missing in the table of metrics, but for that of a
    method outside the package."""
    own = "policy/log_prob"  # docs/extending.md
    with pytest.MonkeyPatch.context() as patch:
        if outputs := sys.modules.get("flowrl.training.outputs"):
            from flowrl.report import described

            def add_described(run, iteration, metrics, add=outputs.add_metrics):
                missing = [name for name in metrics if not described.sentence(name) and name != own]
                assert not missing, f"flowrl/report/templates/metrics.yaml lacks {missing}"
                add(run, iteration, metrics)

            patch.setattr(outputs, "add_metrics", add_described)
        yield


@pytest.fixture
def heard(monkeypatch):
    """caplog hears flowrl's messages, once each, also after a test of the command line, which sends
    them to stderr alone."""
    monkeypatch.setattr(logging.getLogger("flowrl"), "propagate", True)
