"""A whole run whose model is on another device (tests/helpers/far.py), where tensors of two devices
in one operator are an error: all that it makes is what a run on the CPU makes."""

import far
import long
import pytest
import small
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

METHODS = {
    "nft": {},
    "tree_grpo": {"algorithm__tree__children": "2", "algorithm__window__size": "1"},
    "draft": {"reward": "preference", "reward__preference__rounding": "false"},
    "dsrl": {},
    "texforce": {},
}
GROUPS = {"draft": "1", "tree_grpo": "4"}


def ran(folder, method):
    """An iteration between two evaluations, checkpoints, LoRA and report -> (metrics, weights)."""
    trainer = small.trainer(
        folder,
        method,
        iterations="1",
        eval__images="2",
        sampler__steps="3",
        optimizer__eps="1e-3",  # Adam's first step is g / (|g| + eps), which blows rounding up
        batch__group=GROUPS.get(method, "2"),
        **METHODS[method],
    )
    run = trainer.run()
    assert (run.path / "report.html").is_file() and run.evaluation
    weights = {name: far.near(w) for name, w in trainer.policy.state().items()}
    (line,) = run.metrics
    return {k: v for k, v in line.items() if not k.startswith(small.CHANGING)}, weights


@pytest.mark.parametrize("method", long.but(METHODS, METHODS.keys() - {"nft"}))
def test_a_run_on_another_device_is_that_on_the_cpu(method, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "ALGORITHMS", {method: {}})
    with far.whole_runs(monkeypatch):
        metrics, weights = ran(tmp_path / "far", method)
        assert far.waits["upload"] and far.waits["download"]
    with sdpa_kernel(SDPBackend.MATH):  # the one that far attention is
        near_metrics, near_weights = ran(tmp_path / "near", method)
    assert metrics == pytest.approx(near_metrics, rel=1e-4, abs=1e-7)
    assert weights.keys() == near_weights.keys()
    assert all(torch.allclose(w, near_weights[name], atol=1e-6) for name, w in weights.items())
