"""Evaluations that are dealt over processes give the numbers of one process."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from flowrl.evaluation import held_out
from flowrl.evaluation.suites import measure
from flowrl.policy import load_policy
from flowrl.rewards import load_set
from flowrl.runtime.processes import world as distributed

SPEC = importlib.util.spec_from_file_location(
    "processes", Path(__file__).resolve().parents[2] / "scripts" / "bench" / "processes.py"
)
processes = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(processes)

PROMPTS = [{"prompt": f"{n} circles"} for n in ("one", "two", "three", "four", "five")]


def test_suites_and_held_out_evaluations_of_two_processes_equal_one_to_the_bit(
    tmp_path, monkeypatch
):
    """Five prompts in chunks of two: a process has one chunk more. What a journal knows is not
    made again."""
    monkeypatch.setattr(measure, "CHUNK", 4)
    policy = load_policy("shapes-sd3", lora={"rank": 2})
    rewards = load_set({"spread": processes.spread})
    # a row at a time: kernels round by the number of rows
    how = held_out.Sampling(steps=2, guidance="none", micro=1, decode=1)

    def work():
        world = distributed.here()
        own = replace(how, world=world)
        path = tmp_path / f"{world.size}.jsonl" if world.main else None

        def measured():
            journal = measure.MeasureJournal(path)
            how = {"images": 2, "journal": journal, "setting": "base"}
            return measure.measure(policy, PROMPTS, rewards, own, **how)

        found, calls = measured(), policy.calls
        assert (measured().values["spread"] == found.values["spread"]).all()
        assert policy.calls == calls
        evaluator = held_out.Evaluator(
            policy=policy, prompts=PROMPTS, rewards=rewards, how=own, ledger=held_out.Ledger()
        )
        evaluation = evaluator.evaluation(7)
        return {
            "suite": torch.from_numpy(found.values["spread"]),
            "diversity": torch.from_numpy(found.diversity["pixels"]),
            "calls": torch.tensor([calls, found.nfe, evaluation.nfe]),
            "held out": evaluation.values["spread"],
            "pictures": evaluation.images,
        }

    (one,) = processes.on(1, work)
    two = processes.on(2, work)
    assert [part["calls"].tolist() for part in two] == [[12, 2, 2], [8, 2, 2]]
    assert one["calls"].tolist() == [20, 2, 2]
    for part in two:
        for name in ("suite", "diversity", "held out", "pictures"):
            assert (part[name] == one[name]).all(), name
