"""Teams of processes that share each call of a network: the same numbers as one process, and one
sentence where a call cannot be shared."""

import os
from contextlib import nullcontext

import long
import processes
import pytest
import small
import tiny
import torch

from flowrl.config.load import load_config
from flowrl.runtime.processes import launcher
from flowrl.runtime.processes import world as distributed
from flowrl.training.loop import Trainer
from flowrl.training.split import sequence

PROMPTS = [{"prompt": tiny.PROMPTS[0]}]
MICRO = ["batch.micro=2", "batch.updates=2"]


@pytest.mark.parametrize(
    ("name", "method", "size", "words"),
    [
        pytest.param("flux", "flow_grpo", 4, [], marks=long.mark),  # two teams
        ("wan21", "nft", 2, ["train.gradient_checkpointing=true"]),
    ],
)
def test_teams_train_what_one_process_trains(tmp_path, name, method, size, words):
    """Tokens are summed in another order. The rewards of random networks lie close together, and
    advantages divide by their spread."""
    policy = tiny.policy(name, lora={"rank": 2, "alpha": 2})
    seen = []
    for base, on in (("replicated", 1), ("shared", size)):
        asked = processes.words(method, base, tmp_path / base, *MICRO, *words)
        parts = processes.on(on, lambda asked=asked: processes.train(policy, asked))
        seen.append(processes.together(parts, members=2 if base == "shared" else 1))
    found = processes.apart(*seen)
    assert found["prompts"] == 0 and seen[0]["gradient"].norm() > 0
    assert found["samples"] < 1e-6 and found["rewards"] < 1e-6
    assert all(found[key] < 2e-5 for key in ("advantages", "gradient", "step", "moved")), found


@long.mark
def test_a_team_evaluates_and_writes_a_run_as_one_process_does(tmp_path):
    """A reward that differs from call to call: that of the first member counts."""
    policy = tiny.policy("wan22", lora={"rank": 2, "alpha": 2})

    def work():
        asked = processes.words(
            "flow_grpo",
            "shared",
            tmp_path / "run",
            "batch.prompts=2",
            "eval.images=2",
            "eval.steps=2",
        )
        asked = [w for w in asked if not w.startswith("data.eval")]
        given = torch.Generator().manual_seed(int(torch.distributed.is_initialized()))

        def judge(media, *_):
            return torch.rand(len(media), generator=given) + int(os.environ["RANK"])

        live = {"train": tiny.PROMPTS[:2], "eval": tiny.PROMPTS[:1]}
        Trainer(load_config(None, asked), policy=policy, rewards={"r": judge}, prompts=live).run()

    processes.on(2, work)
    (line,) = small.lines(tmp_path / "run")
    assert 0 < line["reward/r/mean"] < 1 and line["policy/grad_norm"] > 0
    assert (tmp_path / "run" / "report.html").exists() and small.values(tmp_path / "run", "after")


@pytest.fixture
def team(tmp_path):
    """What share_calls says in each of two processes that are a team."""

    def said(policy):
        def work():
            world = distributed.World(distributed.start("no", 60), 60, members=2)
            world.meet()
            try:
                sequence.share_calls(policy, world, PROMPTS, guidance="none", autocast=nullcontext)
            except ValueError as error:
                before = {str(m.processor._parallel_config) for m in networks_attention(policy)}
                return {str(error): torch.tensor([before <= {"None"}])}
            return {}

        found = processes.on(2, work)
        assert found[0].keys() == found[1].keys()
        ((sentence, undone),) = found[0].items()
        assert undone.all()
        return sentence

    return said


def networks_attention(policy):
    return [m for network in policy.networks.values() for m in sequence.attentions(network)]


def test_tokens_and_heads_that_cannot_be_dealt_out_are_one_sentence(team):
    policy = tiny.policy("flux", lora={"rank": 2})
    odd = tiny.policy("flux", lora={"rank": 2}, height=20, width=20)
    assert odd.latent_shape != policy.latent_shape
    for module in networks_attention(policy):
        module.heads = 3
    assert "has 3 attention heads, which do not divide by 2" in team(policy)
    assert "cannot be dealt out" in team(odd)


def test_a_network_that_a_team_computes_otherwise_is_refused(team, monkeypatch):
    """A plan that forgets to gather the output of one network."""
    policy = tiny.policy("flux", lora={"rank": 2})
    (network,) = policy.networks.values()
    wrong = {"single_transformer_blocks.0": {}, **network._cp_plan}
    del wrong["proj_out"]
    monkeypatch.setattr(type(network), "_cp_plan", wrong)
    assert "a team predicts [1, 8, 16] for one row, and a process alone [1, 16, 16]" in team(policy)


def test_a_network_without_a_plan_is_refused():
    policy = tiny.policy("sd3", lora={"rank": 2})
    with pytest.raises(ValueError, match=r"\(SD3Transformer2DModel\) has no context-parallel plan"):
        sequence.check_network("transformer", policy.networks["transformer"], 2)


def test_a_network_of_a_run_before_and_another_backend_are_refused():
    (network,) = tiny.policy("wan21").networks.values()
    processor = sequence.attentions(network)[0].processor
    processor._attention_backend = "_native_math"
    with pytest.raises(ValueError, match="attends by _native_math, which cannot be shared; set"):
        sequence.check_network("transformer", network, 2)
    processor._attention_backend = None
    sequence.check_network("transformer", network, 2)
    processor._parallel_config = object()
    with pytest.raises(ValueError, match="was shared by a run before"):
        sequence.check_network("transformer", network, 2)


def test_processes_that_make_no_whole_teams_are_refused():
    launcher.check_teams(4, 2)
    with pytest.raises(ValueError, match="3 cannot be dealt into such teams; launch a multiple of"):
        launcher.check_teams(3, 2)
