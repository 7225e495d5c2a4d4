"""A budget of a masked generator is what its run then is: rows and FLOPs to the digit, and peaks of
memory as torch's profiler counts them."""

from importlib.resources import files

import long
import pytest
import test_budget
from diffusers import AmusedPipeline
from test_budget import CPU
from test_start import Counted, summed, told

from flowrl.training import outputs
from flowrl.training.budget.planner import Planner
from flowrl.training.loop import Trainer

METHODS = ["trace_rl", "diffu_grpo", "masked_ce", "unigrpo"]


def masked(method, *more):
    words = [*test_budget.SMALL, "batch.group=6", "sampler.steps=4"]
    return test_budget.bench.config("shapes-masked", method, *words, *more)


@pytest.mark.parametrize("method", long.but(METHODS, {*METHODS} - {"trace_rl"}))
def test_rows_flops_and_peaks_are_those_of_the_run(method, tmp_path):
    test_budget.told_as_run(masked(method), None, tmp_path)


@long.mark
def test_the_exact_choice_by_confidence_is_counted(tmp_path):
    words = ["algorithm.sde=confidence", "algorithm.ratio=ppo", "sampler.eta=2"]
    test_budget.told_as_run(masked("trace_rl", *words), None, tmp_path)


@pytest.mark.parametrize("guided", ["null", "3.0"])
def test_a_start_is_counted_to_the_digit(guided, tmp_path, monkeypatch):
    """What loads the policy is its self-check; what starts the run is the trial of its rewards and
    the evaluations."""
    data = ["data.eval=shapes:eval", "guard.check_rewards=true", "eval.images=60"]
    more = ["eval.steps=2", "eval.at_start=true", f"eval.baseline_guidance={guided}"]
    cfg = masked("trace_rl", *data, *more, "model.self_check=true", f"output={tmp_path / 'run'}")
    parts = told(cfg)
    folder = files("flowrl.shapes") / "masked"
    pipe = AmusedPipeline.from_pretrained(str(folder))
    counted = Counted(pipe, monkeypatch)
    trainer = Trainer(cfg)
    assert counted.take() == summed([parts["self-check"]])
    outputs.start(trainer)
    assert counted.take() == summed([parts["trial of rewards"], parts["evaluation"]])
    assert [*parts] == ["loading", "self-check", "trial of rewards", "evaluation"]


def test_guidance_is_a_second_row():
    """With guidance each state takes two rows, and a scale of 1 takes one."""
    plain, guided = (
        Planner(masked("trace_rl", f"sampler.guidance={g}"), CPU).budget().rows["nfe/rollout"]
        for g in ("none", "pipeline")
    )
    assert guided == 2 * plain
